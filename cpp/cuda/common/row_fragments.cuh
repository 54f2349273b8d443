// How 16 V rows of a state and their v and outputs lie in the lanes of a warp. Rows r and r + 8 of
// a fragment stand for row_of(r) and row_of(r) + 2: after a transposition of its 8x8 matrices a
// lane holds four neighbouring rows of one token, 8 bytes of v or of the output.
#pragma once

#include "cuda/common/mma.cuh"

namespace gdn {

__device__ __forceinline__ int row_of(int r) { return 4 * (r / 2) + r % 2; }

// Four neighbouring 16-bit elements, on 8 bytes or anywhere.
__device__ __forceinline__ uint2 load_four(const Tensor& t, int64_t offset) {
  return *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(t.data) + offset);
}

__device__ __forceinline__ uint2 load_elements(const Tensor& t, int64_t offset) {
  const auto* from = static_cast<const uint16_t*>(t.data) + offset;
  return {from[0] | static_cast<uint32_t>(from[1]) << 16, from[2] | static_cast<uint32_t>(from[3])
                                                                        << 16};
}

__device__ __forceinline__ uint2 load_operand(const Tensor& t, int64_t offset, bool vectors) {
  return vectors ? load_four(t, offset) : load_elements(t, offset);
}

__device__ __forceinline__ void store_four(const Tensor& t, int64_t offset, uint2 x, bool vectors) {
  auto* to = static_cast<uint16_t*>(const_cast<void*>(t.data)) + offset;
  if (vectors) {
    *reinterpret_cast<uint2*>(to) = x;
    return;
  }
  to[0] = static_cast<uint16_t>(x.x), to[1] = static_cast<uint16_t>(x.x >> 16);
  to[2] = static_cast<uint16_t>(x.y), to[3] = static_cast<uint16_t>(x.y >> 16);
}

// fp32 as the sum of two 16-bit numbers, 16 bits and more of it. `rest` is what `head` leaves.
template <class Io>
__device__ __forceinline__ uint32_t split_pair(float x, float y, uint32_t* rest) {
  const uint32_t head = pack2<Io>(x, y);
  const float2 rounded = unpack2<Io>(head);
  *rest = pack2<Io>(x - rounded.x, y - rounded.y);
  return head;
}

}  // namespace gdn

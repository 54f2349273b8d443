// 16 rows of a state in the registers of a warp, in fp32 whatever the pool holds. A lane's places
// of one step of 16 columns: rows row_of(r) and row_of(r) + 2, columns 4c .. 4c + 3.
#pragma once

#include "cuda/common/pool.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/row_fragments.cuh"

namespace gdn {

// The element of a [V, K] state where a lane's places begin; rows are 2 kDim and steps 16 apart.
template <int kDim>
__device__ __forceinline__ int lane_place(int first_row) {
  const int r = this_lane() / 4, c = this_lane() % 4;
  return (first_row + row_of(r)) * kDim + 4 * c;
}

// Four neighbours of a state that lie anywhere: fp32 as they are, 16 bits as two words.
__device__ __forceinline__ void load_places(float (&x)[4], const void* state, DType dtype, int i) {
  if (dtype == DType::kFloat32) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = static_cast<const float*>(state)[i + e];
    return;
  }
  const auto* from = static_cast<const uint16_t*>(state) + i;
  x[0] = __uint_as_float(from[0] | static_cast<uint32_t>(from[1]) << 16);
  x[1] = __uint_as_float(from[2] | static_cast<uint32_t>(from[3]) << 16);
}

template <class T>
__device__ __forceinline__ void unpack_places(float (&x)[4]) {
  const float2 low = unpack2<T>(__float_as_uint(x[0])), high = unpack2<T>(__float_as_uint(x[1]));
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

__device__ __forceinline__ void store_places(void* state, DType dtype, int i, const float (&x)[4],
                                             bool vectors) {
  const Streaming streaming(false);
  if (dtype == DType::kFloat32) {
    float* to = static_cast<float*>(state) + i;
    if (vectors) {
      streaming.store(to, pack<float>(x));
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[e] = x[e];
    }
    return;
  }
  auto* to = static_cast<uint16_t*>(state) + i;
  const bool is_bf16 = dtype == DType::kBFloat16;
  const uint2 words = {is_bf16 ? pack2<bf16>(x[0], x[1]) : pack2<fp16>(x[0], x[1]),
                       is_bf16 ? pack2<bf16>(x[2], x[3]) : pack2<fp16>(x[2], x[3])};
  if (vectors) {
    streaming.store_half(to, words);
    return;
  }
  to[0] = static_cast<uint16_t>(words.x), to[1] = static_cast<uint16_t>(words.x >> 16);
  to[2] = static_cast<uint16_t>(words.y), to[3] = static_cast<uint16_t>(words.y >> 16);
}

// The [V, K] state of a head, null for row -1 and an absent pool.
__device__ __forceinline__ void* head_state(const Pool& pool, int64_t row, int32_t h,
                                            int64_t head_elements) {
  if (!pool || row < 0) return nullptr;
  const int64_t size = pool.dtype == DType::kFloat32 ? 4 : 2;
  return static_cast<char*>(pool.data) + size * (row * pool.row_stride + h * head_elements);
}

template <int kDim>
struct StateRows {
  static constexpr int kSteps = kDim / 16;
  float x[kSteps][2][4];
  DType dtype = DType::kFloat32;  // of what was loaded; 16 bits lie in words until `unpack`

  // Elements from the lane's first place to that of step e / 2, row e % 2 of two.
  static __device__ __forceinline__ int step_offset(int e) {
    return 16 * (e / 2) + 2 * kDim * (e % 2);
  }

  __device__ __forceinline__ void load(const void* state, DType stored, int place, bool vectors) {
    if (state == nullptr) {
#pragma unroll
      for (int e = 0; e < 8 * kSteps; ++e) x[e / 8][e / 4 % 2][e % 4] = 0.0f;
      return;
    }
    dtype = stored;
    const Streaming streaming(false);
    if (!vectors) {
#pragma unroll
      for (int e = 0; e < 2 * kSteps; ++e) {
        load_places(x[e / 2][e % 2], state, dtype, place + step_offset(e));
      }
    } else if (dtype == DType::kFloat32) {
#pragma unroll
      for (int e = 0; e < 2 * kSteps; ++e) {
        const float* from = static_cast<const float*>(state) + place + step_offset(e);
        gdn::unpack<float>(streaming.load(from), x[e / 2][e % 2]);
      }
    } else {
#pragma unroll
      for (int e = 0; e < 2 * kSteps; ++e) {
        const auto* from = static_cast<const uint16_t*>(state) + place + step_offset(e);
        const uint2 words = streaming.load_half(from);
        x[e / 2][e % 2][0] = __uint_as_float(words.x);
        x[e / 2][e % 2][1] = __uint_as_float(words.y);
      }
    }
  }
  __device__ __forceinline__ void unpack() {
    if (dtype == DType::kFloat32) return;
#pragma unroll
    for (int e = 0; e < 2 * kSteps; ++e) {
      if (dtype == DType::kBFloat16) {
        unpack_places<bf16>(x[e / 2][e % 2]);
      } else {
        unpack_places<fp16>(x[e / 2][e % 2]);
      }
    }
  }
};

}  // namespace gdn

// 16 rows of a state in the registers of a warp, in fp32 whatever the pool holds.
#pragma once

#include "cuda/common/pool.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/row_fragments.cuh"

namespace gdn {

// Which four neighbours of 16 rows are a lane's e-th ones, as element offsets in a [V, K] state.
// As the fragments of m16n8k16: step e / 2 of 16 columns, row e % 2 of two.
template <int kDim>
struct FragmentPlaces {
  static constexpr int kCount = kDim / 8;

  static __device__ __forceinline__ int first(int first_row) {
    const int r = this_lane() / 4, c = this_lane() % 4;
    return (first_row + row_of(r)) * kDim + 4 * c;
  }
  static __device__ __forceinline__ int offset(int e) { return 16 * (e / 2) + 2 * kDim * (e % 2); }
};

// As memory likes it: eight lanes side by side in a row; part e / 4 of it, row e % 4 of four.
template <int kDim>
struct LinePlaces {
  static constexpr int kCount = kDim / 8;

  static __device__ __forceinline__ int first(int first_row) {
    return (first_row + this_lane() / 8) * kDim + 4 * (this_lane() % 8);
  }
  static __device__ __forceinline__ int offset(int e) { return 32 * (e / 4) + 4 * kDim * (e % 4); }
};

// Four neighbours on 16 or 8 bytes.
template <class T>
__device__ __forceinline__ void load_vector(float (&x)[4], const T* from) {
  const Streaming streaming(false);
  if constexpr (sizeof(T) == 4) {
    unpack<float>(streaming.load(from), x);
  } else {
    const uint2 words = streaming.load_half(from);
    const float2 low = unpack2<T>(words.x), high = unpack2<T>(words.y);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
  }
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

template <class Places>
struct StateRows {
  static constexpr int kCount = Places::kCount;
  float x[kCount][4];

  template <class T>
  __device__ __forceinline__ void load_as(const void* state, int place, bool vectors) {
    const T* from = static_cast<const T*>(state) + place;
    if (vectors) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) load_vector(x[e], from + Places::offset(e));
    } else {
#pragma unroll
      for (int e = 0; e < 4 * kCount; ++e) {
        x[e / 4][e % 4] = to_float(from[Places::offset(e / 4) + e % 4]);
      }
    }
  }
  __device__ __forceinline__ void load(const void* state, DType dtype, int place, bool vectors) {
    if (state == nullptr) return clear();
    switch (dtype) {
      case DType::kBFloat16: return load_as<bf16>(state, place, vectors);
      case DType::kFloat16: return load_as<fp16>(state, place, vectors);
      default: return load_as<float>(state, place, vectors);
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int e = 0; e < 4 * kCount; ++e) x[e / 4][e % 4] = 0.0f;
  }
};

}  // namespace gdn

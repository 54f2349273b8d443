// State rows of a pool as the accumulators of a warp: [16 v, D] in 16x8 tiles. Rows r and r + 8 of
// a tile hold v = 2r and 2r + 1, so that a lane's outputs of one token are neighbours in memory.
#pragma once

#include "cuda/common/pool.cuh"
#include "cuda/common/types.cuh"

namespace gdn {

__device__ __forceinline__ float2 load_pair(const float* at) {
  return *reinterpret_cast<const float2*>(at);
}
__device__ __forceinline__ void store_pair(float* at, float x, float y) {
  *reinterpret_cast<float2*>(at) = {x, y};
}
template <class T>
__device__ __forceinline__ float2 load_pair(const T* at) {
  return unpack2<T>(*reinterpret_cast<const uint32_t*>(at));
}
template <class T>
__device__ __forceinline__ void store_pair(T* at, float x, float y) {
  *reinterpret_cast<uint32_t*>(at) = pack2<T>(x, y);
}

// `state` points at the lane's first element; tile n and row half h add 8 n + h D. Pairs are
// moved at once if `paired` says that all are aligned to it.
template <int D, class T>
__device__ __forceinline__ void load_tiles(float (&s)[D / 8][4], const T* state, bool paired) {
  if (paired) {
#pragma unroll
    for (int e = 0; e < D / 4; ++e) {
      const float2 x = load_pair(state + 8 * (e / 2) + (e % 2) * D);
      s[e / 2][2 * (e % 2)] = x.x;
      s[e / 2][2 * (e % 2) + 1] = x.y;
    }
  } else {
#pragma unroll
    for (int e = 0; e < D / 2; ++e) {
      s[e / 4][e % 4] = to_float(state[8 * (e / 4) + (e % 4) / 2 * D + e % 2]);
    }
  }
}

template <int D, class T>
__device__ __forceinline__ void store_tiles(const float (&s)[D / 8][4], T* state, bool paired) {
  if (paired) {
#pragma unroll
    for (int e = 0; e < D / 4; ++e) {
      store_pair(state + 8 * (e / 2) + (e % 2) * D, s[e / 2][2 * (e % 2)],
                 s[e / 2][2 * (e % 2) + 1]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < D / 2; ++e) {
      state[8 * (e / 4) + (e % 4) / 2 * D + e % 2] = from_float<T>(s[e / 4][e % 4]);
    }
  }
}

// Row -1 and an absent pool read zero and are not written. `offset` is the lane's, in elements.
template <int D>
__device__ __forceinline__ void load_state(float (&s)[D / 8][4], const Pool& pool, int64_t row,
                                           int head, int offset, bool paired) {
  constexpr int64_t kHead = D * D;
#pragma unroll
  for (int e = 0; e < D / 2; ++e) s[e / 4][e % 4] = 0.0f;
  if (!pool || row < 0) return;
  switch (pool.dtype) {
    case DType::kBFloat16:
      return load_tiles<D>(s, state_of<bf16>(pool, row, head, kHead) + offset, paired);
    case DType::kFloat16:
      return load_tiles<D>(s, state_of<fp16>(pool, row, head, kHead) + offset, paired);
    default: return load_tiles<D>(s, state_of<float>(pool, row, head, kHead) + offset, paired);
  }
}

template <int D>
__device__ __forceinline__ void store_state(const float (&s)[D / 8][4], const Pool& pool,
                                            int64_t row, int head, int offset, bool paired) {
  constexpr int64_t kHead = D * D;
  if (!pool || row < 0) return;
  switch (pool.dtype) {
    case DType::kBFloat16:
      return store_tiles<D>(s, state_of<bf16>(pool, row, head, kHead) + offset, paired);
    case DType::kFloat16:
      return store_tiles<D>(s, state_of<fp16>(pool, row, head, kHead) + offset, paired);
    default: return store_tiles<D>(s, state_of<float>(pool, row, head, kHead) + offset, paired);
  }
}

}  // namespace gdn

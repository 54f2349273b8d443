// M of a segment, [K, K]: how the summary starts and leaves it, and the split of fp32 into two bf16
// parts, hi + lo, with which the combination multiplies.
//
// M is stored as the B fragments of m16n8k16: for the 16 rows of k step kk and the 8 columns of
// tile j a lane has one vector (hi b0, hi b1, lo b0, lo b1).
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/sm90/traits.h"

namespace gdn::sm90 {

// x = hi + lo to 2^-17 of x.
__device__ __forceinline__ void split_pair(float x, float y, uint32_t& hi, uint32_t& lo) {
  hi = pack2<bf16>(x, y);
  const float2 rounded = unpack2<bf16>(hi);
  lo = pack2<bf16>(x - rounded.x, y - rounded.y);
}

// The accumulators of 64 rows of the identity, from row 64 half on (layout: wgmma.cuh).
__device__ __forceinline__ void load_identity(float (&s)[64], int half, int warp, int lane) {
  const int row = 64 * half + 16 * warp + (lane >> 2), column = 2 * (lane & 3);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[4 * j + e] = row + 8 * (e >> 1) == 8 * j + column + (e & 1) ? 1.0f : 0.0f;
    }
  }
}

// Y^T of M, which has no V: -G (M K^T), as A registers. Where G = 0, M is dropped even if it is not
// finite.
template <class T>
__device__ __forceinline__ void form_transition_y(uint32_t (&y)[16], const float (&z)[32],
                                                  uint32_t from_start, int lane) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float4 g4 = load_shared_float4(from_start + 64 * k + 16 * (lane & 3));
    const float g[4] = {-g4.x, -g4.y, -g4.z, -g4.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = z + 8 * k + 2 * i;
      const float g0 = g[i & 2], g1 = g[(i & 2) + 1];
      y[4 * k + i] = pack2<T>(g0 == 0.0f ? 0.0f : g0 * pair[0], g1 == 0.0f ? 0.0f : g1 * pair[1]);
    }
  }
}

// The 16 rows of k step `step`, from the accumulators of one warp.
__device__ __forceinline__ void store_transition(const float (&s)[64], uint4* transition, int step,
                                                 int lane) {
  uint4* target = transition + step * (16 * 32) + lane;
  __builtin_assume(__isGlobal(target));
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    uint32_t hi0, hi1, lo0, lo1;
    split_pair(s[4 * j], s[4 * j + 1], hi0, lo0);
    split_pair(s[4 * j + 2], s[4 * j + 3], hi1, lo1);
    target[32 * j] = {transpose_matrix(hi0), transpose_matrix(hi1), transpose_matrix(lo0),
                      transpose_matrix(lo1)};
  }
}

}  // namespace gdn::sm90

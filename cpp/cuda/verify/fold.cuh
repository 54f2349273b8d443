// The fold of accepted draft tokens: S := keep S + sum_t weight_t u_t k_t^T as one matrix product
// per 16 x 8 tile, [u | rest of u] [k; k], with u split in two 16-bit numbers and k as it came.
#pragma once

#include "cuda/verify/fragments.cuh"

namespace gdn {

// Draft tokens [first, last) and how they enter the state after the last of them.
struct Fold {
  alignas(8) float weights[kMaxDraft];
  float keep;
  int32_t first, last;
  int32_t replace;  // a reset discards the state, whatever it holds

  __device__ __forceinline__ bool holds(int token) const { return token >= first && token < last; }
  // The words of the keys of tokens 2c and 2c + 1; other tokens may hold anything, NaN included.
  __device__ __forceinline__ uint32_t mask(int c) const {
    return (holds(2 * c) ? 0xffffu : 0u) | (holds(2 * c + 1) ? 0xffff0000u : 0u);
  }
};

// By one warp: lane t holds alpha of draft token t.
__device__ __forceinline__ void make_fold(float alpha, int begin, int end, Fold* fold) {
  const int lane = this_lane();
  float keep = 1.0f, weight = 1.0f;
  int first = begin;
#pragma unroll
  for (int t = kMaxDraft - 1; t >= 0; --t) {
    const float alpha_t = __shfl_sync(kFullWarp, alpha, t);
    if (t >= end || t < first) continue;
    if (t > lane) weight *= alpha_t;
    keep *= alpha_t;
    if (alpha_t == 0.0f) first = t;
  }
  if (lane < kMaxDraft) fold->weights[lane] = weight;
  if (lane > 0) return;
  fold->keep = keep;
  fold->first = first;
  fold->last = end;
  fold->replace = keep == 0.0f;
}

// u of one fold as an A fragment: tokens in columns 0 .. 7, the rest of the split in 8 .. 15.
template <class Io>
__device__ __forceinline__ void weigh_updates(const float2 (&u)[2], const Fold& fold, int c,
                                              uint32_t (&a)[4]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float x = fold.holds(2 * c) ? u[row].x * fold.weights[2 * c] : 0.0f;
    const float y = fold.holds(2 * c + 1) ? u[row].y * fold.weights[2 * c + 1] : 0.0f;
    a[row] = split_pair<Io>(x, y, &a[2 + row]);
  }
}

template <class Traits>
__device__ __forceinline__ void apply_fold(StateStep<Traits>& s, const Fold& fold,
                                           const uint32_t (&u)[4], const uint2* keys,
                                           uint32_t mask) {
  if (fold.replace) s.clear();
#pragma unroll
  for (int step = 0; step < Traits::kVectorSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s.left[step][i] *= fold.keep;
      s.right[step][i] *= fold.keep;
    }
    const uint2 k = {keys[32 * step].x & mask, keys[32 * step].y & mask};
    multiply_add<typename Traits::Io>(s.left[step], u, k.x, k.x);
    multiply_add<typename Traits::Io>(s.right[step], u, k.y, k.y);
  }
}

}  // namespace gdn

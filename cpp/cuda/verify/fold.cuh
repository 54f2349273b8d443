// The fold of accepted draft tokens: S := keep S + sum_t weight_t u_t k_t^T as one matrix product
// per 16 x 8 tile, [u | rest of u] [k; k], with u split in two 16-bit numbers and k as it came.
#pragma once

#include "cuda/verify/fragments.cuh"

namespace gdn {

// Draft tokens [first, last) and how they enter the state after the last of them.
struct Fold {
  float keep = 1.0f;
  float weights[2] = {0.0f, 0.0f};  // of this lane's tokens 2c, 2c + 1
  int first = 0, last = 0;
  bool replace = false;  // a reset discards the state, whatever it holds

  Fold() = default;
  __device__ __forceinline__ Fold(const float (&alpha)[kMaxDraft], int begin, int end, int c)
      : first(begin), last(end) {
#pragma unroll
    for (int t = kMaxDraft - 1; t >= 0; --t) {
      if (t >= end || t < first) continue;
      if (t / 2 == c) weights[t % 2] = keep;
      keep *= alpha[t];
      if (alpha[t] == 0.0f) {
        first = t;
        replace = true;
      }
    }
  }
  __device__ __forceinline__ bool holds(int token) const { return token >= first && token < last; }
  // The words of two tokens' keys; those of other tokens may hold anything, NaN included.
  __device__ __forceinline__ uint32_t mask(int c) const {
    return (holds(2 * c) ? 0xffffu : 0u) | (holds(2 * c + 1) ? 0xffff0000u : 0u);
  }
};

// u of one fold as an A fragment: tokens in columns 0 .. 7, the rest of the split in 8 .. 15.
template <class Io>
__device__ __forceinline__ void weigh_updates(const float2 (&u)[2], const Fold& fold, int c,
                                              uint32_t (&a)[4]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float x = fold.holds(2 * c) ? u[row].x * fold.weights[0] : 0.0f;
    const float y = fold.holds(2 * c + 1) ? u[row].y * fold.weights[1] : 0.0f;
    a[row] = split_pair<Io>(x, y, &a[2 + row]);
  }
}

template <class Traits>
__device__ __forceinline__ void apply_fold(StateStep<Traits>& s, const Fold& fold,
                                           const uint32_t (&u)[4], const uint2* keys) {
#pragma unroll
  for (int step = 0; step < Traits::kVectorSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s.left[step][i] = fold.replace ? 0.0f : fold.keep * s.left[step][i];
      s.right[step][i] = fold.replace ? 0.0f : fold.keep * s.right[step][i];
    }
    const uint2 k = keys[32 * step];
    multiply_add<typename Traits::Io>(s.left[step], u, k.x, k.x);
    multiply_add<typename Traits::Io>(s.right[step], u, k.y, k.y);
  }
}

}  // namespace gdn

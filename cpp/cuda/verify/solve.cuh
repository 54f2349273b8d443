// u and o of the new tokens for 16 rows: with the inverse of I + solve both are matrix products of
// 16 rows and 8 tokens, in tf32 split in two.
#pragma once

#include "cuda/verify/triangle.cuh"

namespace gdn {

// Of rows r and r + 8: lane c holds tokens 2c and 2c + 1, as in C.
struct RowTokens {
  float u[4], o[4];
};

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < INFINITY; }

// d += a m for rows a and m = [t][s], fp32 but for 2^-21. What is not finite counts as zero: a zero
// of m would make NaN of it. Returns whether there was any.
__device__ __forceinline__ bool multiply_add_split(float (&d)[4], const float (&a)[4],
                                                   const SplitMatrix& m) {
  float head[4], rest[4];
  bool any = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = a[2 * (i % 2) + i / 2];
    any |= !is_finite(x);
    const float finite = is_finite(x) ? x : 0.0f;
    head[i] = tf32_head(finite);
    rest[i] = finite - head[i];
  }
  multiply_add_tf32(d, rest, m.head);
  multiply_add_tf32(d, head, m.rest);
  multiply_add_tf32(d, head, m.head);
  return any;
}

// Token by token, for rows with numbers that are not finite: tokens before s and behind a reset
// see nothing of u_s, not even NaN.
template <class Traits>
__device__ __forceinline__ void solve_by_token(const VerifyShared<Traits>& shared,
                                               const float2 (&v)[2], const float (&sk)[4],
                                               const float (&sq)[4], RowTokens* rows) {
  const int lane = this_lane(), c = lane % 4;
  const int resets[2] = {shared.reset[2 * c], shared.reset[2 * c + 1]};
  const TokenPair& pair = shared.tokens[c];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool whole = resets[i % 2] < 0;
    const float own_v = i % 2 ? v[i / 2].y : v[i / 2].x;
    const float from_state = whole ? pair.read_k[i % 2] * sk[i] : 0.0f;
    rows->u[i] = pair.beta[i % 2] * own_v - from_state;
    rows->o[i] = whole ? pair.read_q[i % 2] * sq[i] : 0.0f;
  }
#pragma unroll
  for (int s = 0; s < kMaxDraft; ++s) {
    if (s >= shared.sequence.length) break;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = 2 * c + i % 2;
      const float u = __shfl_sync(kFullWarp, rows->u[i / 2 * 2 + s % 2], (lane & ~3) + s / 2);
      if (s < t && s >= resets[i % 2]) rows->u[i] -= shared.solve[s][t] * u;
      if (s <= t && s >= resets[i % 2]) rows->o[i] += shared.mix[s][t] * u;
    }
  }
}

// u and o of two rows from v and the products with S. Tokens that see only finite numbers get the
// same bits whatever the later ones are.
template <class Traits>
__device__ __forceinline__ void solve_rows(const VerifyShared<Traits>& shared, const float2 (&v)[2],
                                           const float (&sk)[4], const float (&sq)[4],
                                           RowTokens* rows) {
  const int lane = this_lane();
  const TokenPair pair = shared.tokens[lane % 4];
  float from_v_and_state[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float own_v = i % 2 ? v[i / 2].y : v[i / 2].x;
    from_v_and_state[i] = pair.beta[i % 2] * own_v - pair.read_k[i % 2] * sk[i];
    rows->u[i] = 0.0f;
    rows->o[i] = pair.read_q[i % 2] * sq[i];
  }
  bool any = multiply_add_split(rows->u, from_v_and_state, shared.inverse[lane]);
  any |= multiply_add_split(rows->o, rows->u, shared.mix_split[lane]);
#pragma unroll
  for (int i = 0; i < 4; ++i) any |= !is_finite(rows->o[i]);
  if (!__any_sync(kFullWarp, any)) return;
  RowTokens exact;
  solve_by_token(shared, v, sk, sq, &exact);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!is_finite(rows->u[i]) || !is_finite(exact.u[i])) rows->u[i] = exact.u[i];
    if (!is_finite(rows->o[i]) || !is_finite(exact.o[i])) rows->o[i] = exact.o[i];
  }
}

}  // namespace gdn

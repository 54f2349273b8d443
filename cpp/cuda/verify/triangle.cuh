// What the warps of a head share: k and q as fragments, and the triangular part that relates its
// new tokens to each other,
//
//   u_t = beta_t v_t - read_k_t (S k_t) - sum_(s<t)  solve_ts u_s
//   o_t =              read_q_t (S q_t) + sum_(s<=t) mix_ts u_s
#pragma once

#include "core/gate.h"
#include "cuda/common/reduce.cuh"
#include "cuda/verify/fragments.cuh"

namespace gdn {

template <class Traits>
struct VerifyShared {
  uint2 k[Traits::kSteps][32];  // new tokens, by step and lane
  uint2 q[Traits::kSteps][32];
  uint2 old_k[2][Traits::kSteps][32];   // draft tokens of each fold, transposed
  float4 products[Traits::kWarps][32];  // k_r.k_2c, k_r.k_2c+1, q_r.k_2c, q_r.k_2c+1 of a step
  float q_squares[Traits::kWarps][kMaxDraft];
  float alpha[kMaxDraft], beta[kMaxDraft];
  float solve[kMaxDraft][kMaxDraft];  // [s][t]
  float mix[kMaxDraft][kMaxDraft];    // [s][t]
  float read_k[kMaxDraft], read_q[kMaxDraft];
  float k_norm[kMaxDraft];
  int reset[kMaxDraft];  // latest token <= t with alpha = 0, or -1
};

// Gates of token `t` of the sequence.
template <class Traits>
__device__ __forceinline__ void stage_gates(VerifyShared<Traits>& shared, const VerifyProblem& p,
                                            const VerifySequence& s, int32_t h, int t) {
  float alpha_t = 1.0f, beta_t = 0.0f;
  if (t < s.length) {
    const Gates& g = p.gates;
    const float dt_bias = g.dt_bias.data ? load_element(g.dt_bias, 0, h) : 0.0f;
    alpha_t = alpha(GateForm::kRaw, load_element(g.g, s.begin + t, h), load_element(g.A_log, 0, h),
                    dt_bias);
    beta_t = sigmoid(load_element(g.beta, s.begin + t, h));
  }
  shared.alpha[t] = alpha_t;
  shared.beta[t] = beta_t;
}

// One step's share of all products between tokens; the fragments of k and q are A and B at once.
template <class Traits>
__device__ __forceinline__ void stage_products(VerifyShared<Traits>& shared, uint2 k, uint2 q) {
  using Io = typename Traits::Io;
  const int warp = this_warp(), lane = this_lane();
  float d[4] = {};
  multiply_add<Io>(d, {k.x, q.x, k.y, q.y}, k.x, k.y);
  shared.products[warp][lane] = {d[0], d[1], d[2], d[3]};
  const float2 low = unpack2<Io>(q.x), high = unpack2<Io>(q.y);
  float squares = low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y;
  squares = group_sum<4>(squares);
  if (lane % 4 == 0) shared.q_squares[warp][lane / 4] = squares;
}

// k_t.k_s and q_t.k_s of all steps.
template <class Traits>
__device__ __forceinline__ float2 sum_products(const VerifyShared<Traits>& shared, int t, int s) {
  float2 sum{};
#pragma unroll
  for (int w = 0; w < Traits::kWarps; ++w) {
    const float4 x = shared.products[w][4 * t + s / 2];
    sum.x += s % 2 ? x.y : x.x;
    sum.y += s % 2 ? x.w : x.z;
  }
  return sum;
}

// Thread (t, s) makes entry [s][t]; threads past 64 do nothing.
template <class Traits>
__device__ __forceinline__ void make_triangle(VerifyShared<Traits>& shared,
                                              const VerifyProblem& p) {
  const int t = threadIdx.x / kMaxDraft, s = threadIdx.x % kMaxDraft;
  if (t >= kMaxDraft) return;
  const float2 products = sum_products(shared, t, s);
  float k_norm_t = 1.0f, k_norm_s = 1.0f, q_norm = p.scale;
  if (p.qk_l2norm) {
    k_norm_t = rsqrtf(sum_products(shared, t, t).x + 1e-6f);
    k_norm_s = rsqrtf(sum_products(shared, s, s).x + 1e-6f);
    float squares = 0.0f;
    for (int w = 0; w < Traits::kWarps; ++w) squares += shared.q_squares[w][t];
    q_norm *= rsqrtf(squares + 1e-6f);
  }
  float between = 1.0f, decay = 1.0f;  // alpha_(s+1) .. alpha_t, alpha_0 .. alpha_t
  int reset = -1;
  for (int i = 0; i <= t; ++i) {
    const float alpha_i = shared.alpha[i];
    if (i > s) between *= alpha_i;
    decay *= alpha_i;
    if (alpha_i == 0.0f) reset = i;
  }
  shared.solve[s][t] = s < t ? shared.beta[t] * between * k_norm_t * k_norm_s * products.x : 0.0f;
  shared.mix[s][t] = s <= t ? q_norm * between * k_norm_s * products.y : 0.0f;
  if (s > 0) return;
  shared.read_k[t] = shared.beta[t] * decay * k_norm_t;
  shared.read_q[t] = q_norm * decay;
  shared.k_norm[t] = k_norm_t;
  shared.reset[t] = reset;
}

// Solves for u and the outputs of two rows. Lane c of a row holds tokens 2c and 2c + 1: in, v and
// the products with S; out, u and o.
struct RowTokens {
  float u[2], o[2];
};

template <class Traits>
__device__ __forceinline__ void solve_rows(const VerifyShared<Traits>& shared, int length,
                                           RowTokens (&rows)[2], const float (&sk)[4],
                                           const float (&sq)[4]) {
  const int lane = this_lane(), c = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * c + i;
    const bool whole = shared.reset[t] < 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float from_state = whole ? shared.read_k[t] * sk[2 * row + i] : 0.0f;
      rows[row].u[i] = shared.beta[t] * rows[row].u[i] - from_state;
      rows[row].o[i] = whole ? shared.read_q[t] * sq[2 * row + i] : 0.0f;
    }
  }
  const int resets[2] = {shared.reset[2 * c], shared.reset[2 * c + 1]};
#pragma unroll
  for (int s = 0; s < kMaxDraft; ++s) {
    if (s >= length) break;
    const float2 solve = *reinterpret_cast<const float2*>(&shared.solve[s][2 * c]);
    const float2 mix = *reinterpret_cast<const float2*>(&shared.mix[s][2 * c]);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float u = __shfl_sync(kFullWarp, rows[row].u[s % 2], (lane & ~3) + s / 2);
      // Tokens before s and behind a reset see nothing of u, not even NaN.
      if (s < 2 * c && s >= resets[0]) rows[row].u[0] -= solve.x * u;
      if (s < 2 * c + 1 && s >= resets[1]) rows[row].u[1] -= solve.y * u;
      if (s <= 2 * c && s >= resets[0]) rows[row].o[0] += mix.x * u;
      if (s <= 2 * c + 1 && s >= resets[1]) rows[row].o[1] += mix.y * u;
    }
  }
}

}  // namespace gdn

// What the warps of a head share: k and q as fragments, and the triangular part that relates its
// new tokens to each other,
//
//   u_t = beta_t v_t - read_k_t (S k_t) - sum_(s<t)  solve_ts u_s
//   o_t =              read_q_t (S q_t) + sum_(s<=t) mix_ts u_s
#pragma once

#include "core/gate.h"
#include "cuda/verify/fold.cuh"

namespace gdn {

template <class Traits>
struct VerifyShared {
  VerifySequence sequence;
  Fold folds[2];  // up to the page end that is crossed, and to the last accepted token
  int32_t num_folds;
  uint2 k[Traits::kSteps][32];  // new tokens, by step and lane
  uint2 q[Traits::kSteps][32];
  uint2 old_k[Traits::kSteps][32];      // draft tokens, transposed
  float4 products[Traits::kWarps][32];  // k_r.k_2c, k_r.k_2c+1, q_r.k_2c, q_r.k_2c+1 of a warp
  float2 squares[kMaxDraft][Traits::kWarps];  // of k and q
  alignas(16) float alpha[kMaxDraft];
  float beta[kMaxDraft];
  float solve[kMaxDraft][kMaxDraft];  // [s][t]
  float mix[kMaxDraft][kMaxDraft];    // [s][t]
  float read_k[kMaxDraft], read_q[kMaxDraft];
  float k_norm[kMaxDraft];
  int reset[kMaxDraft];  // latest token <= t with alpha = 0, or -1
};

// Gates of all tokens by one warp: a lane brings one of a, b, A_log, dt_bias, so that all loads are
// in flight together.
template <class Traits>
__device__ __forceinline__ void stage_gates(VerifyShared<Traits>& shared, const VerifyProblem& p,
                                            const VerifySequence& s, int32_t h) {
  const int lane = this_lane(), t = lane % kMaxDraft, kind = lane / kMaxDraft;
  const Gates& g = p.gates;
  const Tensor& mine = kind == 0 ? g.g : kind == 1 ? g.beta : kind == 2 ? g.A_log : g.dt_bias;
  const int64_t row = kind < 2 ? s.begin + t : 0;
  const bool wanted = mine.data != nullptr && (kind < 2 ? t < s.length : true);
  const float x = wanted ? load_element(mine, row, h) : 0.0f;
  const float b = __shfl_sync(kFullWarp, x, t + kMaxDraft);
  const float A_log = __shfl_sync(kFullWarp, x, 2 * kMaxDraft);
  const float dt_bias = __shfl_sync(kFullWarp, x, 3 * kMaxDraft);
  if (kind > 0) return;
  const bool exists = t < s.length;
  shared.alpha[t] = exists ? alpha(GateForm::kRaw, x, A_log, dt_bias) : 1.0f;
  shared.beta[t] = exists ? sigmoid(b) : 0.0f;
}

template <class Io>
__device__ __forceinline__ float sum_squares(uint2 four) {
  const float2 low = unpack2<Io>(four.x), high = unpack2<Io>(four.y);
  return low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y;
}

// A warp's share of all products between tokens; the fragments of k and q are A and B at once.
template <class Traits>
struct TokenProducts {
  float d[4] = {};
  float k_squares = 0.0f, q_squares = 0.0f;

  __device__ __forceinline__ void add(uint2 k, uint2 q) {
    using Io = typename Traits::Io;
    multiply_add<Io>(d, {k.x, q.x, k.y, q.y}, k.x, k.y);
    k_squares += sum_squares<Io>(k);
    q_squares += sum_squares<Io>(q);
  }
  __device__ __forceinline__ void stage(VerifyShared<Traits>& shared) const {
    const int warp = this_warp(), lane = this_lane();
    shared.products[warp][lane] = {d[0], d[1], d[2], d[3]};
    const float2 squares = {group_sum<4>(k_squares), group_sum<4>(q_squares)};
    if (lane % 4 == 0) shared.squares[lane / 4][warp] = squares;
  }
};

// k_t.k_s and q_t.k_s.
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

template <class Traits>
__device__ __forceinline__ float2 token_squares(const VerifyShared<Traits>& shared, int t) {
  float2 sum{};
#pragma unroll
  for (int w = 0; w < Traits::kWarps; ++w) {
    const float2 x = shared.squares[t][w];
    sum.x += x.x;
    sum.y += x.y;
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
  const float2 squares = token_squares(shared, t);
  const float k_norm_t = p.qk_l2norm ? rsqrtf(squares.x + 1e-6f) : 1.0f;
  const float k_norm_s = p.qk_l2norm ? rsqrtf(token_squares(shared, s).x + 1e-6f) : 1.0f;
  const float q_norm = p.qk_l2norm ? p.scale * rsqrtf(squares.y + 1e-6f) : p.scale;
  float between = 1.0f, decay = 1.0f;  // alpha_(s+1) .. alpha_t, alpha_0 .. alpha_t
  int reset = -1;
#pragma unroll
  for (int i = 0; i < kMaxDraft; ++i) {
    const float alpha_i = i <= t ? shared.alpha[i] : 1.0f;
    between *= i > s ? alpha_i : 1.0f;
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

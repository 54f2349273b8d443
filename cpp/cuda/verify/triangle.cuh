// What the warps of a head share: k and q as fragments, and the triangular part that relates its
// new tokens to each other,
//
//   u_t = beta_t v_t - read_k_t (S k_t) - sum_(s<t)  solve_ts u_s
//   o_t =              read_q_t (S q_t) + sum_(s<=t) mix_ts u_s
//
// made by one warp, lane (r, c) the entries of t = r and s = 2c, 2c + 1.
#pragma once

#include "core/gate.h"
#include "cuda/verify/fold.cuh"

namespace gdn {

// Factors of tokens 2c and 2c + 1.
struct TokenPair {
  float beta[2];
  float read_k[2], read_q[2];
  float k_norm[2];
};

// An 8 x 8 matrix [t][s] as the B fragment of m16n8k8, split in two numbers of 11 bits and more:
// lane (r, c) holds [r][2c] and [r][2c + 1].
struct SplitMatrix {
  float2 head, rest;
};

// All products between new tokens of some steps, with their squares. The fragments of k and q are A
// and B at once.
struct TokenProducts {
  float d[4] = {};  // k_r.k_2c, k_r.k_2c+1, q_r.k_2c, q_r.k_2c+1
  float k_squares = 0.0f, q_squares = 0.0f;

  template <class Io>
  static __device__ __forceinline__ float sum_squares(uint2 four) {
    const float2 low = unpack2<Io>(four.x), high = unpack2<Io>(four.y);
    return low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y;
  }
  template <class Io>
  __device__ __forceinline__ void add(uint2 k, uint2 q) {
    multiply_add<Io>(d, {k.x, q.x, k.y, q.y}, k.x, k.y);
    k_squares += sum_squares<Io>(k);
    q_squares += sum_squares<Io>(q);
  }
};

template <class Traits>
struct VerifyShared {
  VerifySequence sequence;
  Fold fold, boundary_fold;
  bool resets;
  uint2 k[Traits::kSteps][32];  // new tokens, by step and lane
  uint2 q[Traits::kSteps][32];
  uint2 old_k[Traits::kSteps][32];      // draft tokens, transposed
  float4 products[Traits::kWarps][32];  // of a warp's steps
  float2 squares[Traits::kWarps][32];
  float alpha[kMaxDraft], beta[kMaxDraft];
  alignas(16) TokenPair tokens[kMaxDraft / 2];
  alignas(16) SplitMatrix inverse[32], mix_split[32];
  // For rows that hold numbers which are not finite.
  float solve[kMaxDraft][kMaxDraft];  // [s][t]
  float mix[kMaxDraft][kMaxDraft];    // [s][t]
  int reset[kMaxDraft];               // latest token <= t with alpha = 0, or -1
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

// Both fragments of tf32: 11 bits of x, and of what they leave.
__device__ __forceinline__ float tf32_head(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}

__device__ __forceinline__ SplitMatrix split_matrix(float x, float y) {
  const float2 head = {tf32_head(x), tf32_head(y)};
  return {head, {x - head.x, y - head.y}};
}

// Lane (r, c) holds [r][2c] and [r][2c + 1] of a strictly lower matrix L: the same of 1 / (I + L).
__device__ __forceinline__ float2 invert_unit_lower(float2 lower) {
  const int lane = this_lane(), r = lane / 4, c = lane % 4;
  float2 x = {r == 2 * c ? 1.0f : 0.0f, r == 2 * c + 1 ? 1.0f : 0.0f};
#pragma unroll
  for (int s = 0; s + 1 < kMaxDraft; ++s) {
    const float entry = __shfl_sync(kFullWarp, s % 2 ? lower.y : lower.x, (lane & ~3) + s / 2);
    const float2 row = {__shfl_sync(kFullWarp, x.x, 4 * s + c),
                        __shfl_sync(kFullWarp, x.y, 4 * s + c)};
    if (r > s) x.x -= entry * row.x, x.y -= entry * row.y;
  }
  return x;
}

// By one warp, from what all of them staged.
template <class Traits>
__device__ __forceinline__ void make_triangle(VerifyShared<Traits>& shared,
                                              const VerifyProblem& p) {
  const int lane = this_lane(), t = lane / 4, c = lane % 4;
  TokenProducts products;
#pragma unroll
  for (int w = 0; w < Traits::kWarps; ++w) {
    const float4 d = shared.products[w][lane];
    const float2 squares = shared.squares[w][lane];
    products.d[0] += d.x, products.d[1] += d.y, products.d[2] += d.z, products.d[3] += d.w;
    products.k_squares += squares.x, products.q_squares += squares.y;
  }
  const float k_squares = group_sum<4>(products.k_squares);
  const float q_squares = group_sum<4>(products.q_squares);
  const float k_norm = p.qk_l2norm ? rsqrtf(k_squares + 1e-6f) : 1.0f;
  const float q_norm = p.qk_l2norm ? p.scale * rsqrtf(q_squares + 1e-6f) : p.scale;
  const float k_norms[2] = {__shfl_sync(kFullWarp, k_norm, 8 * c),
                            __shfl_sync(kFullWarp, k_norm, 8 * c + 4)};
  const float beta_t = shared.beta[t];
  float between[2] = {1.0f, 1.0f}, decay = 1.0f;  // alpha_(s+1) .. alpha_t, alpha_0 .. alpha_t
  int reset = -1;
#pragma unroll
  for (int i = 0; i < kMaxDraft; ++i) {
    float alpha_i = shared.alpha[i];
    if (i > t) alpha_i = 1.0f;
    if (i > 2 * c) between[0] *= alpha_i;
    if (i > 2 * c + 1) between[1] *= alpha_i;
    decay *= alpha_i;
    if (alpha_i == 0.0f) reset = i;
  }
  float solve[2], mix[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int s = 2 * c + i;
    const float weight = between[i] * k_norms[i];
    solve[i] = s < t ? beta_t * k_norm * weight * products.d[i] : 0.0f;
    mix[i] = s <= t ? q_norm * weight * products.d[2 + i] : 0.0f;
    shared.solve[s][t] = solve[i];
    shared.mix[s][t] = mix[i];
  }
  const float2 inverse = invert_unit_lower({solve[0], solve[1]});
  shared.inverse[lane] = split_matrix(inverse.x, inverse.y);
  shared.mix_split[lane] = split_matrix(mix[0], mix[1]);
  if (c > 0) return;
  TokenPair& pair = shared.tokens[t / 2];
  pair.beta[t % 2] = beta_t;
  pair.read_k[t % 2] = beta_t * decay * k_norm;
  pair.read_q[t % 2] = q_norm * decay;
  pair.k_norm[t % 2] = k_norm;
  shared.reset[t] = reset;
}

}  // namespace gdn

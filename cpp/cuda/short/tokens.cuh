// What the warps of a head share: k and q of up to 16 tokens as fragments, and the triangular part
// that relates the tokens to each other,
//
//   u_t = beta_t (v_t - G_t S k_t) - sum_(s<t)  solve_ts u_s      solve_ts = beta_t D_ts k_t.k_s
//   o_t = scale G_t S q_t          + sum_(s<=t) mix_ts u_s        mix_ts = scale D_ts q_t.k_s
//
// G_t is the product of alpha up to t, D_ts that between s and t.
#pragma once

#include "core/gate.h"
#include "cuda/short/params.h"
#include "cuda/short/state.cuh"

namespace gdn {

template <class Io_, int kHeadDim>
struct ShortTraits {
  using Io = Io_;
  static constexpr int kDim = kHeadDim;     // K = V
  static constexpr int kSteps = kDim / 16;  // of 16 columns of S
  static constexpr int kTiles = kDim / 16;  // of 16 rows of S, one for each warp of a head
  static constexpr int kMaxWarps = 4;       // of a block
  static constexpr int kBlocksPerSm = 4;
  // What registers are shared out for: with four blocks head size 128 spills there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  static constexpr int kRegisterBlocks = kDim == 128 ? 3 : kBlocksPerSm;
#else
  static constexpr int kRegisterBlocks = kBlocksPerSm;
#endif
  static constexpr int kHead = kDim * kDim;
};

inline constexpr int kTokens = static_cast<int>(kShortTokens);

// k or q of 16 tokens. The 16 places of a step are columns as a lane of S holds them: places 2c and
// 2c + 1 of the left half are columns 4c and 4c + 1, those of the right half 4c + 2 and 4c + 3.
// Halves are rows of 16 bytes, so one ldmatrix reads the fragments of a step: matrices (tokens
// 0-7, left), (8-15, left), (0-7, right), (8-15, right), which are A with tokens as rows, B with
// tokens as columns, and transposed B with tokens summed over.
template <class Traits>
struct TokenTile {
  static constexpr int kHalf = 16 * kTokens;
  static constexpr int kStep = 2 * kHalf + 16;  // neighbouring steps in different banks
  static constexpr int kPieces = Traits::kDim / 8;
  alignas(16) uint8_t bytes[Traits::kSteps * kStep];

  // Eight columns of one token.
  __device__ __forceinline__ void store(int token, int piece, const uint4& x) {
    uint8_t* to = bytes + piece / 2 * kStep + 16 * token + 8 * (piece % 2);
    *reinterpret_cast<uint2*>(to) = {x.x, x.z};
    *reinterpret_cast<uint2*>(to + kHalf) = {x.y, x.w};
  }
  // Where a lane points ldmatrix for step 0.
  __device__ __forceinline__ uint32_t place(int lane) const {
    return shared_address(bytes) + (lane >> 4) * kHalf + 16 * (lane & 15);
  }
};

template <class Traits>
struct ShortShared {
  TokenTile<Traits> k, q;
  ShortEntry entry;
  // [s][t]; 20 floats a row put the lanes that write a column into different banks.
  alignas(16) float between[kTokens][20];  // D_ts for s <= t
  alignas(16) float solve[kTokens][20];
  alignas(16) float mix[kTokens][20];
  float decay[kTokens];  // G_t
  float beta[kTokens];
  int32_t reset[kTokens];  // latest token <= t with alpha = 0, or -1
};

// Eight elements of one row as they lie in memory.
__device__ __forceinline__ uint4 load_eight(const Tensor& x, int64_t offset, bool vector) {
  const auto* from = static_cast<const uint16_t*>(x.data) + offset;
  if (vector) return *reinterpret_cast<const uint4*>(from);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

// l2norm over the kLanes lanes of a row, rounded to the io dtype.
template <class Io, int kLanes>
__device__ __forceinline__ uint4 normalized(const uint4& piece) {
  float x[8];
  unpack<Io>(piece, x);
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < 8; ++e) sum = fmaf(x[e], x[e], sum);
  const float inverse_norm = rsqrtf(group_sum<kLanes>(sum) + 1e-6f);
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] *= inverse_norm;
  return pack<Io>(x);
}

// k and q of 8 or 16 tokens by the whole block. Rows past the sequence are zero and not read.
template <class Traits>
__device__ __forceinline__ void stage_tokens(ShortShared<Traits>& shared, const ShortParams& p,
                                             const ShortEntry& s, int32_t h) {
  using Io = typename Traits::Io;
  constexpr int kPieces = TokenTile<Traits>::kPieces;
  const Tensor &q = p.problem.q, &k = p.problem.k;
  const int64_t q_head = divide(h, p.heads_per_q) * q.head_stride;
  const int64_t k_head = divide(h, p.heads_per_k) * k.head_stride;
  const int count = (s.length > 8 ? kTokens : 8) * kPieces;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int token = i / kPieces, piece = i % kPieces;
    uint4 k_piece = {}, q_piece = {};
    if (token < s.length) {
      const int64_t row = s.begin + token;
      k_piece = load_eight(k, row * k.row_stride + k_head + 8 * piece, p.vector_qk);
      q_piece = load_eight(q, row * q.row_stride + q_head + 8 * piece, p.vector_qk);
    }
    if (p.problem.qk_l2norm) {
      k_piece = normalized<Io, kPieces>(k_piece);
      q_piece = normalized<Io, kPieces>(q_piece);
    }
    shared.k.store(token, piece, k_piece);
    shared.q.store(token, piece, q_piece);
  }
}

// Gates of all tokens by one warp: lanes 0 .. 15 bring g, the others beta, in flight together.
template <class Traits>
__device__ __forceinline__ void stage_gates(ShortShared<Traits>& shared, const Gates& gates,
                                            const ShortEntry& s, int32_t h) {
  const int lane = this_lane(), t = lane % kTokens;
  const bool exists = t < s.length, is_gate = lane < kTokens;
  const Tensor& mine = is_gate ? gates.g : gates.beta;
  const float x = exists && mine.data ? load_element(mine, s.begin + t, h) : 1.0f;
  const float A_log = gates.A_log.data ? load_element(gates.A_log, 0, h) : 0.0f;
  const float dt_bias = gates.dt_bias.data ? load_element(gates.dt_bias, 0, h) : 0.0f;
  const float alpha_t = exists ? alpha(gates.form, x, A_log, dt_bias) : 1.0f;
  if (!is_gate) {
    const float beta = gates.beta_is_logit ? sigmoid(x) : x;
    shared.beta[t] = exists ? beta : 0.0f;
  }
  const unsigned resets = __ballot_sync(kFullWarp, is_gate && alpha_t == 0.0f);
  float product = 1.0f;
#pragma unroll
  for (int i = kTokens - 1; i >= 0; --i) {
    if (i < kTokens - 1) {
      const float next = __shfl_sync(kFullWarp, alpha_t, i + 1);
      if (i < t) product *= next;
    }
    if (is_gate) shared.between[i][t] = product;
  }
  product *= __shfl_sync(kFullWarp, alpha_t, 0);
  if (!is_gate) return;
  shared.decay[t] = product;
  shared.reset[t] = 31 - __clz(static_cast<int>(resets & ((2u << t) - 1)));
}

// Products of tokens with k, [t, s] in two accumulators of eight s.
template <class Traits>
__device__ __forceinline__ void multiply_tokens(float (&d)[2][4], const TokenTile<Traits>& rows,
                                                const TokenTile<Traits>& keys, bool wide) {
  const uint32_t from = rows.place(this_lane()), key = keys.place(this_lane());
#pragma unroll
  for (int step = 0; step < Traits::kSteps; ++step) {
    uint32_t a[4], b[4];
    load_matrices(a, from + step * TokenTile<Traits>::kStep);
    load_matrices(b, key + step * TokenTile<Traits>::kStep);
    multiply_add<typename Traits::Io>(d[0], a, b[0], b[2]);
    if (wide) multiply_add<typename Traits::Io>(d[1], a, b[1], b[3]);
  }
}

// Both matrices; the first and the last warp make one each.
template <class Traits>
__device__ __forceinline__ void make_triangles(ShortShared<Traits>& shared, float scale,
                                               bool wide) {
  const int warp = this_warp(), r = this_lane() / 4, c = this_lane() % 4;
  const int last_warp = static_cast<int>(blockDim.x / 32) - 1;
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    if (warp != (which == 0 ? 0 : last_warp)) continue;
    float d[2][4] = {};
    multiply_tokens(d, which == 0 ? shared.k : shared.q, shared.k, wide);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int t = r + 8 * (e / 2 % 2), s = 8 * (e / 4) + 2 * c + e % 2;
      const float x = d[e / 4][e % 4] * shared.between[s][t];
      if (which == 0) {
        shared.solve[s][t] = s < t ? shared.beta[t] * x : 0.0f;
      } else {
        shared.mix[s][t] = s <= t ? scale * x : 0.0f;
      }
    }
  }
}

// Updates and outputs of all tokens for a warp's rows, as accumulators of eight tokens each:
// element e of half j is row row_of(r) + 2 (e / 2), token 8 j + 2c + e % 2.
struct TileTokens {
  float u[2][4];  // in: v
  float o[2][4];
};

// From the products with S: sk = S k^T, sq = S q^T.
template <class Traits>
__device__ __forceinline__ void solve_tile(const ShortShared<Traits>& shared, float scale,
                                           int length, TileTokens& x, const float (&sk)[2][4],
                                           const float (&sq)[2][4]) {
  const int lane = this_lane(), c = lane % 4;
  int reset[2][2];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int j = e / 4, t = 8 * j + 2 * c + e % 2;
    reset[j][e % 2] = shared.reset[t];
    // Tokens behind a reset see nothing of S, not even NaN.
    const bool whole = reset[j][e % 2] < 0;
    const float beta = shared.beta[t], decay = shared.decay[t];
    const float from_state = whole ? beta * decay * sk[j][e % 4] : 0.0f;
    x.u[j][e % 4] = beta * x.u[j][e % 4] - from_state;
    x.o[j][e % 4] = whole ? scale * decay * sq[j][e % 4] : 0.0f;
  }
#pragma unroll
  for (int s = 0; s < kTokens; ++s) {
    if (s >= length) break;
    const int from = (lane & ~3) + s % 8 / 2;
    const float u[2] = {__shfl_sync(kFullWarp, x.u[s / 8][s % 2], from),
                        __shfl_sync(kFullWarp, x.u[s / 8][2 + s % 2], from)};
#pragma unroll
    for (int j = s / 8; j < 2; ++j) {
      if (8 * j >= length) break;
      const float2 solve = *reinterpret_cast<const float2*>(&shared.solve[s][8 * j + 2 * c]);
      const float2 mix = *reinterpret_cast<const float2*>(&shared.mix[s][8 * j + 2 * c]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Tokens before s and behind a reset see nothing of u, not even NaN.
        const int t = 8 * j + 2 * c + i;
        if (s < reset[j][i] || s > t) continue;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          if (s < t) x.u[j][2 * row + i] -= (i == 0 ? solve.x : solve.y) * u[row];
          x.o[j][2 * row + i] += (i == 0 ? mix.x : mix.y) * u[row];
        }
      }
    }
  }
}

}  // namespace gdn

// Everything of a chunk that does not depend on the state, for all chunks at once.
//
//     G_t = prod of alpha up to t          D_ts = G_t / G_s for s <= t, as exp2 of a difference
//     That = (I + diag(beta) strict_lower(K K^T))^-1 diag(beta)
//     T = D o That,   P = scale D o (Q K^T)
//
// Grid: one block per (chunk, unit of state heads that share a q and a k head). The block forms
// K K^T and Q K^T once; then each of its warps takes a head's T or P at a time.
#pragma once

#include "core/gate.h"
#include "cuda/common/dependent.cuh"
#include "cuda/sm80/traits.h"

namespace gdn {

// log2 alpha below this is 0 in fp32: an exact reset. It also bounds the cumulative sums.
inline constexpr float kResetLog2 = -150.0f;

__device__ __forceinline__ uint32_t load_raw(const Tensor& x, int64_t row, int head) {
  const int64_t i = row * x.row_stride + head * x.head_stride;
  if (x.dtype == DType::kFloat32) return static_cast<const uint32_t*>(x.data)[i];
  return static_cast<const uint16_t*>(x.data)[i];
}

__device__ __forceinline__ float decode_raw(uint32_t raw, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return unpack2<bf16>(raw).x;
    case DType::kFloat16: return unpack2<fp16>(raw).x;
    default: return __uint_as_float(raw);
  }
}

__device__ __forceinline__ float log2_alpha_of(const Gates& gates, uint32_t raw, int head) {
  constexpr float kLog2e = 1.4426950408889634f;
  if (gates.form == GateForm::kNone) return 0.0f;
  const float g = decode_raw(raw, gates.g.dtype);
  if (gates.form == GateForm::kLinear) return log2f(g);
  const float A_log = gates.A_log.data ? load_element(gates.A_log, 0, head) : 0.0f;
  const float dt_bias = gates.dt_bias.data ? load_element(gates.dt_bias, 0, head) : 0.0f;
  return kLog2e * log_alpha(gates.form, g, A_log, dt_bias);
}

// log2 alpha and beta of all heads of the block, into shared memory; heads are the fastest index,
// as in memory. Foreign rows have alpha = 1 and beta = 0. No load waits for another.
template <int D>
__device__ __forceinline__ void load_gates(const PrefillParams& p, const ChunkRows& rows,
                                           int first_head, uint32_t shared) {
  using S = PrepareTraits<D>;
  constexpr int kThreads = 32 * S::kNumWarps, kTurns = kChunk * kMaxUnitHeads / kThreads;
  const Gates& gates = p.gates;
  const int count = kChunk * p.group;
  uint32_t raw_g[kTurns], raw_beta[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int i = threadIdx.x + turn * kThreads, row = i / p.group;
    const bool valid = i < count && rows.valid(row);
    const int64_t token = rows.origin + row;
    const int head = first_head + i - row * p.group;
    raw_g[turn] = valid && gates.g.data ? load_raw(gates.g, token, head) : 0u;
    raw_beta[turn] = valid && gates.beta.data ? load_raw(gates.beta, token, head) : 0u;
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int i = threadIdx.x + turn * kThreads, row = i / p.group, member = i - row * p.group;
    if (i >= count) break;
    float log2_alpha = 0.0f, beta = 0.0f;
    if (rows.valid(row)) {
      log2_alpha = log2_alpha_of(gates, raw_g[turn], first_head + member);
      beta = gates.beta.data ? decode_raw(raw_beta[turn], gates.beta.dtype) : 1.0f;
      if (gates.beta_is_logit) beta = sigmoid(beta);
    }
    const uint32_t to = shared + S::kHeads + member * S::kHeadBytes + 4 * row;
    store_shared(to + S::kLogAlpha, log2_alpha);
    store_shared(to + S::kBeta, beta);
  }
}

// Eight elements of one row as they lie in memory.
__device__ __forceinline__ uint4 load_piece(const Tensor& x, int64_t offset, bool vector) {
  const auto* data = static_cast<const uint16_t*>(x.data) + offset;
  if (vector) return *reinterpret_cast<const uint4*>(data);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = data[2 * i] | static_cast<uint32_t>(data[2 * i + 1]) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

// The piece as bf16: l2norm over the kLanes lanes of its row, rounded to the io dtype first.
template <int kLanes>
__device__ __forceinline__ uint4 canonical_piece(uint4 piece, bool fp16_io, bool normalize) {
  if (!fp16_io && !normalize) return piece;
  float x[8];
  if (fp16_io) {
    unpack<fp16>(piece, x);
  } else {
    unpack<bf16>(piece, x);
  }
  if (normalize) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum = fmaf(x[e], x[e], sum);
    const float inverse_norm = rsqrtf(group_sum<kLanes>(sum) + 1e-6f);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      x[e] *= inverse_norm;
      if (fp16_io) x[e] = to_float(from_float<fp16>(x[e]));
    }
  }
  return pack<bf16>(x);
}

// Rows of one head of one operand, and where they go. Null or kNowhere: not there.
inline constexpr uint32_t kNowhere = 0xffffffffu;

struct TileCopy {
  const Tensor& source;
  int head;
  bool vector;
  bool normalize;
  uint32_t shared;  // Tile<2 D>
  bf16* staged;     // [64, D]
};

// Rows that need no change: no thread waits for its own.
template <int D>
__device__ __forceinline__ void copy_plain(const TileCopy& copy, const ChunkRows& rows) {
  constexpr int kPieces = D / 8;
  const int piece = threadIdx.x % kPieces, step = blockDim.x / kPieces;
  int row = threadIdx.x / kPieces;
  const auto* from = static_cast<const uint16_t*>(copy.source.data) +
                     int64_t{rows.origin + row} * copy.source.row_stride +
                     copy.head * copy.source.head_stride + 8 * piece;
#pragma unroll 8
  for (; row < kChunk; row += step, from += step * copy.source.row_stride) {
    copy_async_or_zero(copy.shared + Tile<2 * D>::offset(row, piece), from, rows.valid(row));
  }
}

// Rows that need a change or a copy for the scan.
template <int D>
__device__ __forceinline__ void copy_changed(const TileCopy& copy, const ChunkRows& rows,
                                             bool fp16_io) {
  constexpr int kPieces = D / 8;
  const int piece = threadIdx.x % kPieces, step = blockDim.x / kPieces;
#pragma unroll 2
  for (int row = threadIdx.x / kPieces; row < kChunk; row += step) {
    uint4 x = {};
    if (rows.valid(row)) {
      const int64_t offset = int64_t{rows.origin + row} * copy.source.row_stride +
                             copy.head * copy.source.head_stride + 8 * piece;
      x = load_piece(copy.source, offset, copy.vector);
    }
    x = canonical_piece<kPieces>(x, fp16_io, copy.normalize);
    if (copy.shared != kNowhere) store_shared4(copy.shared + Tile<2 * D>::offset(row, piece), x);
    if (copy.staged) *reinterpret_cast<uint4*>(copy.staged + row * D + 8 * piece) = x;
  }
}

// Row block i of the lower triangle of A B^T, [64, D] tiles.
template <int D>
__device__ __forceinline__ void multiply_rows(float (&acc)[4][2][4], uint32_t a_tile,
                                              uint32_t b_tile, int i, int lane) {
  using KeyTile = Tile<2 * D>;
  const uint32_t a_base = a_tile + KeyTile::rows_first(lane) + 16 * i * 2 * D;
  const uint32_t b_base = b_tile + KeyTile::pieces_first(lane);
#pragma unroll
  for (int e = 0; e < 32; ++e) acc[e / 8][(e / 4) % 2][e % 4] = 0.0f;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[4], b[4];
    load_matrices(a, a_base ^ (32 * k));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j > i) continue;
      load_matrices(b, (b_base ^ (32 * k)) + 16 * j * 2 * D);
      multiply_add<bf16>(acc[j][0], a, b[0], b[1]);
      multiply_add<bf16>(acc[j][1], a, b[2], b[3]);
    }
  }
}

// K K^T: fp16 for the merges of the inverse, its 8x8 diagonal blocks in fp32 as well.
template <int D>
__device__ __forceinline__ void form_gram_rows(uint32_t shared, int i, int lane) {
  using S = PrepareTraits<D>;
  float acc[4][2][4];
  multiply_rows<D>(acc, shared + S::kKeys, shared + S::kKeys, i, lane);
  const int r = lane >> 2, c = lane & 3;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j > i) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // tile e / 2, row half e % 2
      const float low = acc[j][e / 2][2 * (e % 2)], high = acc[j][e / 2][2 * (e % 2) + 1];
      const int row = 16 * i + r + 8 * (e % 2);
      store_shared(shared + S::kGram + GramTile::offset(row, 2 * j + e / 2) + 4 * c,
                   pack2<fp16>(low, high));
      if (j == i && e / 2 == e % 2) {
        const uint32_t block = shared + S::kDiagonal + (2 * i + e / 2) * kDiagonalBlockBytes;
        store_shared(block + 32 * r + 8 * c, low);
        store_shared(block + 32 * r + 8 * c + 4, high);
      }
    }
  }
}

// Q K^T, fp32, in accumulator order: two 16-byte words per lane and block.
template <int D>
__device__ __forceinline__ void form_product_rows(uint32_t shared, int i, int lane) {
  using S = PrepareTraits<D>;
  float acc[4][2][4];
  multiply_rows<D>(acc, shared + S::kQueries, shared + S::kKeys, i, lane);
  __syncwarp();  // the blocks take the place of the rows just read
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j > i) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float* d = acc[j][n];
      store_shared4(shared + S::kProducts + S::product_block(i, j) + n * 512 + lane * 16,
                    {__float_as_uint(d[0]), __float_as_uint(d[1]), __float_as_uint(d[2]),
                     __float_as_uint(d[3])});
    }
  }
}

// Cumulative gates of one head: into the warp's shared memory and, as factors, into the record.
// Returns whether there are resets.
template <int D>
__device__ __forceinline__ bool form_gates(uint32_t head_shared, uint32_t warp_shared, int lane,
                                           GateRecord& record) {
  using S = PrepareTraits<D>;
  const float log_alpha0 = load_shared_float(head_shared + S::kLogAlpha + 8 * lane);
  const float log_alpha1 = load_shared_float(head_shared + S::kLogAlpha + 8 * lane + 4);
  // A reset adds nothing to the sum: pairs on both its sides are cut off by their segments.
  const bool reset0 = log_alpha0 < kResetLog2, reset1 = log_alpha1 < kResetLog2;
  const float log0 = reset0 ? 0.0f : log_alpha0;
  const float log1 = reset1 ? 0.0f : log_alpha1;
  const float sum1 = warp_inclusive_sum(log0 + log1, lane);
  float sum0 = __shfl_up_sync(kFullWarp, sum1, 1);
  sum0 = (lane == 0 ? 0.0f : sum0) + log0;

  // Token of the last reset at or before each token, -1 if there is none.
  const unsigned even = __ballot_sync(kFullWarp, reset0), odd = __ballot_sync(kFullWarp, reset1);
  const unsigned before = (1u << lane) - 1, upto = before | (1u << lane);
  const int last_even = 2 * (31 - __clz(even & upto));  // -2: none
  const int odd_before = 2 * (31 - __clz(odd & before)) + 1,
            odd_upto = 2 * (31 - __clz(odd & upto)) + 1;
  const int segment0 = max(max(last_even, odd_before), -1);
  const int segment1 = max(max(last_even, odd_upto), -1);

  const float end = __shfl_sync(kFullWarp, sum1, 31);
  const int end_segment = __shfl_sync(kFullWarp, segment1, 31);
  const uint32_t at = warp_shared + 8 * lane;
  store_shared(at + S::kLogGates, sum0);
  store_shared(at + S::kLogGates + 4, sum1);
  store_shared(at + S::kSegments, static_cast<uint32_t>(segment0));
  store_shared(at + S::kSegments + 4, static_cast<uint32_t>(segment1));
  __syncwarp();

  const int place = gate_place(2 * lane);
  *reinterpret_cast<float2*>(record.from_start + place) = {segment0 < 0 ? exp2_fast(sum0) : 0.0f,
                                                           segment1 < 0 ? exp2_fast(sum1) : 0.0f};
  *reinterpret_cast<float2*>(record.to_end + place) = {
      2 * lane >= end_segment ? exp2_fast(end - sum0) : 0.0f,
      2 * lane + 1 >= end_segment ? exp2_fast(end - sum1) : 0.0f};
  const auto starts_segment = [&](int t) {
    return t == __float_as_int(load_shared_float(warp_shared + S::kSegments + 4 * t));
  };
  const unsigned low = __ballot_sync(kFullWarp, starts_segment(lane));
  const unsigned high = __ballot_sync(kFullWarp, starts_segment(lane + 32));
  if (lane == 0) *reinterpret_cast<uint2*>(record.resets) = {low, high};
  return (low | high) != 0;
}

// Writes D o x of block (i, j), x as accumulators, as the B fragments of two n-tiles of t. Without
// resets the blocks below the diagonal need no test; tests select, as a factor 0 would not keep inf
// or NaN out, and past the diagonal the exponent is positive and may overflow.
template <int D, bool kResets>
__device__ __forceinline__ void write_block(uint8_t* to, const float (&x)[2][4], int i, int j,
                                            uint32_t warp_shared, int lane) {
  using S = PrepareTraits<D>;
  const uint32_t log_gates = warp_shared + S::kLogGates;
  const int r = lane >> 2, c = lane & 3;
  uint32_t words[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {  // n-tile e % 2, row half e / 2
    const int t = 16 * i + 8 * (e / 2) + r, s = 16 * j + 8 * (e % 2) + 2 * c;
    const float log_t = load_shared_float(log_gates + 4 * t);
    float out[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      out[u] =
          x[e % 2][2 * (e / 2) + u] * exp2_fast(log_t - load_shared_float(log_gates + 4 * (s + u)));
      bool reaches = i != j || s + u <= t;
      if (kResets) {
        const int segment = __float_as_int(load_shared_float(warp_shared + S::kSegments + 4 * t));
        reaches = reaches && s + u >= segment;
      }
      if (!reaches) out[u] = 0.0f;
    }
    words[e] = pack2<bf16>(out[0], out[1]);
  }
  *reinterpret_cast<uint4*>(to + (i * (i + 1) / 2 + j) * kTriangleBlockBytes + lane * 16) = {
      words[0], words[1], words[2], words[3]};
}

// T of one head.
template <int D, bool kResets>
__device__ __forceinline__ void write_inverse(uint32_t shared, uint32_t head_shared,
                                              uint32_t warp_shared, ChunkRecord& record) {
  using S = PrepareTraits<D>;
  const int lane = fresh_lane();
  invert_lower({.gram = shared + S::kGram,
                .diagonal = shared + S::kDiagonal,
                .beta = head_shared + S::kBeta,
                .scratch = warp_shared + S::kScratch},
               lane, [&](int i, int j, const float (&x)[2][4]) {
                 write_block<D, kResets>(record.t, x, i, j, warp_shared, lane);
               });
}

// P of one head.
template <int D, bool kResets>
__device__ __forceinline__ void write_products(uint32_t shared, uint32_t warp_shared, float scale,
                                               ChunkRecord& record) {
  using S = PrepareTraits<D>;
  const int lane = fresh_lane();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      float x[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float4 d = load_shared_float4(shared + S::kProducts + S::product_block(i, j) +
                                            n * 512 + lane * 16);
        x[n][0] = scale * d.x;
        x[n][1] = scale * d.y;
        x[n][2] = scale * d.z;
        x[n][3] = scale * d.w;
      }
      write_block<D, kResets>(record.p, x, i, j, warp_shared, lane);
    }
  }
}

template <int D>
__global__ void __launch_bounds__(32 * PrepareTraits<D>::kNumWarps, 4)
    prefill_prepare(const __grid_constant__ PrefillParams p) {
  using S = PrepareTraits<D>;
  extern __shared__ __align__(256) uint8_t storage[];
  const uint32_t shared = shared_address(storage);
  constexpr int kNumWarps = S::kNumWarps;
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
  dependency_wait();

  const int32_t slot = blockIdx.x / p.units, unit = blockIdx.x % p.units;
  const int32_t number = p.slab_begin + slot;
  const SequenceEntry sequence = load_entry(p.plan, p.entries, p.entry_bound, number, lane);
  if (number >= p.plan->num_chunks || !sequence.live()) return;
  const ChunkRows rows = chunk_rows(p.grid, sequence, number - sequence.chunk_begin);
  const int first_head = unit * p.group;

  const int64_t tile = (static_cast<int64_t>(slot) * p.units + unit) * kChunk * D;
  const TileCopy keys = {.source = p.k,
                         .head = p.heads.k_of(first_head),
                         .vector = p.vector_qk,
                         .normalize = p.qk_l2norm,
                         .shared = shared + S::kKeys,
                         .staged = p.staging.qk ? p.staged_k + tile : nullptr};
  const TileCopy queries = {.source = p.q,
                            .head = p.heads.q_of(first_head),
                            .vector = p.vector_qk,
                            .normalize = p.qk_l2norm,
                            .shared = shared + S::kQueries,
                            .staged = p.staging.qk ? p.staged_q + tile : nullptr};
  if (p.staging.qk) {
    copy_changed<D>(keys, rows, p.io_fp16);
    copy_changed<D>(queries, rows, p.io_fp16);
  } else {
    copy_plain<D>(keys, rows);
    copy_plain<D>(queries, rows);
    copy_commit();
  }
  load_gates<D>(p, rows, first_head, shared);
  copy_wait_all();
  __syncthreads();
  // A long row block and a short one for each warp.
  form_gram_rows<D>(shared, warp, fresh_lane());
  form_product_rows<D>(shared, kNumWarps - 1 - warp, fresh_lane());
  __syncthreads();

  // The block's tasks are T of every head, then P of every head.
  const uint32_t warp_shared = shared + S::kWarps + warp * S::kWarpBytes;
  bool resets = false;
  int formed = -1;  // whose gates the warp holds
#pragma unroll 1
  for (int task = warp; task < 2 * p.group; task += kNumWarps) {
    const int member = task < p.group ? task : task - p.group;
    const uint32_t head_shared = shared + S::kHeads + member * S::kHeadBytes;
    ChunkRecord& record =
        p.records[static_cast<int64_t>(slot) * p.heads.state + first_head + member];
    if (member != formed) {
      __syncwarp();  // the last task has read its gates
      resets = form_gates<D>(head_shared, warp_shared, fresh_lane(), record.gates);
      formed = member;
    }
    if (task < p.group && !resets) {
      write_inverse<D, false>(shared, head_shared, warp_shared, record);
    } else if (task < p.group) {
      write_inverse<D, true>(shared, head_shared, warp_shared, record);
    } else if (!resets) {
      write_products<D, false>(shared, warp_shared, p.scale, record);
    } else {
      write_products<D, true>(shared, warp_shared, p.scale, record);
    }
  }
  // NOTE: not before: a scan of few blocks would crowd on the multiprocessors that drain first.
  allow_dependents();
  if (!p.staging.v) return;
  for (int h = first_head; h < first_head + p.group; ++h) {
    const int64_t place = static_cast<int64_t>(slot) * p.heads.state + h;
    const TileCopy values = {.source = p.v,
                             .head = p.heads.v_of(h),
                             .vector = p.vector_v,
                             .normalize = false,
                             .shared = kNowhere,
                             .staged = p.staged_v + place * kChunk * D};
    copy_changed<D>(values, rows, p.io_fp16);
  }
}

}  // namespace gdn

// Everything of a chunk that does not depend on the state, for all chunks at once.
//
//     G_t = prod of alpha up to t          D_ts = G_t / G_s for s <= t, as exp2 of a difference
//     That = (I + diag(beta) strict_lower(K K^T))^-1 diag(beta)
//     T = D o That,   P = scale D o (Q K^T)
//
// Grid: one block per (chunk, unit of state heads that share a q and a k head). Half of its warps
// form K K^T together and invert for one head after the other; the other half form Q K^T, which
// never leaves their registers, and P.
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/sm80/prepare_gates.cuh"
#include "cuda/sm80/prepare_products.cuh"

namespace gdn {

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
  uint32_t shared;  // PieceTile
  bf16* staged;     // [64, D]
};

// Rows that need no change, by the first 64 threads: none waits for its own.
template <class Traits>
__device__ __forceinline__ void copy_plain(const TileCopy& copy, const ChunkRows& rows) {
  constexpr int kPieces = Traits::D / 8, step = 64 / kPieces;
  if (threadIdx.x >= 64) return;
  const int piece = threadIdx.x % kPieces;
  int row = threadIdx.x / kPieces;
  using Tile = PieceTile<Traits::D>;
  const uint32_t place = copy.shared + Tile::offset(row, piece);
  const int64_t stride = copy.source.row_stride;
  const auto* from = static_cast<const uint16_t*>(copy.source.data) +
                     int64_t{rows.origin + row} * stride + copy.head * copy.source.head_stride +
                     8 * piece;
  if (rows.first == 0 && rows.last == kChunk) {
#pragma unroll
    for (int turn = 0; turn < 64 / step; ++turn) {
      const int more = turn * step;
      copy_async((place ^ Tile::flip(more)) + more * Tile::kRowBytes, from + more * stride);
    }
    return;
  }
#pragma unroll 1
  for (; row < kChunk; row += step, from += step * stride) {
    copy_async_or_zero(copy.shared + Tile::offset(row, piece), from, rows.valid(row));
  }
}

// Rows that need a change or a copy for the scan.
template <class Traits>
__device__ __forceinline__ void copy_changed(const TileCopy& copy, const ChunkRows& rows,
                                             bool fp16_io) {
  constexpr int D = Traits::D, kPieces = D / 8, step = Traits::kThreads / kPieces;
  const int piece = threadIdx.x % kPieces;
#pragma unroll 2
  for (int row = threadIdx.x / kPieces; row < kChunk; row += step) {
    uint4 x = {};
    if (rows.valid(row)) {
      const int64_t offset = int64_t{rows.origin + row} * copy.source.row_stride +
                             copy.head * copy.source.head_stride + 8 * piece;
      x = load_piece(copy.source, offset, copy.vector);
    }
    x = canonical_piece<kPieces>(x, fp16_io, copy.normalize);
    if (copy.shared != kNowhere) store_shared4(copy.shared + PieceTile<D>::offset(row, piece), x);
    if (copy.staged) *reinterpret_cast<uint4*>(copy.staged + row * D + 8 * piece) = x;
  }
}

// Writes 2^log_scale D o x of blocks (i, j), x as accumulators, as B fragments of two n-tiles.
// Without resets the blocks below the diagonal need no test; tests select, as a factor 0 would not
// keep inf or NaN out, and past the diagonal the exponent is positive and may overflow.
template <class Traits>
struct BlockWriter {
  uint8_t* to;     // the triangle
  uint32_t gates;  // of the head
  float log_scale;
  int lane;

  template <bool kResets, bool kDiagonal>
  __device__ __forceinline__ void write(const float (&x)[2][4], int i, int j) const {
    const int r = lane >> 2, c = lane & 3;
    // Tokens 16 i + r, r + 8 is two on, and 16 j + {2c, 2c + 1, 2c + 8, 2c + 9}.
    const uint32_t own = gates + Traits::gate_offset(16 * i) + 4 * gate_place(r);
    const uint32_t others = gates + Traits::gate_offset(16 * j) + 16 * c;
    const float log_t[2] = {load_shared_float(own + Traits::kLog) + log_scale,
                            load_shared_float(own + Traits::kLog + 8) + log_scale};
    const float4 log_s4 = load_shared_float4(others + Traits::kLog);
    const float log_s[4] = {log_s4.x, log_s4.y, log_s4.z, log_s4.w};
    int segments[2] = {};
    if (kResets) {
      segments[0] = static_cast<int>(load_shared(own + Traits::kSegments));
      segments[1] = static_cast<int>(load_shared(own + Traits::kSegments + 8));
    }
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // n-tile e % 2, row half e / 2
      const int t = 8 * (e / 2) + r, s = 8 * (e % 2) + 2 * c;
      float out[2];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        out[u] = x[e % 2][2 * (e / 2) + u] * exp2_fast(log_t[e / 2] - log_s[2 * (e % 2) + u]);
        bool reaches = !kDiagonal || s + u <= t;
        if (kResets) reaches = reaches && 16 * j + s + u >= segments[e / 2];
        if (!reaches) out[u] = 0.0f;
      }
      words[e] = pack2<bf16>(out[0], out[1]);
    }
    *reinterpret_cast<uint4*>(to + (i * (i + 1) / 2 + j) * kTriangleBlockBytes + lane * 16) = {
        words[0], words[1], words[2], words[3]};
  }
};

// T of one head.
template <class Traits, bool kResets>
__device__ __forceinline__ void write_inverse(const InverseInput& input, uint32_t gates,
                                              ChunkRecord& record) {
  const int lane = fresh_lane();
  const BlockWriter<Traits> writer = {
      .to = record.t, .gates = gates, .log_scale = 0.0f, .lane = lane};
  invert_lower(input, lane, [&](int i, int j, const float (&x)[2][4]) {
    if (i == j) {
      writer.template write<kResets, true>(x, i, j);
    } else {
      writer.template write<kResets, false>(x, i, j);
    }
  });
}

// The row blocks of Q K^T and P in the set kBlocks by one warp, one after the other; the rows of Q
// for the next are on their way meanwhile. NOTE: unrolled, as a loop over the row blocks runs the
// products of four column blocks in each: prepare 160 us against 135 (16/32, 8192x4, H200).
template <class Traits, unsigned kBlocks>
struct ProductRole {
  static constexpr int D = Traits::D;
  RowFragment queries[2][D / 32];

  static __device__ __forceinline__ constexpr bool has(int i) { return kBlocks >> i & 1; }
  // The first of the set from i on; 4: none.
  static __device__ __forceinline__ constexpr int next(int i) {
    while (i < 4 && !has(i)) ++i;
    return i;
  }
  static __device__ __forceinline__ constexpr int buffer(int i) {
    int before = 0;
    for (int b = 0; b < i; ++b) before += has(b);
    return before & 1;
  }
  static constexpr int kFirst = next(0);

  template <int i>
  __device__ __forceinline__ void load(const QueryRows& rows) {
    rows.load<D>(queries[buffer(i)], i, fresh_lane());
  }
  __device__ __forceinline__ void start(const RowFragment (&first)[D / 32]) {
#pragma unroll
    for (int s = 0; s < D / 32; ++s) queries[0][s] = first[s];
  }

  // Row block i and those behind it. `records` are those of the unit's heads.
  template <int i = kFirst>
  __device__ __forceinline__ void run(const PrefillParams& p, const QueryRows& rows, uint32_t keys,
                                      uint32_t gates, ChunkRecord* records) {
    constexpr int kNext = next(i + 1), kBuffer = buffer(i);
    if constexpr (kNext < 4) load<kNext>(rows);
    const int lane = fresh_lane();
    const KeyRows<D> key_rows(keys, lane);
    float acc[i + 1][2][4];
#pragma unroll
    for (int s = 0; s < D / 32; ++s) {
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        multiply_fragments(acc[j], queries[kBuffer][s], key_rows.load(j, s), s > 0);
      }
    }
    if (p.scale < 0) {
#pragma unroll
      for (int e = 0; e < 8 * (i + 1); ++e) acc[e / 8][e / 4 % 2][e % 4] *= -1.0f;
    }
#pragma unroll 1
    for (int member = 0; member < p.group; ++member) {
      const BlockWriter<Traits> writer = {.to = records[member].p,
                                          .gates = gates + member * Traits::kHeadBytes,
                                          .log_scale = p.log2_scale,
                                          .lane = lane};
      if (load_shared(writer.gates + Traits::kResets) == 0) {
        write_row<false>(writer, acc);
      } else {
        write_row<true>(writer, acc);
      }
    }
    if constexpr (kNext < 4) run<kNext>(p, rows, keys, gates, records);
  }

  template <bool kResets, int kCount>
  static __device__ __forceinline__ void write_row(const BlockWriter<Traits>& writer,
                                                   const float (&acc)[kCount][2][4]) {
#pragma unroll
    for (int j = 0; j < kCount - 1; ++j) {
      writer.template write<kResets, false>(acc[j], kCount - 1, j);
    }
    writer.template write<kResets, true>(acc[kCount - 1], kCount - 1, kCount - 1);
  }
};

// What the block's warps work on.
template <class Traits>
struct PrepareBlock {
  static constexpr int D = Traits::D;

  const PrefillParams& p;
  ChunkRows rows;
  QueryRows queries;
  int first_head;
  ChunkRecord* records;  // of the block's heads
  uint32_t shared;

  __device__ __forceinline__ uint32_t gates(int member) const {
    return shared + Traits::kHeads + member * Traits::kHeadBytes;
  }

  // Gates of the heads of one warp that inverts.
  __device__ __forceinline__ void form_heads(int warp, int lane) const {
    constexpr int kTurns = Traits::kPairs == 1 ? 1 : kMaxUnitHeads / Traits::kPairs;
    RawGates raw[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int member = warp + turn * Traits::kPairs;
      if (member < p.group) raw[turn] = read_gates(p.gates, rows, first_head + member, lane);
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int member = warp + turn * Traits::kPairs;
      if (member >= p.group) continue;
      form_gates<Traits>(p.gates, raw[turn], rows, first_head + member, lane, gates(member),
                         records[member].gates);
    }
  }

  // K K^T, then T of the warp's heads. Row blocks 0 and 3 have as many 16x16 blocks as 1 and 2.
  __device__ __forceinline__ void invert(int warp) const {
    const uint32_t keys = shared + Traits::kKeys, gram = shared + Traits::kGram;
    const uint32_t diagonal = shared + Traits::kDiagonal;
    if (Traits::kPairs == 1) {
      form_gram<D, 0b1111>(keys, gram, diagonal);
      __syncwarp();
    } else {
      if (warp == 0) form_gram<D, 0b1001>(keys, gram, diagonal);
      if (warp == 1) form_gram<D, 0b0110>(keys, gram, diagonal);
      asm volatile("bar.sync 1, %0;" : : "n"(32 * Traits::kPairs) : "memory");
    }
#pragma unroll 1
    for (int member = warp; member < p.group; member += Traits::kPairs) {
      const InverseInput input = {
          .gram = gram,
          .diagonal = diagonal,
          .beta = gates(member) + Traits::kBeta,
          .scratch = shared + Traits::kScratch + warp * kInverseScratchBytes};
      if (load_shared(gates(member) + Traits::kResets) == 0) {
        write_inverse<Traits, false>(input, gates(member), records[member]);
      } else {
        write_inverse<Traits, true>(input, gates(member), records[member]);
      }
      __syncwarp();  // the scratch is free
    }
  }

  // Q K^T and P by one warp, whose first row block is loaded.
  template <unsigned kBlocks>
  __device__ __forceinline__ void form_products(const RowFragment (&first)[D / 32]) const {
    ProductRole<Traits, kBlocks> role;
    role.start(first);
    role.run(p, queries, shared + Traits::kKeys, gates(0), records);
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    prefill_prepare(const __grid_constant__ PrefillParams p) {
  constexpr int D = Traits::D;
  extern __shared__ __align__(256) uint8_t storage[];
  const uint32_t shared = shared_address(storage);
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
  dependency_wait();

  const uint32_t units = p.units;
  const int32_t slot = blockIdx.x / units, unit = blockIdx.x % units;
  const int32_t number = p.slab_begin + slot;
  const SequenceEntry sequence = load_entry(p.plan, p.entries, p.entry_bound, number, lane);
  if (number >= p.plan->num_chunks || !sequence.live()) return;
  PrepareBlock<Traits> block = {.p = p};
  block.rows = chunk_rows(p.grid, sequence, number - sequence.chunk_begin);
  block.first_head = unit * p.group;
  block.records = p.records + (static_cast<int64_t>(slot) * p.heads.state + block.first_head);
  block.shared = shared;
  const ChunkRows& rows = block.rows;
  const int q_head = divide(block.first_head, p.heads_per_q);

  const int64_t tile = (static_cast<int64_t>(slot) * p.units + unit) * kChunk * D;
  const TileCopy keys = {.source = p.k,
                         .head = static_cast<int>(divide(block.first_head, p.heads_per_k)),
                         .vector = p.vector_qk,
                         .normalize = p.qk_l2norm,
                         .shared = shared + Traits::kKeys,
                         .staged = p.staging.qk ? p.staged_k + tile : nullptr};
  if (p.staging.qk) {
    copy_changed<Traits>(keys, rows, p.io_fp16);
    const TileCopy queries = {.source = p.q,
                              .head = q_head,
                              .vector = p.vector_qk,
                              .normalize = p.qk_l2norm,
                              .shared = kNowhere,
                              .staged = p.staged_q + tile};
    copy_changed<Traits>(queries, rows, p.io_fp16);
    block.queries = {.from = p.staged_q + tile, .stride = D, .first = 0, .last = kChunk};
  } else {
    copy_plain<Traits>(keys, rows);
    copy_commit();
    block.queries = {.from = static_cast<const bf16*>(p.q.data) + rows.origin * p.q.row_stride +
                             q_head * p.q.head_stride,
                     .stride = p.q.row_stride,
                     .first = rows.first,
                     .last = rows.last};
  }
  for (int h = block.first_head; p.staging.v && h < block.first_head + p.group; ++h) {
    const int64_t place = static_cast<int64_t>(slot) * p.heads.state + h;
    const TileCopy values = {.source = p.v,
                             .head = p.heads.v_of(h),
                             .vector = p.vector_v,
                             .normalize = false,
                             .shared = kNowhere,
                             .staged = p.staged_v + place * kChunk * D};
    copy_changed<Traits>(values, rows, p.io_fp16);
  }
  block.queries.from += (lane >> 2) * block.queries.stride + 8 * (lane & 3);

  // Row blocks 0 and 3 have as many 16x16 blocks as 1 and 2.
  const bool inverts = warp < Traits::kPairs, has_second = Traits::kPairs == 2 && warp == 3;
  RowFragment queries[D / 32];
  if (inverts) {
    block.form_heads(warp, lane);
  } else if (!p.staging.qk) {
    block.queries.template load<D>(queries, has_second, lane);
  }
  copy_wait_all();
  __syncthreads();
  if (inverts) {
    block.invert(warp);
  } else {
    if (p.staging.qk) block.queries.template load<D>(queries, has_second, lane);
    if (Traits::kPairs == 1) {
      block.template form_products<0b1111>(queries);
    } else if (!has_second) {
      block.template form_products<0b1001>(queries);
    } else {
      block.template form_products<0b0110>(queries);
    }
  }
  // NOTE: not before: a scan of few blocks would crowd on the multiprocessors that drain first.
  __syncthreads();
  allow_dependents();
}

}  // namespace gdn

// The serial pass over the chunks of one sequence, state in registers. With S the [V, K] state
// before the chunk, for the rows v that a warp owns:
//
//     Y = V - G K S^T         U = T Y
//     O = scale G Q S^T + P U
//     S = G_C S + (U o G_C / G)^T K
//
// Grid: one block per (sequence, state head, split of V). A warp owns 16 rows of S, [16, D] in the
// accumulators of 16x8 tiles, and works on transposes (v along rows), so that every result is the
// next product's A fragment in place. Rows r and r + 8 of a tile are v = 2r and 2r + 1: a lane's
// outputs of one token are then neighbours, and a warp's store fills whole sectors. K, T and gates
// are copied a chunk ahead, V, Q and P into the place that the chunk before has just left.
#pragma once

#include <cstddef>

#include "cuda/common/dependent.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/sm80/scan_copy.cuh"
#include "cuda/sm80/scan_state.cuh"

namespace gdn {

template <class Traits>
struct Scan {
  static constexpr int D = Traits::D;
  using KeyTile = typename Traits::KeyTile;
  using ValueTile = typename Traits::ValueTile;
  using Chunk = ScanChunk<Traits::kUnaligned>;
  using State = float[D / 8][4];
  using Operand = uint32_t[4][4];  // [16 v, 64 t] as A fragments

  const PrefillParams& p;
  const ScanBlock& block;
  const ScanCopies<Traits>& copies;

  // ---- products ----

  static __device__ __forceinline__ void multiply_or_add(float (&d)[4], const uint32_t (&a)[4],
                                                         uint32_t b0, uint32_t b1, bool add) {
    if (add) {
      multiply_add<bf16>(d, a, b0, b1);
    } else {
      multiply_bf16(d, a, b0, b1);
    }
  }

  // z^T = S x^T for the rows x of a key tile.
  __device__ __forceinline__ void multiply_state(float (&z)[8][4], const State& s,
                                                 uint32_t tile) const {
    const uint32_t base = tile + KeyTile::pieces_first(this_lane());
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[4];
      pack_a<bf16>(a, s[2 * k], s[2 * k + 1]);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        uint32_t b[4];
        load_matrices(b, (base ^ (32 * k)) + 16 * t * KeyTile::kRowBytes);
        multiply_or_add(z[2 * t], a, b[0], b[1], k > 0);
        multiply_or_add(z[2 * t + 1], a, b[2], b[3], k > 0);
      }
    }
  }

  // z^T (+)= y^T L^T for the token block i of a lower triangle L, seen from this lane.
  static __device__ __forceinline__ void multiply_triangle(float (&left)[4], float (&right)[4],
                                                           const Operand& y, uint32_t triangle,
                                                           int i, bool add) {
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      const uint4 b = load_shared4(triangle + (i * (i + 1) / 2 + j) * kTriangleBlockBytes);
      multiply_or_add(left, y[j], b.x, b.y, add || j > 0);
      multiply_or_add(right, y[j], b.z, b.w, add || j > 0);
    }
  }

  // S = G_C S + (U o G_C / G)^T K. U is weighted as rounded for the output: its weighted copy would
  // take the registers of another operand.
  static __device__ __forceinline__ void update_state(State& s, const Operand& u, uint32_t stage) {
    const int lane = this_lane();
    const uint32_t gates = stage + Traits::kGates;
    const float decay = load_shared_float(gates + 4 * gate_place(kChunk - 1));
#pragma unroll
    for (int e = 0; e < D / 2; ++e) s[e / 4][e % 4] *= decay;
    const uint32_t base = stage + Traits::kKeys + KeyTile::rows_first(lane);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float4 f = gate_factors(gates + offsetof(GateRecord, to_end), lane, t);
      uint32_t w[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // row half e % 2, tokens of n-tile e / 2
        const float2 pair = unpack2<bf16>(u[t][e]);
        w[e] = pack2<bf16>((e < 2 ? f.x : f.z) * pair.x, (e < 2 ? f.y : f.w) * pair.y);
      }
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        load_matrices_transposed(b, (base ^ (32 * n)) + 16 * t * KeyTile::kRowBytes);
        multiply_add<bf16>(s[2 * n], w, b[0], b[1]);
        multiply_add<bf16>(s[2 * n + 1], w, b[2], b[3]);
      }
    }
  }

  // ---- what lies between them ----

  // The lane's factors of tokens 16 i + {2c, 2c + 1, 2c + 8, 2c + 9}.
  static __device__ __forceinline__ float4 gate_factors(uint32_t table, int lane, int i) {
    return load_shared_float4(table + 64 * i + 16 * (lane & 3));
  }

  // Y^T = V^T - G (K S^T)^T; zero outside tokens [first, last).
  __device__ __forceinline__ void form_residual(Operand& y, const State& s, int32_t chunk,
                                                int first, int last) const {
    const uint32_t stage = copies.stage(chunk), values = copies.values(chunk);
    float z[8][4];
    multiply_state(z, s, stage + Traits::kKeys);
    const int lane = this_lane();
    const uint32_t pairs[2] = {values + ValueTile::pair(this_warp(), lane, 0),
                               values + ValueTile::pair(this_warp(), lane, 1)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 g = gate_factors(stage + Traits::kGates, lane, i);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float* d = z[2 * i + n];
        const float2 v0 =
            unpack2<bf16>(load_shared(pairs[0] + 8 * (2 * i + n) * ValueTile::kRowBytes));
        const float2 v1 =
            unpack2<bf16>(load_shared(pairs[1] + 8 * (2 * i + n) * ValueTile::kRowBytes));
        const float g0 = n == 0 ? g.x : g.z, g1 = n == 0 ? g.y : g.w;
        y[i][2 * n] = pack2<bf16>(fmaf(-g0, d[0], v0.x), fmaf(-g1, d[1], v1.x));
        y[i][2 * n + 1] = pack2<bf16>(fmaf(-g0, d[2], v0.y), fmaf(-g1, d[3], v1.y));
      }
    }
    if (first == 0 && last == kChunk) return;
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const int t = 16 * (e / 4) + 8 * (e % 4 / 2) + 2 * (lane & 3);
      if (t < first || t >= last) y[e / 4][e % 4] &= 0xffff0000u;
      if (t + 1 < first || t + 1 >= last) y[e / 4][e % 4] &= 0x0000ffffu;
    }
  }

  // U = T Y in place of Y, the last tokens first: block i needs the blocks up to i.
  static __device__ __forceinline__ void form_updates(Operand& y, uint32_t stage) {
    const uint32_t triangle = stage + Traits::kTriangle + this_lane() * 16;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      float left[4], right[4];
      multiply_triangle(left, right, y, triangle, i, false);
      pack_a<bf16>(y[i], left, right);
    }
  }

  // ---- output ----

  // O^T = scale G (Q S^T)^T + (P U)^T, as pairs of columns: word 2 j + e is token 8 j + 2c + e.
  __device__ __forceinline__ void form_output(uint32_t (&words)[16], const State& s,
                                              const Operand& u, int32_t chunk) const {
    float z[8][4];
    multiply_state(z, s, copies.queries(chunk));
    const int lane = this_lane();
    const uint32_t gates = copies.stage(chunk) + Traits::kGates;
    const uint32_t products = copies.products(chunk) + lane * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 g = gate_factors(gates, lane, i);
      const float factors[4] = {p.scale * g.x, p.scale * g.y, p.scale * g.z, p.scale * g.w};
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        z[2 * i][d] *= factors[d % 2];
        z[2 * i + 1][d] *= factors[2 + d % 2];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_triangle(z[2 * i], z[2 * i + 1], u, products, i, true);
    const bool fp16_io = p.io_fp16;
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const float a = z[e / 2][e % 2], b = z[e / 2][e % 2 + 2];
      words[e] = fp16_io ? pack2<fp16>(a, b) : pack2<bf16>(a, b);
    }
  }

  __device__ __forceinline__ void store_output(const uint32_t (&words)[16], const Chunk& chunk,
                                               int first, int last) const {
    const int lane = this_lane(), row = 2 * (lane & 3);
    first = max(first, chunk.first(block));
    last = min(last, chunk.last(block));
    const int64_t stride = p.output.row_stride;
    uint16_t* to = output_row(chunk.begin() + row) + 2 * (lane >> 2);
    if (first == 0 && last == kChunk && p.vector_output) {
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        store_global(to + (8 * (e / 2) + e % 2) * stride, words[e]);
      }
      return;
    }
    if (Traits::kUnaligned && p.vector_output) {
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        const int at = 8 * (e / 2) + e % 2;
        if (row + at >= first && row + at < last) store_global(to + at * stride, words[e]);
      }
      return;
    }
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const int at = 8 * (e / 2) + e % 2;
      if (row + at < first || row + at >= last) continue;
      to[at * stride] = static_cast<uint16_t>(words[e]);
      to[at * stride + 1] = static_cast<uint16_t>(words[e] >> 16);
    }
  }

  static __device__ __forceinline__ void store_global(uint16_t* to, uint32_t word) {
    asm volatile("st.global.u32 [%0], %1;"
                 :
                 : "l"(__cvta_generic_to_global(to)), "r"(word)
                 : "memory");
  }

  // Column 0 of this warp of the output of a row of the sequence.
  __device__ __forceinline__ uint16_t* output_row(int64_t row) const {
    return block.output + row * p.output.row_stride + Traits::kWarpColumns * this_warp();
  }

  __device__ __forceinline__ void zero_output() const {
    const int lane = this_lane();
    for (Chunk chunk(p.grid, block); chunk.number < block.end; chunk.advance(p.grid)) {
      for (int row = 0; row < chunk.last(block); ++row) {
        if (lane < Traits::kWarpColumns) output_row(chunk.begin() + row)[lane] = 0;
      }
    }
  }

  // ---- one chunk ----

  __device__ __forceinline__ Chunk after(Chunk chunk) const {
    chunk.advance(p.grid);
    return chunk;
  }

  // Tokens [first, last) of a chunk, all of them unless it has resets.
  __device__ __forceinline__ void advance(State& s, const Chunk& chunk, int first, int last) const {
    const uint32_t stage = copies.stage(chunk.number);
    Operand y;
    form_residual(y, s, chunk.number, first, last);
    form_updates(y, stage);
    uint32_t words[16];
    form_output(words, s, y, chunk.number);
    if (!Traits::kAhead && last == kChunk) {
      __syncthreads();  // all warps are past V, Q and P
      copies.copy_rest(after(chunk));
    }
    store_output(words, chunk, first, last);
    update_state(s, y, stage);
  }

  // First element of this lane in a [D, D] state.
  __device__ __forceinline__ int lane_offset() const {
    const int lane = this_lane();
    return (block.column + Traits::kWarpColumns * this_warp() + 2 * (lane >> 2)) * D +
           2 * (lane & 3);
  }

  __device__ __forceinline__ void load(State& s) const {
    if (block.begin > 0) {  // cut by the slab before
      load_tiles<D>(s, p.handover_in + block.head * int64_t{D * D} + lane_offset(), true);
    } else {
      load_state<D>(s, p.initial, p.entries[block.entry].read_row, block.head, lane_offset(),
                    p.vector_state);
    }
  }

  __device__ __forceinline__ void store(const State& s, const Pool& pool, int64_t row) const {
    store_state<D>(s, pool, row, block.head, lane_offset(), p.vector_state);
  }

  // Chunks done at the first page end past chunk `begin`.
  __device__ __forceinline__ int32_t first_checkpoint() const {
    const int32_t passed = p.grid.page_ends(block.page_end, block.begin);
    return block.page_end + passed * p.grid.page_chunks;
  }

  __device__ __forceinline__ void store_checkpoint(const State& s, int32_t chunk) const {
    const SequenceEntry& sequence = p.entries[block.entry];
    const int64_t entry =
        sequence.checkpoint_start + p.grid.page_ends(sequence.first_checkpoint, chunk);
    store(s, p.checkpoints, p.checkpoint_indices ? p.checkpoint_indices[entry] : entry);
  }

  // The end of the sequence or of the slab.
  __device__ __forceinline__ void store_end(const State& s) const {
    const SequenceEntry& sequence = p.entries[block.entry];
    if (block.end == sequence.chunk_count(p.grid)) {
      store(s, p.output_state, sequence.write_row);
    } else {
      store_tiles<D>(s, p.handover_out + block.head * int64_t{D * D} + lane_offset(), true);
    }
  }

  // Tokens after a reset owe nothing to those before it, NaN and inf included. A zero factor would
  // not keep those out of a product, so a chunk with resets runs once per segment between them.
  __device__ __forceinline__ void run_chunk(State& s, const Chunk& chunk) const {
    int first = 0;  // token where the segment begins
#pragma unroll 1
    do {
      int last = kChunk;
      const uint4 words =
          load_shared4(copies.stage(chunk.number) + Traits::kGates + offsetof(GateRecord, resets));
      if ((words.x | words.y) != 0) {
        const uint64_t ahead = (static_cast<uint64_t>(words.y) << 32 | words.x) >> first;
        if (ahead & 1) {
#pragma unroll
          for (int e = 0; e < D / 2; ++e) s[e / 4][e % 4] = 0.0f;
        }
        if (ahead >> 1 != 0) last = first + __ffsll(static_cast<int64_t>(ahead >> 1));
      }
      advance(s, chunk, first, last);
      first = last % static_cast<int>(kChunk);
    } while (first != 0);
  }

  __device__ __forceinline__ void run() const {
    const bool holds_state =
        32 * Traits::kWarps == Traits::kThreads || this_warp() < Traits::kWarps;
    if (!block.live) {
      if (holds_state) zero_output();
      return;
    }
    Chunk chunk(p.grid, block);
    copies.copy_keyed(chunk);
    copies.copy_rest(chunk);
    State s;
    if (holds_state) load(s);
    int32_t checkpoint = first_checkpoint();
#pragma unroll 1
    for (; chunk.number < block.end; chunk.advance(p.grid)) {
      copy_wait_all();
      __syncthreads();
      const Chunk next = after(chunk);
      copies.copy_keyed(next);
      if (Traits::kAhead) copies.copy_rest(next);
      if (!holds_state) continue;
      run_chunk(s, chunk);
      // A chunk that ends early ends no page.
      if (chunk.number + 1 == checkpoint &&
          chunk.last(block) == kChunk - (Traits::kUnaligned ? p.grid.gap : 0)) {
        store_checkpoint(s, chunk.number);
        checkpoint += p.grid.page_chunks;
      }
    }
    if (holds_state) store_end(s);
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    prefill_scan(const __grid_constant__ PrefillParams p) {
  extern __shared__ __align__(256) uint8_t storage[];
  dependency_wait();
  allow_dependents();
  ScanBlock& found = *reinterpret_cast<ScanBlock*>(storage + Traits::kBlock);
  if (threadIdx.x < 32) find_block<Traits>(p, found);
  __syncthreads();
  const ScanBlock block = found;
  if (block.entry < 0) return;
  const ScanCopies<Traits> copies(p, block, shared_address(storage));
  const Scan<Traits> scan{.p = p, .block = block, .copies = copies};
  scan.run();
}

}  // namespace gdn

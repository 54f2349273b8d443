// The state role of the scan: one warpgroup carries 64 rows of V of a state through its chunks.
// S is kept in fp32 accumulators; its 16-bit copy and Y are A registers, so neither passes through
// shared memory.
#pragma once

#include <cfloat>

#include "cuda/common/copy.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/sm90/scan_item.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace gdn::sm90 {

// This thread's part of a [128, 128] state: s[4 j + e] is row 64 group + 16 warp + lane / 4 +
// 8 (e / 2), column 8 j + 2 (lane % 4) + e % 2.
__device__ __forceinline__ int state_offset(int group, int warp, int lane) {
  return (64 * group + 16 * warp + (lane >> 2)) * kDim + 2 * (lane & 3);
}

template <class Pair>
__device__ __forceinline__ void load_state_as(float (&s)[64], const Pair* rows) {
  __builtin_assume(__isGlobal(rows));  // the pointer came through shared memory
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    const Pair pair = rows[4 * (e >> 1) + (e & 1) * 4 * kDim];
    if constexpr (sizeof(Pair) == 8) {
      s[2 * e] = pair.x;
      s[2 * e + 1] = pair.y;
    } else {
      const float2 x = {to_float(pair.x), to_float(pair.y)};
      s[2 * e] = x.x;
      s[2 * e + 1] = x.y;
    }
  }
}

__device__ __forceinline__ void load_state(float (&s)[64], const void* state, DType dtype,
                                           int offset) {
  if (state == nullptr) {
#pragma unroll
    for (int e = 0; e < 64; ++e) s[e] = 0.0f;
  } else if (dtype == DType::kFloat32) {
    load_state_as(s, reinterpret_cast<const float2*>(static_cast<const float*>(state) + offset));
  } else if (dtype == DType::kBFloat16) {
    load_state_as(
        s, reinterpret_cast<const __nv_bfloat162*>(static_cast<const bf16*>(state) + offset));
  } else {
    load_state_as(s, reinterpret_cast<const __half2*>(static_cast<const fp16*>(state) + offset));
  }
}

__device__ __forceinline__ void store_state(const float (&s)[64], void* state, DType dtype,
                                            int offset) {
  if (dtype == DType::kFloat32) {
    auto* rows = reinterpret_cast<float2*>(static_cast<float*>(state) + offset);
    __builtin_assume(__isGlobal(rows));
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      rows[4 * (e >> 1) + (e & 1) * 4 * kDim] = {s[2 * e], s[2 * e + 1]};
    }
    return;
  }
  auto* rows = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(state) + offset);
  __builtin_assume(__isGlobal(rows));
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    rows[4 * (e >> 1) + (e & 1) * 4 * kDim] = dtype == DType::kBFloat16
                                                  ? pack2<bf16>(s[2 * e], s[2 * e + 1])
                                                  : pack2<fp16>(s[2 * e], s[2 * e + 1]);
  }
}

// S as A registers: the k16 step kk is words 4 kk .. 4 kk + 3.
template <class T>
__device__ __forceinline__ void pack_state(uint32_t (&a)[32], const float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) a[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
}

// acc = A B^T over 128 columns of K, B a [64, 128] tile.
template <class T>
__device__ __forceinline__ void multiply_state(float (&acc)[32], const uint32_t (&a)[32],
                                               Operand<> b) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    wgmma_rs<T, 0>(acc, a + 4 * k, b.at((k & 3) * 32 + (k >> 2) * kPanelBytes), k != 0);
  }
}

// V^T of 16 columns and all tokens, as A registers; V is [t][v].
__device__ __forceinline__ void load_columns(uint32_t (&v)[16], uint32_t values) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t words[4];
    load_matrices_transposed(words, values + k * 16 * 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[4 * k + i] = words[i];
  }
}

// Y^T = V^T - G (S K^T), as A registers, in the place of V^T. kCareful: foreign rows give 0
// whatever they hold, and where G = 0 the old state is dropped even if it is not finite.
template <class T, bool kCareful>
__device__ __forceinline__ void form_y(uint32_t (&y)[16], const float (&z)[32], uint32_t from_start,
                                       RowRange rows, int lane) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float4 g4 = load_shared_float4(from_start + 64 * k + 16 * (lane & 3));
    const float g[4] = {g4.x, g4.y, g4.z, g4.w};  // tokens 2c, 2c + 1, 2c + 8, 2c + 9
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // words: V rows r, r + 8 of the left tokens, then of the right
      const float2 value = unpack2<T>(y[4 * k + i]);
      const float* pair = z + 8 * k + 2 * i;
      const float g0 = g[i & 2], g1 = g[(i & 2) + 1];
      float y0 = fmaf(-g0, pair[0], value.x), y1 = fmaf(-g1, pair[1], value.y);
      if constexpr (kCareful) {
        const int token = 16 * k + 4 * (i & 2) + 2 * (lane & 3);
        y0 = g0 == 0.0f ? value.x : y0;
        y1 = g1 == 0.0f ? value.y : y1;
        y0 = rows.valid(token) ? y0 : 0.0f;
        y1 = rows.valid(token + 1) ? y1 : 0.0f;
      }
      y[4 * k + i] = pack2<T>(y0, y1);
    }
  }
}

// z = scale G z, columns are tokens.
template <bool kCareful>
__device__ __forceinline__ void scale_columns(float (&z)[32], uint32_t from_start, float scale,
                                              int lane) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float4 g4 = load_shared_float4(from_start + 64 * k + 16 * (lane & 3));
    const float g[4] = {scale * g4.x, scale * g4.y, scale * g4.z, scale * g4.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float factor = g[(e >> 2) * 2 + (e & 1)];
      float& x = z[8 * k + e];
      x = kCareful && factor == 0.0f ? 0.0f : x * factor;
    }
  }
}

// One state warpgroup: its threads, addresses and barriers.
template <class T, bool kUnaligned>
struct StateRole {
  using Traits = ScanTraits;

  const HopperParams& p;
  uint32_t shared;
  int group;
  int warp;
  Ring<Traits::kItemStages> items;
  Ring<Traits::kKeyStages> keys;
  Ring<Traits::kQueryStages> queries;
  Ring<Traits::kGateStages> gates;
  Ring<Traits::kPairStages> pairs;

  __device__ __forceinline__ uint32_t values(int stage) const {
    return shared + Traits::kValues + (stage * Traits::kStateGroups + group) * kPanel;
  }
  __device__ __forceinline__ uint32_t value_full(int stage) const {
    return shared + Traits::kValueFull + 8 * (group * Traits::kPairStages + stage);
  }

  // Outputs in the place of V: each warp writes the 16 columns that only it has read.
  __device__ __forceinline__ void hand_over(const uint32_t (&o)[16], int stage) const {
    const int lane = fresh_lane();
    const uint32_t own = values(stage) + value_offset(lane);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t words[4] = {o[4 * k], o[4 * k + 1], o[4 * k + 2], o[4 * k + 3]};
      store_matrices_transposed(own + k * 16 * 128, words);
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(shared + Traits::kOutputFull + 8 * (group * Traits::kPairStages + stage));
    }
  }

  // Where a lane points ldmatrix and stmatrix, transposed, for its warp's 16 columns.
  __device__ __forceinline__ uint32_t value_offset(int lane) const {
    return Tile<128>::offset((lane & 7) + ((lane >> 4) << 3), 2 * warp + ((lane >> 3) & 1));
  }

  // One chunk. `a` is S in 16 bits; `o` the outputs of the chunk before, which leave meanwhile.
  __device__ __forceinline__ void advance(float (&s)[64], uint32_t (&a)[32], uint32_t (&o)[16],
                                          const ItemChunk<kUnaligned>& at) {
    const uint32_t gate = shared + Traits::kGates + gates.stage * sizeof(GateBlock);
    const Operand<> k_tile = Operand<>::k_major(shared + Traits::kKeys + keys.stage * kTile);
    const Operand<> q_tile = Operand<>::k_major(shared + Traits::kQueries + queries.stage * kTile);
    const Operand<> x_tile = Operand<>::mn_major(shared + Traits::kX + pairs.stage * kTile);
    const Operand<> r_tile = Operand<>::k_major(shared + Traits::kR + pairs.stage * kPanel);
    const uint32_t value_place = values(pairs.stage);

    // S k^T, for all tokens of the chunk.
    barrier_wait(shared + keys.of(Traits::kKeyFull), keys.parity);
    float z[32];
    pin(z);
    pin(a);
    wgmma_fence();
    multiply_state<T>(z, a, k_tile);
    wgmma_commit();

    // Behind it: the outputs of the chunk before, V^T, and the decay of S.
    if (at.chunk > 0) hand_over(o, pairs.stage ^ 1);
    const RowRange rows = at.rows(p.call.grid);
    barrier_wait(value_full(pairs.stage), pairs.parity);
    uint32_t y[16];
    int lane = fresh_lane();
    load_columns(y, value_place + value_offset(lane));
    const float total = load_shared_float(gate + kGateTotal);
    if (total == 0.0f) {
      // A reset: finite first (maximum and minimum drop a NaN), so that the product is 0. NOTE:
      // assigning 0 instead spills 112 bytes (nvcc 13.0).
#pragma unroll
      for (int e = 0; e < 64; ++e) s[e] = fminf(fmaxf(s[e], -FLT_MAX), FLT_MAX);
    }
    if (total != 1.0f) {
#pragma unroll
      for (int e = 0; e < 64; ++e) s[e] *= total;
      pin(s);
    }
    wgmma_wait<0>();
    pin(z);
    pin(a);
    lane = fresh_lane();
    if (lane == 0) barrier_arrive(shared + keys.of(Traits::kKeyEmpty));

    const uint32_t from_start = gate + offsetof(GateBlock, from_start);
    if (total == 0.0f || !rows.whole()) {
      form_y<T, true>(y, z, from_start, rows, lane);
    } else {
      form_y<T, false>(y, z, from_start, rows, lane);
    }

    // S q^T of the old state, and behind it S += Y^T X.
    barrier_wait(shared + queries.of(Traits::kQueryFull), queries.parity);
    pin(z);
    wgmma_fence();
    multiply_state<T>(z, a, q_tile);
    wgmma_commit();
    barrier_wait(shared + pairs.of(Traits::kXFull), pairs.parity);
    pin(s);
    pin(y);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_rs<T>(s, y + 4 * k, x_tile.at(k * 2048), 1);
    wgmma_commit();
    wgmma_wait<1>();
    pin(z);
    pin(a);
    lane = fresh_lane();
    if (lane == 0) barrier_arrive(shared + queries.of(Traits::kQueryEmpty));

    // O = scale G Q S^T + R Y.
    if (total == 0.0f) {
      scale_columns<true>(z, from_start, p.call.scale, lane);
    } else {
      scale_columns<false>(z, from_start, p.call.scale, lane);
    }
    barrier_wait(shared + pairs.of(Traits::kRFull), pairs.parity);
    pin(z);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_rs<T, 0>(z, y + 4 * k, r_tile.at(k * 32), 1);
    wgmma_commit();
    wgmma_wait<1>();
    pin(s);
    if (fresh_lane() == 0) barrier_arrive(shared + pairs.of(Traits::kXEmpty));
    pack_state<T>(a, s);
    wgmma_wait<0>();
    pin(z);
    pin(y);
    if (fresh_lane() == 0) barrier_arrive(shared + pairs.of(Traits::kREmpty));
#pragma unroll
    for (int i = 0; i < 16; ++i) o[i] = pack2<T>(z[2 * i], z[2 * i + 1]);
    keys.advance();
    queries.advance();
    gates.advance();
    pairs.advance();
  }

  // A page's state as it is stored; row -1 is skipped.
  __device__ __forceinline__ void store_checkpoint(const float (&s)[64], uint32_t item,
                                                   int64_t entry) const {
    const PrefillParams& call = p.call;
    const int64_t row = call.checkpoint_indices ? call.checkpoint_indices[entry] : entry;
    if (row < 0) return;
    const Pool& pool = call.checkpoints;
    const int64_t at = row * pool.row_stride + GDN_ITEM(item, head) * (kDim * kDim);
    const int bytes = pool.dtype == DType::kFloat32 ? 4 : 2;
    store_state(s, static_cast<char*>(pool.data) + at * bytes, pool.dtype,
                state_offset(rows(item), warp, fresh_lane()));
  }

  // The 64 rows of V that this warpgroup has of an item.
  __device__ __forceinline__ int rows(uint32_t item) const {
    const int half = GDN_ITEM(item, half);
    return half < 0 ? group : half;
  }

  // A chunk of which the other warpgroup has the rows: what is released by all is released.
  __device__ __forceinline__ void pass_chunk() {
    const auto pass = [&](uint32_t full, uint32_t empty, uint32_t parity) {
      barrier_wait(shared + full, parity);
      if (fresh_lane() == 0) barrier_arrive(shared + empty);
    };
    pass(keys.of(Traits::kKeyFull), keys.of(Traits::kKeyEmpty), keys.parity);
    pass(queries.of(Traits::kQueryFull), queries.of(Traits::kQueryEmpty), queries.parity);
    pass(pairs.of(Traits::kXFull), pairs.of(Traits::kXEmpty), pairs.parity);
    pass(pairs.of(Traits::kRFull), pairs.of(Traits::kREmpty), pairs.parity);
    keys.advance();
    queries.advance();
    gates.advance();
    pairs.advance();
  }

  __device__ __forceinline__ uint32_t item() const {
    return shared + Traits::kItems + items.stage * sizeof(ScanItem);
  }

  // Waits for the item; returns its chunks, 0 at the end.
  __device__ __forceinline__ int begin_item() const {
    barrier_wait(shared + items.of(Traits::kItemFull), items.parity);
    return GDN_ITEM(item(), chunks);
  }

  // A warp reads what the warp of its number has written in another block.
  __device__ __forceinline__ int32_t* written(int32_t piece) const {
    return p.pieces.written + piece * Traits::kStateWarps + 4 * group + warp;
  }
  __device__ __forceinline__ void await_state(int32_t piece) const {
    if (piece < 0) return;
    if (fresh_lane() == 0) {
      while (load_acquire(written(piece)) == 0) __nanosleep(100);
    }
    __syncwarp();
  }
  // The combination has formed this warp's 16 rows of the state before the segment.
  __device__ __forceinline__ void await_steps(uint32_t item) const {
    const int steps = GDN_ITEM(item, steps);
    if (steps == 0) return;
    if (fresh_lane() == 0) {
      const int32_t* done = p.segments.steps + GDN_ITEM(item, chain) + 4 * rows(item) + warp;
      while (load_acquire(done) < steps) __nanosleep(50);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void announce_state(int32_t piece) const {
    if (piece < 0) return;
    __threadfence();
    __syncwarp();
    if (fresh_lane() == 0) store_release(written(piece), 1);
  }

  __device__ __forceinline__ void run_chunks(float (&s)[64], uint32_t item, int chunks) {
    await_state(GDN_ITEM(item, awaited));
    await_steps(item);
    load_state(
        s, reinterpret_cast<const void*>(load_shared_u64(item + offsetof(ScanItem, state_in))),
        static_cast<DType>(GDN_ITEM(item, dtype_in)), state_offset(rows(item), warp, fresh_lane()));
    int page_end = GDN_ITEM(item, page_end);
    int checkpoint = 0;
    uint32_t a[32], o[16];
    pack_state<T>(a, s);
#pragma unroll 1
    for (auto at = begin_chunks<kUnaligned>(item, chunks); at.chunk < chunks;
         at.advance(p.call.grid)) {
      advance(s, a, o, at);
      // The last chunk ends a page only if its rows reach the end.
      const int whole = static_cast<int>(kChunk) - (kUnaligned ? p.call.grid.gap : 0);
      if (at.chunk + 1 == page_end &&
          (at.chunk + 1 < chunks || GDN_ITEM(item, last_row) == whole)) {
        store_checkpoint(s, item, static_cast<int64_t>(GDN_ITEM(item, checkpoint)) + checkpoint);
        page_end += p.call.grid.page_chunks;
        ++checkpoint;
      }
    }
    hand_over(o, pairs.stage ^ 1);
  }

  // All items are halves: nothing for the second warpgroup.
  __device__ __forceinline__ void run_idle() {
    for (int chunks = begin_item(); chunks > 0; chunks = begin_item()) {
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) pass_chunk();
      if (fresh_lane() == 0) barrier_arrive(shared + items.of(Traits::kItemEmpty));
      items.advance();
    }
  }

  __device__ __forceinline__ void run() {
    if (group > 0 && begin_item() > 0 && GDN_ITEM(item(), half) >= 0) return run_idle();
    for (int chunks = begin_item(); chunks > 0;) {
      const uint32_t done = item(), done_empty = shared + items.of(Traits::kItemEmpty);
      float s[64];
      run_chunks(s, done, chunks);
      items.advance();
      chunks = begin_item();
      void* state_out =
          reinterpret_cast<void*>(load_shared_u64(done + offsetof(ScanItem, state_out)));
      if (state_out != nullptr) {
        store_state(s, state_out, static_cast<DType>(GDN_ITEM(done, dtype_out)),
                    state_offset(rows(done), warp, fresh_lane()));
      }
      announce_state(GDN_ITEM(done, announced));
      __syncwarp();
      if (fresh_lane() == 0) barrier_arrive(done_empty);
    }
  }
};

}  // namespace gdn::sm90

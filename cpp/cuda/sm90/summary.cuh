// The map of every segment, S_end = S_start M + N, by the recurrence of the scan on the rows of
// [N; M] without outputs: N starts at zero with the true V, M at the identity with V = 0. The first
// segment of a sequence starts N at the true state and needs no M; the last needs neither.
//
// Persistent grid, one block per multiprocessor, over items of 128 rows (SummaryItem) drawn by
// ticket. Roles, by warpgroup:
//   state (2)  64 rows of N or M each, as in the scan
//   aux        X of every chunk, a chunk or two ahead
//   loader     draws items; K, V, That and gates of a chunk into one stage
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/sm90/rows.cuh"
#include "cuda/sm90/scan_products.cuh"
#include "cuda/sm90/scan_state.cuh"
#include "cuda/sm90/summary_item.cuh"
#include "cuda/sm90/transition.cuh"

namespace gdn::sm90 {

template <class T>
struct SummaryLoader {
  using Traits = SummaryTraits;

  const HopperParams& p;
  uint32_t shared;
  SummaryItem* item_slots;
  int warp;
  SlabSequences sequences;
  int32_t segment_chunks;
  int32_t num_items;
  int32_t pieces;  // that items are shared out in; 0: they are whole
  Tickets tickets;
  SummaryPiece piece;
  Ring<Traits::kItemStages> items;
  Ring<Traits::kStages> stages;

  static __device__ __forceinline__ void sync() { sync_threads(Traits::kLoaderSync, 128); }

  // By warp 0: the next item, or the end.
  __device__ __forceinline__ void draw_item(SummaryItem& item) {
    const int lane = fresh_lane();
    const SummaryLine line = {.items = num_items, .length = segment_chunks, .pieces = pieces};
    int32_t number = -1;
    ChunkSpan span = {0, segment_chunks};
    while (number < 0) {
      if (!piece.finished()) {
        const int32_t next = piece.item;
        span = piece.next(line);
        if (span.begin < span.end) number = next;
        continue;
      }
      const int32_t ticket = tickets.draw(&p.state->next_summary, pieces == 0, lane);
      if (ticket >= (pieces > 0 ? pieces : num_items)) {
        if (lane == 0) item.part.chunks = 0;
        return;
      }
      // A piece waits for the next one, which an earlier ticket has drawn.
      if (pieces == 0) number = ticket;
      if (pieces > 0) piece.begin(line, pieces - 1 - ticket);
    }
    const int32_t heads = p.call.heads.state;
    const Found found = find_cut_part<true>(p, sequences, segment_chunks, number / heads, lane);
    if (lane == 0) {
      make_summary_item(p, found, sequences, segment_chunks, number % heads, span, item);
      if (span.begin > 0) item.part.awaited = piece.number + 1;
      if (span.end < segment_chunks) item.part.announced = piece.number;
    }
  }

  __device__ __forceinline__ void load_chunk(const ItemChunk<true>& at) {
    const uint32_t item = at.item;
    const int token = at.token();
    const RowRange range = at.rows(p.call.grid);
    const bool copy_keys = p.call.qk_l2norm || !range.whole();
    const int stage = stages.stage;
    const uint32_t k_tile = shared + Traits::kKeys + stage * kTile;
    const uint32_t full = shared + stages.of(Traits::kFull);
    if (warp == 0) barrier_wait(shared + stages.of(Traits::kEmpty), stages.parity ^ 1);
    if (copy_keys) {
      sync();
      copy_rows<T>({.source = p.call.k,
                    .head = GDN_ITEM(item, k_head),
                    .tile = k_tile,
                    .normalize = p.call.qk_l2norm},
                   {.origin = token, .first = range.first, .last = range.last},
                   32 * warp + fresh_lane(), 128);
      fence_async_proxy();
      sync();
    }
    if (warp == 0 && fresh_lane() == 0) {
      const int half = item_field(item, offsetof(SummaryItem, half));
      barrier_arrive_expect(full, (copy_keys ? 0 : kTile) + (half < 0 ? kTile : kPanel) +
                                      kInverseBytes + static_cast<int>(sizeof(GateBlock)));
      if (!copy_keys) {
        LoaderRole<T, true>::load_tile(p.k_map, GDN_ITEM(item, k_head), token, k_tile, full);
      }
      const uint32_t values = shared + Traits::kValues + stage * kTile;
      if (half <= 0) tensor_load(values, &p.v_map, 0, GDN_ITEM(item, v_head), token, full);
      if (half != 0) {
        tensor_load(values + kPanel, &p.v_map, 64, GDN_ITEM(item, v_head), token, full);
      }
      const int64_t record =
          GDN_ITEM(item, record) + static_cast<int64_t>(at.chunk) * p.call.heads.state;
      LoaderRole<T, true>::load_inverse(p.inverses + record * kInverseBytes,
                                        shared + Traits::kInverses + stage * kPanel, full);
      bulk_load(shared + Traits::kGates + stage * sizeof(GateBlock), p.gates + record,
                sizeof(GateBlock), full);
    }
    __syncwarp();
    stages.advance();
  }

  __device__ __forceinline__ void run() {
    for (;; items.advance()) {
      if (warp == 0) {
        barrier_wait(shared + items.of(Traits::kItemEmpty), items.parity ^ 1);
        draw_item(item_slots[items.stage]);
        __syncwarp();
      }
      sync();
      if (warp == 0 && fresh_lane() == 0) barrier_arrive(shared + items.of(Traits::kItemFull));
      const uint32_t item = shared + Traits::kItems + items.stage * sizeof(SummaryItem);
      const int chunks = GDN_ITEM(item, chunks);
      if (chunks == 0) break;
#pragma unroll 1
      for (auto at = begin_chunks<true>(item, chunks); at.chunk < chunks; at.advance(p.call.grid)) {
        load_chunk(at);
      }
    }
  }
};

// X alone, by the arithmetic of the scan.
template <class T>
struct SummaryAux {
  using Traits = SummaryTraits;
  using Scan = AuxRole<T>;

  const HopperParams& p;
  uint32_t shared;
  int warp;
  Ring<Traits::kItemStages> items;
  Ring<Traits::kStages> stages;
  Ring<Traits::kXStages> outputs;

  __device__ __forceinline__ void form_chunk() {
    const uint32_t gate = shared + Traits::kGates + stages.stage * sizeof(GateBlock);
    const Operand<> keys = Operand<>::mn_major(shared + Traits::kKeys + stages.stage * kTile);
    const auto inverse =
        Scan::Inverse::mn_major(shared + Traits::kInverses + stages.stage * kPanel);
    const uint32_t x_place = shared + Traits::kX + outputs.stage * kTile;
    const Scan scan = {.p = p, .shared = shared, .warp = warp};
    float left[32], right[32];
    barrier_wait(shared + stages.of(Traits::kFull), stages.parity);
    Scan::multiply_x(left, inverse, keys, 0);
    Scan::multiply_x(right, inverse, keys, 1);
    barrier_wait(shared + outputs.of(Traits::kXEmpty), outputs.parity ^ 1);
    wgmma_wait<1>();
    pin(left);
    scan.store_x(left, x_place, gate);
    wgmma_wait<0>();
    pin(right);
    scan.store_x(right, x_place + kPanel, gate);
    fence_async_proxy();
    __syncwarp();
    if (fresh_lane() == 0) {
      barrier_arrive(shared + outputs.of(Traits::kXFull));
      barrier_arrive(shared + stages.of(Traits::kEmpty));
    }
    stages.advance();
    outputs.advance();
  }

  __device__ __forceinline__ void run() {
    for (;; items.advance()) {
      barrier_wait(shared + items.of(Traits::kItemFull), items.parity);
      const int chunks =
          GDN_ITEM(shared + Traits::kItems + items.stage * sizeof(SummaryItem), chunks);
      if (chunks == 0) break;
      __syncwarp();
      if (fresh_lane() == 0) barrier_arrive(shared + items.of(Traits::kItemEmpty));
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) form_chunk();
    }
  }
};

template <class T>
struct SummaryState {
  using Traits = SummaryTraits;

  const HopperParams& p;
  uint32_t shared;
  int group;
  int warp;
  Ring<Traits::kItemStages> items;
  Ring<Traits::kStages> stages;
  Ring<Traits::kXStages> inputs;

  // Where a lane points ldmatrix, transposed, for its warp's 16 columns of V.
  __device__ __forceinline__ uint32_t value_offset(int lane) const {
    return Tile<128>::offset((lane & 7) + ((lane >> 4) << 3), 2 * warp + ((lane >> 3) & 1));
  }

  // One chunk of 64 rows; returns whether it held a reset.
  __device__ __forceinline__ bool advance(float (&s)[64], RowRange rows, int half,
                                          bool transition) {
    const int stage = stages.stage;
    const uint32_t gate = shared + Traits::kGates + stage * sizeof(GateBlock);
    const Operand<> keys = Operand<>::k_major(shared + Traits::kKeys + stage * kTile);
    const Operand<> x = Operand<>::mn_major(shared + Traits::kX + inputs.stage * kTile);
    uint32_t a[32];
    pack_state<T>(a, s);
    barrier_wait(shared + stages.of(Traits::kFull), stages.parity);
    const float total = load_shared_float(gate + kGateTotal);
    float z[32];
    pin(z);
    wgmma_fence();
    multiply_state<T>(z, a, keys);
    wgmma_commit();
    wgmma_wait<0>();
    pin(z);
    pin(a);

    uint32_t y[16];
    const int lane = fresh_lane();
    const uint32_t values = shared + Traits::kValues + stage * kTile + half * kPanel;
    const uint32_t from_start = gate + offsetof(GateBlock, from_start);
    if (transition) {
      form_transition_y<T>(y, z, from_start, lane);
    } else if (total == 0.0f || !rows.whole()) {
      load_columns(y, values + value_offset(lane));
      form_y<T, true>(y, z, from_start, rows, lane);
    } else {
      load_columns(y, values + value_offset(lane));
      form_y<T, false>(y, z, from_start, rows, lane);
    }
    if (total == 0.0f) {
      // A reset, as in the scan.
#pragma unroll
      for (int e = 0; e < 64; ++e) s[e] = fminf(fmaxf(s[e], -FLT_MAX), FLT_MAX);
    }
    if (total != 1.0f) {
#pragma unroll
      for (int e = 0; e < 64; ++e) s[e] *= total;
    }

    barrier_wait(shared + inputs.of(Traits::kXFull), inputs.parity);
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_rs<T>(s, y + 4 * k, x.at(k * 2048), 1);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    pin(y);
    if (fresh_lane() == 0) {
      barrier_arrive(shared + inputs.of(Traits::kXEmpty));
      barrier_arrive(shared + stages.of(Traits::kEmpty));
    }
    stages.advance();
    inputs.advance();
    return total == 0.0f;
  }

  // The state of a piece's first item, for the block that goes on with it, and whether that held a
  // reset so far.
  __device__ __forceinline__ float* piece_state(int32_t piece) const {
    return p.pieces.states + static_cast<int64_t>(piece) * (kDim * kDim);
  }
  __device__ __forceinline__ int32_t* written(int32_t piece) const {
    return p.pieces.written + piece * ScanTraits::kStateWarps + 4 * group + warp;
  }
  __device__ __forceinline__ bool take_over(float (&s)[64], int32_t piece) const {
    int32_t found;
    while ((found = load_acquire(written(piece))) == 0) __nanosleep(100);
    __syncwarp();
    load_state(s, piece_state(piece), DType::kFloat32, state_offset(group, warp, fresh_lane()));
    return found == 2;
  }
  __device__ __forceinline__ void hand_over(const float (&s)[64], int32_t piece, bool reset) const {
    store_state(s, piece_state(piece), DType::kFloat32, state_offset(group, warp, fresh_lane()));
    __threadfence();
    __syncwarp();
    if (fresh_lane() == 0) store_release(written(piece), reset ? 2 : 1);
  }

  // The first chunks of a segment start it, and leave a copy of what the scan may overwrite.
  __device__ __forceinline__ void start(float (&s)[64], uint32_t item, int rows,
                                        bool transition) const {
    if (transition) return load_identity(s, rows, warp, fresh_lane());
    const int offset = state_offset(rows, warp, fresh_lane());
    load_state(s,
               reinterpret_cast<const void*>(load_shared_u64(item + offsetof(ScanItem, state_in))),
               static_cast<DType>(GDN_ITEM(item, dtype_in)), offset);
    if (item_field(item, offsetof(SummaryItem, copied)) != 0) {
      store_state(
          s, reinterpret_cast<void*>(load_shared_u64(item + offsetof(SummaryItem, state_copy))),
          DType::kFloat32, offset);
    }
  }

  __device__ __forceinline__ void finish(const float (&s)[64], uint32_t item, int rows,
                                         bool transition, bool reset) const {
    const int lane = fresh_lane();
    if (!transition) {
      return store_state(
          s, reinterpret_cast<void*>(load_shared_u64(item + offsetof(ScanItem, state_out))),
          DType::kFloat32, state_offset(rows, warp, lane));
    }
    store_transition(
        s, reinterpret_cast<uint4*>(load_shared_u64(item + offsetof(SummaryItem, transition))),
        4 * rows + warp, lane);
    if (warp == 0 && lane == 0) {
      *reinterpret_cast<int32_t*>(load_shared_u64(item + offsetof(SummaryItem, reset))) = reset;
    }
  }

  __device__ __forceinline__ void run_item(uint32_t item, int chunks) {
    const int half = item_field(item, offsetof(SummaryItem, half));
    const bool first = half < 0, transition = !first && group == 1;
    const int rows = first ? group : half;
    const int awaited = GDN_ITEM(item, awaited), announced = GDN_ITEM(item, announced);
    float s[64];
    bool reset = false;
    if (awaited >= 0) {
      reset = take_over(s, awaited);
    } else {
      start(s, item, rows, transition);
    }
#pragma unroll 1
    for (auto at = begin_chunks<true>(item, chunks); at.chunk < chunks; at.advance(p.call.grid)) {
      reset |= advance(s, at.rows(p.call.grid), rows, transition);
    }
    if (announced >= 0) {
      hand_over(s, announced, reset);
    } else {
      finish(s, item, rows, transition, reset);
    }
  }

  __device__ __forceinline__ void run() {
    for (;; items.advance()) {
      barrier_wait(shared + items.of(Traits::kItemFull), items.parity);
      const uint32_t item = shared + Traits::kItems + items.stage * sizeof(SummaryItem);
      const int chunks = GDN_ITEM(item, chunks);
      if (chunks == 0) break;
      run_item(item, chunks);
      __syncwarp();
      if (fresh_lane() == 0) barrier_arrive(shared + items.of(Traits::kItemEmpty));
    }
  }
};

__device__ __forceinline__ void init_summary_barriers(uint32_t shared) {
  using Traits = SummaryTraits;
  constexpr int kStateWarps = 4 * Traits::kStateGroups, kAuxWarps = 4;
  const auto init = [&](uint32_t first, int count, uint32_t arrivals) {
    for (int i = 0; i < count; ++i) barrier_init(shared + first + 8 * i, arrivals);
  };
  init(Traits::kFull, Traits::kStages, 1);
  init(Traits::kEmpty, Traits::kStages, kStateWarps + kAuxWarps);
  init(Traits::kXFull, Traits::kXStages, kAuxWarps);
  init(Traits::kXEmpty, Traits::kXStages, kStateWarps);
  init(Traits::kItemFull, Traits::kItemStages, 1);
  init(Traits::kItemEmpty, Traits::kItemStages, kStateWarps + kAuxWarps);
  barrier_init_fence();
}

template <class T>
__global__ void __launch_bounds__(SummaryTraits::kThreads, 1)
    summarize_segments(const __grid_constant__ HopperParams p) {
  using Traits = SummaryTraits;
  extern __shared__ __align__(1024) uint8_t summary_storage[];
  const uint32_t shared = shared_address(summary_storage);
  // From a shuffle, so that the compiler knows warp numbers to be uniform.
  const int warp_id = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
  const int group = warp_id >> 2, warp = warp_id & 3;
  if (threadIdx.x == 0) init_summary_barriers(shared);
  // The blocks of That above the diagonal stay zero.
  for (int i = Traits::kInverses + 16 * threadIdx.x; i < Traits::kX; i += 16 * Traits::kThreads) {
    store_shared4(shared + i, {});
  }
  fence_async_proxy();
  if (warp_id == 0) request_sequences(p, fresh_lane());
  if (threadIdx.x == 32) {
    prefetch_tensor_map(&p.k_map);
    prefetch_tensor_map(&p.v_map);
  }
  __syncthreads();
  dependency_wait();
  allow_dependents();
  const SlabState state = *p.state;
  if (state.segment_chunks == 0) return;
  const int counters =
      p.segments.steps ? p.segments.capacity * p.call.heads.state * ScanTraits::kStateWarps : 0;
  for (int i = blockIdx.x * Traits::kThreads + threadIdx.x; i < counters;
       i += gridDim.x * Traits::kThreads) {
    p.segments.steps[i] = 0;
  }

  if (group < Traits::kStateGroups) {
    take_registers<Traits::kStateRegisters>();
    SummaryState<T>{.p = p, .shared = shared, .group = group, .warp = warp}.run();
  } else if (group == Traits::kAuxGroup) {
    give_registers<Traits::kAuxRegisters>();
    SummaryAux<T>{.p = p, .shared = shared, .warp = warp}.run();
  } else {
    give_registers<Traits::kLoaderRegisters>();
    SummaryLoader<T>{.p = p,
                     .shared = shared,
                     .item_slots = reinterpret_cast<SummaryItem*>(summary_storage + Traits::kItems),
                     .warp = warp,
                     .sequences = state.sequences,
                     .segment_chunks = state.segment_chunks,
                     .num_items = state.num_summaries * p.call.heads.state,
                     .pieces = state.summary_pieces}
        .run();
  }
}

}  // namespace gdn::sm90

// The loader role of the scan and the items it draws: (part of a sequence, state head) pairs.
#pragma once

#include "cuda/sm90/pieces.cuh"
#include "cuda/sm90/rows.cuh"
#include "cuda/sm90/scan_item.cuh"

namespace gdn::sm90 {

template <class T, bool kUnaligned>
struct LoaderRole {
  using Traits = ScanTraits;

  const HopperParams& p;
  uint32_t shared;
  ScanItem* item_slots;
  int warp;
  const SlabState& slab;  // in shared memory, for warp 0
  bool waits;             // for prepare, after the first item is known
  bool drawn = false;     // a ticket
  Piece piece;
  Ring<Traits::kItemStages> items;
  Ring<Traits::kKeyStages> keys;
  Ring<Traits::kQueryStages> queries;  // and of That
  static_assert(Traits::kInverseStages == Traits::kQueryStages);
  Ring<Traits::kGateStages> gates;

  static __device__ __forceinline__ void sync() {
    sync_threads(Traits::kLoaderSync, 32 * Traits::kLoaderWarps);
  }

  // By warp 0: the next item that has work, or the end.
  __device__ __forceinline__ void draw_item(ScanItem& item) {
    const int lane = fresh_lane();
    for (;;) {
      const SlabSequences sequences = slab.sequences;
      const int32_t cut_items = slab.cut_items;
      if (piece.at < piece.end) {
        Part part;
        int32_t head;
        const PieceLine line = {.p = p, .all = sequences, .items = cut_items};
        if (!line.next(piece, part, &head)) continue;
        if (lane == 0) {
          make_item(p, part, sequences.slab, head, item);
          cut_item(p, sequences.slab, part, piece.number, item);
        }
        return;
      }
      int32_t ticket = blockIdx.x;
      // The first ticket is the block's number, which costs no trip to memory. Not where a block
      // waits for what an earlier ticket does: that block has to run already.
      if (drawn || cut_items > 0) {
        if (waits) await_prepare_alone();
        if (lane == 0) ticket = atomicAdd(&p.state->next_item, 1);
        ticket = __shfl_sync(kFullWarp, ticket, 0) + (cut_items > 0 ? 0 : gridDim.x);
      }
      drawn = true;
      if (cut_items > 0) {
        if (ticket < p.pieces.count) {
          const PieceLine line = {.p = p, .all = sequences, .items = cut_items};
          piece = line.begin(p.pieces.count - 1 - ticket, lane);
          continue;
        }
        ticket += cut_items - p.pieces.count;
      }
      const bool halves = slab.halves != 0;
      const int32_t heads = p.call.heads.state, number = halves ? ticket >> 1 : ticket;
      if (number >= slab.num_parts * heads) {
        if (lane == 0) item.chunks = 0;
        return;
      }
      const Part part = find_part(p, sequences, slab.segment_chunks, number / heads, lane);
      if (!part.sequence.live()) continue;
      if (lane == 0) {
        make_item(p, part, sequences.slab, number % heads, item);
        if (halves) item.half = ticket & 1;
      }
      return;
    }
  }
  // prepare resets the counter of tickets.
  __device__ __forceinline__ void await_prepare_alone() {
    dependency_wait();
    waits = false;
  }

  // The state of an item comes from far: it is on its way to L2 before the item is reached.
  __device__ __forceinline__ void prefetch_state(const ScanItem& item, int thread) const {
    const auto* state = static_cast<const char*>(item.state_in);
    if (state == nullptr || item.awaited >= 0) return;
    const int bytes = kDim * kDim * (static_cast<DType>(item.dtype_in) == DType::kFloat32 ? 4 : 2);
    for (int at = thread * 128; at < bytes; at += 128 * 32 * Traits::kLoaderWarps) {
      prefetch_l2(state + at);
    }
  }

  // Rows by this warpgroup's threads, after warp 0 has seen the stage empty.
  __device__ __forceinline__ void copy(const Tensor& source, int head, uint32_t tile,
                                       const ChunkRows& rows) const {
    sync();
    copy_rows<T>({.source = source, .head = head, .tile = tile, .normalize = p.call.qk_l2norm},
                 rows, 32 * warp + fresh_lane(), 32 * Traits::kLoaderWarps);
    fence_async_proxy();
    sync();
  }

  static __device__ __forceinline__ void load_tile(const CUtensorMap& map, int head, int token,
                                                   uint32_t tile, uint32_t full) {
    tensor_load(tile, &map, 0, head, token, full);
    tensor_load(tile + kPanel, &map, 64, head, token, full);
  }

  // The packed triangle, panel by panel; what lies above it in shared memory stays.
  static __device__ __forceinline__ void load_inverse(const uint8_t* source, uint32_t tile,
                                                      uint32_t full) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bulk_load(tile + 2048 * j + 512 * j, source + inverse_panel(j), inverse_panel_bytes(j), full);
    }
  }

  __device__ __forceinline__ void load_chunk(const ItemChunk<kUnaligned>& at) {
    const uint32_t item = at.item;
    const int token = at.token();
    const RowRange range = at.rows(p.call.grid);
    const ChunkRows rows = {.origin = token, .first = range.first, .last = range.last};
    const int64_t record =
        GDN_ITEM(item, record) + static_cast<int64_t>(at.chunk) * p.call.heads.state;

    // K, and the gates with it. Foreign rows of K would reach products with zero weights, where a
    // NaN survives; those of Q and V only reach places that are not used.
    const bool copy_keys = p.call.qk_l2norm || !range.whole();
    const uint32_t k_tile = shared + Traits::kKeys + keys.stage * kTile;
    const uint32_t key_full = shared + keys.of(Traits::kKeyFull);
    if (warp == 0) barrier_wait(shared + keys.of(Traits::kKeyEmpty), keys.parity ^ 1);
    if (copy_keys) copy(p.call.k, GDN_ITEM(item, k_head), k_tile, rows);
    if (warp == 0 && fresh_lane() == 0) {
      barrier_arrive_expect(key_full, sizeof(GateBlock) + (copy_keys ? 0 : kTile));
      if (!copy_keys) load_tile(p.k_map, GDN_ITEM(item, k_head), token, k_tile, key_full);
      bulk_load(shared + Traits::kGates + gates.stage * sizeof(GateBlock), p.gates + record,
                sizeof(GateBlock), key_full);
      tensor_prefetch(&p.v_map, 0, GDN_ITEM(item, v_head), token);
      tensor_prefetch(&p.v_map, 64, GDN_ITEM(item, v_head), token);
    }
    __syncwarp();

    if (warp == 0) {
      barrier_wait(shared + queries.of(Traits::kInverseEmpty), queries.parity ^ 1);
      if (fresh_lane() == 0) {
        const uint32_t full = shared + queries.of(Traits::kInverseFull);
        barrier_arrive_expect(full, kInverseBytes);
        load_inverse(p.inverses + record * kInverseBytes,
                     shared + Traits::kInverses + queries.stage * kPanel, full);
      }
      __syncwarp();
    }

    const bool copy_queries = p.call.qk_l2norm;
    const uint32_t q_tile = shared + Traits::kQueries + queries.stage * kTile;
    const uint32_t query_full = shared + queries.of(Traits::kQueryFull);
    if (warp == 0) barrier_wait(shared + queries.of(Traits::kQueryEmpty), queries.parity ^ 1);
    if (copy_queries) copy(p.call.q, GDN_ITEM(item, q_head), q_tile, rows);
    if (warp == 0 && fresh_lane() == 0) {
      if (copy_queries) {
        barrier_arrive(query_full);
      } else {
        barrier_arrive_expect(query_full, kTile);
        load_tile(p.q_map, GDN_ITEM(item, q_head), token, q_tile, query_full);
      }
    }
    __syncwarp();
    keys.advance();
    queries.advance();
    gates.advance();
  }

  // What does not come from prepare is on its way to L2 meanwhile.
  __device__ __forceinline__ void await_prepare(uint32_t item, int chunks) {
    if (warp == 0 && fresh_lane() == 0) {
#pragma unroll 1
      for (int chunk = 0; chunk < min(chunks, Traits::kQueryStages); ++chunk) {
        const int token = GDN_ITEM(item, origin) + chunk * static_cast<int>(kChunk);
        for (int x = 0; x < kDim; x += 64) {
          tensor_prefetch(&p.k_map, x, GDN_ITEM(item, k_head), token);
          tensor_prefetch(&p.q_map, x, GDN_ITEM(item, q_head), token);
          tensor_prefetch(&p.v_map, x, GDN_ITEM(item, v_head), token);
        }
      }
    }
    __syncwarp();
    dependency_wait();
    waits = false;
  }

  __device__ __forceinline__ void run() {
    for (;; items.advance()) {
      ScanItem& slot = item_slots[items.stage];
      if (warp == 0) {
        barrier_wait(shared + items.of(Traits::kItemEmpty), items.parity ^ 1);
        draw_item(slot);
        __syncwarp();
      }
      sync();
      const int thread = 32 * warp + fresh_lane();
      if (thread == 0) barrier_arrive(shared + items.of(Traits::kItemFull));
      const uint32_t item = shared + Traits::kItems + items.stage * sizeof(ScanItem);
      const int chunks = GDN_ITEM(item, chunks);
      if (chunks == 0) break;
      prefetch_state(slot, thread);
      if (waits) await_prepare(item, chunks);
#pragma unroll 1
      for (auto at = begin_chunks<kUnaligned>(item, chunks); at.chunk < chunks;
           at.advance(p.call.grid)) {
        load_chunk(at);
      }
    }
  }
};

}  // namespace gdn::sm90

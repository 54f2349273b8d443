// The value role of the scan, a warp for each state warpgroup: V of the group's 64 columns into
// shared memory, and O, which the group has put in V's place, out of it. The state warpgroups, on
// whose chain all waits, then meet no fence, no barrier of their own and no copy.
#pragma once

#include "cuda/common/copy.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/sm90/scan_item.cuh"

namespace gdn::sm90 {

template <class T, bool kUnaligned>
struct ValueRole {
  using Traits = ScanTraits;

  const HopperParams& p;
  uint32_t shared;
  int group;
  Ring<Traits::kItemStages> items;
  Ring<Traits::kPairStages> stages;

  // A chunk whose V is in a stage and whose O is to come.
  struct Pending {
    ItemChunk<kUnaligned> at = {};  // item 0: none
    uint32_t item_empty = 0;
  };
  Pending older, newer;

  __device__ __forceinline__ uint32_t place(int stage) const {
    return shared + Traits::kValues + (stage * Traits::kStateGroups + group) * kPanel;
  }
  __device__ __forceinline__ int column(uint32_t item) const {
    const int half = GDN_ITEM(item, half);
    return 64 * (half < 0 ? group : half);
  }
  __device__ __forceinline__ uint32_t barrier(uint32_t first, int stage) const {
    return shared + first + 8 * (group * Traits::kPairStages + stage);
  }

  __device__ __forceinline__ void load(const ItemChunk<kUnaligned>& at, int stage) const {
    const uint32_t full = barrier(Traits::kValueFull, stage);
    const int token = at.token();
    barrier_arrive_expect(full, kPanel);
    tensor_load(place(stage), &p.v_map, column(at.item), GDN_ITEM(at.item, v_head), token, full);
  }

  // Valid rows alone, where not all rows of a chunk are its sequence's.
  __device__ __forceinline__ void store_rows(uint32_t item, int token, RowRange rows,
                                             uint32_t from) const {
    const int lane = fresh_lane();
    const Tensor& output = p.call.output;
    auto* target = static_cast<T*>(const_cast<void*>(output.data)) +
                   GDN_ITEM(item, head) * output.head_stride + column(item) + 8 * (lane & 7);
#pragma unroll 1
    for (int row = lane >> 3; row < kChunk; row += 4) {
      if (!rows.valid(row)) continue;
      *reinterpret_cast<uint4*>(target + (static_cast<int64_t>(token) + row) * output.row_stride) =
          load_shared4(from + Tile<128>::offset(row, lane & 7));
    }
  }

  // O of the chunk that holds the stage, which is free afterwards.
  __device__ __forceinline__ void store(const Pending& of, int stage, uint32_t parity) const {
    barrier_wait(barrier(Traits::kOutputFull, stage), parity);
    fence_async_proxy();
    const RowRange rows = of.at.rows(p.call.grid);
    const int token = of.at.token();
    if (!rows.whole()) {
      store_rows(of.at.item, token, rows, place(stage));
    } else if (fresh_lane() == 0) {
      tensor_store(&p.output_map, column(of.at.item), GDN_ITEM(of.at.item, head), token,
                   place(stage));
      bulk_commit();
      bulk_wait_read();
    }
    __syncwarp();
    if (of.at.chunk + 1 == of.at.chunks && fresh_lane() == 0) barrier_arrive(of.item_empty);
  }

  __device__ __forceinline__ void run() {
    for (;; items.advance()) {
      barrier_wait(shared + items.of(Traits::kItemFull), items.parity);
      const uint32_t item = shared + Traits::kItems + items.stage * sizeof(ScanItem);
      const int chunks = GDN_ITEM(item, chunks);
      if (chunks == 0) break;
      if (group > 0 && GDN_ITEM(item, half) >= 0) {  // the other group has all rows
        if (fresh_lane() == 0) barrier_arrive(shared + items.of(Traits::kItemEmpty));
        continue;
      }
#pragma unroll 1
      for (auto at = begin_chunks<kUnaligned>(item, chunks); at.chunk < chunks;
           at.advance(p.call.grid)) {
        if (older.at.item != 0) store(older, stages.stage, stages.parity ^ 1);
        if (fresh_lane() == 0) load(at, stages.stage);
        __syncwarp();
        older = newer;
        newer = {.at = at, .item_empty = shared + items.of(Traits::kItemEmpty)};
        stages.advance();
      }
    }
    static_assert(Traits::kPairStages == 2);
    if (older.at.item != 0) store(older, stages.stage, stages.parity ^ 1);
    stages.advance();
    if (newer.at.item != 0) store(newer, stages.stage, stages.parity ^ 1);
    if (fresh_lane() == 0) bulk_wait();
  }
};

}  // namespace gdn::sm90

// What the roles of the scan share: rings of stages, and the items the loader hands out.
#pragma once

#include <cstddef>

#include "cuda/common/mma.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/traits.h"

namespace gdn::sm90 {

// Position in a ring of stages, and the parity of its phase.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ uint32_t of(uint32_t barriers) const { return barriers + 8 * stage; }
};

__device__ __forceinline__ int item_field(uint32_t item, size_t offset) {
  return load_shared_int(item + static_cast<uint32_t>(offset));
}
#define GDN_ITEM(item, field) item_field(item, offsetof(ScanItem, field))

// Tickets of a kernel's blocks, by a whole warp of each.
struct Tickets {
  bool drawn = false;

  // first_by_block: the first one is the block's number, which costs no trip to memory. Not where a
  // block waits for what an earlier ticket does: that block has to run already.
  __device__ __forceinline__ int32_t draw(int32_t* counter, bool first_by_block, int lane) {
    if (first_by_block && !drawn) {
      drawn = true;
      return blockIdx.x;
    }
    int32_t ticket = 0;
    if (lane == 0) ticket = atomicAdd(counter, 1);
    return __shfl_sync(kFullWarp, ticket, 0) + (first_by_block ? gridDim.x : 0);
  }
};

// Rows of the chunk that hold tokens of the sequence.
struct RowRange {
  int first;
  int last;

  __device__ __forceinline__ bool whole() const { return last - first == kChunk; }
  __device__ __forceinline__ bool valid(int row) const { return row >= first && row < last; }
};

// Where a role stands in an item. kUnaligned: a page may end in a shorter chunk.
// NOTE: two kernels, as the arithmetic of the second in all roles costs 1024x8 8/32 3 % (H200).
template <bool kUnaligned>
struct ItemChunk;

template <>
struct ItemChunk<false> {
  uint32_t item = 0;
  int chunks = 0;
  int chunk = 0;

  __device__ __forceinline__ RowRange rows(const ChunkGrid&) const {
    return {.first = chunk == 0 ? GDN_ITEM(item, first_row) : 0,
            .last = chunk == chunks - 1 ? GDN_ITEM(item, last_row) : static_cast<int>(kChunk)};
  }
  // Of the chunk's row 0.
  __device__ __forceinline__ int token() const {
    return GDN_ITEM(item, origin) + chunk * static_cast<int>(kChunk);
  }
  __device__ __forceinline__ void advance(const ChunkGrid&) { ++chunk; }
};

template <>
struct ItemChunk<true> {
  uint32_t item = 0;
  int chunks = 0;
  int chunk = 0;
  int page_end = 0;     // chunks of the item up to the next page end
  int first_token = 0;  // of the chunk's row 0

  __device__ __forceinline__ int most_rows(const ChunkGrid& grid) const {
    return static_cast<int>(kChunk) - (chunk + 1 == page_end ? grid.gap : 0);
  }
  __device__ __forceinline__ RowRange rows(const ChunkGrid& grid) const {
    return {.first = chunk == 0 ? GDN_ITEM(item, first_row) : 0,
            .last = chunk == chunks - 1 ? GDN_ITEM(item, last_row) : most_rows(grid)};
  }
  __device__ __forceinline__ int token() const { return first_token; }
  __device__ __forceinline__ void advance(const ChunkGrid& grid) {
    first_token += most_rows(grid);
    if (++chunk == page_end) page_end += grid.page_chunks;
  }
};

template <bool kUnaligned>
__device__ __forceinline__ ItemChunk<kUnaligned> begin_chunks(uint32_t item, int chunks) {
  ItemChunk<kUnaligned> at;
  at.item = item;
  at.chunks = chunks;
  if constexpr (kUnaligned) {
    at.page_end = GDN_ITEM(item, page_end);
    at.first_token = GDN_ITEM(item, origin);
  }
  return at;
}

}  // namespace gdn::sm90

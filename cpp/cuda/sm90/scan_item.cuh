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

// Rows of the chunk that hold tokens of the sequence.
struct RowRange {
  int first;
  int last;

  __device__ __forceinline__ bool whole() const { return last - first == kChunk; }
  __device__ __forceinline__ bool valid(int row) const { return row >= first && row < last; }
};

// Where a role stands in an item: a chunk, and the chunks of the item up to the next page end.
struct ItemChunk {
  uint32_t item;
  int chunks;
  int page_end;
  int chunk = 0;

  __device__ __forceinline__ bool last() const { return chunk + 1 == chunks; }
  __device__ __forceinline__ bool ends_page() const { return chunk + 1 == page_end; }
  __device__ __forceinline__ RowRange rows(const ChunkGrid& grid) const {
    const int whole = static_cast<int>(kChunk) - (ends_page() ? grid.gap : 0);
    return {.first = chunk == 0 ? GDN_ITEM(item, first_row) : 0,
            .last = last() ? GDN_ITEM(item, last_row) : whole};
  }
  __device__ __forceinline__ void advance(const ChunkGrid& grid) {
    if (ends_page()) page_end += grid.page_chunks;
    ++chunk;
  }
};
__device__ __forceinline__ ItemChunk chunks_of(uint32_t item, int chunks) {
  return {.item = item, .chunks = chunks, .page_end = GDN_ITEM(item, page_end)};
}

// The same with the token of the chunk's row 0.
struct ItemTokens {
  ItemChunk at;
  int token;

  __device__ __forceinline__ void advance(const ChunkGrid& grid) {
    token += static_cast<int>(kChunk) - (at.ends_page() ? grid.gap : 0);
    at.advance(grid);
  }
};
__device__ __forceinline__ ItemTokens tokens_of(uint32_t item, int chunks) {
  return {.at = chunks_of(item, chunks), .token = GDN_ITEM(item, origin)};
}

}  // namespace gdn::sm90

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

__device__ __forceinline__ RowRange item_rows(uint32_t item, int chunk, int chunks) {
  return {.first = chunk == 0 ? GDN_ITEM(item, first_row) : 0,
          .last = chunk == chunks - 1 ? GDN_ITEM(item, last_row) : static_cast<int>(kChunk)};
}

}  // namespace gdn::sm90

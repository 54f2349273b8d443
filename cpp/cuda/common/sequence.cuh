// From a chunk number to its sequence, tokens and valid rows.
//
// Chunks lie in the grid of core/chunks.h, so that page ends are chunk ends for any prefix: the
// first chunk of a sequence may begin with rows of the prefix, the last one and the last of a page
// may end early. Rows outside [first, last) are never read.
#pragma once

#include <climits>
#include <cstdint>

#include "core/chunks.h"
#include "cuda/common/reduce.cuh"

namespace gdn {

// One sequence that has new tokens, as the plan lists it.
struct alignas(16) SequenceEntry {
  int32_t begin;             // first token
  int32_t length;            // new tokens
  int32_t pad;               // rows before the first token; -1: dead, outputs zero, no store
  int32_t chunk_begin;       // number of its first chunk among those of all sequences
  int32_t first_checkpoint;  // chunks up to the first page end; far off without pages
  int32_t read_row;          // -1: zero state
  int32_t write_row;         // -1: no final store
  int32_t checkpoint_start;  // entry of its first checkpoint

  GDN_HOST_DEVICE bool live() const { return pad >= 0; }
  GDN_HOST_DEVICE int32_t skipped() const { return pad > 0 ? pad : 0; }
  GDN_HOST_DEVICE int32_t chunk_count(const ChunkGrid& grid) const {
    const int64_t rows = static_cast<int64_t>(skipped()) + length;
    return static_cast<int32_t>(chunks_of_rows(grid, first_checkpoint, rows));
  }
};

struct PlanHeader {
  int32_t num_entries;
  int32_t num_chunks;
  int32_t num_short;  // sequences without chunks, listed from the end (common/short_sequence.h)
};

// Rows of one chunk that hold tokens of its sequence.
struct ChunkRows {
  int32_t origin;  // token of row 0; rows before `first` belong to others
  int32_t first;
  int32_t last;  // past the end

  __device__ __forceinline__ bool valid(int row) const { return row >= first && row < last; }
};

// Chunk number `chunk` of the sequence itself.
__device__ __forceinline__ ChunkRows chunk_rows(const ChunkGrid& grid, const SequenceEntry& s,
                                                int32_t chunk) {
  const int64_t start = rows_before(grid, s.first_checkpoint, chunk);
  const int64_t end = s.skipped() + static_cast<int64_t>(s.length) - start;
  const int32_t rows = rows_of_chunk(grid, s.first_checkpoint, chunk);
  return {.origin = static_cast<int32_t>(s.begin - s.skipped() + start),
          .first = chunk == 0 ? s.skipped() : 0,
          .last = static_cast<int32_t>(end < rows ? end : rows)};
}

// The last of `count` entries whose first chunk is not past `chunk`. All lanes of a warp search
// together, 32 places at a time.
__device__ __forceinline__ int32_t find_sequence(const SequenceEntry* entries, int32_t count,
                                                 int32_t chunk, int lane) {
  int32_t low = 0;
  while (count > 1) {
    const int32_t step = (count + 31) / 32;
    const int64_t place = static_cast<int64_t>(lane) * step;
    const int32_t begin = place < count ? entries[low + place].chunk_begin : INT_MAX;
    const int below = __popc(__ballot_sync(kFullWarp, begin <= chunk));
    const int32_t skip = (below > 0 ? below - 1 : 0) * step;
    low += skip;
    count = step < count - skip ? step : count - skip;
  }
  return low;
}

// Entries that the plan fills with `kNoChunk` past its last one, so that a warp may read them all
// before it knows how many there are.
inline constexpr int32_t kPaddedEntries = 32;
inline constexpr int32_t kNoChunk = INT_MAX;

// The entry of chunk `chunk` by a whole warp; `bound` is what the list may hold. Of a short list
// every lane reads one entry, which takes one trip to memory in place of three.
__device__ __forceinline__ SequenceEntry load_entry(const PlanHeader* plan,
                                                    const SequenceEntry* entries, int64_t bound,
                                                    int32_t chunk, int lane) {
  if (bound > kPaddedEntries)
    return entries[find_sequence(entries, plan->num_entries, chunk, lane)];
  SequenceEntry entry = {};
  entry.chunk_begin = kNoChunk;
  if (lane < bound) entry = entries[lane];
  const unsigned begun = __ballot_sync(kFullWarp, entry.chunk_begin <= chunk);
  const int from = 31 - __clz(static_cast<int>(begun | 1u));
  return {.begin = __shfl_sync(kFullWarp, entry.begin, from),
          .length = __shfl_sync(kFullWarp, entry.length, from),
          .pad = __shfl_sync(kFullWarp, entry.pad, from),
          .chunk_begin = __shfl_sync(kFullWarp, entry.chunk_begin, from),
          .first_checkpoint = __shfl_sync(kFullWarp, entry.first_checkpoint, from),
          .read_row = __shfl_sync(kFullWarp, entry.read_row, from),
          .write_row = __shfl_sync(kFullWarp, entry.write_row, from),
          .checkpoint_start = __shfl_sync(kFullWarp, entry.checkpoint_start, from)};
}

}  // namespace gdn

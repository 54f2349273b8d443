// The grid of chunks: at most 64 tokens each, counted from the start of a page, so that page ends
// are chunk ends for any prefix. Pages of a multiple of 64 tokens give absolute multiples of 64;
// of any other page the last chunk is shorter.
#pragma once

#include "core/problem.h"

namespace gdn {

struct ChunkGrid {
  int32_t page_chunks = 1 << 30;  // twice this many still count in 32 bits
  int32_t gap = 0;                // rows that the last chunk of a page lacks, 0 to 63
  // x / page_chunks = x factor >> (32 + shift) for x < 2^31; factor 0 stands for 1 chunk.
  uint32_t factor = 0;
  uint32_t shift = 0;

  // Tokens from one page end to the next; far more than a call has where there are no pages.
  GDN_HOST_DEVICE int64_t page_rows() const { return page_chunks * kChunk - gap; }
  // Page ends before chunk `chunk` of a run whose first page ends after `to_page_end` chunks.
  GDN_HOST_DEVICE int32_t page_ends(int32_t to_page_end, int32_t chunk) const {
    if (chunk < to_page_end) return 0;
    const auto x = static_cast<uint32_t>(chunk - to_page_end);
    if (factor == 0) return static_cast<int32_t>(x + 1);
    return static_cast<int32_t>((uint64_t{x} * factor >> 32 >> shift) + 1);
  }
};

// `every`: tokens of a page, 0: there are none.
GDN_HOST_DEVICE inline ChunkGrid chunk_grid(int64_t every) {
  ChunkGrid grid;
  if (every == 0) return grid;
  const int64_t chunks = (every + kChunk - 1) / kChunk;
  grid.page_chunks = static_cast<int32_t>(chunks);
  grid.gap = static_cast<int32_t>(chunks * kChunk - every);
  if (chunks == 1) return grid;
  while (chunks > int64_t{2} << grid.shift) ++grid.shift;
  grid.factor = static_cast<uint32_t>(((int64_t{1} << (32 + grid.shift)) + chunks - 1) / chunks);
  return grid;
}

// Where a token at an absolute position lies in the grid.
struct ChunkPlace {
  int64_t row;          // in its chunk
  int64_t to_page_end;  // chunks up to the end of its page, its own included
};
GDN_HOST_DEVICE inline ChunkPlace chunk_place(const ChunkGrid& grid, int64_t position) {
  const int64_t in_page = position % grid.page_rows();
  return {.row = in_page % kChunk, .to_page_end = grid.page_chunks - in_page / kChunk};
}

// Rows before chunk `chunk` and in all, of a run of chunks whose first page ends after
// `to_page_end` of them. Rows count from the first chunk's first one.
GDN_HOST_DEVICE inline int64_t rows_before(const ChunkGrid& grid, int32_t to_page_end,
                                           int32_t chunk) {
  const int64_t rows = chunk * kChunk;
  if (grid.gap == 0) return rows;
  return rows - int64_t{grid.page_ends(to_page_end, chunk)} * grid.gap;
}

// Rows of a chunk, unless the tokens end earlier.
GDN_HOST_DEVICE inline int32_t rows_of_chunk(const ChunkGrid& grid, int32_t to_page_end,
                                             int32_t chunk) {
  if (grid.gap == 0) return kChunk;
  const bool ends_page =
      grid.page_ends(to_page_end, chunk) != grid.page_ends(to_page_end, chunk + 1);
  return kChunk - (ends_page ? grid.gap : 0);
}

// Chunks that hold the first `rows` rows of such a run, less than 2^32.
GDN_HOST_DEVICE inline int64_t chunks_of_rows(const ChunkGrid& grid, int32_t to_page_end,
                                              int64_t rows) {
  if (grid.gap == 0) return (rows + kChunk - 1) / kChunk;
  const int64_t first = to_page_end * kChunk - grid.gap;
  if (rows <= first) return (rows + kChunk - 1) / kChunk;
  // A page with a gap is given in 31 bits; a GPU has no instruction for a 64-bit division.
  const auto size = static_cast<uint32_t>(grid.page_rows());
  const auto past = static_cast<uint32_t>(rows - first), pages = past / size;
  const uint32_t rest = past - pages * size;
  return to_page_end + int64_t{pages} * grid.page_chunks + (rest + kChunk - 1) / kChunk;
}

// A bound of the chunks that `tokens` tokens of `sequences` sequences lie in, wherever in a page
// these begin. Of n tokens at least one chunk, and one for each of the n - 1 places between them
// where a chunk can begin: n rows hold at most n page_chunks / page_rows such places, and less than
// two in excess, as the two around a short chunk are `page_rows % 64` apart.
GDN_HOST_DEVICE inline int64_t most_chunks(const ChunkGrid& grid, int64_t tokens,
                                           int64_t sequences) {
  if (grid.gap == 0) {
    const int64_t chunks = (tokens + 62 * sequences) / kChunk + sequences;
    return tokens < chunks ? tokens : chunks;
  }
  const int64_t chunks = grid.page_chunks, rows = grid.page_rows();
  const int64_t around = 2 * rows - (kChunk - grid.gap + 1) * chunks, one = rows - chunks;
  const int64_t excess = sequences * (around > one ? around : one);
  const int64_t most = sequences + ((tokens - sequences) * chunks + excess) / rows;
  return tokens < most ? tokens : most;
}

}  // namespace gdn

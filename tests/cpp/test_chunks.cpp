// The grid of chunks against one that is walked token by token.
#include <cstdint>
#include <vector>

#include "check.h"
#include "core/chunks.h"

namespace {

using namespace gdn;

// A chunk ends at a page end, or after 64 tokens from the start of the page.
bool ends_chunk(int64_t every, int64_t position) {  // the tokens [0, position)
  const int64_t in_page = every > 0 ? position % every : position;
  return in_page % kChunk == 0;
}

struct Walked {
  std::vector<int64_t> begins;  // rows of the chunks, from row 0 of the first one
  int64_t first_row;            // rows before the first token
};

Walked walk(int64_t every, int64_t prefix, int64_t length) {
  int64_t begin = prefix;
  while (begin > 0 && !ends_chunk(every, begin)) --begin;
  Walked walked{{0}, prefix - begin};
  for (int64_t t = prefix + 1; t < prefix + length; ++t) {
    if (ends_chunk(every, t)) walked.begins.push_back(t - begin);
  }
  return walked;
}

void check_run(int64_t every, int64_t prefix, int64_t length) {
  const ChunkGrid grid = chunk_grid(every);
  const ChunkPlace place = chunk_place(grid, prefix);
  const Walked walked = walk(every, prefix, length);
  const auto count = static_cast<int32_t>(walked.begins.size());
  const auto to_page_end = static_cast<int32_t>(place.to_page_end);
  CHECK_EQUAL(place.row, walked.first_row);
  CHECK_EQUAL(chunks_of_rows(grid, to_page_end, place.row + length), count);
  CHECK(count <= most_chunks(grid, length, 1));
  for (int32_t chunk = 0; chunk < count; ++chunk) {
    const int64_t begin = walked.begins[static_cast<size_t>(chunk)];
    CHECK_EQUAL(rows_before(grid, to_page_end, chunk), begin);
    if (chunk + 1 == count) break;
    const int64_t end = walked.begins[static_cast<size_t>(chunk) + 1];
    CHECK_EQUAL(rows_of_chunk(grid, to_page_end, chunk), end - begin);
    const bool ends_page = every > 0 && (prefix - place.row + end) % every == 0;
    const int32_t passed =
        grid.page_ends(to_page_end, chunk + 1) - grid.page_ends(to_page_end, chunk);
    CHECK_EQUAL(passed, ends_page);
  }
}

void check_division() {
  for (const int64_t chunks : {1, 2, 3, 7, 9, 64, 1000, 65535, 1 << 24, (1 << 25) - 1}) {
    const ChunkGrid grid = chunk_grid(chunks * kChunk);
    for (const int64_t x : {int64_t{0}, chunks - 1, chunks, 12 * chunks - 1, int64_t{1} << 30,
                            int64_t{INT32_MAX} / chunks * chunks, int64_t{INT32_MAX} - 1}) {
      const int64_t bounded = x < INT32_MAX ? x : INT32_MAX - 1;
      CHECK_EQUAL(grid.page_ends(0, static_cast<int32_t>(bounded)), bounded / chunks + 1);
    }
  }
}

}  // namespace

int main() {
  check_division();
  for (const int64_t every : {0, 1, 2, 16, 63, 64, 65, 100, 127, 128, 192, 528}) {
    for (int64_t prefix = 0; prefix < 300; prefix += prefix < 140 ? 1 : 13) {
      for (const int64_t length : {1, 2, 15, 63, 64, 65, 100, 130, 529, 700}) {
        check_run(every, prefix, length);
      }
    }
  }
  // The bound holds for sums: sequences add up, and no chunk is empty.
  const ChunkGrid grid = chunk_grid(100);
  CHECK_EQUAL(most_chunks(grid, 5, 5), 5);
  CHECK(most_chunks(grid, 1000, 10) >= 10 * chunks_of_rows(grid, 1, 100));
  CHECK_EQUAL(most_chunks(chunk_grid(64), 128, 1), 3);
  CHECK(most_chunks(chunk_grid(INT32_MAX), INT32_MAX, INT32_MAX) <= INT32_MAX);
  return 0;
}

// White box: the page rules of core/slots.h.
#include <vector>

#include "check.h"
#include "core/slots.h"

using namespace gdn;
using Ints = std::vector<int32_t>;

namespace {

IndexTable table_of(const Ints& values) {
  return {.data = values.data(), .size = static_cast<int64_t>(values.size())};
}

struct OneSequence {
  Ints pages, indptr, last;
  PageTable table;

  OneSequence(Ints page_ids, int32_t last_page_len, int64_t page_size)
      : pages(page_ids), indptr{0, static_cast<int32_t>(page_ids.size())}, last{last_page_len} {
    table = {.indices = table_of(pages),
             .indptr = table_of(indptr),
             .last_page_len = table_of(last),
             .page_size = page_size};
  }
  OneSequence(const OneSequence&) = delete;
};

void expect(const OneSequence& s, int64_t length, const PrefillSlots& expected) {
  const PrefillSlots slots = prefill_slots(s.table, 16, 0, length);
  CHECK_EQUAL(slots.prefix, expected.prefix);
  if (expected.prefix < 0) return;
  CHECK_EQUAL(slots.read_row, expected.read_row);
  CHECK_EQUAL(slots.write_row, expected.write_row);
  CHECK_EQUAL(slots.checkpoint_start, expected.checkpoint_start);
}

void test_prefill() {
  const OneSequence three({7, 3, 12}, 452, 1024);  // 2500 tokens
  expect(three, 452, {.read_row = 3, .write_row = 12, .checkpoint_start = 2, .prefix = 2048});
  expect(three, 453, {.read_row = 3, .write_row = 12, .checkpoint_start = 1, .prefix = 2047});
  expect(three, 451, {.read_row = 12, .write_row = 12, .checkpoint_start = 2, .prefix = 2049});
  expect(three, 2500, {.read_row = -1, .write_row = 12, .checkpoint_start = 0, .prefix = 0});
  expect(three, 0, {.read_row = 12, .write_row = -1, .checkpoint_start = 2, .prefix = 2500});
  expect(three, 2501, {.prefix = -1});
  const OneSequence full({5, 2}, 64, 64);  // the last page's checkpoint is the final state
  expect(full, 128, {.read_row = -1, .write_row = -1, .checkpoint_start = 0, .prefix = 0});
  expect(full, 64, {.read_row = 5, .write_row = -1, .checkpoint_start = 1, .prefix = 64});
  expect(full, 1, {.read_row = 2, .write_row = -1, .checkpoint_start = 1, .prefix = 127});
}

void test_broken_prefill() {
  expect(OneSequence({}, 1, 64), 1, {.prefix = -1});
  expect(OneSequence({16}, 10, 64), 10, {.prefix = -1});
  expect(OneSequence({-2}, 10, 64), 10, {.prefix = -1});
  expect(OneSequence({3}, 0, 64), 0, {.prefix = -1});
  expect(OneSequence({3}, 65, 64), 10, {.prefix = -1});
  expect(OneSequence({3}, 10, 64), -1, {.prefix = -1});
  // Pages that the call does not touch are not looked at; -1 reads zero and skips a store.
  expect(OneSequence({99, 4, 5}, 10, 64), 20,
         {.read_row = 4, .write_row = 5, .checkpoint_start = 1, .prefix = 118});
  expect(OneSequence({-1, 5}, 10, 64), 10,
         {.read_row = -1, .write_row = 5, .checkpoint_start = 1, .prefix = 64});
  expect(OneSequence({4, -1}, 10, 64), 10,
         {.read_row = 4, .write_row = -1, .checkpoint_start = 1, .prefix = 64});
}

void expect_decode(const OneSequence& s, int64_t read_row, int64_t write_row) {
  const DecodeRow row = decode_slots(s.table, 16, 0);
  CHECK_EQUAL(row.read_row, read_row);
  CHECK_EQUAL(row.write_row, write_row);
  CHECK_EQUAL(row.live, write_row >= 0);
}

void test_decode() {
  expect_decode(OneSequence({4, 6}, 1, 0), 4, 6);  // opens page 6
  expect_decode(OneSequence({4, 6}, 2, 0), 6, 6);  // continues it
  expect_decode(OneSequence({6}, 1, 0), -1, 6);    // a first token
  expect_decode(OneSequence({4, -1}, 5, 0), -1, -1);
  expect_decode(OneSequence({-1, 6}, 1, 0), -1, 6);
  expect_decode(OneSequence({}, 1, 0), -1, -1);
  expect_decode(OneSequence({16}, 5, 0), -1, -1);
  expect_decode(OneSequence({17, 3}, 1, 0), -1, -1);
  expect_decode(OneSequence({3}, 0, 0), -1, -1);
}

void test_counts() {
  CHECK_EQUAL(checkpoint_count(0, 63, 64), 0);
  CHECK_EQUAL(checkpoint_count(0, 64, 64), 1);
  CHECK_EQUAL(checkpoint_count(63, 1, 64), 1);
  CHECK_EQUAL(checkpoint_count(64, 63, 64), 0);
  CHECK_EQUAL(checkpoint_count(100, 200, 64), 3);
  CHECK_EQUAL(checkpoint_count(5, 100, 0), 0);
}

void test_token_range() {
  const Ints cu = {0, 5, 3, 20, 30};
  int64_t begin, length;
  CHECK(token_range(table_of(cu), 20, 0, &begin, &length) && begin == 0 && length == 5);
  CHECK(!token_range(table_of(cu), 20, 1, &begin, &length) && length == 0);
  CHECK(token_range(table_of(cu), 20, 2, &begin, &length) && begin == 3 && length == 17);
  CHECK(!token_range(table_of(cu), 20, 3, &begin, &length) && length == 0);  // clipped
  CHECK(!token_range(table_of(cu), 10, 2, &begin, &length) && length == 7);
  const Ints negative = {-5, 3};
  CHECK(!token_range(table_of(negative), 20, 0, &begin, &length) && length == 0);
}

// Slots from the caller: rows are checked against the pools before anything is touched.
void test_given_slots() {
  const Ints cu = {0, 70}, read = {2}, write = {3}, starts = {0}, prefix = {0}, rows = {1};
  float data = 0;
  PrefillProblem p;
  p.num_seqs = 1;
  p.num_tokens = 70;
  p.cu_seqlens = table_of(cu);
  p.initial = p.output_state = p.checkpoints = {.data = &data, .num_rows = 4, .row_stride = 1};
  p.state_indices = table_of(read);
  p.output_state_indices = table_of(write);
  p.checkpoint_indices = table_of(rows);
  p.checkpoint_starts = table_of(starts);
  p.prefix_lens = table_of(prefix);
  p.checkpoint_every = 64;
  Sequence s = resolve_sequence(p, 0);
  CHECK(s.live && s.length == 70 && s.read_row == 2 && s.write_row == 3);
  CHECK_EQUAL(checkpoint_row(p, s, 0), 1);
  const auto dead = [&p](IndexTable PrefillProblem::* table, const Ints& values) {
    PrefillProblem changed = p;
    changed.*table = table_of(values);
    return !resolve_sequence(changed, 0).live;
  };
  CHECK(dead(&PrefillProblem::state_indices, {4}));
  CHECK(dead(&PrefillProblem::state_indices, {-2}));
  CHECK(!dead(&PrefillProblem::state_indices, {-1}));
  CHECK(dead(&PrefillProblem::output_state_indices, {4}));
  CHECK(dead(&PrefillProblem::checkpoint_indices, {4}));
  CHECK(dead(&PrefillProblem::checkpoint_starts, {1}));  // its one checkpoint lies past the table
  CHECK(dead(&PrefillProblem::checkpoint_starts, {-1}));
  CHECK(dead(&PrefillProblem::prefix_lens, {-1}));
  p.max_seqlen = 69;
  CHECK(!resolve_sequence(p, 0).live);
}

}  // namespace

int main() {
  test_prefill();
  test_broken_prefill();
  test_decode();
  test_counts();
  test_token_range();
  test_given_slots();
}

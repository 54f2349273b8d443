// gdn_validate_page_table, gdn_prefill_slots, gdn_decode_slots and gdn_page_stats on the host.
#include <cmath>
#include <cstring>
#include <limits>

#include "calls.h"
#include "check.h"

using gdn_test::TableCall;
using Ints = std::vector<int32_t>;

namespace {

enum Kind { kPrefill = 0, kDecode = 1 };

// The check finds `rule` and its text holds `text`.
void expect(TableCall& call, Kind kind, int32_t rule, const char* text) {
  gdn_page_table_report_t report = {};
  call.params.report = &report;
  const gdn_status_t status = gdn_validate_page_table(&call.params, kind);
  CHECK_EQUAL(report.rule, rule);
  CHECK_EQUAL(status, rule == GDN_PAGE_TABLE_OK ? GDN_OK : GDN_PAGE_TABLE);
  CHECK_CONTAINS(gdn_last_error(), text);
  if (rule == GDN_PAGE_TABLE_OK) return;
  CHECK_EQUAL(report.is_decode, kind);
  char words[256];
  size_t need = 0;
  CHECK_OK(gdn_page_table_report_text(&report, words, sizeof words, &need));
  CHECK_CONTAINS(words, text);
  CHECK_EQUAL(need, std::strlen(words) + 1);
  char start[8];
  CHECK_OK(gdn_page_table_report_text(&report, start, sizeof start, &need));
  CHECK_EQUAL(std::strlen(start), 7);
  CHECK_EQUAL(need, std::strlen(words) + 1);
}

// A report that no check wrote is put into words all the same.
void test_foreign_report() {
  gdn_page_table_report_t report = {};
  report.rule = GDN_PAGE_TABLE_INDPTR_ORDER;
  report.entry = INT64_MIN;
  char words[256];
  CHECK_OK(gdn_page_table_report_text(&report, words, sizeof words, nullptr));
  CHECK_CONTAINS(words, "page_indptr[-9223372036854775808]");
}

// A count of 0 is unknown, unless the caller says that it is a count.
void test_exact_counts() {
  TableCall call({0, 10}, {3}, {0, 1}, {10});
  call.params.num_pages = 0;
  expect(call, kPrefill, GDN_PAGE_TABLE_OK, "");
  call.params.flags = GDN_EXACT_COUNTS;
  expect(call, kPrefill, GDN_PAGE_TABLE_SEQLENS_END, "cu_seqlens[1] is 10, but there are 0 tokens");
  expect(call, kDecode, GDN_PAGE_TABLE_PAGE_ID,
         "page_indices[0] is 3, expected a page id in [0, 0)");
  CHECK_OK(gdn_prefill_slots(&call.params));
  CHECK_EQUAL(call.prefix[0], -1);
}

void test_offsets() {
  TableCall negative({0, 10}, {0}, {-1, 1}, {10});
  expect(negative, kPrefill, GDN_PAGE_TABLE_INDPTR_START, "page_indptr[0] is -1, expected >= 0");
  TableCall order({0, 10, 20, 30}, {0, 1, 2}, {0, 2, 1, 3}, {10, 10, 10});
  expect(order, kPrefill, GDN_PAGE_TABLE_INDPTR_ORDER,
         "sequence 1: page_indptr[2] is 1, less than page_indptr[1] which is 2");
  TableCall end({0, 10}, {0}, {0, 2}, {10});
  expect(end, kPrefill, GDN_PAGE_TABLE_INDPTR_END,
         "sequence 0: page_indptr[1] is 2, but there are 1 entries of page_indices");
  TableCall start({3, 10}, {0}, {0, 1}, {10});
  expect(start, kPrefill, GDN_PAGE_TABLE_SEQLENS_START, "cu_seqlens[0] is 3, expected 0");
  TableCall decreasing({0, 9, 4}, {0, 1}, {0, 1, 2}, {10, 10});
  expect(decreasing, kPrefill, GDN_PAGE_TABLE_SEQLENS_ORDER,
         "sequence 1: cu_seqlens[2] is 4, less than cu_seqlens[1] which is 9");
  TableCall past({0, 10}, {0}, {0, 1}, {10});
  past.params.num_tokens = 9;
  expect(past, kPrefill, GDN_PAGE_TABLE_SEQLENS_END,
         "sequence 0: cu_seqlens[1] is 10, but there are 9 tokens");
}

void test_pages() {
  TableCall empty({0, 5, 5}, {0}, {0, 1, 1}, {5, 1});
  expect(empty, kPrefill, GDN_PAGE_TABLE_EMPTY, "sequence 1 has an empty page list");
  TableCall null_page({0, 10}, {-1}, {0, 1}, {10});
  expect(null_page, kPrefill, GDN_PAGE_TABLE_PAGE_ID,
         "sequence 0: page_indices[0] is -1, expected a page id in [0, 16)");
  TableCall past({0, 10, 20}, {3, 1, 16}, {0, 1, 3}, {10, 10});
  expect(past, kPrefill, GDN_PAGE_TABLE_PAGE_ID, "sequence 1: page_indices[2] is 16");
  past.params.num_pages = 0;  // unknown
  expect(past, kPrefill, GDN_PAGE_TABLE_OK, "");
  TableCall zero({0, 10}, {4}, {0, 1}, {0});
  expect(zero, kPrefill, GDN_PAGE_TABLE_LAST_PAGE_LEN,
         "sequence 0: last_page_len[0] is 0, expected 1 to page_size = 64");
  TableCall long_page({0, 10}, {4}, {0, 1}, {65});
  expect(long_page, kPrefill, GDN_PAGE_TABLE_LAST_PAGE_LEN, "last_page_len[0] is 65");
  TableCall too_many({0, 200}, {0, 1}, {0, 2}, {8});
  expect(too_many, kPrefill, GDN_PAGE_TABLE_TOO_MANY_NEW,
         "sequence 0 has 200 new tokens but its table holds 72");
}

void test_shared_pages() {
  TableCall writers({0, 10, 30}, {2, 5, 2, 5}, {0, 2, 4}, {16, 26});
  expect(writers, kPrefill, GDN_PAGE_TABLE_TWO_WRITERS, "page 5 written by sequences 0 and 1");
  TableCall twice({0, 100}, {5, 5}, {0, 2}, {36});
  expect(twice, kPrefill, GDN_PAGE_TABLE_TWO_WRITERS, "page 5 written twice by sequence 0");
  TableCall read({0, 64, 74}, {3, 3, 6}, {0, 1, 3}, {64, 10});
  expect(read, kPrefill, GDN_PAGE_TABLE_WRITE_AND_READ,
         "page 3 written by sequence 0 and read by sequence 1");
  // Full prefix pages may be read by many; a page may be continued in place.
  TableCall shared({0, 5, 75}, {7, 3, 12, 7, 3, 1, 14}, {0, 3, 7}, {5, 6});
  expect(shared, kPrefill, GDN_PAGE_TABLE_OK, "");
  TableCall in_place({0, 10}, {4}, {0, 1}, {30});
  expect(in_place, kPrefill, GDN_PAGE_TABLE_OK, "");
  // A sequence without new tokens touches nothing.
  TableCall idle({0, 10, 10}, {4, 4}, {0, 1, 2}, {30, 30});
  expect(idle, kPrefill, GDN_PAGE_TABLE_OK, "");
  TableCall first_rule({0, 10, 4}, {-1, 1}, {0, 1, 2}, {10, 0});
  expect(first_rule, kPrefill, GDN_PAGE_TABLE_SEQLENS_ORDER, "cu_seqlens[2]");
}

void test_decode() {
  TableCall fork({}, {4, 6, 4, 1, 5}, {0, 2, 4, 5}, {1, 1, 17});
  expect(fork, kDecode, GDN_PAGE_TABLE_OK, "");
  TableCall writers({}, {4, 6, 2, 6}, {0, 2, 4}, {5, 9});
  expect(writers, kDecode, GDN_PAGE_TABLE_TWO_WRITERS, "page 6 written by sequences 0 and 1");
  TableCall read({}, {4, 4, 6}, {0, 1, 3}, {5, 1});
  expect(read, kDecode, GDN_PAGE_TABLE_WRITE_AND_READ,
         "page 4 written by sequence 0 and read by sequence 1");
  TableCall any_length({}, {4}, {0, 1}, {1000});
  any_length.params.page_size = 0;
  expect(any_length, kDecode, GDN_PAGE_TABLE_OK, "");
  TableCall zero({}, {4}, {0, 1}, {0});
  zero.params.page_size = 0;
  expect(zero, kDecode, GDN_PAGE_TABLE_LAST_PAGE_LEN, "last_page_len[0] is 0, expected >= 1");
}

void test_padding() {
  TableCall rows({}, {4, -1, -1}, {0, 1, 2, 3, 3}, {9, 0, 2, 0});
  expect(rows, kDecode, GDN_PAGE_TABLE_EMPTY, "sequence 3");
  rows.params.flags = GDN_ALLOW_PADDING;
  expect(rows, kDecode, GDN_PAGE_TABLE_OK, "");
  CHECK_OK(gdn_decode_slots(&rows.params));
  CHECK(rows.read == (Ints{4, -1, -1, -1}) && rows.write == (Ints{4, -1, -1, -1}));
  TableCall skipped({0, 128, 140}, {-1, 3, -1, 8}, {0, 2, 4}, {64, 12});
  skipped.params.flags = GDN_ALLOW_PADDING;
  expect(skipped, kPrefill, GDN_PAGE_TABLE_OK, "");
  skipped.page_indices[0] = -2;
  expect(skipped, kPrefill, GDN_PAGE_TABLE_PAGE_ID, "page_indices[0] is -2");
}

void test_slots() {
  TableCall call({0, 5, 75, 75, 139}, {7, 3, 12, 7, 3, 1, 14, 9, 8}, {0, 3, 7, 8, 9},
                 {5, 6, 20, 64});
  CHECK_OK(gdn_prefill_slots(&call.params));
  CHECK(call.read == (Ints{3, 3, 9, -1}));
  CHECK(call.write == (Ints{12, 14, -1, -1}));
  CHECK(call.starts == (Ints{2, 5, 7, 8}));
  CHECK(call.prefix == (Ints{128, 128, 20, 0}));
  TableCall broken({0, 200, 210}, {0, 1, 2}, {0, 2, 3}, {8, 10});
  CHECK_OK(gdn_prefill_slots(&broken.params));
  CHECK(broken.prefix == (Ints{-1, 0}) && broken.write == (Ints{-1, 2}));
  TableCall decode({}, {4, 6, 4, 1, 5, 3}, {0, 2, 4, 5, 6}, {1, 1, 17, 1});
  CHECK_OK(gdn_decode_slots(&decode.params));
  CHECK(decode.read == (Ints{4, 4, 5, -1}) && decode.write == (Ints{6, 1, 5, 3}));
  CHECK_EQUAL(decode.starts[0], 99);  // not written in decode
}

void test_page_stats() {
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<float> wide = {1, -3, 2, 0, 99, inf, std::nanf(""), -inf, 0.5f, 99};
  gdn_pool_t pool = GDN_POOL_INIT;
  pool.data = wide.data();
  pool.num_rows = 2;
  pool.row_stride = 5;
  int64_t nans[3], infs[3];
  float largest[3];
  const Ints pages = {1, 0, 2};
  gdn_page_stats_params_t params = GDN_PAGE_STATS_PARAMS_INIT;
  params.pool = &pool;
  params.row_elements = 4;
  params.num_pages = 3;
  params.page_indices = pages.data();
  params.nan_count = nans;
  params.inf_count = infs;
  params.abs_max = largest;
  CHECK_OK(gdn_page_stats(&params));
  CHECK(nans[0] == 1 && infs[0] == 2 && largest[0] == 0.5f);
  CHECK(nans[1] == 0 && infs[1] == 0 && largest[1] == 3.0f);
  CHECK(nans[2] == -1 && infs[2] == -1);
  std::vector<uint16_t> half = {0x3c00, 0xc400, 0x7c00, 0x7e00,
                                0x0001, 0,      0,      0};  // 1, -4, inf, nan
  pool.data = half.data();
  pool.dtype = GDN_FLOAT16;
  pool.row_stride = 0;
  params.num_pages = 0;
  params.page_indices = nullptr;
  CHECK_OK(gdn_page_stats(&params));
  CHECK(nans[0] == 1 && infs[0] == 1 && largest[0] == 4.0f);
  CHECK(nans[1] == 0 && infs[1] == 0 && largest[1] == std::ldexp(1.0f, -24));
}

}  // namespace

int main() {
  test_foreign_report();
  test_exact_counts();
  test_offsets();
  test_pages();
  test_shared_pages();
  test_decode();
  test_padding();
  test_slots();
  test_page_stats();
}

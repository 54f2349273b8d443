// Slots, the check of page tables, page health, and the functions that return texts.
#include <cstring>

#include "batch.h"
#include "ops.h"
#include "place.h"

namespace gdn_fuzz {
namespace {

alignas(256) char set;  // the address of a field that is to get a place

// An int32 result array per sequence, in the output region.
void place_result(Place& place, int32_t** field, int64_t seqs, int index) {
  if (*field == nullptr) return;
  const Wide bytes = Wide{seqs} * 4;
  if (bytes < 0 || bytes > 4096) {
    place.oversized = true;
    return;
  }
  char* begin = memory().output.begin() + index * 8192;
  *field = reinterpret_cast<int32_t*>(begin);
}

void allow_result(const int32_t* array, int64_t seqs) {
  if (array == nullptr) return;
  memory().output.allow(reinterpret_cast<const char*>(array), static_cast<size_t>(seqs) * 4);
}

void check_report(const gdn_page_table_report_t& report, gdn_status_t status) {
  FUZZ_CHECK((report.rule == GDN_PAGE_TABLE_OK) == (status == GDN_OK));
  FUZZ_CHECK(report.rule >= 0 && report.rule <= GDN_PAGE_TABLE_INITIAL_PAGE);
}

}  // namespace

void page_table(Bytes& in) {
  const bool decode = in.flag();
  const Batch batch(in, decode);
  gdn_page_table_params_t p = GDN_PAGE_TABLE_PARAMS_INIT;
  p.num_seqs = batch.num_seqs, p.num_indices = static_cast<int64_t>(batch.indices.size());
  if (in.flag()) p.num_pages = batch.num_rows, p.num_tokens = batch.num_tokens;
  p.page_size = decode && in.flag() ? 0 : batch.page_size;
  p.page_indices = p.page_indptr = p.last_page_len = &set;
  if (!decode || in.one_in(4)) p.cu_seqlens = &set;
  if (in.one_in(4)) p.flags = GDN_ALLOW_PADDING;
  p.flags |= batch.page_flags();
  if (in.one_in(4)) p.initial_page_indices = &set;
  if (in.one_in(4)) p.page_indices_dtype = GDN_INT64;
  p.state_indices = p.output_state_indices = reinterpret_cast<int32_t*>(&set);
  p.checkpoint_cu_starts = p.prefix_lens = p.state_indices;
  spoil(in, &p);
  const auto seen = visible(p);
  Place place{in};
  place.table(&p.cu_seqlens, seen.cu_seqlens_dtype, Wide{seen.num_seqs} + 1, batch.cu_seqlens);
  place.table(&p.page_indices, seen.page_indices_dtype, seen.num_indices, batch.indices);
  place.table(&p.page_indptr, seen.page_indptr_dtype, Wide{seen.num_seqs} + 1, batch.indptr);
  place.table(&p.last_page_len, seen.last_page_len_dtype, seen.num_seqs, batch.last_page_len);
  place.table(&p.initial_page_indices, seen.initial_page_indices_dtype, seen.num_seqs,
              batch.initial_pages);
  place_result(place, &p.state_indices, seen.num_seqs, 0);
  place_result(place, &p.output_state_indices, seen.num_seqs, 1);
  place_result(place, &p.checkpoint_cu_starts, seen.num_seqs, 2);
  place_result(place, &p.prefix_lens, seen.num_seqs, 3);
  place.scratch(&p.workspace, seen.workspace_bytes);
  place.threads(&p.parallel_for);
  gdn_page_table_report_t report = {};
  p.report = in.flag() ? &report : nullptr;
  const gdn_page_table_params_t* const placed = place.params(p);
  size_t bytes = 0;
  check_status(gdn_validate_page_table_workspace_size(placed, &bytes));
  if (place.oversized) return;
  gdn_status_t status = gdn_validate_page_table(placed, decode);
  check_status(status);
  if ((status == GDN_OK || status == GDN_PAGE_TABLE) && visible(*placed).report != nullptr) {
    check_report(report, status);
  }
  memory().check(true);
  status = decode ? gdn_decode_slots(placed) : gdn_prefill_slots(placed);
  check_status(status);
  if (status == GDN_OK) {
    const auto taken = visible(*placed);
    allow_result(taken.state_indices, taken.num_seqs);
    allow_result(taken.output_state_indices, taken.num_seqs);
    if (!decode) allow_result(taken.checkpoint_cu_starts, taken.num_seqs);
    if (!decode) allow_result(taken.prefix_lens, taken.num_seqs);
  }
  memory().check(status != GDN_OK);
}

void page_stats(Bytes& in) {
  const Batch batch(in, true);
  gdn_page_stats_params_t p = GDN_PAGE_STATS_PARAMS_INIT;
  p.pool = reinterpret_cast<gdn_pool_t*>(&set);
  p.row_elements = 64;
  if (in.flag()) {
    p.page_indices = &set;
    p.num_pages = static_cast<int64_t>(batch.indices.size());
  }
  p.num_threads = 1;
  spoil(in, &p);
  const auto seen = visible(p);
  Place place{in};
  place.table(&p.page_indices, seen.page_indices_dtype, seen.num_pages, batch.indices);
  gdn_pool_t pool = GDN_POOL_INIT;
  pool.data = &set, pool.num_rows = batch.num_rows;
  if (in.one_in(4)) pool.dtype = in.flag() ? GDN_BFLOAT16 : GDN_FLOAT16;
  spoil(in, &pool);
  place.pool(&p.pool, pool, 0, seen.row_elements);
  // Results for at most 1024 pages, each in a block of its own.
  const int64_t rows = p.pool != nullptr ? visible(pool).num_rows : 0;
  const int64_t pages = p.page_indices != nullptr ? seen.num_pages : rows;
  if (pages < 0 || pages > 1024) return;
  char* const results = memory().output.begin();
  if (p.nan_count != nullptr || !in.one_in(16)) p.nan_count = reinterpret_cast<int64_t*>(results);
  p.inf_count = reinterpret_cast<int64_t*>(results + 8192);
  p.abs_max = reinterpret_cast<float*>(results + 16384);
  if (place.oversized) return;
  const gdn_page_stats_params_t* const placed = place.params(p);
  const gdn_status_t status = gdn_page_stats(placed);
  check_status(status);
  if (status == GDN_OK) {
    memory().output.allow(results, static_cast<size_t>(pages) * 8);
    memory().output.allow(results + 8192, static_cast<size_t>(pages) * 8);
    memory().output.allow(results + 16384, static_cast<size_t>(pages) * 4);
  }
  memory().check(status != GDN_OK);
}

void report_text(Bytes& in) {
  gdn_page_table_report_t report;
  report.rule = in.flag() ? static_cast<int32_t>(in.below(16)) : in.take<int32_t>();
  report.is_decode = in.take<int32_t>();
  report.sequence = in.number(), report.entry = in.number();
  report.value = in.number(), report.expected = in.number();
  const size_t cap = static_cast<size_t>(in.below(256));
  char* const text = cap > 0 || in.flag() ? memory().text.place(cap, 1, true) : nullptr;
  size_t need = 0;
  FUZZ_CHECK(gdn_page_table_report_text(&report, text, cap, in.flag() ? &need : nullptr) == GDN_OK);
  if (cap > 0) FUZZ_CHECK(std::memchr(text, '\0', cap) != nullptr);
}

void names(Bytes& in) {
  const auto op = static_cast<int32_t>(in.number()), index = static_cast<int32_t>(in.number());
  const char* const name = gdn_kernel_row_name(op, index);
  FUZZ_CHECK((name == nullptr) == (gdn_kernel_row_description(op, index) == nullptr));
  FUZZ_CHECK(gdn_status_string(op)[0] != '\0');
  const size_t header = 8;
  size_t need = 0;
  const gdn_status_t status = gdn_explain(op % 8 ? 0 : op, &header, nullptr, 0, &need);
  check_status(status);
  FUZZ_CHECK(status != GDN_OK && gdn_preload(index) != GDN_OK);
}

}  // namespace gdn_fuzz

// gdn_page_table_params_t and gdn_page_stats_params_t to their problems.
#include "core/arguments.h"
#include "core/validate.h"

namespace gdn {
namespace {

void read_table(const gdn_page_table_params_t& c, bool required, PageTableProblem* p) {
  TableArgument t = {.size = c.num_indices, .required = required && c.num_indices > 0};
  t.name = "page_indices", t.data = c.page_indices, t.dtype = c.page_indices_dtype;
  p->table.indices = check_table(t);
  t.name = "page_indptr", t.data = c.page_indptr, t.dtype = c.page_indptr_dtype;
  t.size = p->num_seqs + 1, t.required = required;
  p->table.indptr = check_table(t);
  t.name = "last_page_len", t.data = c.last_page_len, t.dtype = c.last_page_len_dtype;
  t.size = p->num_seqs;
  p->table.last_page_len = check_table(t);
  p->table.initial_pages = check_initial_pages(c, p->num_seqs);
  if (p->is_decode) return;  // cu_seqlens is not looked at: one new token each
  t.name = "cu_seqlens", t.data = c.cu_seqlens, t.dtype = c.cu_seqlens_dtype;
  t.size = p->num_seqs + 1;
  p->cu_seqlens = check_table(t);
}

void read_outputs(const gdn_page_table_params_t& c, PageTableProblem* p) {
  const auto require = [p](const char* name, const int32_t* array) {
    GDN_REQUIRE(array != nullptr, "%s: NULL given, int32 [%lld] expected", name,
                static_cast<long long>(p->num_seqs));
  };
  require("state_indices", c.state_indices);
  require("output_state_indices", c.output_state_indices);
  if (!p->is_decode) {
    require("checkpoint_cu_starts", c.checkpoint_cu_starts);
    require("prefix_lens", c.prefix_lens);
  }
  p->state_indices = c.state_indices;
  p->output_state_indices = c.output_state_indices;
  p->checkpoint_starts = c.checkpoint_cu_starts;
  p->prefix_lens = c.prefix_lens;
}

}  // namespace

PageTableProblem page_table_problem(const gdn_page_table_params_t* params, TableUse use,
                                    bool is_decode) {
  const auto c = read_struct("gdn_page_table_params_t", params);
  check_flags(c.flags, GDN_ALLOW_PADDING | GDN_EXACT_COUNTS | GDN_ALLOW_UNALIGNED_PAGES);
  GDN_REQUIRE(c.reserved == 0, "reserved: %d given, 0 expected", c.reserved);
  GDN_REQUIRE(c.reserved2 == 0, "reserved2: %d given, 0 expected", c.reserved2);
  check_count("num_seqs", c.num_seqs);
  check_count("num_tokens", c.num_tokens);
  check_count("num_indices", c.num_indices);
  check_count("num_pages", c.num_pages);
  if (!is_decode || c.page_size != 0) check_page_size(c.page_size, c.flags);
  PageTableProblem p;
  p.device = check_device(c.device_type, c.device_id, c.stream);
  p.threads = check_threads(c.parallel_for, c.parallel_for_context, c.num_threads);
  p.table.page_size = c.page_size;
  p.num_seqs = c.num_seqs;
  const bool exact = c.flags & GDN_EXACT_COUNTS;
  if (exact || c.num_tokens > 0) p.num_tokens = c.num_tokens;
  if (exact || c.num_pages > 0) p.num_pages = c.num_pages;
  // Slots are int32: a larger id of an int64 table must not wrap into the pool.
  if (p.num_pages == INT64_MAX && use == TableUse::kSlots) p.num_pages = INT32_MAX;
  p.is_decode = is_decode;
  p.allow_padding = c.flags & GDN_ALLOW_PADDING;
  p.report = c.report;
  p.workspace = c.workspace;
  p.workspace_bytes = c.workspace_bytes;
  const bool required = use != TableUse::kValidateSize && p.num_seqs > 0;
  read_table(c, required, &p);
  if (use == TableUse::kSlots && required) read_outputs(c, &p);
  GDN_REQUIRE(use != TableUse::kValidate || p.device.type == GDN_CPU || p.report != nullptr,
              "report: NULL given, a gdn_page_table_report_t in device memory expected");
  return p;
}

PageStatsProblem page_stats_problem(const gdn_page_stats_params_t* params) {
  const auto c = read_struct("gdn_page_stats_params_t", params);
  PageStatsProblem p;
  p.device = check_device(c.device_type, c.device_id, c.stream);
  p.threads = check_threads(nullptr, nullptr, c.num_threads);
  GDN_REQUIRE(c.row_elements >= 1, "row_elements: %lld given, H * V * K expected",
              static_cast<long long>(c.row_elements));
  p.row_elements = c.row_elements;
  p.pool = check_pool(
      {.name = "pool", .pool = c.pool, .elements = c.row_elements, .data_required = false});
  GDN_REQUIRE(p.pool.data != nullptr || p.pool.num_rows == 0,
              "pool.data: NULL given, %lld rows expected", static_cast<long long>(p.pool.num_rows));
  check_count("num_pages", c.num_pages);
  p.page_indices = check_table({.name = "page_indices",
                                .data = c.page_indices,
                                .dtype = c.page_indices_dtype,
                                .size = c.num_pages,
                                .required = false});
  p.num_pages = p.page_indices ? c.num_pages : p.pool.num_rows;
  GDN_REQUIRE(p.page_indices || c.num_pages == 0 || c.num_pages == p.pool.num_rows,
              "num_pages: %lld given, 0 or %lld (rows of the pool) expected without page_indices",
              static_cast<long long>(c.num_pages), static_cast<long long>(p.pool.num_rows));
  if (p.num_pages == 0) return p;
  GDN_REQUIRE(c.nan_count != nullptr, "nan_count: NULL given, int64 [num_pages] expected");
  GDN_REQUIRE(c.inf_count != nullptr, "inf_count: NULL given, int64 [num_pages] expected");
  GDN_REQUIRE(c.abs_max != nullptr, "abs_max: NULL given, float [num_pages] expected");
  p.nan_count = c.nan_count;
  p.inf_count = c.inf_count;
  p.abs_max = c.abs_max;
  return p;
}

}  // namespace gdn

// Page tables: slots, checks, and the health of pages.
#include <cstring>

#include "call.h"

namespace gdn::python {
namespace {

// Positions in the argument tuple; python/gdn_paged packs them in this order. A decode table has
// no cu_seqlens (None) and may have no page_size (0).
enum Position : int {
  kCuSeqlens,
  kPageIndices,
  kPageIndptr,
  kPageSize,
  kLastPageLen,
  kStream,
  kNumThreads,
  kInitialPages,
  kAllowUnaligned,
  kCount
};

struct TableCall {
  explicit TableCall(const Arguments& arguments)
      : args(arguments), is_decode(arguments[kCuSeqlens].is_none()),
        call("page_indices", arguments[kPageIndices]) {
    call.use_stream(args[kStream]);
    set_tables();
  }

  void set_tables() {
    p.device_type = call.first().device_type;
    p.device_id = call.first().device_id;
    p.stream = call.stream();
    p.num_threads = to_int32("num_threads", args[kNumThreads]);
    p.page_size = to_int64("page_size", args[kPageSize]);
    if (!is_decode) {
      const Table cu = call.table("cu_seqlens", args[kCuSeqlens], kAny);
      if (cu.size < 1) fail("cu_seqlens: 0 entries; expected num_seqs + 1");
      if (p.page_size == 0)
        fail("page_size: 0; expected a positive multiple of 64, or any with allow_unaligned_pages");
      p.cu_seqlens = cu.data;
      p.cu_seqlens_dtype = cu.dtype;
      p.num_seqs = cu.size - 1;
    }
    const Table last =
        call.table("last_page_len", args[kLastPageLen], is_decode ? kAny : p.num_seqs);
    p.num_seqs = last.size;
    const Table indptr = call.table("page_indptr", args[kPageIndptr], p.num_seqs + 1);
    const Table indices = call.table("page_indices", args[kPageIndices], kAny);
    p.page_indices = indices.data;
    p.page_indices_dtype = indices.dtype;
    p.num_indices = indices.size;
    p.page_indptr = indptr.data;
    p.page_indptr_dtype = indptr.dtype;
    p.last_page_len = last.data;
    p.last_page_len_dtype = last.dtype;
    call.initial_pages(args[kInitialPages], p.num_seqs, p);
    if (to_bool("allow_unaligned_pages", args[kAllowUnaligned])) {
      p.flags |= GDN_ALLOW_UNALIGNED_PAGES;
    }
  }

  // An int32 array [num_seqs] for a result.
  nb::object result(int32_t** data) {
    nb::object array = call.empty({p.num_seqs}, "int32");
    *data = static_cast<int32_t*>(
        call.array("slots", array, {{p.num_seqs}, "[num_seqs]"}, Access::kWrite).data);
    return array;
  }

  const Arguments& args;
  bool is_decode;
  Call call;
  gdn_page_table_params_t p = GDN_PAGE_TABLE_PARAMS_INIT;
};

// (state_indices, output_state_indices, checkpoint_cu_starts, prefix_lens), or the first two as
// (initial_state_indices, output_state_indices) for a decode table.
nb::tuple slots(const nb::tuple& tuple) {
  const Arguments args(tuple, kCount);
  TableCall c(args);
  nb::object reads = c.result(&c.p.state_indices);
  nb::object writes = c.result(&c.p.output_state_indices);
  nb::object starts, prefixes;
  if (!c.is_decode) {
    starts = c.result(&c.p.checkpoint_cu_starts);
    prefixes = c.result(&c.p.prefix_lens);
  }
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = c.is_decode ? gdn_decode_slots(&c.p) : gdn_prefill_slots(&c.p);
  }
  check_status(status);
  if (c.is_decode) return nb::make_tuple(reads, writes);
  return nb::make_tuple(reads, writes, starts, prefixes);
}

// The report of the check, a uint8 array where the tables are; on a device the check is enqueued
// and not waited for. report_text reads a host copy of it. `exact`: counts of 0 are counts.
nb::object validate(const nb::tuple& tuple, const nb::tuple& counts, nb::handle allow_padding,
                    nb::handle exact) {
  const Arguments args(tuple, kCount);
  TableCall c(args);
  c.p.num_pages = to_int64("num_pages", counts[0]);
  c.p.num_tokens = to_int64("num_tokens", counts[1]);
  if (to_bool("allow_padding", allow_padding)) c.p.flags |= GDN_ALLOW_PADDING;
  if (to_bool("exact", exact)) c.p.flags |= GDN_EXACT_COUNTS;
  size_t bytes = sizeof(gdn_page_table_report_t);
  nb::object report = c.call.empty({static_cast<int64_t>(bytes)}, "uint8");
  c.p.report = static_cast<gdn_page_table_report_t*>(
      c.call.array("report", report, {{kAny}, "[bytes]"}, Access::kWrite).data);
  if (c.call.on_cuda()) {
    check_status(gdn_validate_page_table_workspace_size(&c.p, &c.p.workspace_bytes));
    c.p.workspace = c.call.scratch("workspace", nb::none(), &c.p.workspace_bytes);
  }
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_validate_page_table(&c.p, c.is_decode);
  }
  if (status != GDN_PAGE_TABLE) check_status(status);
  return report;
}

// "" for a table without a fault.
nb::str report_text(const nb::bytes& bytes) {
  gdn_page_table_report_t report;
  if (bytes.size() < sizeof report) throw nb::value_error("report: too short");
  std::memcpy(&report, bytes.c_str(), sizeof report);
  if (report.rule == GDN_PAGE_TABLE_OK) return nb::str("");
  char text[1024];
  check_status(gdn_page_table_report_text(&report, text, sizeof text, nullptr));
  return nb::str(text);
}

// (nan_count, inf_count, abs_max) of the listed pages, or of every row.
nb::tuple page_stats(nb::handle state_pool, nb::handle page_indices, nb::handle stream,
                     nb::handle num_threads) {
  Call call("state_pool", state_pool);
  call.use_stream(stream);
  const ArrayView view =
      call.array("state_pool", state_pool, {{kAny, kAny, kAny, kAny}, "[num_pages, H, V, K]"});
  const HeadCounts heads{0, 0, 0, view.shape[1], view.shape[3], view.shape[2]};
  const gdn_pool_t pool = call.pool("state_pool", state_pool, heads, Access::kRead);
  gdn_page_stats_params_t p = GDN_PAGE_STATS_PARAMS_INIT;
  p.device_type = view.device_type;
  p.device_id = view.device_id;
  p.stream = call.stream();
  p.num_threads = to_int32("num_threads", num_threads);
  p.pool = &pool;
  p.row_elements = heads.state * heads.dim_v * heads.dim_k;
  p.num_pages = view.shape[0];
  if (!page_indices.is_none()) {
    const Table pages = call.table("page_indices", page_indices, kAny);
    p.page_indices = pages.data;
    p.page_indices_dtype = pages.dtype;
    p.num_pages = pages.size;
  }
  const auto result = [&](const char* dtype, void** data) {
    nb::object array = call.empty({p.num_pages}, dtype);
    *data = call.array("result", array, {{p.num_pages}, "[num_pages]"}, Access::kWrite).data;
    return array;
  };
  void *nans, *infs, *largest;
  nb::object nan_count = result("int64", &nans), inf_count = result("int64", &infs);
  nb::object abs_max = result("float32", &largest);
  p.nan_count = static_cast<int64_t*>(nans);
  p.inf_count = static_cast<int64_t*>(infs);
  p.abs_max = static_cast<float*>(largest);
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_page_stats(&p);
  }
  check_status(status);
  return nb::make_tuple(nan_count, inf_count, abs_max);
}

}  // namespace

void define_slots(nb::module_& m) {
  m.def("slots", &slots, nb::arg("arguments"),
        nb::sig("def slots(arguments: tuple) -> tuple[typing.Any, ...]"));
  m.def("validate_page_table", &validate, nb::arg("arguments"), nb::arg("counts"),
        nb::arg("allow_padding").none(), nb::arg("exact").none(),
        nb::sig("def validate_page_table(arguments: tuple, counts: tuple, allow_padding: "
                "bool, exact: bool) -> typing.Any"));
  m.def("report_text", &report_text, nb::arg("report"));
  m.def("page_stats", &page_stats, nb::arg("state_pool").none(), nb::arg("page_indices").none(),
        nb::arg("stream").none(), nb::arg("num_threads").none());
}

}  // namespace gdn::python

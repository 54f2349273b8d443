// Prefill on a paged pool: gdn_prefill_paged, its plan and its workspace.
#include <iterator>

#include "prefill_call.h"

namespace gdn::python {
namespace {

// clang-format off
enum Paged : int {
  kStatePool = kCommonCount, kPageIndices, kPageIndptr, kPageSize, kLastPageLen, kSlots,
  kInitialPages, kAllowUnaligned, kMaxSeqlen, kPagedCount
};
// clang-format on

void set_slots(PrefillCall& c) {
  nb::handle slots = c.args[kSlots];
  if (slots.is_none()) return;
  if (!PyTuple_Check(slots.ptr()) || PyTuple_Size(slots.ptr()) != 4) {
    fail("slots: got %s; expected GDNPagedPrefillSlots, as gdn_paged_prefill_slots returns it",
         type_of(slots).c_str());
  }
  const int64_t n = c.p.num_seqs;
  const nb::tuple fields = nb::borrow<nb::tuple>(slots);
  c.p.state_indices = c.call.slot_array("slots.state_indices", fields[0], n);
  c.p.output_state_indices = c.call.slot_array("slots.output_state_indices", fields[1], n);
  c.p.checkpoint_cu_starts = c.call.slot_array("slots.checkpoint_cu_starts", fields[2], n);
  c.p.prefix_lens = c.call.slot_array("slots.prefix_lens", fields[3], n);
}

void set_page_table(PrefillCall& c) {
  gdn_prefill_params_t& p = c.p;
  const Table indices = c.call.table("page_indices", c.args[kPageIndices], kAny);
  const Table indptr = c.call.table("page_indptr", c.args[kPageIndptr], p.num_seqs + 1);
  const Table last = c.call.table("last_page_len", c.args[kLastPageLen], p.num_seqs);
  p.page_indices = indices.data;
  p.page_indices_dtype = indices.dtype;
  p.num_indices = indices.size;
  p.page_indptr = indptr.data;
  p.page_indptr_dtype = indptr.dtype;
  p.last_page_len = last.data;
  p.last_page_len_dtype = last.dtype;
  p.page_size = to_int64("page_size", c.args[kPageSize]);
  if (p.page_size == 0)
    fail("page_size: 0; expected a positive multiple of 64, or any with allow_unaligned_pages");
  if (to_bool("allow_unaligned_pages", c.args[kAllowUnaligned])) {
    p.flags |= GDN_ALLOW_UNALIGNED_PAGES;
  }
  c.call.initial_pages(c.args[kInitialPages], p.num_seqs, p);
  if (!c.args[kMaxSeqlen].is_none()) p.max_seqlen = to_int64("max_seqlen", c.args[kMaxSeqlen]);
  c.pool = c.call.pool("state_pool", c.args[kStatePool], c.heads, Access::kWrite);
  p.state_pool = &c.pool;
}

void set_paged(PrefillCall& c) {
  set_common(c);
  set_page_table(c);
  set_slots(c);
  set_output(c);
  set_scratch(c);
}

nb::object run_paged(const nb::tuple& tuple) {
  const Arguments args(tuple, kPagedCount);
  PrefillCall c(args, Use::kLaunch);
  set_paged(c);
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_prefill_paged(&c.p);
  }
  check_status(status);
  return c.output;
}

nb::str explain_paged(const nb::tuple& tuple) {
  const Arguments args(tuple, kPagedCount);
  PrefillCall c(args, Use::kExplain);
  set_paged(c);
  return explain(GDN_OP_PREFILL_PAGED, c.p);
}

// Writes the plan into `plan` of the arguments, or into memory of the caller's framework.
nb::object plan_paged(const nb::tuple& tuple) {
  const Arguments args(tuple, kPagedCount);
  PrefillCall c(args, Use::kPlan);
  set_paged(c);
  nb::object plan = nb::borrow(args[kPlan]);
  if (plan.is_none()) {
    size_t bytes = 0;
    check_status(gdn_prefill_plan_size(&c.p, &bytes));
    plan = c.call.empty({static_cast<int64_t>(bytes)}, "uint8");
  }
  c.p.plan = c.call.scratch("plan", plan, &c.p.plan_bytes);
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_prefill_plan(&c.p);
  }
  check_status(status);
  return plan;
}

// Bytes of workspace from host integers alone, packed by python/gdn_paged/prefill.py.
size_t workspace_size(const nb::tuple& tuple, nb::handle backend) {
  static const char* const kNames[] = {"num_seqs",    "num_tokens",  "max_seqlen",   "page_size",
                                       "num_q_heads", "num_k_heads", "num_v_heads",  "head_dim_k",
                                       "head_dim_v",  "io_dtype",    "state_dtype",  "device",
                                       "device",      "use_cp",      "deterministic"};
  constexpr int kCount = std::size(kNames);
  const Arguments args(tuple, kCount);
  int64_t sizes[kCount];
  for (int i = 0; i < kCount; ++i) sizes[i] = to_int64(kNames[i], args[i]);
  const auto small = [&](int i) { return to_int32(kNames[i], args[i]); };
  gdn_pool_t pool = GDN_POOL_INIT;
  pool.dtype = small(10);
  gdn_prefill_params_t p = GDN_PREFILL_PARAMS_INIT;
  p.num_seqs = sizes[0];
  p.num_tokens = sizes[1];
  p.max_seqlen = sizes[2];
  p.page_size = sizes[3];
  p.num_q_heads = small(4);
  p.num_k_heads = small(5);
  p.num_v_heads = small(6);
  p.head_dim_k = small(7);
  p.head_dim_v = small(8);
  p.io_dtype = small(9);
  p.device_type = small(11);
  p.device_id = small(12);
  p.use_cp = small(13);
  p.flags = static_cast<uint64_t>(sizes[14]);
  p.backend = to_backend(backend);
  (p.page_size ? p.state_pool : p.initial_state) = &pool;
  size_t bytes = 0;
  check_status(gdn_prefill_workspace_size(&p, &bytes));
  return bytes;
}

}  // namespace

const int kPagedArguments = kPagedCount;

void set_paged_call(PrefillCall& c) { set_paged(c); }

void define_prefill_paged(nb::module_& m) {
  m.def("prefill_paged", &run_paged, nb::arg("arguments"),
        nb::sig("def prefill_paged(arguments: tuple) -> typing.Any"));
  m.def("explain_prefill_paged", &explain_paged, nb::arg("arguments"));
  m.def("plan_prefill_paged", &plan_paged, nb::arg("arguments"),
        nb::sig("def plan_prefill_paged(arguments: tuple) -> typing.Any"));
  m.def("prefill_workspace_size", &workspace_size, nb::arg("sizes"), nb::arg("backend").none());
}

}  // namespace gdn::python

// Prefill: Python arrays to gdn_prefill_params_t. The paged and the slot form share their first
// arguments.
#include <cstring>

#include "call.h"

namespace gdn::python {
namespace {

// Positions in the argument tuple; python/gdn_paged/ops.py packs them in this order.
enum Common : int {
  kQ, kK, kV, kG, kBeta, kScale, kCuSeqlens, kUseQkL2norm, kOutput, kGateDomain, kUseGate, kALog,
  kDtBias, kBetaIsLogit, kStream, kWorkspace, kPlan, kDeterministic, kNumThreads, kBackend,
  kCommonCount
};
enum Paged : int {
  kStatePool = kCommonCount, kPageIndices, kPageIndptr, kPageSize, kLastPageLen, kSlots, kPagedCount
};
enum Flat : int {
  kInitialState = kCommonCount, kOutputFinalState, kOutputState, kStateCheckpoints,
  kCheckpointCuStarts, kCheckpointEvery, kUseCp, kStateIndices, kMaxSeqlen, kCuSeqlensCpu,
  kOutputStateIndices, kCheckpointStateIndices, kPrefixLens, kFlatCount
};

enum class Use { kLaunch, kExplain, kPlan };

// A call that owns what its params point to.
struct PrefillCall {
  PrefillCall(const Arguments& arguments, Use purpose)
      : args(arguments), use(purpose), call("q", arguments[kQ]) {}

  const Arguments& args;
  Use use;
  Call call;
  HeadCounts heads{};
  gdn_prefill_params_t p = GDN_PREFILL_PARAMS_INIT;
  gdn_pool_t pool = GDN_POOL_INIT;         // state_pool or initial_state
  gdn_pool_t output_state = GDN_POOL_INIT;
  gdn_pool_t checkpoints = GDN_POOL_INIT;
  nb::object output;
  nb::object final_state;
};

void set_operands(PrefillCall& c) {
  const ArrayView q = c.call.array("q", c.args[kQ],
                                   {{kAny, kAny, kAny}, "[tokens, num_q_heads, head_dim_k]"});
  const int64_t tokens = q.shape[0];
  const ArrayView k = c.call.array(
      "k", c.args[kK], {{tokens, kAny, q.shape[2]}, "[tokens, num_k_heads, head_dim_k]"});
  const ArrayView v = c.call.array("v", c.args[kV],
                                   {{tokens, kAny, kAny}, "[tokens, num_v_heads, head_dim_v]"});
  check_io(q);
  for (const ArrayView* view : {&k, &v}) check_same_dtype(*view, q);
  for (const ArrayView* view : {&q, &k, &v}) c.call.refuse_grad(*view);
  c.heads = check_heads(q, k, v);
  const Operand oq = c.call.operand(q, 1), ok = c.call.operand(k, 1), ov = c.call.operand(v, 1);
  gdn_prefill_params_t& p = c.p;
  p.num_tokens = tokens;
  p.num_q_heads = static_cast<int32_t>(c.heads.q);
  p.num_k_heads = static_cast<int32_t>(c.heads.k);
  p.num_v_heads = static_cast<int32_t>(c.heads.v);
  p.head_dim_k = static_cast<int32_t>(c.heads.dim_k);
  p.head_dim_v = static_cast<int32_t>(c.heads.dim_v);
  p.io_dtype = q.dtype;
  p.q = oq.data;
  p.q_token_stride = oq.row_stride;
  p.q_head_stride = oq.head_stride;
  p.k = ok.data;
  p.k_token_stride = ok.row_stride;
  p.k_head_stride = ok.head_stride;
  p.v = ov.data;
  p.v_token_stride = ov.row_stride;
  p.v_head_stride = ov.head_stride;
}

// Last of the checks, since it may allocate.
void set_output(PrefillCall& c) {
  if (c.use == Use::kPlan) return;
  const int64_t tokens = c.p.num_tokens;
  c.output = nb::borrow(c.args[kOutput]);
  if (c.output.is_none()) c.output = c.call.empty({tokens, c.heads.state, c.heads.dim_v});
  const ArrayView output =
      c.call.array("output", c.output,
                   {{tokens, c.heads.state, c.heads.dim_v}, "[tokens, H, head_dim_v]"},
                   Access::kWrite);
  check_same_dtype(output, c.call.first());
  const Operand o = c.call.operand(output, 1);
  c.p.output = o.data;
  c.p.output_token_stride = o.row_stride;
  c.p.output_head_stride = o.head_stride;
}

void set_gates(PrefillCall& c) {
  gdn_prefill_params_t& p = c.p;
  const Shape shape{{p.num_tokens, c.heads.state}, "[tokens, H]"};
  const Operand g = c.call.gate("g", c.args[kG], shape);
  const Operand beta = c.call.gate("beta", c.args[kBeta], shape);
  p.g = g.data;
  p.g_dtype = g.dtype;
  p.g_token_stride = g.row_stride;
  p.g_head_stride = g.head_stride;
  p.beta = beta.data;
  p.beta_dtype = beta.dtype;
  p.beta_token_stride = beta.row_stride;
  p.beta_head_stride = beta.head_stride;
  if (to_bool("beta_is_logit", c.args[kBetaIsLogit])) p.flags |= GDN_BETA_IS_LOGIT;

  const char* domain = to_text("gate_domain", c.args[kGateDomain]);
  const bool is_log = domain != nullptr && !std::strcmp(domain, "log");
  if (!is_log && (domain == nullptr || std::strcmp(domain, "linear") != 0)) {
    fail("gate_domain: \"%s\"; expected \"linear\" or \"log\"", domain ? domain : "None");
  }
  p.gate = is_log ? GDN_GATE_LOG : GDN_GATE_LINEAR;
  const bool in_kernel = to_bool("use_gate_in_kernel", c.args[kUseGate]);
  const Operand A_log = c.call.per_head("A_log", c.args[kALog], c.heads.state);
  const Operand dt_bias = c.call.per_head("dt_bias", c.args[kDtBias], c.heads.state);
  if (!in_kernel) {
    if (A_log.data) fail("A_log: given; expected use_gate_in_kernel=True with it");
    if (dt_bias.data) fail("dt_bias: given; expected use_gate_in_kernel=True with it");
    return;
  }
  if (c.args[kG].is_none()) fail("g: None; use_gate_in_kernel=True expects raw gate logits");
  if (!A_log.data) fail("A_log: None; use_gate_in_kernel=True expects one value per head");
  p.gate = GDN_GATE_RAW;
  p.A_log = A_log.data;
  p.A_log_dtype = A_log.dtype;
  p.dt_bias = dt_bias.data;
  p.dt_bias_dtype = dt_bias.dtype;
}

void set_common(PrefillCall& c) {
  gdn_prefill_params_t& p = c.p;
  set_launch(p, c.call,
             {.stream = c.args[kStream],
              .deterministic = c.args[kDeterministic],
              .num_threads = c.args[kNumThreads],
              .backend = c.args[kBackend]});
  set_operands(c);
  if (c.args[kCuSeqlens].is_none()) {
    fail("cu_seqlens: None; expected an int32 or int64 table [num_seqs + 1]");
  }
  const Table cu = c.call.table("cu_seqlens", c.args[kCuSeqlens], kAny);
  if (cu.size < 1) fail("cu_seqlens: 0 entries; expected num_seqs + 1");
  p.cu_seqlens = cu.data;
  p.cu_seqlens_dtype = cu.dtype;
  p.num_seqs = cu.size - 1;
  set_gates(c);
  if (!c.args[kScale].is_none()) p.scale = to_double("scale", c.args[kScale]);
  if (to_bool("use_qk_l2norm_in_kernel", c.args[kUseQkL2norm])) p.flags |= GDN_QK_L2NORM;
}

void set_scratch(PrefillCall& c) {
  gdn_prefill_params_t& p = c.p;
  if (c.use != Use::kPlan && !c.args[kPlan].is_none()) {
    p.plan = c.call.scratch("plan", c.args[kPlan], &p.plan_bytes);
  }
  if (c.use != Use::kLaunch) return;
  if (c.args[kWorkspace].is_none()) check_status(gdn_prefill_workspace_size(&p, &p.workspace_bytes));
  p.workspace = c.call.scratch("workspace", c.args[kWorkspace], &p.workspace_bytes);
}

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
  if (p.page_size == 0) fail("page_size: 0; expected a positive multiple of 64");
  c.pool = c.call.pool("state_pool", c.args[kStatePool], c.heads, Access::kWrite);
  p.state_pool = &c.pool;
}

void set_initial_state(PrefillCall& c, bool by_slots) {
  nb::handle initial = c.args[kInitialState];
  if (initial.is_none()) {
    if (by_slots) fail("initial_state: None; state_indices expects the pool that it points into");
    return;
  }
  c.pool = c.call.pool("initial_state", initial, c.heads, Access::kRead,
                       by_slots ? kAny : c.p.num_seqs);
  c.p.initial_state = &c.pool;
}

void set_indices(PrefillCall& c, bool has_final_state) {
  gdn_prefill_params_t& p = c.p;
  const bool by_slots = !c.args[kStateIndices].is_none();
  if (by_slots) {
    const Table rows = c.call.table("state_indices", c.args[kStateIndices], p.num_seqs);
    p.state_indices = rows.data;
    p.state_indices_dtype = rows.dtype;
  }
  if (!c.args[kOutputStateIndices].is_none()) {
    if (!by_slots) fail("output_state_indices: given; expected state_indices with it");
    if (!has_final_state || c.args[kOutputState].is_none()) {
      fail("output_state_indices: given; expected output_state and output_final_state=True with it");
    }
    const Table rows =
        c.call.table("output_state_indices", c.args[kOutputStateIndices], p.num_seqs);
    p.output_state_indices = rows.data;
    p.output_state_indices_dtype = rows.dtype;
  }
  for (int i : {kCheckpointStateIndices, kPrefixLens}) {
    if (c.args[i].is_none()) continue;
    const char* name = i == kPrefixLens ? "prefix_lens" : "checkpoint_state_indices";
    if (!by_slots) fail("%s: given; expected state_indices with it", name);
    if (p.checkpoint_every_n_tokens == 0) {
      fail("%s: given; expected checkpoint_every_n_tokens > 0 with it", name);
    }
  }
  if (!c.args[kPrefixLens].is_none()) {
    const Table lens = c.call.table("prefix_lens", c.args[kPrefixLens], p.num_seqs);
    p.prefix_lens = lens.data;
    p.prefix_lens_dtype = lens.dtype;
  }
}

void set_checkpoints(PrefillCall& c) {
  gdn_prefill_params_t& p = c.p;
  const bool by_rows = !c.args[kCheckpointStateIndices].is_none();
  if (p.checkpoint_every_n_tokens == 0) {
    if (!c.args[kStateCheckpoints].is_none() || !c.args[kCheckpointCuStarts].is_none()) {
      fail("state_checkpoints, checkpoint_cu_starts: given; expected checkpoint_every_n_tokens > 0 "
           "with them");
    }
    return;
  }
  if (c.args[kStateCheckpoints].is_none() || c.args[kCheckpointCuStarts].is_none()) {
    fail("checkpoint_every_n_tokens: %lld; expected state_checkpoints and checkpoint_cu_starts "
         "with it", static_cast<long long>(p.checkpoint_every_n_tokens));
  }
  c.checkpoints =
      c.call.pool("state_checkpoints", c.args[kStateCheckpoints], c.heads, Access::kWrite);
  p.state_checkpoints = &c.checkpoints;
  const Table starts = c.call.table("checkpoint_cu_starts", c.args[kCheckpointCuStarts], kAny);
  if (starts.size != p.num_seqs + 1 && !(by_rows && starts.size == p.num_seqs)) {
    fail("checkpoint_cu_starts: %lld entries; expected %lld", static_cast<long long>(starts.size),
         static_cast<long long>(p.num_seqs + 1));
  }
  p.checkpoint_cu_starts = starts.data;
  p.checkpoint_cu_starts_dtype = starts.dtype;
  if (!by_rows) return;
  const Table rows =
      c.call.table("checkpoint_state_indices", c.args[kCheckpointStateIndices], kAny);
  p.checkpoint_state_indices = rows.data;
  p.checkpoint_state_indices_dtype = rows.dtype;
  p.num_checkpoint_indices = rows.size;
}

void set_output_state(PrefillCall& c) {
  nb::handle given = c.args[kOutputState];
  const bool by_slots = !c.args[kStateIndices].is_none();
  if (given.is_none() && by_slots) {
    fail("output_state: None; output_final_state=True with state_indices expects the pool to write");
  }
  c.final_state = nb::borrow(given);
  if (given.is_none()) {
    const HeadCounts& h = c.heads;
    c.final_state = c.call.empty({c.p.num_seqs, h.state, h.dim_v, h.dim_k}, "float32");
    nb::module_::import_("gdn_paged._frameworks")
        .attr("start_from")(c.final_state, c.args[kInitialState], c.call.stream_object());
  }
  c.output_state = c.call.pool("output_state", c.final_state, c.heads, Access::kWrite,
                               by_slots ? kAny : c.p.num_seqs);
  c.p.output_state = &c.output_state;
}

void set_hints(PrefillCall& c) {
  gdn_prefill_params_t& p = c.p;
  nb::handle use_cp = c.args[kUseCp];
  if (use_cp.is(Py_True) || use_cp.is(Py_False)) {
    p.use_cp = use_cp.is(Py_True) ? GDN_CP_ON : GDN_CP_OFF;
  } else if (!nb::isinstance<nb::str>(use_cp) || nb::cast<std::string>(use_cp) != "auto") {
    fail("use_cp: got %s; expected \"auto\", True or False",
         nb::cast<std::string>(nb::repr(use_cp)).c_str());
  }
  if (!c.args[kMaxSeqlen].is_none()) p.max_seqlen = to_int64("max_seqlen", c.args[kMaxSeqlen]);
  if (c.args[kCuSeqlensCpu].is_none()) return;
  Call host("cu_seqlens_cpu", c.args[kCuSeqlensCpu]);
  if (host.on_cuda()) fail("cu_seqlens_cpu: on CUDA; expected a host array");
  const Table cu = host.table("cu_seqlens_cpu", c.args[kCuSeqlensCpu], p.num_seqs + 1);
  p.cu_seqlens_host = cu.data;
  p.cu_seqlens_host_dtype = cu.dtype;
}

void set_paged(PrefillCall& c) {
  set_common(c);
  set_page_table(c);
  set_slots(c);
  set_output(c);
  set_scratch(c);
}

void set_flat(PrefillCall& c) {
  set_common(c);
  c.p.checkpoint_every_n_tokens = to_int64("checkpoint_every_n_tokens", c.args[kCheckpointEvery]);
  const bool has_final_state = to_bool("output_final_state", c.args[kOutputFinalState]);
  set_initial_state(c, !c.args[kStateIndices].is_none());
  set_indices(c, has_final_state);
  set_checkpoints(c);
  set_hints(c);
  if (has_final_state) set_output_state(c);
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

// output, or (output, final_state) with output_final_state.
nb::object run_flat(const nb::tuple& tuple) {
  const Arguments args(tuple, kFlatCount);
  PrefillCall c(args, Use::kLaunch);
  set_flat(c);
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_prefill(&c.p);
  }
  check_status(status);
  if (!c.final_state.is_valid()) return c.output;
  return nb::make_tuple(c.output, c.final_state);
}

nb::str explain_paged(const nb::tuple& tuple) {
  const Arguments args(tuple, kPagedCount);
  PrefillCall c(args, Use::kExplain);
  set_paged(c);
  return explain(GDN_OP_PREFILL_PAGED, c.p);
}

nb::str explain_flat(const nb::tuple& tuple) {
  const Arguments args(tuple, kFlatCount);
  PrefillCall c(args, Use::kExplain);
  set_flat(c);
  return explain(GDN_OP_PREFILL, c.p);
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

// Bytes of workspace from host integers alone, in the order of ops.prefill_workspace_size.
size_t workspace_size(const nb::tuple& sizes, const char* backend) {
  enum : int {
    kSeqs, kTokens, kMaxLen, kPage, kQHeads, kKHeads, kVHeads, kDimK, kDimV, kIoDtype, kStateDtype,
    kDeviceType, kDeviceId, kCp, kFlags, kCount
  };
  if (nb::len(sizes) != kCount) throw nb::type_error("wrong number of sizes");
  const auto size = [&](int i) { return nb::cast<int64_t>(sizes[i]); };
  const auto small = [&](int i) { return nb::cast<int32_t>(sizes[i]); };
  gdn_prefill_params_t p = GDN_PREFILL_PARAMS_INIT;
  gdn_pool_t pool = GDN_POOL_INIT;
  pool.dtype = small(kStateDtype);
  p.num_seqs = size(kSeqs);
  p.num_tokens = size(kTokens);
  p.max_seqlen = size(kMaxLen);
  p.page_size = size(kPage);
  p.num_q_heads = small(kQHeads);
  p.num_k_heads = small(kKHeads);
  p.num_v_heads = small(kVHeads);
  p.head_dim_k = small(kDimK);
  p.head_dim_v = small(kDimV);
  p.io_dtype = small(kIoDtype);
  p.device_type = small(kDeviceType);
  p.device_id = small(kDeviceId);
  p.use_cp = small(kCp);
  p.flags = static_cast<uint64_t>(size(kFlags));
  p.backend = backend;
  (p.page_size ? p.state_pool : p.initial_state) = &pool;
  size_t bytes = 0;
  check_status(gdn_prefill_workspace_size(&p, &bytes));
  return bytes;
}

}  // namespace

void define_prefill(nb::module_& m) {
  m.def("prefill_paged", &run_paged, nb::arg("arguments"),
        nb::sig("def prefill_paged(arguments: tuple) -> typing.Any"));
  m.def("prefill", &run_flat, nb::arg("arguments"),
        nb::sig("def prefill(arguments: tuple) -> typing.Any"));
  m.def("explain_prefill_paged", &explain_paged, nb::arg("arguments"));
  m.def("explain_prefill", &explain_flat, nb::arg("arguments"));
  m.def("plan_prefill_paged", &plan_paged, nb::arg("arguments"),
        nb::sig("def plan_prefill_paged(arguments: tuple) -> typing.Any"));
  m.def("prefill_workspace_size", &workspace_size, nb::arg("sizes"), nb::arg("backend").none());
}

}  // namespace gdn::python

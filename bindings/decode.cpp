// Decode: Python arrays to gdn_decode_params_t, paged form and slot form.
#include "call.h"

namespace gdn::python {
namespace {

// Positions in the argument tuple; python/gdn_paged/decode.py packs them in this order.
// clang-format off
enum Common : int {
  kQ, kK, kV, kALog, kA, kDtBias, kB, kScale, kOutput, kUseQkL2norm, kStream, kDeterministic,
  kNumThreads, kBackend, kCommonCount
};
enum Paged : int {
  kStatePool = kCommonCount, kPageIndices, kPageIndptr, kLastPageLen, kSlots, kInitialPages,
  kPagedCount
};
enum Pretranspose : int {
  kState = kCommonCount, kInitialState, kInitialStateIndices, kOutputStateIndices,
  kPretransposeCount
};
// clang-format on

// A call that owns what its params point to.
struct DecodeCall {
  explicit DecodeCall(const Arguments& arguments) : args(arguments), call("q", arguments[kQ]) {}

  const Arguments& args;
  Call call;
  HeadCounts heads{};
  gdn_decode_params_t p = GDN_DECODE_PARAMS_INIT;
  gdn_pool_t pool = GDN_POOL_INIT;
  nb::object output;
};

void set_operands(DecodeCall& c) {
  const ArrayView q = c.call.array(
      "q", c.args[kQ], {{kAny, kAny, kAny, kAny}, "[batch, 1, num_q_heads, head_dim_k]"});
  const int64_t batch = q.shape[0];
  if (q.shape[1] != 1) {
    fail("q: T = %lld tokens per row, %s; decode expects T = 1 (prefill serves more)",
         static_cast<long long>(q.shape[1]), describe(q).c_str());
  }
  const ArrayView k =
      c.call.array("k", c.args[kK],
                   {{batch, 1, kAny, q.shape[3]}, "[batch, 1, num_k_heads, head_dim_k] as in q"});
  const ArrayView v = c.call.array("v", c.args[kV],
                                   {{batch, 1, kAny, kAny}, "[batch, 1, num_v_heads, head_dim_v]"});
  check_io(q);
  for (const ArrayView* view : {&k, &v}) check_same_dtype(*view, q);
  for (const ArrayView* view : {&q, &k, &v}) c.call.refuse_grad(*view);
  c.heads = check_heads(q, k, v);
  const Operand oq = c.call.operand(q, 2), ok = c.call.operand(k, 2), ov = c.call.operand(v, 2);
  gdn_decode_params_t& p = c.p;
  p.batch_size = batch;
  set_heads(c.heads, q.dtype, p);
  p.q = oq.data;
  p.q_batch_stride = oq.row_stride;
  p.q_head_stride = oq.head_stride;
  p.k = ok.data;
  p.k_batch_stride = ok.row_stride;
  p.k_head_stride = ok.head_stride;
  p.v = ov.data;
  p.v_batch_stride = ov.row_stride;
  p.v_head_stride = ov.head_stride;
}

void set_gates(DecodeCall& c) {
  gdn_decode_params_t& p = c.p;
  const Shape shape{{p.batch_size, 1, c.heads.state}, "[batch, 1, H]"};
  for (int i : {kA, kB, kALog}) {
    const char* name = i == kA ? "a" : i == kB ? "b" : "A_log";
    if (c.args[i].is_none()) fail("%s: None; expected an array", name);
  }
  const Operand a = c.call.gate("a", c.args[kA], shape);
  const Operand b = c.call.gate("b", c.args[kB], shape);
  const Operand A_log = c.call.per_head("A_log", c.args[kALog], c.heads.state);
  const Operand dt_bias = c.call.per_head("dt_bias", c.args[kDtBias], c.heads.state);
  p.a = a.data;
  p.a_dtype = a.dtype;
  p.a_batch_stride = a.row_stride;
  p.a_head_stride = a.head_stride;
  p.b = b.data;
  p.b_dtype = b.dtype;
  p.b_batch_stride = b.row_stride;
  p.b_head_stride = b.head_stride;
  p.A_log = A_log.data;
  p.A_log_dtype = A_log.dtype;
  p.dt_bias = dt_bias.data;
  p.dt_bias_dtype = dt_bias.dtype;
}

void set_common(DecodeCall& c) {
  gdn_decode_params_t& p = c.p;
  set_launch(p, c.call,
             {.stream = c.args[kStream],
              .deterministic = c.args[kDeterministic],
              .num_threads = c.args[kNumThreads],
              .backend = c.args[kBackend]});
  set_operands(c);
  set_gates(c);
  if (!c.args[kScale].is_none()) {  // in decode a scale of 0 is 0
    p.scale = to_double("scale", c.args[kScale]);
    p.flags |= GDN_EXPLICIT_SCALE;
  }
  if (to_bool("use_qk_l2norm", c.args[kUseQkL2norm])) p.flags |= GDN_QK_L2NORM;
}

// Last of the checks, since it may allocate.
void set_output(DecodeCall& c) {
  const int64_t batch = c.p.batch_size;
  c.output = nb::borrow(c.args[kOutput]);
  if (c.output.is_none()) c.output = c.call.empty({batch, 1, c.heads.state, c.heads.dim_v});
  const ArrayView output = c.call.array(
      "output", c.output, {{batch, 1, c.heads.state, c.heads.dim_v}, "[batch, 1, H, head_dim_v]"},
      Access::kWrite);
  check_same_dtype(output, c.call.first());
  const Operand o = c.call.operand(output, 2);
  c.p.output = o.data;
  c.p.output_batch_stride = o.row_stride;
  c.p.output_head_stride = o.head_stride;
}

void set_slots(DecodeCall& c) {
  nb::handle slots = c.args[kSlots];
  if (slots.is_none()) return;
  if (!PyTuple_Check(slots.ptr()) || PyTuple_Size(slots.ptr()) != 2) {
    fail("slots: got %s; expected GDNPagedDecodeSlots, as gdn_paged_decode_slots returns it",
         type_of(slots).c_str());
  }
  const nb::tuple fields = nb::borrow<nb::tuple>(slots);
  const int64_t batch = c.p.batch_size;
  c.p.initial_state_indices = c.call.slot_array("slots.initial_state_indices", fields[0], batch);
  c.p.output_state_indices = c.call.slot_array("slots.output_state_indices", fields[1], batch);
}

void set_paged(DecodeCall& c) {
  set_common(c);
  gdn_decode_params_t& p = c.p;
  const Table indices = c.call.table("page_indices", c.args[kPageIndices], kAny);
  const Table indptr = c.call.table("page_indptr", c.args[kPageIndptr], p.batch_size + 1);
  const Table last = c.call.table("last_page_len", c.args[kLastPageLen], p.batch_size);
  p.page_indices = indices.data;
  p.page_indices_dtype = indices.dtype;
  p.num_indices = indices.size;
  p.page_indptr = indptr.data;
  p.page_indptr_dtype = indptr.dtype;
  p.last_page_len = last.data;
  p.last_page_len_dtype = last.dtype;
  c.call.initial_pages(c.args[kInitialPages], p.batch_size, p);
  c.pool = c.call.pool("state_pool", c.args[kStatePool], c.heads, Access::kWrite);
  p.state_pool = &c.pool;
  set_slots(c);
  set_output(c);
}

// `state` holds row b of batch row b; `initial_state` is a pool with indices.
void set_pretranspose(DecodeCall& c) {
  set_common(c);
  gdn_decode_params_t& p = c.p;
  nb::handle state = c.args[kState], pool = c.args[kInitialState];
  nb::handle reads = c.args[kInitialStateIndices], writes = c.args[kOutputStateIndices];
  if (state.is_none() == pool.is_none()) {
    fail("state, initial_state: %s; expected exactly one of them",
         pool.is_none() ? "neither is given" : "both are given");
  }
  if (pool.is_none() != reads.is_none()) {
    fail("initial_state, initial_state_indices: only one of them is given; expected both");
  }
  if (pool.is_none() && !writes.is_none()) {
    fail("output_state_indices: given; expected initial_state with it");
  }
  if (pool.is_none()) {
    c.pool = c.call.pool("state", state, c.heads, Access::kWrite, p.batch_size);
  } else {
    c.pool = c.call.pool("initial_state", pool, c.heads, Access::kWrite);
    const Table rows = c.call.table("initial_state_indices", reads, p.batch_size);
    p.initial_state_indices = rows.data;
    p.initial_state_indices_dtype = rows.dtype;
  }
  if (!writes.is_none()) {
    const Table rows = c.call.table("output_state_indices", writes, p.batch_size);
    p.output_state_indices = rows.data;
    p.output_state_indices_dtype = rows.dtype;
  }
  p.initial_state = &c.pool;
  set_output(c);
}

nb::object run_paged(const nb::tuple& tuple) {
  const Arguments args(tuple, kPagedCount);
  DecodeCall c(args);
  set_paged(c);
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_decode_paged(&c.p);
  }
  check_status(status);
  return c.output;
}

nb::object run_pretranspose(const nb::tuple& tuple) {
  const Arguments args(tuple, kPretransposeCount);
  DecodeCall c(args);
  set_pretranspose(c);
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_decode(&c.p);
  }
  check_status(status);
  nb::handle state = args[kState].is_none() ? args[kInitialState] : args[kState];
  return nb::make_tuple(c.output, state);
}

nb::str explain_paged(const nb::tuple& tuple) {
  const Arguments args(tuple, kPagedCount);
  DecodeCall c(args);
  set_paged(c);
  return explain(GDN_OP_DECODE_PAGED, c.p);
}

nb::str explain_pretranspose(const nb::tuple& tuple) {
  const Arguments args(tuple, kPretransposeCount);
  DecodeCall c(args);
  set_pretranspose(c);
  return explain(GDN_OP_DECODE, c.p);
}

}  // namespace

void define_decode(nb::module_& m) {
  m.def("decode_paged", &run_paged, nb::arg("arguments"),
        nb::sig("def decode_paged(arguments: tuple) -> typing.Any"));
  m.def("decode", &run_pretranspose, nb::arg("arguments"),
        nb::sig("def decode(arguments: tuple) -> typing.Any"));
  m.def("explain_decode_paged", &explain_paged, nb::arg("arguments"));
  m.def("explain_decode", &explain_pretranspose, nb::arg("arguments"));
}

}  // namespace gdn::python

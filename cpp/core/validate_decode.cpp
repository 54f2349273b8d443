// gdn_decode_params_t to DecodeProblem.
#include "core/arguments.h"
#include "core/overlap.h"
#include "core/validate.h"

namespace gdn {
namespace {

constexpr uint64_t kFlags = GDN_QK_L2NORM | GDN_EXPLICIT_SCALE | GDN_BATCH_INVARIANT;

void read_sizes(const gdn_decode_params_t& c, DecodeProblem* p) {
  check_flags(c.flags, kFlags);
  GDN_REQUIRE(c.reserved == 0, "reserved: %d given, 0 expected", c.reserved);
  GDN_REQUIRE(c.reserved2 == 0, "reserved2: %d given, 0 expected", c.reserved2);
  GDN_REQUIRE(c.reserved3 == 0, "reserved3: %d given, 0 expected", c.reserved3);
  read_launch(c, p);
  check_count("batch_size", c.batch_size);
  p->batch = c.batch_size;
  read_heads(c, p);
  p->batch_invariant = c.flags & GDN_BATCH_INVARIANT;
}

void read_operands(const gdn_decode_params_t& c, bool required, DecodeProblem* p) {
  Operand o = {.row_name = "batch", .dtype = p->io, .rows = p->batch, .required = required};
  o.name = "q", o.data = c.q, o.heads = p->heads.q, o.dim = p->heads.dim_k;
  o.row_stride = c.q_batch_stride, o.head_stride = c.q_head_stride;
  p->q = check_operand(o);
  o.name = "k", o.data = c.k, o.heads = p->heads.k;
  o.row_stride = c.k_batch_stride, o.head_stride = c.k_head_stride;
  p->k = check_operand(o);
  o.name = "v", o.data = c.v, o.heads = p->heads.v, o.dim = p->heads.dim_v;
  o.row_stride = c.v_batch_stride, o.head_stride = c.v_head_stride;
  p->v = check_operand(o);
  o.name = "output", o.data = c.output, o.heads = p->heads.state, o.written = true;
  o.row_stride = c.output_batch_stride, o.head_stride = c.output_head_stride;
  p->output = check_operand(o);
}

void read_gates(const gdn_decode_params_t& c, bool required, DecodeProblem* p) {
  Gates& gates = p->gates;
  gates.form = GateForm::kRaw;
  gates.beta_is_logit = true;
  Operand o = {.row_name = "batch", .heads = p->heads.state, .required = required};
  o.rows = p->batch;
  o.name = "a", o.data = c.a, o.dtype = check_float_dtype("a_dtype", c.a_dtype, true);
  o.row_stride = c.a_batch_stride, o.head_stride = c.a_head_stride;
  gates.g = check_operand(o);
  o.name = "b", o.data = c.b, o.dtype = check_float_dtype("b_dtype", c.b_dtype, true);
  o.row_stride = c.b_batch_stride, o.head_stride = c.b_head_stride;
  gates.beta = check_operand(o);
  o.rows = 1, o.row_stride = 0, o.head_stride = 0;
  o.name = "A_log", o.data = c.A_log;
  o.dtype = check_float_dtype("A_log_dtype", c.A_log_dtype, true);
  gates.A_log = check_operand(o);
  o.name = "dt_bias", o.data = c.dt_bias, o.required = false;
  o.dtype = check_float_dtype("dt_bias_dtype", c.dt_bias_dtype, true);
  gates.dt_bias = check_operand(o);
}

void read_slot_tables(const gdn_decode_params_t& c, DecodeProblem* p) {
  p->initial_indices = check_table({.name = "initial_state_indices",
                                    .data = c.initial_state_indices,
                                    .dtype = c.initial_state_indices_dtype,
                                    .size = p->batch,
                                    .required = false});
  p->output_indices = check_table({.name = "output_state_indices",
                                   .data = c.output_state_indices,
                                   .dtype = c.output_state_indices_dtype,
                                   .size = p->batch,
                                   .required = false});
}

void read_paged(const gdn_decode_params_t& c, bool required, DecodeProblem* p) {
  check_absent("initial_state", c.initial_state, "paged");
  check_absent("output_state", c.output_state, "paged");
  check_count("num_indices", c.num_indices);
  TableArgument t = {.size = c.num_indices, .required = required && c.num_indices > 0};
  t.name = "page_indices", t.data = c.page_indices, t.dtype = c.page_indices_dtype;
  p->table.indices = check_table(t);
  t.name = "page_indptr", t.data = c.page_indptr, t.dtype = c.page_indptr_dtype;
  t.size = p->batch + 1, t.required = required;
  p->table.indptr = check_table(t);
  t.name = "last_page_len", t.data = c.last_page_len, t.dtype = c.last_page_len_dtype;
  t.size = p->batch;
  p->table.last_page_len = check_table(t);
  p->table.initial_pages = check_initial_pages(c, p->batch);
  p->slots_given = p->initial_indices && p->output_indices;
  check_no_slots(c.initial_page_indices, p->slots_given);
  GDN_REQUIRE(p->slots_given || (!p->initial_indices && !p->output_indices),
              "%s: NULL given, both initial_state_indices and output_state_indices or neither "
              "expected",
              p->initial_indices ? "output_state_indices" : "initial_state_indices");
  p->initial = check_pool({.name = "state_pool",
                           .pool = c.state_pool,
                           .elements = p->heads.state_elements(),
                           .required = required,
                           .data_required = required});
  p->output_state = p->initial;
}

// A row per batch entry is needed where no array says which.
void check_packed_rows(const char* name, const Pool& pool, int64_t batch) {
  GDN_REQUIRE(pool.num_rows >= batch,
              "%s.num_rows: %lld given, a row per batch entry (%lld) expected without indices",
              name, static_cast<long long>(pool.num_rows), static_cast<long long>(batch));
}

void read_slots(const gdn_decode_params_t& c, bool required, DecodeProblem* p) {
  check_absent("state_pool", c.state_pool, "slot");
  check_absent("page_indices", c.page_indices, "slot");
  check_absent("page_indptr", c.page_indptr, "slot");
  check_absent("last_page_len", c.last_page_len, "slot");
  check_absent("initial_page_indices", c.initial_page_indices, "slot");
  PoolArgument a = {.elements = p->heads.state_elements(), .required = required};
  a.data_required = required;
  a.name = "initial_state", a.pool = c.initial_state;
  p->initial = check_pool(a);
  a.name = "output_state", a.pool = c.output_state, a.required = false;
  p->output_state = c.output_state != nullptr ? check_pool(a) : p->initial;
  if (!required || p->initial_indices) return;
  check_packed_rows("initial_state", p->initial, p->batch);
  if (!p->output_indices) check_packed_rows("output_state", p->output_state, p->batch);
}

void check_output_overlap(const DecodeProblem& p) {
  const Heads& h = p.heads;
  const Span output = span_of("output", p.output, p.batch, h.state, h.dim_v);
  check_no_overlap(output, span_of("q", p.q, p.batch, h.q, h.dim_k));
  check_no_overlap(output, span_of("k", p.k, p.batch, h.k, h.dim_k));
  check_no_overlap(output, span_of("v", p.v, p.batch, h.v, h.dim_v));
  check_no_overlap(output, span_of("a", p.gates.g, p.batch, h.state, 1));
  check_no_overlap(output, span_of("b", p.gates.beta, p.batch, h.state, 1));
  check_no_overlap(output, span_of("A_log", p.gates.A_log, 1, h.state, 1));
  check_no_overlap(output, span_of("dt_bias", p.gates.dt_bias, 1, h.state, 1));
  check_no_overlap(output, span_of("page_indices", p.table.indices));
  check_no_overlap(output, span_of("page_indptr", p.table.indptr));
  check_no_overlap(output, span_of("last_page_len", p.table.last_page_len));
  check_no_overlap(output, span_of("initial_page_indices", p.table.initial_pages));
  check_no_overlap(output, span_of("initial_state_indices", p.initial_indices));
  check_no_overlap(output, span_of("output_state_indices", p.output_indices));
  const int64_t state = h.state_elements();
  check_no_overlap(output, span_of(p.paged ? "state_pool" : "initial_state", p.initial, state));
  check_no_overlap(output, span_of("output_state", p.output_state, state));
}

}  // namespace

DecodeProblem decode_problem(const gdn_decode_params_t* params, Form form) {
  const auto c = read_struct("gdn_decode_params_t", params);
  DecodeProblem p;
  read_sizes(c, &p);
  const bool required = p.batch > 0;
  read_operands(c, required, &p);
  read_gates(c, required, &p);
  read_slot_tables(c, &p);
  p.paged = form == Form::kPaged;
  if (p.paged) {
    read_paged(c, required, &p);
  } else {
    read_slots(c, required, &p);
  }
  check_output_overlap(p);
  return p;
}

}  // namespace gdn

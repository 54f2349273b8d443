// gdn_prefill_params_t: sizes, operands, gates. Tables and pools: validate_prefill_state.cpp.
#include "core/validate_prefill.h"

#include "core/overlap.h"
#include "core/validate.h"

namespace gdn {
namespace {

constexpr uint64_t kFlags = GDN_QK_L2NORM | GDN_BETA_IS_LOGIT | GDN_EXPLICIT_SCALE |
                            GDN_BATCH_INVARIANT | GDN_ALLOW_UNALIGNED_PAGES;

void read_sizes(const gdn_prefill_params_t& c, PrefillProblem* p) {
  check_flags(c.flags, kFlags);
  GDN_REQUIRE(c.reserved == 0, "reserved: %d given, 0 expected", c.reserved);
  GDN_REQUIRE(c.reserved2 == 0, "reserved2: %d given, 0 expected", c.reserved2);
  read_launch(c, p);
  check_count("num_seqs", c.num_seqs);
  check_count("num_tokens", c.num_tokens);
  check_count("max_seqlen", c.max_seqlen);
  p->num_seqs = c.num_seqs;
  p->num_tokens = c.num_tokens;
  p->max_seqlen = c.max_seqlen;
  read_heads(c, p);
  p->batch_invariant = c.flags & GDN_BATCH_INVARIANT;
  GDN_REQUIRE(c.use_cp >= GDN_CP_AUTO && c.use_cp <= GDN_CP_ON,
              "use_cp: %d given, GDN_CP_AUTO (0), GDN_CP_OFF (1) or GDN_CP_ON (2) expected",
              c.use_cp);
  p->use_cp = c.use_cp;
  p->workspace = c.workspace;
  p->workspace_bytes = c.workspace_bytes;
  p->plan = c.plan;
  p->plan_bytes = c.plan_bytes;
}

void check_gate_form(const gdn_prefill_params_t& c, bool required) {
  GDN_REQUIRE(c.gate >= GDN_GATE_LINEAR && c.gate <= GDN_GATE_RAW,
              "gate: %d given, GDN_GATE_LINEAR (0), GDN_GATE_LOG (1) or GDN_GATE_RAW (2) expected",
              c.gate);
  const bool raw = c.gate == GDN_GATE_RAW;
  GDN_REQUIRE(raw || c.A_log == nullptr,
              "A_log: %p given with gate = %d, GDN_GATE_RAW (2) or a "
              "NULL A_log expected",
              c.A_log, c.gate);
  GDN_REQUIRE(raw || c.dt_bias == nullptr,
              "dt_bias: %p given with gate = %d, GDN_GATE_RAW (2) or "
              "a NULL dt_bias expected",
              c.dt_bias, c.gate);
  GDN_REQUIRE(!required || !raw || c.g != nullptr,
              "g: NULL given with gate = GDN_GATE_RAW, raw gate logits expected");
  GDN_REQUIRE(!required || !raw || c.A_log != nullptr,
              "A_log: NULL given with gate = GDN_GATE_RAW, [H] values expected");
  GDN_REQUIRE(!required || !(c.flags & GDN_BETA_IS_LOGIT) || c.beta != nullptr,
              "beta: NULL given with GDN_BETA_IS_LOGIT, beta logits expected");
}

void read_gates(const gdn_prefill_params_t& c, bool required, PrefillProblem* p) {
  check_gate_form(c, required);
  constexpr GateForm kForms[] = {GateForm::kLinear, GateForm::kLog, GateForm::kRaw};
  Gates& gates = p->gates;
  gates.form = c.g != nullptr ? kForms[c.gate] : GateForm::kNone;
  gates.beta_is_logit = c.flags & GDN_BETA_IS_LOGIT;
  Operand o = {.row_name = "token", .heads = p->heads.state, .required = false};
  o.rows = p->num_tokens;
  o.name = "g", o.data = c.g, o.dtype = check_float_dtype("g_dtype", c.g_dtype, true);
  o.row_stride = c.g_token_stride, o.head_stride = c.g_head_stride;
  gates.g = check_operand(o);
  o.name = "beta", o.data = c.beta, o.dtype = check_float_dtype("beta_dtype", c.beta_dtype, true);
  o.row_stride = c.beta_token_stride, o.head_stride = c.beta_head_stride;
  gates.beta = check_operand(o);
  o.rows = 1, o.row_stride = 0, o.head_stride = 0;
  o.name = "A_log", o.data = c.A_log;
  o.dtype = check_float_dtype("A_log_dtype", c.A_log_dtype, true);
  gates.A_log = check_operand(o);
  o.name = "dt_bias", o.data = c.dt_bias;
  o.dtype = check_float_dtype("dt_bias_dtype", c.dt_bias_dtype, true);
  gates.dt_bias = check_operand(o);
}

void check_output_overlap(const PrefillProblem& p) {
  const Heads& h = p.heads;
  const int64_t tokens = p.num_tokens;
  const Span output = span_of("output", p.output, tokens, h.state, h.dim_v);
  check_no_overlap(output, span_of("q", p.q, tokens, h.q, h.dim_k));
  check_no_overlap(output, span_of("k", p.k, tokens, h.k, h.dim_k));
  check_no_overlap(output, span_of("v", p.v, tokens, h.v, h.dim_v));
  check_no_overlap(output, span_of("g", p.gates.g, tokens, h.state, 1));
  check_no_overlap(output, span_of("beta", p.gates.beta, tokens, h.state, 1));
  check_no_overlap(output, span_of("A_log", p.gates.A_log, 1, h.state, 1));
  check_no_overlap(output, span_of("dt_bias", p.gates.dt_bias, 1, h.state, 1));
  check_no_overlap(output, span_of("cu_seqlens", p.cu_seqlens));
  check_no_overlap(output, span_of("page_indices", p.table.indices));
  check_no_overlap(output, span_of("page_indptr", p.table.indptr));
  check_no_overlap(output, span_of("last_page_len", p.table.last_page_len));
  check_no_overlap(output, span_of("initial_page_indices", p.table.initial_pages));
  check_no_overlap(output, span_of("state_indices", p.state_indices));
  check_no_overlap(output, span_of("output_state_indices", p.output_state_indices));
  check_no_overlap(output, span_of("checkpoint_cu_starts", p.checkpoint_starts));
  check_no_overlap(output, span_of("checkpoint_state_indices", p.checkpoint_indices));
  check_no_overlap(output, span_of("prefix_lens", p.prefix_lens));
  const int64_t state = h.state_elements();
  check_no_overlap(output, span_of(p.paged ? "state_pool" : "initial_state", p.initial, state));
  check_no_overlap(output, span_of("output_state", p.output_state, state));
  check_no_overlap(output, span_of("state_checkpoints", p.checkpoints, state));
}

}  // namespace

PrefillProblem prefill_problem(const gdn_prefill_params_t* params, Form form, Use use) {
  const auto c = read_struct("gdn_prefill_params_t", params);
  PrefillProblem p;
  read_sizes(c, &p);
  const bool empty = p.num_seqs == 0 || p.num_tokens == 0;
  read_token_operands(c, use == Use::kLaunch && !empty, &p);
  read_gates(c, use == Use::kLaunch && !empty, &p);
  p.paged = form == Form::kPaged ||
            (form == Form::kEither && (c.page_size != 0 || c.state_pool != nullptr));
  const PrefillStateUse state_use = {.tables = use != Use::kSize && !empty,
                                     .data = use == Use::kLaunch && !empty};
  read_prefill_state(c, state_use, &p);
  if (use == Use::kLaunch) check_output_overlap(p);
  return p;
}

}  // namespace gdn

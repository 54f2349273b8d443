#include <cstring>

#include "prefill_call.h"
#include "tokens.h"

namespace gdn::python {
namespace {

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

}  // namespace

void set_common(PrefillCall& c) {
  gdn_prefill_params_t& p = c.p;
  set_launch(p, c.call,
             {.stream = c.args[kStream],
              .deterministic = c.args[kDeterministic],
              .num_threads = c.args[kNumThreads],
              .backend = c.args[kBackend]});
  c.heads = set_token_operands(c.call, c.args[kQ], c.args[kK], c.args[kV], p);
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

void set_output(PrefillCall& c) {
  if (c.use == Use::kPlan) return;
  c.output = set_token_output(c.call, c.args[kOutput], c.heads, c.p);
}

void set_scratch(PrefillCall& c) {
  gdn_prefill_params_t& p = c.p;
  if (c.use != Use::kPlan && !c.args[kPlan].is_none()) {
    p.plan = c.call.scratch("plan", c.args[kPlan], &p.plan_bytes);
  }
  if (c.use != Use::kLaunch) return;
  if (c.args[kWorkspace].is_none())
    check_status(gdn_prefill_workspace_size(&p, &p.workspace_bytes));
  p.workspace = c.call.scratch("workspace", c.args[kWorkspace], &p.workspace_bytes);
}

}  // namespace gdn::python

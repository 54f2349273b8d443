// Prefill: what the paged and the slot form share. A PrefillCall turns Python arrays into
// gdn_prefill_params_t and owns what the params point to.
#pragma once

#include "call.h"

namespace gdn::python {

// Positions in the argument tuple; python/gdn_paged/prefill.py packs them in this order.
// clang-format off
enum PrefillArgument : int {
  kQ, kK, kV, kG, kBeta, kScale, kCuSeqlens, kUseQkL2norm, kOutput, kGateDomain, kUseGate, kALog,
  kDtBias, kBetaIsLogit, kStream, kWorkspace, kPlan, kDeterministic, kNumThreads, kBackend,
  kCommonCount
};
// clang-format on

enum class Use { kLaunch, kExplain, kPlan };

struct PrefillCall {
  PrefillCall(const Arguments& arguments, Use purpose)
      : args(arguments), use(purpose), call("q", arguments[kQ]) {}

  const Arguments& args;
  Use use;
  Call call;
  HeadCounts heads{};
  gdn_prefill_params_t p = GDN_PREFILL_PARAMS_INIT;
  gdn_pool_t pool = GDN_POOL_INIT;  // state_pool or initial_state
  gdn_pool_t output_state = GDN_POOL_INIT;
  gdn_pool_t checkpoints = GDN_POOL_INIT;
  nb::object output;
  nb::object final_state;
};

// Operands, sequences, gates and launch options.
void set_common(PrefillCall& c);
// The output, allocated if need be: last of the checks.
void set_output(PrefillCall& c);
// Plan and workspace.
void set_scratch(PrefillCall& c);

// All of the paged form's arguments, which are `kPagedArguments`.
extern const int kPagedArguments;
void set_paged_call(PrefillCall& c);

void define_prefill_paged(nb::module_& m);

}  // namespace gdn::python

// The kernel of short sequences as the rows of prefill see it.
#pragma once

#include "core/text.h"
#include "cuda/common/sequence.cuh"
#include "cuda/common/short_sequence.h"

namespace gdn {

// The whole of a call of regime kAll: one kernel, no workspace.
void launch_short(const PrefillProblem& p);

// The short sequences of a plan, behind the call's last scan, beside which it runs. `last` is the
// last entry of the plan's list.
void launch_listed_short(const PrefillProblem& p, const PlanHeader* plan, const ShortEntry* last);

// Adds the line on short sequences to what a row says of itself.
void explain_short(const PrefillProblem& p, Text* text);

}  // namespace gdn

// The half of prefill validation that is about sequences, tables, slots and pools.
#pragma once

#include "core/arguments.h"

namespace gdn {

struct PrefillStateUse {
  bool tables = true;  // tables are required
  bool data = true;    // pool data is required
};

// Fills the sequences, table, slots and pools of `p`, whose sizes and `paged` are set.
void read_prefill_state(const gdn_prefill_params_t& c, PrefillStateUse use, PrefillProblem* p);

}  // namespace gdn

// What the kernel of short sequences is handed.
#pragma once

#include "cuda/common/divide.h"
#include "cuda/common/sequence.cuh"
#include "cuda/common/short_sequence.h"

namespace gdn {

struct ShortParams {
  PrefillProblem problem;
  SmallDivisor heads_per_q;  // state heads that share a q head
  SmallDivisor heads_per_k;
  SmallDivisor heads_per_v;
  const PlanHeader* plan = nullptr;     // null: every sequence is short and resolved here
  const ShortEntry* entries = nullptr;  // the last of the plan's list; they lie before it
  int32_t parts = 1;                    // blocks that share a state
  bool vector_qk = false;               // rows of q and k lie on 16 bytes
  bool vector_v = false;                // four elements of v and of the output lie on 8 bytes
  bool vector_state = false;            // four elements of all pools lie on their size
};

}  // namespace gdn

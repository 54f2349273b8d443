// What one verify launch gets.
#pragma once

#include "core/verify.h"
#include "cuda/common/divide.h"

namespace gdn {

struct VerifyParams {
  VerifyProblem problem;
  DraftLayout layout;
  SmallDivisor heads_per_q;  // state heads that share a q head
  SmallDivisor heads_per_k;
  SmallDivisor heads_per_v;
  bool vectors = false;  // four elements of q, k, v and output lie on 8 bytes
};

}  // namespace gdn

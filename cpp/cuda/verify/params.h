// What one verify launch gets.
#pragma once

#include "core/verify.h"

namespace gdn {

struct VerifyParams {
  VerifyProblem problem;
  DraftLayout layout;
  bool vectors = false;  // four elements of q, k, v and output lie on 8 bytes
};

}  // namespace gdn

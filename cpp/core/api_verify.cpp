// The extern "C" entries of speculative decoding: fence, validate, dispatch; nothing else.
#include "core/dispatch.h"
#include "core/status.h"
#include "core/validate.h"
#include "core/verify.h"

using namespace gdn;

static void run(const gdn_verify_params_t* params, VerifyUse use) {
  const VerifyProblem problem = verify_problem(params, use);
  const VerifyRow& row = select(problem);
  if (problem.num_seqs > 0) row.launch(problem);
}

extern "C" {

gdn_status_t gdn_verify_paged(const gdn_verify_params_t* params) {
  return fence([&] { run(params, VerifyUse::kVerify); });
}

gdn_status_t gdn_commit_paged(const gdn_verify_params_t* params) {
  return fence([&] { run(params, VerifyUse::kCommit); });
}

gdn_status_t gdn_verify_draft_size(const gdn_verify_params_t* params, size_t* bytes) {
  return fence([&] {
    GDN_REQUIRE(bytes != nullptr, "bytes: NULL given, a pointer expected");
    const VerifyProblem p = verify_problem(params, VerifyUse::kSize);
    *bytes =
        static_cast<size_t>(p.num_drafts * draft_layout(p.heads, p.io, p.max_draft).slot_bytes);
  });
}

}  // extern "C"

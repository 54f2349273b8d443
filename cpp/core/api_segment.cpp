// The extern "C" entries of one prompt over several devices: fence, validate, dispatch.
#include "core/dispatch.h"
#include "core/segment.h"
#include "core/status.h"

using namespace gdn;

static void run(const gdn_prefill_params_t* params, const gdn_segment_t* segment,
                SegmentPhase phase) {
  const SegmentProblem problem = segment_problem(params, segment, phase);
  select(problem).launch(problem);
}

static void combine(const gdn_segment_combine_params_t* params) {
  const CombineProblem problem = combine_problem(params);
  page_table_kernels(problem.device);  // throws where the build lacks the backend
#if defined(GDN_WITH_CUDA)
  if (problem.device.type == GDN_CUDA_DEVICE) return combine_segments_cuda(problem);
#endif
  combine_segments_cpu(problem);
}

extern "C" {

gdn_status_t gdn_segment_begin(const gdn_prefill_params_t* params, const gdn_segment_t* segment) {
  return fence([&] { run(params, segment, SegmentPhase::kBegin); });
}

gdn_status_t gdn_segment_finish(const gdn_prefill_params_t* params, const gdn_segment_t* segment) {
  return fence([&] { run(params, segment, SegmentPhase::kFinish); });
}

gdn_status_t gdn_segment_workspace_size(const gdn_prefill_params_t* params,
                                        const gdn_segment_t* segment, size_t* bytes) {
  return fence([&] {
    GDN_REQUIRE(bytes != nullptr, "bytes: NULL given, a pointer expected");
    const SegmentProblem problem = segment_problem(params, segment, SegmentPhase::kSize);
    *bytes = select(problem).workspace(problem);
  });
}

gdn_status_t gdn_segment_combine(const gdn_segment_combine_params_t* params) {
  return fence([&] { combine(params); });
}

}  // extern "C"

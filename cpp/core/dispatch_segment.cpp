// The table of the rows that serve a part of a prompt.
#include <iterator>

#include "core/dispatch_table.h"
#include "core/segment.h"

namespace gdn {
namespace {

#if defined(GDN_WITH_CUDA)
// Listed for its reason: it has no form of a map.
constexpr SegmentRow kSegmentCudaPortable = {
    .name = "cuda_portable",
    .description = [] { return "refuses: it forms no maps"; },
    .refuse = [](const SegmentProblem&) -> const char* {
      return "it forms no maps of segments; on CUDA they need sm_90 and head size 128";
    },
    .workspace = [](const SegmentProblem&) { return size_t{0}; },
    .launch = [](const SegmentProblem&) {},
};
#if defined(GDN_WITH_SM90)
constexpr const SegmentRow* kSegmentRows[] = {&kSegmentCudaSm90, &kSegmentCudaPortable,
                                              &kSegmentCpu};
constexpr const char* kUnbuiltSegment[] = {nullptr};
#else
constexpr const SegmentRow* kSegmentRows[] = {&kSegmentCudaPortable, &kSegmentCpu};
constexpr const char* kUnbuiltSegment[] = {"cuda_sm90", nullptr};
#endif
#else
constexpr const SegmentRow* kSegmentRows[] = {&kSegmentCpu};
constexpr const char* kUnbuiltSegment[] = {"cuda_sm90", "cuda_portable", nullptr};
#endif

constexpr Table<SegmentProblem> kSegmentTable = {"segment", kSegmentRows, std::size(kSegmentRows),
                                                 kUnbuiltSegment};

}  // namespace

const SegmentRow& select(const SegmentProblem& problem) {
  return select_row(kSegmentTable, problem);
}

void explain(const SegmentProblem& problem, Text* text) {
  explain_row(kSegmentTable, problem, text);
}

void explain_segment(const gdn_prefill_params_t* params, Text* text) {
  gdn_segment_t last = GDN_SEGMENT_INIT;
  alignas(16) static const float kLater[4] = {};  // stands for a state that comes later
  last.initial_state = kLater;
  explain(segment_problem(params, &last, SegmentPhase::kBegin), text);
}

RowText segment_row(int32_t index) { return row_text(kSegmentTable, index); }

}  // namespace gdn

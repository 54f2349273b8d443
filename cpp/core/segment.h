// A part of a prompt whose tokens lie on several devices, in two halves (gdn_segment_begin and
// gdn_segment_finish), and the composition of the maps of such parts.
#pragma once

#include "core/kernel.h"

namespace gdn {

enum class SegmentPhase { kBegin, kFinish, kSize };

// One sequence in the paged form.
struct SegmentProblem : PrefillProblem {
  SegmentPhase phase = SegmentPhase::kBegin;
  bool open = false;                     // the state before the part is known to finish alone
  bool mapped = false;                   // begin writes `offset`, and `transition` if open
  const float* initial_state = nullptr;  // [H, V, K]; open alone
  float* transition = nullptr;           // [H, K, K]; open alone
  float* offset = nullptr;               // [H, V, K]
};

// state = initial_state M + N, map after map.
struct CombineProblem {
  Device device;
  Threads threads;
  int64_t num_maps = 0;
  int32_t heads = 0, dim_k = 0, dim_v = 0;
  const float* transitions = nullptr;  // [num_maps, H, K, K]
  const float* offsets = nullptr;      // [num_maps, H, V, K]
  int64_t transition_stride = 0;       // elements from map to map
  int64_t offset_stride = 0;
  const float* initial_state = nullptr;  // [H, V, K]; null: zero, and the first M is not read
  float* state = nullptr;                // [H, V, K], written
};

SegmentProblem segment_problem(const gdn_prefill_params_t* params, const gdn_segment_t* segment,
                               SegmentPhase phase);
CombineProblem combine_problem(const gdn_segment_combine_params_t* params);

using SegmentRow = Row<SegmentProblem>;
extern const SegmentRow kSegmentCpu;
void combine_segments_cpu(const CombineProblem& p);
#if defined(GDN_WITH_CUDA)
#if defined(GDN_WITH_SM90)
extern const SegmentRow kSegmentCudaSm90;
#endif
void combine_segments_cuda(const CombineProblem& p);
#endif

// As the functions of core/dispatch.h.
const SegmentRow& select(const SegmentProblem& problem);
void explain(const SegmentProblem& problem, Text* text);

}  // namespace gdn

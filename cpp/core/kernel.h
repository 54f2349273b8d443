// The rows of the dispatch tables. A backend defines its rows; core declares them here and reaches
// backends in no other way.
#pragma once

#include <cstddef>

#include "core/problem.h"

namespace gdn {

// What a row returns from `refuse` (this very pointer) when the build holds no code for the GPU of
// the call; the status is then GDN_NO_KERNEL_FOR_DEVICE.
inline constexpr char kNoCodeForDevice[] = "this build holds no code for this GPU";

class Text;

// One kernel of an operation. `refuse` returns null or a static reason.
template <class Problem>
struct Row {
  const char* name;
  const char* (*description)();
  const char* (*refuse)(const Problem&);
  size_t (*workspace)(const Problem&);  // bytes, from host integers alone
  void (*launch)(const Problem&);
  // Adds lines on how the row runs this call; null: there is one way.
  void (*explain)(const Problem&, Text*) = nullptr;
};

using PrefillRow = Row<PrefillProblem>;
using DecodeRowKernel = Row<DecodeProblem>;
struct VerifyProblem;  // core/verify.h
using VerifyRow = Row<VerifyProblem>;

extern const PrefillRow kPrefillCpu;
extern const DecodeRowKernel kDecodeCpu;
extern const VerifyRow kVerifyCpu;

// Operations that every device serves in one way.
struct PageTableKernels {
  void (*prefill_slots)(const PageTableProblem&);
  void (*decode_slots)(const PageTableProblem&);
  void (*validate)(const PageTableProblem&);  // writes problem.report
  size_t (*validate_workspace)(const PageTableProblem&);
  void (*page_stats)(const PageStatsProblem&);
};

extern const PageTableKernels kPageTableCpu;

#if defined(GDN_WITH_CUDA)
extern const PrefillRow kPrefillCudaPortable;
#if defined(GDN_WITH_SM90)
extern const PrefillRow kPrefillCudaSm90;
#endif
extern const DecodeRowKernel kDecodeCuda;
extern const VerifyRow kVerifyCuda;
extern const PageTableKernels kPageTableCuda;

// The layer-independent part of a prefill step on the device.
struct PlanKernels {
  size_t (*size)(const PrefillProblem&);
  void (*make)(const PrefillProblem&);
};
extern const PlanKernels kPlanCuda;

void preload_cuda(int32_t device_id);
const char* cuda_build_info();  // "13.0, sm_80 sm_86 ..."
#endif

}  // namespace gdn

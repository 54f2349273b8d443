// Launches of one prefill call on Hopper: plan, then per slab prepare, the summary where
// sequences may be cut, and the scan.
#pragma once

#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/prepare.cuh"
#include "cuda/sm90/scan.cuh"
#include "cuda/sm90/summary.cuh"

namespace gdn::sm90 {

// slab_chunks bounds the chunks of a slab; the kernels see how many there are.
template <class T, int kWarps>
void launch_prepare_by(const HopperParams& params, const Device& device) {
  launch(prepare_inverses<T, kWarps>,
         {.blocks = 1 + int64_t{params.call.slab_chunks} * params.call.units,
          .threads = PrepareMap<kWarps>::kThreads,
          .shared_bytes = PrepareMap<kWarps>::kBytes,
          .stream = device.stream,
          .early_start = true},
         params, "prepare_inverses");
}

template <class T>
void launch_prepare(const HopperParams& params, const Device& device) {
  if (params.call.group == 1) {
    launch_prepare_by<T, 1>(params, device);
  } else if (params.call.group == 2) {
    launch_prepare_by<T, 2>(params, device);
  } else {
    launch_prepare_by<T, 4>(params, device);
  }
}

template <class T>
void launch_scan(const HopperParams& params, const Device& device) {
  const int64_t items = 2 * int64_t{params.call.slab_chunks} * params.call.heads.state;
  launch(params.call.grid.gap == 0 ? scan_chunks<T, false> : scan_chunks<T, true>,
         {.blocks = std::min<int64_t>(device_info(device.id).num_sms, items),
          .threads = ScanTraits::kThreads,
          .shared_bytes = ScanTraits::kSharedBytes,
          .stream = device.stream,
          .early_start = true},
         params, "scan_chunks");
}

// N and M of every segment; exits at once where the device cut nothing.
template <class T>
void launch_summaries(const HopperParams& params, const Device& device) {
  launch(summarize_segments<T>,
         {.blocks = device_info(device.id).num_sms,
          .threads = SummaryTraits::kThreads,
          .shared_bytes = SummaryTraits::kSharedBytes,
          .stream = device.stream,
          .early_start = true},
         params, "summarize_segments");
}

// What a part of a prompt has in common with the call of the row prefill.cu.
const char* refuse_call(const PrefillProblem& p);
HopperParams call_of(const PrefillProblem& p, char* plan);

template <class T>
void load_kernels() {
  load_kernel(prepare_inverses<T, 1>, "prepare_inverses", PrepareMap<1>::kBytes);
  load_kernel(prepare_inverses<T, 2>, "prepare_inverses", PrepareMap<2>::kBytes);
  load_kernel(prepare_inverses<T, 4>, "prepare_inverses", PrepareMap<4>::kBytes);
  load_kernel(summarize_segments<T>, "summarize_segments", SummaryTraits::kSharedBytes);
  load_kernel(scan_chunks<T, false>, "scan_chunks", ScanTraits::kSharedBytes);
  load_kernel(scan_chunks<T, true>, "scan_chunks", ScanTraits::kSharedBytes);
}

extern template void launch_prepare<bf16>(const HopperParams&, const Device&);
extern template void launch_prepare<fp16>(const HopperParams&, const Device&);
extern template void launch_summaries<bf16>(const HopperParams&, const Device&);
extern template void launch_summaries<fp16>(const HopperParams&, const Device&);
extern template void launch_scan<bf16>(const HopperParams&, const Device&);
extern template void launch_scan<fp16>(const HopperParams&, const Device&);
extern template void load_kernels<bf16>();
extern template void load_kernels<fp16>();

}  // namespace gdn::sm90

// Launches of one prefill call: plan, then prepare and scan per slab.
#pragma once

#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/sm80/prepare.cuh"
#include "cuda/sm80/scan.cuh"

namespace gdn {

// How the scan cuts the columns of V. Wide blocks share the copies of K and Q among more warps;
// where few blocks would leave multiprocessors idle, narrow ones, with warps that only copy, make
// the serial chain shorter.
enum class ScanShape { kWide, kNarrow };
template <int D>
using WideScan = ScanTraits<D, 4, 0, false, 2>;
template <int D>
using NarrowScan = ScanTraits<D, 2, 2, true, 2>;

template <class Traits>
void launch_scan(const PrefillParams& params, const PrefillProblem& p, bool early_start) {
  const int64_t sequences = std::min<int64_t>(entry_bound(p), params.slab_chunks);
  launch(params.grid.gap == 0 ? prefill_scan<Traits> : prefill_scan<UnalignedScan<Traits>>,
         {.blocks = sequences * params.heads.state * Traits::kSplits,
          .threads = Traits::kThreads,
          .shared_bytes = Traits::kBytes,
          .stream = p.device.stream,
          .early_start = early_start},
         params, "prefill_scan");
}

template <class Traits>
void launch_prepare(const PrefillParams& params, const PrefillProblem& p, bool early_start) {
  launch(prefill_prepare<Traits>,
         {.blocks = int64_t{params.slab_chunks} * params.units,
          .threads = Traits::kThreads,
          .shared_bytes = static_cast<size_t>(Traits::bytes(params.group)),
          .stream = p.device.stream,
          .early_start = early_start},
         params, "prefill_prepare");
}

template <int D>
void launch_slab(const PrefillParams& params, const PrefillProblem& p, ScanShape shape) {
  const bool early_start = device_info(p.device.id).has_dependent_launch();
  if (params.group == 1) {
    launch_prepare<PrepareTraits<D, 1>>(params, p, early_start);
  } else {
    launch_prepare<PrepareTraits<D, 2>>(params, p, early_start);
  }
  switch (shape) {
    case ScanShape::kWide: return launch_scan<WideScan<D>>(params, p, early_start);
    case ScanShape::kNarrow: return launch_scan<NarrowScan<D>>(params, p, early_start);
  }
}

template <class Traits>
void load_scan() {
  load_kernel(prefill_scan<Traits>, "prefill_scan", Traits::kBytes);
  load_kernel(prefill_scan<UnalignedScan<Traits>>, "prefill_scan", Traits::kBytes);
}

template <int D>
void load_prefill_kernels() {
  load_kernel(prefill_prepare<PrepareTraits<D, 1>>, "prefill_prepare");
  load_kernel(prefill_prepare<PrepareTraits<D, 2>>, "prefill_prepare");
  load_scan<WideScan<D>>();
  load_scan<NarrowScan<D>>();
}

extern template void launch_slab<64>(const PrefillParams&, const PrefillProblem&, ScanShape);
extern template void launch_slab<128>(const PrefillParams&, const PrefillProblem&, ScanShape);
extern template void load_prefill_kernels<64>();
extern template void load_prefill_kernels<128>();

// What every row hands to its kernels as it came.
PrefillParams call_params(const PrefillProblem& p);
// The plan that the caller brought, checked; or `own`, written on the stream.
void* plan_of(const PrefillProblem& p, void* own);
// Behind the last scan: the short sequences that the plan lists.
void launch_short_of_plan(const PrefillProblem& p, const void* plan);
// What a call needs whose chunks need `chunks` bytes.
size_t prefill_workspace(const PrefillProblem& p, size_t chunks);

// The whole call; `shape` is prefill_shape(p) but for tests and tuning.
ScanShape prefill_shape(const PrefillProblem& p);
void launch_prefill(const PrefillProblem& p, ScanShape shape);
void make_plan(const PrefillProblem& p);

}  // namespace gdn

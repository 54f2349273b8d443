// The kernels for fp16 operands.
#include "cuda/sm90/prefill.cuh"

namespace gdn::sm90 {

template void launch_prepare<fp16>(const HopperParams&, const Device&);
template void launch_summaries<fp16>(const HopperParams&, const Device&);
template void launch_scan<fp16>(const HopperParams&, const Device&);
template void load_kernels<fp16>();

}  // namespace gdn::sm90

// The kernels for bf16 operands.
#include "cuda/sm90/prefill.cuh"

namespace gdn::sm90 {

template void launch_prepare<bf16>(const HopperParams&, const Device&);
template void launch_summaries<bf16>(const HopperParams&, const Device&);
template void launch_scan<bf16>(const HopperParams&, const Device&);
template void load_kernels<bf16>();

}  // namespace gdn::sm90

// The kernels for head size 64.
#include "cuda/sm80/prefill.cuh"

namespace gdn {

template void launch_slab<64>(const PrefillParams&, const PrefillProblem&, ScanShape);
template void load_prefill_kernels<64>();

}  // namespace gdn

// The kernels for head size 128.
#include "cuda/sm80/prefill.cuh"

namespace gdn {

template void launch_slab<128>(const PrefillParams&, const PrefillProblem&, ScanShape);
template void load_prefill_kernels<128>();

}  // namespace gdn

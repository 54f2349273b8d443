#include "cpu/kernel_table.h"

namespace gdn::cpu {

extern const Kernels kKernelsBaseline;
const Kernels kKernelsBaseline = kTable;

}  // namespace gdn::cpu

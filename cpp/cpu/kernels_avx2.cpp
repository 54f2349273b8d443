#include "cpu/kernel_table.h"

namespace gdn::cpu {

extern const Kernels kKernelsAvx2;
const Kernels kKernelsAvx2 = kTable;

}  // namespace gdn::cpu

#include "cpu/kernel_table.h"

namespace gdn::cpu {

extern const Kernels kKernelsAvx512;
const Kernels kKernelsAvx512 = kTable;

}  // namespace gdn::cpu

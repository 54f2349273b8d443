#include "cpu/kernels.h"

namespace gdn::cpu {

extern const Kernels kKernelsBaseline;
#if defined(GDN_CPU_WITH_AVX2)
extern const Kernels kKernelsAvx2;
#endif
#if defined(GDN_CPU_WITH_AVX512)
extern const Kernels kKernelsAvx512;
#endif

namespace {

const Kernels& select() {
#if defined(GDN_CPU_WITH_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return kKernelsAvx512;
  }
#endif
#if defined(GDN_CPU_WITH_AVX2)
  // Every AVX2 machine with FMA has F16C; the compiler's feature names do not all know it.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kKernelsAvx2;
#endif
  return kKernelsBaseline;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& best = select();
  return best;
}

}  // namespace gdn::cpu

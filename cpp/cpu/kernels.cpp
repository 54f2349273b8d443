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

struct Supported {
  const Kernels* tables[3] = {};
  int count = 0;

  Supported() {
#if defined(GDN_CPU_WITH_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      tables[count++] = &kKernelsAvx512;
    }
#endif
#if defined(GDN_CPU_WITH_AVX2)
    // Every AVX2 machine with FMA has F16C; not every compiler knows that feature's name.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      tables[count++] = &kKernelsAvx2;
    }
#endif
    tables[count++] = &kKernelsBaseline;
  }
};

const Supported& supported() {
  static const Supported all;
  return all;
}

}  // namespace

const Kernels* supported_kernels(int index) {
  return index < supported().count ? supported().tables[index] : nullptr;
}

const Kernels& kernels() { return *supported().tables[0]; }

}  // namespace gdn::cpu

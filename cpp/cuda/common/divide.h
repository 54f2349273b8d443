// Division of head indices by a number that the launch knows.
#pragma once

#include <cstdint>

namespace gdn {

// Divides 0 <= x < 2^16 by 1 <= d < 2^16 with one multiplication.
struct SmallDivisor {
  uint32_t factor = 0;  // ceil(2^32 / d); 0 stands for d = 1
};

inline SmallDivisor small_divisor(uint32_t d) {
  return {.factor = d == 1 ? 0 : 0xffffffffu / d + 1};
}

#if defined(__CUDACC__)
__device__ __forceinline__ uint32_t divide(uint32_t x, SmallDivisor d) {
  return d.factor == 0 ? x : __umulhi(x, d.factor);
}
#endif

}  // namespace gdn

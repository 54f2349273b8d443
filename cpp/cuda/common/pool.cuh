// State rows in device memory. A row is a dense [H, V, K] block; row -1 reads zero and is never
// written.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/common/types.cuh"

namespace gdn {

// The [V, K] state of head h in pool row `row`; not to be followed for row -1. Offsets are 64-bit.
template <class T>
__device__ __forceinline__ T* state_of(const Pool& pool, int64_t row, int64_t h,
                                       int64_t head_elements) {
  return static_cast<T*>(pool.data) + row * pool.row_stride + h * head_elements;
}

// Bytes that pass through once: kept out of L1 and, if asked for, first to leave L2.
struct Streaming {
  uint64_t policy;

  __device__ __forceinline__ explicit Streaming(bool evict_first) {
    uint64_t normal;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    if (!evict_first) policy = normal;
  }
  __device__ __forceinline__ uint4 load(const void* p) const {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy));
    return v;
  }
  __device__ __forceinline__ void store(void* p, const uint4& v) const {
    asm volatile("st.global.L1::no_allocate.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
                 :
                 : "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy)
                 : "memory");
  }
  // Eight bytes.
  __device__ __forceinline__ uint2 load_half(const void* p) const {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(p), "l"(policy));
    return v;
  }
  __device__ __forceinline__ void store_half(void* p, const uint2& v) const {
    asm volatile("st.global.L1::no_allocate.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;"
                 :
                 : "l"(p), "r"(v.x), "r"(v.y), "l"(policy)
                 : "memory");
  }
};

}  // namespace gdn

// Asynchronous 16-byte copies from global to shared memory, and plain shared accesses by address.
#pragma once

#include <cstdint>

namespace gdn {

__device__ __forceinline__ void copy_async(uint32_t shared, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :
               : "r"(shared), "l"(__cvta_generic_to_global(source))
               : "memory");
}

__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// This thread's copies have landed; a barrier makes those of the others visible.
__device__ __forceinline__ void copy_wait_all() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ uint4 load_shared4(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ float4 load_shared_float4(uint32_t address) {
  const uint4 v = load_shared4(address);
  return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

__device__ __forceinline__ float load_shared_float(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared4(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" : : "r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float v) {
  store_shared(address, __float_as_uint(v));
}

// A row without a token is never read, so that nothing of a neighbour can reach a product.
// NOTE: cp.async's own zero fill costs three dummy loads for each copy (nvcc 13.0).
__device__ __forceinline__ void copy_async_or_zero(uint32_t shared, const void* source,
                                                   bool valid) {
  if (valid) {
    copy_async(shared, source);
  } else {
    store_shared4(shared, {});
  }
}

}  // namespace gdn

// Bulk copies between device and shared memory, one instruction per function. Sizes and addresses
// are multiples of 16 bytes. On GPUs before sm_90 they do nothing: hosts launch no kernel there
// that depends on them.
#pragma once

#include <cstdint>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define GDN_BULK_ASM(...) asm volatile(__VA_ARGS__)
#else
#define GDN_BULK_ASM(...)
#endif

namespace gdn {

inline constexpr int32_t kBulkCapability = 90;

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A barrier that one arrival and the announced bytes complete.
__device__ __forceinline__ void barrier_init(uint64_t* barrier) {
  GDN_BULK_ASM("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// Initialised barriers are visible to bulk copies.
__device__ __forceinline__ void barrier_init_fence() {
  GDN_BULK_ASM("fence.mbarrier_init.release.cluster;" :: : "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  GDN_BULK_ASM(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(shared_address(barrier)),
      "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  GDN_BULK_ASM(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" : : "r"(shared_address(barrier)),
      "r"(parity) : "memory");
}

__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier, uint64_t l2_policy) {
  GDN_BULK_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" : : "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(l2_policy) : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes,
                                           uint64_t l2_policy) {
  GDN_BULK_ASM(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" : : "l"(
          global),
      "r"(shared_address(shared)), "r"(bytes), "l"(l2_policy) : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  GDN_BULK_ASM("cp.async.bulk.commit_group;" :: : "memory");
}

// Shared memory of all stores may be reused or given up.
__device__ __forceinline__ void bulk_wait_read() {
  GDN_BULK_ASM("cp.async.bulk.wait_group.read 0;" :: : "memory");
}

// This thread's ordinary writes to shared memory are visible to bulk copies.
__device__ __forceinline__ void bulk_fence() {
  GDN_BULK_ASM("fence.proxy.async.shared::cta;" :: : "memory");
}

// A hint: these bytes will be read soon.
__device__ __forceinline__ void bulk_prefetch(const void* global, uint32_t bytes) {
  GDN_BULK_ASM("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

}  // namespace gdn

#undef GDN_BULK_ASM

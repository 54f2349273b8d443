// Warpgroup matrix products of sm_90a: the five forms the scan uses, for bf16 and fp16 operands.
//
// Accumulators D [64, N] fp32: warp w of the group holds rows 16 w .. 16 w + 15; d[4 j + e] is row
// lane / 4 + 8 (e / 2), column 8 j + 2 (lane % 4) + e % 2. Packed in pairs, the accumulators of 16
// columns are the A registers of one k16 step.
//
// Shared operands are panels of 64 rows of 128 bytes, 16-byte piece p of row t at p ^ (t % 8), or
// of 32 bytes, piece p at p ^ (t / 4 % 2):
//   K-major   rows are M or N, columns K. 32 bytes per k16 step inside a panel, one panel per 64.
//   MN-major  rows are K, columns M or N. 16 rows per k16 step; one panel per 64 (or 16) columns.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/types.cuh"

namespace gdn::sm90 {

inline constexpr uint32_t kPanelBytes = 8192;  // with rows of 128 bytes

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// At most kPending of the committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// Registers of a running wgmma, A operands too, may not be touched; the compiler does not know.
// Pinned after the wait, they cannot be moved before it.
template <int N>
__device__ __forceinline__ void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// A matrix descriptor as its low word: a step to another place is one 32-bit addition.
template <int kRowBytes = 128>
struct Operand {
  static_assert(kRowBytes == 128 || kRowBytes == 32);
  uint32_t low;

  static __device__ __forceinline__ Operand k_major(uint32_t shared) {
    return {(1u << 16) | ((shared & 0x3ffff) >> 4)};
  }
  static __device__ __forceinline__ Operand mn_major(uint32_t shared) {
    return {((64u * kRowBytes >> 4) << 16) | ((shared & 0x3ffff) >> 4)};
  }
  // `bytes` is a compile-time constant.
  __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
    // Kind of swizzle, and the step of 8 rows.
    constexpr uint32_t kHigh = (kRowBytes == 128 ? 1u : 3u) << 30 | (8u * kRowBytes >> 4);
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low + (bytes >> 4)), "r"(kHigh));
    return descriptor;
  }
};

#define GDN_D8(d, i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define GDN_D32(d, i) GDN_D8(d, i), GDN_D8(d, i + 8), GDN_D8(d, i + 16), GDN_D8(d, i + 24)
#define GDN_N32                                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define GDN_N64                                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "  \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "  \
  "%56, %57, %58, %59, %60, %61, %62, %63}"

// A in registers, 64 columns; kTransposed: B is MN-major. With `add` 0 the old D is dropped.
#define GDN_RS64(type)                                                        \
  asm volatile(                                                               \
      "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"                               \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " GDN_N32 \
      ", {%32, %33, %34, %35}, %36, p, 1, 1, %38;}"                           \
      : GDN_D32(d, 0)                                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposed))

// A in registers, 128 columns, B MN-major.
#define GDN_RS128(type)                                                        \
  asm volatile(                                                                \
      "{.reg .pred p; setp.ne.b32 p, %69, 0;\n"                                \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " GDN_N64 \
      ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;}"                              \
      : GDN_D32(d, 0), GDN_D32(d, 32)                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

// A and B in shared memory, 64 columns; kTransposed: both are MN-major.
#define GDN_SS64(type)                                                        \
  asm volatile(                                                               \
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"                               \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " GDN_N32 \
      ", %32, %33, p, 1, 1, %35, %35;}"                                       \
      : GDN_D32(d, 0)                                                         \
      : "l"(a), "l"(b), "r"(add), "n"(kTransposed))

template <class T, int kTransposed>
__device__ __forceinline__ void wgmma_rs(float (&d)[32], const uint32_t* a, uint64_t b, int add) {
  if constexpr (std::is_same_v<T, bf16>) {
    GDN_RS64("bf16");
  } else {
    GDN_RS64("f16");
  }
}

template <class T>
__device__ __forceinline__ void wgmma_rs(float (&d)[64], const uint32_t* a, uint64_t b, int add) {
  if constexpr (std::is_same_v<T, bf16>) {
    GDN_RS128("bf16");
  } else {
    GDN_RS128("f16");
  }
}

template <class T, int kTransposed>
__device__ __forceinline__ void wgmma_ss(float (&d)[32], uint64_t a, uint64_t b, int add) {
  if constexpr (std::is_same_v<T, bf16>) {
    GDN_SS64("bf16");
  } else {
    GDN_SS64("f16");
  }
}

#undef GDN_SS64
#undef GDN_RS128
#undef GDN_RS64
#undef GDN_N64
#undef GDN_N32
#undef GDN_D32
#undef GDN_D8

}  // namespace gdn::sm90

// Vectors and their conversions for the instruction set that the including file is compiled for.
// All of it has internal linkage: a function compiled for AVX-512 must never be the copy that the
// linker keeps for the baseline.
#pragma once

#include <cstdint>

#include "core/problem.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

#define GDN_INLINE inline __attribute__((always_inline))

namespace gdn::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Vec = float __attribute__((vector_size(4 * kLanes)));
using Vec4 = float __attribute__((vector_size(16)));
using Vec8 = float __attribute__((vector_size(32)));
using Int8 = int32_t __attribute__((vector_size(32)));
using UInt8 = uint32_t __attribute__((vector_size(32)));
using Half8 = uint16_t __attribute__((vector_size(16)));

// The same types at any element address of any buffer. Clang ignores `aligned` in an alias
// declaration, hence typedef.
typedef float VecAt __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef float Vec4At __attribute__((vector_size(16), aligned(4), may_alias));
typedef float Vec8At __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t Half8At __attribute__((vector_size(16), aligned(2), may_alias));
static_assert(alignof(VecAt) == 4 && alignof(Vec4At) == 4 && alignof(Vec8At) == 4);
static_assert(alignof(Half8At) == 2);

GDN_INLINE Vec load(const float* p) { return *reinterpret_cast<const VecAt*>(p); }
GDN_INLINE void store(float* p, Vec x) { *reinterpret_cast<VecAt*>(p) = x; }
// x - 0 is x for every x, -0 included, so this is one broadcast; x + 0 would be an addition.
GDN_INLINE Vec broadcast(float x) { return x - Vec{}; }
GDN_INLINE Vec8 load8(const float* p) { return *reinterpret_cast<const Vec8At*>(p); }
GDN_INLINE void store8(float* p, Vec8 x) { *reinterpret_cast<Vec8At*>(p) = x; }

template <class To, class From>
GDN_INLINE To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, x);
}

GDN_INLINE Vec8 from_bf16(Half8 x) {
  return bit_cast<Vec8>(__builtin_convertvector(x, UInt8) << 16);
}

// Round to nearest even; a NaN keeps its sign and stays a NaN.
GDN_INLINE Half8 to_bf16(Vec8 x) {
  const UInt8 bits = bit_cast<UInt8>(x);
  const UInt8 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const UInt8 quiet = (bits >> 16) | 0x40;
  const Int8 is_nan = x != x;
  return __builtin_convertvector(is_nan ? quiet : rounded, Half8);
}

#if defined(__F16C__)
GDN_INLINE Vec8 from_fp16(Half8 x) { return (Vec8)_mm256_cvtph_ps((__m128i)x); }
GDN_INLINE Half8 to_fp16(Vec8 x) {
  return (Half8)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
}
#else
GDN_INLINE Vec8 from_fp16(Half8 x) {
  const UInt8 h = __builtin_convertvector(x, UInt8);
  const UInt8 sign = (h & 0x8000) << 16, magnitude = h & 0x7fff;
  // Exponent and mantissa in place, then times 2^112 moves the bias; exact for subnormals too.
  const Vec8 scaled = bit_cast<Vec8>(magnitude << 13) * 0x1p112f;
  const UInt8 special = (magnitude << 13) | 0x7f800000;
  const Int8 is_special = magnitude >= 0x7c00;
  return bit_cast<Vec8>((is_special ? special : bit_cast<UInt8>(scaled)) | sign);
}
GDN_INLINE Half8 to_fp16(Vec8 x) {
  const UInt8 bits = bit_cast<UInt8>(x);
  const UInt8 sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  const UInt8 normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 1/2 leaves the subnormal's rounded mantissa in the low bits of the sum.
  const UInt8 small = bit_cast<UInt8>(bit_cast<Vec8>(magnitude) + 0.5f) - 0x3f000000;
  const UInt8 inf = UInt8{} + 0x7c00, nan = UInt8{} + 0x7e00;
  UInt8 half = magnitude < 0x38800000 ? small : normal;
  half = magnitude >= 0x477ff000 ? inf : half;  // 65520 and above
  half = magnitude > 0x7f800000 ? nan : half;
  return __builtin_convertvector(half | sign, Half8);
}
#endif

// One cache line, past the caches where the instruction set can.
GDN_INLINE void stream16(float* p, Vec8 low, Vec8 high) {
#if defined(__AVX512F__)
  const Vec line =
      __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_stream_ps(p, (__m512)line);
#elif defined(__AVX__)
  _mm256_stream_ps(p, (__m256)low);
  _mm256_stream_ps(p + 8, (__m256)high);
#else
  store8(p, low);
  store8(p + 8, high);
#endif
}

void finish_streaming() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// Eight elements of any float dtype, from and to memory.
GDN_INLINE Vec8 read8(const void* p, int64_t i, DType dtype) {
  if (dtype == DType::kFloat32) return load8(static_cast<const float*>(p) + i);
  const Half8 x = *reinterpret_cast<const Half8At*>(static_cast<const uint16_t*>(p) + i);
  return dtype == DType::kBFloat16 ? from_bf16(x) : from_fp16(x);
}

GDN_INLINE void write8(void* p, int64_t i, DType dtype, Vec8 x) {
  if (dtype == DType::kFloat32) return store8(static_cast<float*>(p) + i, x);
  *reinterpret_cast<Half8At*>(static_cast<uint16_t*>(p) + i) =
      dtype == DType::kBFloat16 ? to_bf16(x) : to_fp16(x);
}

GDN_INLINE Vec8 round8(Vec8 x, DType dtype) {
  if (dtype == DType::kFloat32) return x;
  return dtype == DType::kBFloat16 ? from_bf16(to_bf16(x)) : from_fp16(to_fp16(x));
}

GDN_INLINE float sum(Vec8 x) {
  const Vec4 half =
      __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
  const Vec4 pair = half + __builtin_shufflevector(half, half, 2, 3, 2, 3);
  return pair[0] + pair[1];
}

// Columns of an 8 x 8 block of fp32 in memory (load_columns8) and in registers (transpose8).
#if defined(__AVX__)
GDN_INLINE Vec8 load_halves(const float* low, const float* high) {
  return (Vec8)_mm256_loadu2_m128(high, low);
}

// The halves of a register come from rows i and i + 4, which the load ports put together; only
// transpositions of 4 x 4 are left to shuffle.
GDN_INLINE void load_columns8(const float* p, int64_t row_stride, Vec8 (&columns)[8]) {
#pragma GCC unroll 2
  for (int c = 0; c < 8; c += 4) {
    Vec8 a[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      a[i] = load_halves(p + i * row_stride + c, p + (i + 4) * row_stride + c);
    }
    const Vec8 b0 = __builtin_shufflevector(a[0], a[1], 0, 8, 1, 9, 4, 12, 5, 13);
    const Vec8 b1 = __builtin_shufflevector(a[0], a[1], 2, 10, 3, 11, 6, 14, 7, 15);
    const Vec8 b2 = __builtin_shufflevector(a[2], a[3], 0, 8, 1, 9, 4, 12, 5, 13);
    const Vec8 b3 = __builtin_shufflevector(a[2], a[3], 2, 10, 3, 11, 6, 14, 7, 15);
    columns[c] = __builtin_shufflevector(b0, b2, 0, 1, 8, 9, 4, 5, 12, 13);
    columns[c + 1] = __builtin_shufflevector(b0, b2, 2, 3, 10, 11, 6, 7, 14, 15);
    columns[c + 2] = __builtin_shufflevector(b1, b3, 0, 1, 8, 9, 4, 5, 12, 13);
    columns[c + 3] = __builtin_shufflevector(b1, b3, 2, 3, 10, 11, 6, 7, 14, 15);
  }
}

GDN_INLINE void transpose8(Vec8 (&r)[8]) {
  Vec8 a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    a[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    b[i] = __builtin_shufflevector(a[i], a[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    b[i + 1] = __builtin_shufflevector(a[i], a[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    b[i + 2] = __builtin_shufflevector(a[i + 1], a[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    b[i + 3] = __builtin_shufflevector(a[i + 1], a[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
#else
GDN_INLINE void load_columns8(const float* p, int64_t row_stride, Vec8 (&columns)[8]) {
  Vec4 halves[8][2];
#pragma GCC unroll 4
  for (int quarter = 0; quarter < 4; ++quarter) {
    const int c = quarter / 2 * 4, half = quarter % 2;
    Vec4 a[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      a[i] = *reinterpret_cast<const Vec4At*>(p + (half * 4 + i) * row_stride + c);
    }
    const Vec4 b0 = __builtin_shufflevector(a[0], a[1], 0, 4, 1, 5);
    const Vec4 b1 = __builtin_shufflevector(a[0], a[1], 2, 6, 3, 7);
    const Vec4 b2 = __builtin_shufflevector(a[2], a[3], 0, 4, 1, 5);
    const Vec4 b3 = __builtin_shufflevector(a[2], a[3], 2, 6, 3, 7);
    halves[c][half] = __builtin_shufflevector(b0, b2, 0, 1, 4, 5);
    halves[c + 1][half] = __builtin_shufflevector(b0, b2, 2, 3, 6, 7);
    halves[c + 2][half] = __builtin_shufflevector(b1, b3, 0, 1, 4, 5);
    halves[c + 3][half] = __builtin_shufflevector(b1, b3, 2, 3, 6, 7);
  }
  __builtin_memcpy(columns, halves, sizeof halves);
}

GDN_INLINE void transpose8(Vec8 (&r)[8]) {
  float rows[64];
  __builtin_memcpy(rows, r, sizeof rows);
  load_columns8(rows, 8, r);
}
#endif

// Eight sums at once: element i is the sum of x[i].
GDN_INLINE Vec8 sums(Vec8 (&x)[8]) {
  transpose8(x);
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

}  // namespace
}  // namespace gdn::cpu

// One register of V rows from and to v, output and pools: kLanes elements of any float dtype.
#pragma once

#include <cstring>

#include "cpu/vec.h"

namespace gdn::cpu {
namespace {

#if defined(__AVX512F__)
using UInt16 = uint32_t __attribute__((vector_size(64)));
using Half16 = uint16_t __attribute__((vector_size(32)));
typedef uint16_t Half16At __attribute__((vector_size(32), aligned(2), may_alias));  // see vec.h
#endif

// Of a block with `left` V rows (a multiple of 8) behind this register only those are touched.
GDN_INLINE Vec read_lanes(const void* p, int64_t i, DType dtype, int left) {
#if defined(__AVX512F__)
  if (left >= 16 && dtype != DType::kFloat16) {
    if (dtype == DType::kFloat32) return load(static_cast<const float*>(p) + i);
    const auto x = *reinterpret_cast<const Half16At*>(static_cast<const uint16_t*>(p) + i);
    return bit_cast<Vec>(__builtin_convertvector(x, UInt16) << 16);
  }
  const Vec8 low = read8(p, i, dtype);
  const Vec8 high = left >= 16 ? read8(p, i + 8, dtype) : Vec8{};
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX2__)
  (void)left;
  return read8(p, i, dtype);
#else
  (void)left;
  if (dtype == DType::kFloat32) return load(static_cast<const float*>(p) + i);
  Half8 x{};
  std::memcpy(&x, static_cast<const uint16_t*>(p) + i, 8);
  const Vec8 wide = dtype == DType::kBFloat16 ? from_bf16(x) : from_fp16(x);
  return __builtin_shufflevector(wide, wide, 0, 1, 2, 3);
#endif
}

GDN_INLINE void write_lanes(void* p, int64_t i, DType dtype, int left, Vec x) {
#if defined(__AVX512F__)
  if (left >= 16 && dtype != DType::kFloat16) {
    if (dtype == DType::kFloat32) return store(static_cast<float*>(p) + i, x);
    const UInt16 bits = bit_cast<UInt16>(x);
    const UInt16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const UInt16 y = x != x ? (bits >> 16) | 0x40 : rounded;
    *reinterpret_cast<Half16At*>(static_cast<uint16_t*>(p) + i) =
        __builtin_convertvector(y, Half16);
    return;
  }
  write8(p, i, dtype, __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7));
  if (left < 16) return;
  write8(p, i + 8, dtype, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
#elif defined(__AVX2__)
  (void)left;
  write8(p, i, dtype, x);
#else
  (void)left;
  if (dtype == DType::kFloat32) return store(static_cast<float*>(p) + i, x);
  const Vec8 wide = __builtin_shufflevector(x, x, 0, 1, 2, 3, 0, 1, 2, 3);
  const Half8 y = dtype == DType::kBFloat16 ? to_bf16(wide) : to_fp16(wide);
  std::memcpy(static_cast<uint16_t*>(p) + i, &y, 8);
#endif
}

}  // namespace
}  // namespace gdn::cpu

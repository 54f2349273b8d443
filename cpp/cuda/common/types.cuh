// Element types on the device: conversion to and from fp32, 16-byte vectors, strided scalars.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/problem.h"

namespace gdn {

using bf16 = __nv_bfloat16;
using fp16 = __half;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }

// Round to nearest even; fp16 overflow gives inf.
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
  return __float2half_rn(x);
}

// Two neighbours in one 32-bit word, the first in the low half.
template <class T>
__device__ __forceinline__ float2 unpack2(uint32_t word);
template <>
__device__ __forceinline__ float2 unpack2<bf16>(uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
template <>
__device__ __forceinline__ float2 unpack2<fp16>(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack2<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack2<fp16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// One 16-byte vector of T as fp32, and back.
template <class T>
inline constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));

template <class T>
__device__ __forceinline__ void unpack(const uint4& v, float (&out)[kPerVector<T>]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      out[i] = __uint_as_float(words[i]);
    } else {
      const float2 pair = unpack2<T>(words[i]);
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    }
  }
}

template <class T>
__device__ __forceinline__ uint4 pack(const float (&x)[kPerVector<T>]) {
  if constexpr (sizeof(T) == 4) {
    return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
            __float_as_uint(x[3])};
  } else {
    return {pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7])};
  }
}

// One element of a run-time dtype. For operands so small that a branch costs nothing.
__device__ __forceinline__ float load_element(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kBFloat16: return to_float(static_cast<const bf16*>(data)[i]);
    case DType::kFloat16: return to_float(static_cast<const fp16*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}

__device__ __forceinline__ void store_element(void* data, DType dtype, int64_t i, float x) {
  switch (dtype) {
    case DType::kBFloat16: static_cast<bf16*>(data)[i] = from_float<bf16>(x); break;
    case DType::kFloat16: static_cast<fp16*>(data)[i] = from_float<fp16>(x); break;
    default: static_cast<float*>(data)[i] = x;
  }
}

// Element (row, head) of a [rows, heads] operand.
__device__ __forceinline__ float load_element(const Tensor& t, int64_t row, int64_t head) {
  return load_element(t.data, t.dtype, row * t.row_stride + head * t.head_stride);
}

}  // namespace gdn

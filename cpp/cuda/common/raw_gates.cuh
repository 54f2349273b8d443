// Gates of a chunk as a warp reads them, before they are converted: the loads are on their way
// before the first is waited for.
#pragma once

#include "cuda/common/types.cuh"

namespace gdn {

// log2 alpha below this is 0 in fp32: an exact reset.
inline constexpr float kResetLog2 = -150.0f;

// Gates of tokens 2 lane and 2 lane + 1 as read.
struct RawGates {
  uint32_t g[2] = {};
  uint32_t beta[2] = {};
};

__device__ __forceinline__ uint32_t raw_gate(const Tensor& x, int64_t row, int head) {
  const int64_t i = row * x.row_stride + head * x.head_stride;
  if (x.dtype == DType::kFloat32) return static_cast<const uint32_t*>(x.data)[i];
  return static_cast<const uint16_t*>(x.data)[i];
}

__device__ __forceinline__ float gate_value(uint32_t raw, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return unpack2<bf16>(raw).x;
    case DType::kFloat16: return unpack2<fp16>(raw).x;
    default: return __uint_as_float(raw);
  }
}

}  // namespace gdn

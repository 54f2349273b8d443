// Single elements and addresses of strided operands.
#pragma once

#include <bit>
#include <cstdint>

#include "core/gate.h"
#include "core/problem.h"

namespace gdn::cpu {

// What no CPU row serves, or null.
inline const char* refuse_operands(const Device& device, const Heads& heads) {
  if (device.type != GDN_CPU) return "the operands are not in host memory";
  if (heads.dim_k % 8 != 0 || heads.dim_v % 8 != 0) {
    return "head_dim_k and head_dim_v must be multiples of 8";
  }
  return nullptr;
}

inline int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline float from_fp16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | magnitude << 13);
  return std::bit_cast<float>(
      sign | std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f));
}

// Element i of an array of any float dtype, as fp32.
inline float read_element(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  const uint16_t x = static_cast<const uint16_t*>(data)[i];
  return dtype == DType::kBFloat16 ? std::bit_cast<float>(static_cast<uint32_t>(x) << 16)
                                   : from_fp16(x);
}

inline float read_element(const Tensor& t, int64_t row, int64_t head) {
  return read_element(t.data, t.dtype, row * t.row_stride + head * t.head_stride);
}

// Address of the vector [row, head, offset ..].
inline const void* address(const Tensor& t, int64_t row, int64_t head, int64_t offset = 0) {
  const int64_t i = row * t.row_stride + head * t.head_stride + offset;
  return static_cast<const char*>(t.data) + i * element_bytes(t.dtype);
}
inline void* writable(const Tensor& t, int64_t row, int64_t head, int64_t offset) {
  return const_cast<void*>(address(t, row, head, offset));
}

// The V rows from `offset` of a state head in a pool; null for row -1 and an absent pool.
inline void* state_address(const Pool& pool, const Heads& heads, int64_t row, int64_t head,
                           int64_t offset) {
  if (!pool || row < 0) return nullptr;
  const int64_t i = row * pool.row_stride + (head * heads.dim_v + offset) * heads.dim_k;
  return static_cast<char*>(pool.data) + i * element_bytes(pool.dtype);
}

// alpha and beta of one row and head.
inline float read_alpha(const Gates& gates, int64_t row, int64_t head) {
  if (gates.form == GateForm::kNone) return 1.0f;
  float A_log = 0.0f, dt_bias = 0.0f;
  if (gates.form == GateForm::kRaw) {
    A_log = read_element(gates.A_log, 0, head);
    if (gates.dt_bias.data != nullptr) dt_bias = read_element(gates.dt_bias, 0, head);
  }
  return alpha(gates.form, read_element(gates.g, row, head), A_log, dt_bias);
}
inline float read_beta(const Gates& gates, int64_t row, int64_t head) {
  if (gates.beta.data == nullptr) return 1.0f;
  const float beta = read_element(gates.beta, row, head);
  return gates.beta_is_logit ? sigmoid(beta) : beta;
}

}  // namespace gdn::cpu

// Gates of one chunk and head: from any form to the factors of GateBlock, by one warp.
#pragma once

#include "core/gate.h"
#include "cuda/common/copy.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/raw_gates.cuh"
#include "cuda/sm90/traits.h"

namespace gdn::sm90 {

// What a reset counts as in the sums of log2 alpha: 2^-300 is 0 whatever is added to it, and 64
// such terms keep the differences between other tokens exact to 2^-9.
inline constexpr float kResetLog2Sum = -300.0f;

// Foreign rows have alpha = 1 and beta = 0.
struct LaneGates {
  float log2_alpha[2];
  float beta[2];
};

__device__ __forceinline__ RawGates load_gates(const Gates& gates, const ChunkRows& rows, int head,
                                               int lane) {
  RawGates raw;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int row = 2 * lane + u;
    if (gates.g.data && rows.valid(row)) raw.g[u] = raw_gate(gates.g, rows.origin + row, head);
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int row = 2 * lane + u;
    if (gates.beta.data && rows.valid(row)) {
      raw.beta[u] = raw_gate(gates.beta, rows.origin + row, head);
    }
  }
  return raw;
}

__device__ __forceinline__ LaneGates decode_gates(const Gates& gates, const RawGates& raw,
                                                  const ChunkRows& rows, int head, int lane) {
  constexpr float kLog2e = 1.4426950408889634f;
  const float A_log = gates.A_log.data ? load_element(gates.A_log, 0, head) : 0.0f;
  const float dt_bias = gates.dt_bias.data ? load_element(gates.dt_bias, 0, head) : 0.0f;
  LaneGates out;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const float g = gate_value(raw.g[u], gates.g.dtype);
    float log2_alpha = 0.0f;
    if (gates.form == GateForm::kLinear) {
      log2_alpha = log2f(g);
    } else if (gates.form != GateForm::kNone) {
      log2_alpha = kLog2e * log_alpha(gates.form, g, A_log, dt_bias);
    }
    float beta = gates.beta.data ? gate_value(raw.beta[u], gates.beta.dtype) : 1.0f;
    if (gates.beta_is_logit) beta = sigmoid(beta);
    const bool valid = rows.valid(2 * lane + u);
    out.log2_alpha[u] = valid ? log2_alpha : 0.0f;
    out.beta[u] = valid ? beta : 0.0f;
  }
  return out;
}

// Sums of the log2 gates and their factors; beta goes to shared memory for the inverse.
__device__ __forceinline__ void form_gates(const LaneGates& gates, uint32_t beta, int lane,
                                           GateBlock& block) {
  // Written so that a NaN gate stays one.
  const float log0 = gates.log2_alpha[0] < kResetLog2 ? kResetLog2Sum : gates.log2_alpha[0];
  const float log1 = gates.log2_alpha[1] < kResetLog2 ? kResetLog2Sum : gates.log2_alpha[1];
  const float sum1 = warp_inclusive_sum(log0 + log1, lane);
  const float below = __shfl_up_sync(kFullWarp, sum1, 1);
  const float sum0 = (lane == 0 ? 0.0f : below) + log0;
  *reinterpret_cast<float2*>(block.log2 + 2 * lane) = {sum0, sum1};
  *reinterpret_cast<float2*>(block.from_start + gate_place(2 * lane)) = {exp2_fast(sum0),
                                                                         exp2_fast(sum1)};
  store_shared(beta + 8 * lane, gates.beta[0]);
  store_shared(beta + 8 * lane + 4, gates.beta[1]);
  __syncwarp();
}

}  // namespace gdn::sm90

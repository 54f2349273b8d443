// Gates of one chunk and head, by one warp: from any form to the factors of GateRecord, and to what
// prepare itself needs in shared memory.
#pragma once

#include "core/gate.h"
#include "cuda/common/copy.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/raw_gates.cuh"
#include "cuda/sm80/traits.h"

namespace gdn {

__device__ __forceinline__ RawGates read_gates(const Gates& gates, const ChunkRows& rows, int head,
                                               int lane) {
  RawGates raw;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int row = 2 * lane + u;
    if (!rows.valid(row)) continue;
    if (gates.g.data) raw.g[u] = raw_gate(gates.g, rows.origin + row, head);
    if (gates.beta.data) raw.beta[u] = raw_gate(gates.beta, rows.origin + row, head);
  }
  return raw;
}

__device__ __forceinline__ float log2_alpha_of(const Gates& gates, uint32_t raw, int head) {
  constexpr float kLog2e = 1.4426950408889634f;
  if (gates.form == GateForm::kNone) return 0.0f;
  const float g = gate_value(raw, gates.g.dtype);
  if (gates.form == GateForm::kLinear) return log2f(g);
  const float A_log = gates.A_log.data ? load_element(gates.A_log, 0, head) : 0.0f;
  const float dt_bias = gates.dt_bias.data ? load_element(gates.dt_bias, 0, head) : 0.0f;
  return kLog2e * log_alpha(gates.form, g, A_log, dt_bias);
}

// Sums of the log2 gates and their factors, into the record and to `shared`. Foreign rows have
// alpha = 1 and beta = 0.
template <class Traits>
__device__ __forceinline__ void form_gates(const Gates& gates, const RawGates& raw,
                                           const ChunkRows& rows, int head, int lane,
                                           uint32_t shared, GateRecord& record) {
  float log_alpha[2], beta[2];
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const bool valid = rows.valid(2 * lane + u);
    log_alpha[u] = valid ? log2_alpha_of(gates, raw.g[u], head) : 0.0f;
    beta[u] = gates.beta.data ? gate_value(raw.beta[u], gates.beta.dtype) : 1.0f;
    if (gates.beta_is_logit) beta[u] = sigmoid(beta[u]);
    if (!valid) beta[u] = 0.0f;
  }
  store_shared(shared + Traits::kBeta + 8 * lane, beta[0]);
  store_shared(shared + Traits::kBeta + 8 * lane + 4, beta[1]);

  // A reset adds nothing to the sum: pairs on both its sides are cut off by their segments.
  const bool reset0 = log_alpha[0] < kResetLog2, reset1 = log_alpha[1] < kResetLog2;
  const float log0 = reset0 ? 0.0f : log_alpha[0];
  const float log1 = reset1 ? 0.0f : log_alpha[1];
  const float sum1 = warp_inclusive_sum(log0 + log1, lane);
  float sum0 = __shfl_up_sync(kFullWarp, sum1, 1);
  sum0 = (lane == 0 ? 0.0f : sum0) + log0;
  const float end = __shfl_sync(kFullWarp, sum1, 31);
  const int place = gate_place(2 * lane);
  const uint32_t to = shared + Traits::gate_offset(place);
  store_shared(to + Traits::kLog, sum0);
  store_shared(to + Traits::kLog + 4, sum1);

  float2 from_start = {exp2_fast(sum0), exp2_fast(sum1)};
  float2 to_end = {exp2_fast(end - sum0), exp2_fast(end - sum1)};
  const unsigned even = __ballot_sync(kFullWarp, reset0), odd = __ballot_sync(kFullWarp, reset1);
  uint2 resets = {};
  if ((even | odd) != 0) {
    // Token of the last reset at or before each token; -1 and less: there is none.
    const unsigned before = (1u << lane) - 1, upto = before | (1u << lane);
    const int last_even = 2 * (31 - __clz(even & upto));
    const int segment0 = max(max(last_even, 2 * (31 - __clz(odd & before)) + 1), -1);
    const int segment1 = max(max(last_even, 2 * (31 - __clz(odd & upto)) + 1), -1);
    const int end_segment = __shfl_sync(kFullWarp, segment1, 31);
    if (segment0 >= 0) from_start.x = 0.0f;
    if (segment1 >= 0) from_start.y = 0.0f;
    if (2 * lane < end_segment) to_end.x = 0.0f;
    if (2 * lane + 1 < end_segment) to_end.y = 0.0f;
    store_shared(to + Traits::kSegments, static_cast<uint32_t>(segment0));
    store_shared(to + Traits::kSegments + 4, static_cast<uint32_t>(segment1));
    const unsigned own = lane & 1 ? odd : even;  // of token `lane` and of token `lane` + 32
    resets.x = __ballot_sync(kFullWarp, own >> (lane >> 1) & 1);
    resets.y = __ballot_sync(kFullWarp, own >> (16 + (lane >> 1)) & 1);
  }
  *reinterpret_cast<float2*>(record.from_start + place) = from_start;
  *reinterpret_cast<float2*>(record.to_end + place) = to_end;
  if (lane == 0) {
    store_shared(shared + Traits::kResets, resets.x | resets.y);
    *reinterpret_cast<uint2*>(record.resets) = resets;
  }
}

}  // namespace gdn

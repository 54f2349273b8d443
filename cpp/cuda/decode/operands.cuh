// The small operands of one (batch row, state head): slots, q, k, v and the gates. Loads take bits
// and conversions come later, so that all loads are in flight before the first one is waited for.
#pragma once

#include "core/gate.h"
#include "core/slots.h"
#include "cuda/common/reduce.cuh"
#include "cuda/common/types.cuh"
#include "cuda/decode/params.h"

namespace gdn {

// Computed here and now: the compiler may not move it behind the wait that follows.
__device__ __forceinline__ int64_t settled(int64_t offset) {
  asm volatile("" : "+l"(offset));
  return offset;
}

__device__ __forceinline__ int64_t element_offset(const Tensor& t, int64_t row, int64_t head) {
  return row * t.row_stride + head * t.head_stride;
}

__device__ __forceinline__ uint16_t load_io(const Tensor& t, int64_t offset) {
  return static_cast<const uint16_t*>(t.data)[offset];
}

__device__ __forceinline__ void store_io(const Tensor& t, int64_t offset, uint16_t bits) {
  static_cast<uint16_t*>(const_cast<void*>(t.data))[offset] = bits;
}

__device__ __forceinline__ uint16_t io_bits(float x, DType dtype) {
  return dtype == DType::kBFloat16 ? __bfloat16_as_ushort(from_float<bf16>(x))
                                   : __half_as_ushort(from_float<fp16>(x));
}

__device__ __forceinline__ float from_bits(uint32_t bits, DType dtype) {
  const float half = __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  const float wide = __uint_as_float(dtype == DType::kBFloat16 ? bits << 16 : bits);
  return dtype == DType::kFloat16 ? half : wide;
}

__device__ __forceinline__ uint32_t load_bits(const Tensor& t, int64_t offset) {
  return t.dtype == DType::kFloat32 ? static_cast<const uint32_t*>(t.data)[offset]
                                    : static_cast<const uint16_t*>(t.data)[offset];
}

// a, b, A_log and dt_bias of one head.
struct GateBits {
  uint32_t a = 0, b = 0, A_log = 0, dt_bias = 0;

  __device__ __forceinline__ void load(const Gates& gates, int64_t a_offset, int64_t b_offset,
                                       int32_t h) {
    a = load_bits(gates.g, a_offset);
    b = load_bits(gates.beta, b_offset);
    A_log = load_bits(gates.A_log, h * gates.A_log.head_stride);
    if (gates.dt_bias.data) dt_bias = load_bits(gates.dt_bias, h * gates.dt_bias.head_stride);
  }
  __device__ __forceinline__ float alpha(const Gates& gates) const {
    return gdn::alpha(GateForm::kRaw, from_bits(a, gates.g.dtype),
                      from_bits(A_log, gates.A_log.dtype), from_bits(dt_bias, gates.dt_bias.dtype));
  }
  __device__ __forceinline__ float beta(const Gates& gates) const {
    return sigmoid(from_bits(b, gates.beta.dtype));
  }
};

// An entry of an index table; widening an int32 would wait for it.
struct IndexBits {
  int32_t low = 0, high = 0;
  bool is_int64;

  __device__ __forceinline__ IndexBits(const IndexTable& table, int64_t i)
      : is_int64(table.is_int64) {
    if (!table) return;
    const auto* words = static_cast<const int32_t*>(table.data);
    low = words[is_int64 ? 2 * i : i];
    if (is_int64) high = words[2 * i + 1];
  }
  __device__ __forceinline__ int64_t value() const {
    const int64_t upper = is_int64 ? high : low >> 31;
    return upper << 32 | static_cast<uint32_t>(low);
  }
};

__device__ __forceinline__ int64_t load_index_from_l2(const IndexTable& table, int64_t i) {
  return table.is_int64 ? __ldcg(static_cast<const long long*>(table.data) + i)
                        : __ldcg(static_cast<const int32_t*>(table.data) + i);
}

// resolve_decode of core/slots.h, with both slots on their way together.
struct SlotBits {
  IndexBits read, write;

  __device__ __forceinline__ SlotBits(const DecodeProblem& p, int64_t b)
      : read(p.initial_indices, b), write(p.output_indices, b) {}

  __device__ __forceinline__ DecodeRow rows(const DecodeProblem& p, int64_t b) const {
    if (p.paged && !p.slots_given) return decode_slots(p.table, p.initial.num_rows, b);
    const int64_t read_row = p.initial_indices ? read.value() : b;
    return checked_row(p, read_row, p.output_indices ? write.value() : read_row);
  }
};

// Where this thread stands. v and the output go through the lanes: lane (r, g) of a warp, r the row
// in a group and g the lane in a row, holds those of row r of group g.
template <class Traits>
struct DecodePlace {
  int64_t b;   // batch row
  int32_t h;   // state head
  int groups;  // of this warp
  int lane_in_row;
  int warp_row;   // the warp's first V row
  int group_row;  // row of this lane in the warp's first group
  int own_row;    // the row whose v and output this lane holds
  bool owns_row;

  __device__ __forceinline__ explicit DecodePlace(const DecodeParams& p) {
    uint32_t block = blockIdx.x, state = 0;
    int parts_log2 = p.parts_log2;
    groups = p.groups;
    if (block >= p.tail_block) {
      block -= static_cast<uint32_t>(p.tail_block);
      state = static_cast<uint32_t>(p.tail_block) >> parts_log2;
      parts_log2 += p.tail_log2;
      groups >>= p.tail_log2;
    }
    state += block >> parts_log2;
    const int part = block & ((1 << parts_log2) - 1);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t row = state / static_cast<uint32_t>(p.problem.heads.state);
    b = row;
    h = static_cast<int32_t>(state - row * p.problem.heads.state);
    lane_in_row = lane % Traits::kLanes;
    warp_row = (part * Traits::kWarps + warp) * groups * Traits::kGroupRows;
    group_row = warp_row + lane / Traits::kLanes;
    own_row = group_row + lane_in_row * Traits::kGroupRows;
    owns_row = lane_in_row < groups;
  }
};

// Offsets of this thread's operand elements.
template <class Traits>
struct DecodeOffsets {
  int64_t k, q, v, output, a, b;

  __device__ __forceinline__ DecodeOffsets(const DecodeParams& p, const DecodePlace<Traits>& at) {
    const DecodeProblem& d = p.problem;
    const int i = threadIdx.x;
    k = settled(element_offset(d.k, at.b, divide(at.h, p.heads_per_k)) + i);
    q = settled(element_offset(d.q, at.b, divide(at.h, p.heads_per_q)) + i);
    v = settled(element_offset(d.v, at.b, divide(at.h, p.heads_per_v)) + at.own_row);
    output = settled(element_offset(d.output, at.b, at.h) + at.own_row);
    a = settled(element_offset(d.gates.g, at.b, at.h));
    b = settled(element_offset(d.gates.beta, at.b, at.h));
  }
};

// Whether this thread brings one element of k and q.
template <class Traits>
__device__ __forceinline__ bool owns_element() {
  return Traits::kThreads == Traits::kDim || threadIdx.x < Traits::kDim;
}

// What this thread loads of the operands.
template <class Traits>
struct DecodeOperands {
  uint16_t k = 0, q = 0, v = 0;
  GateBits gates;  // the first warp's

  __device__ __forceinline__ DecodeOperands(const DecodeProblem& problem,
                                            const DecodePlace<Traits>& at,
                                            const DecodeOffsets<Traits>& offsets) {
    if (owns_element<Traits>()) {
      k = load_io(problem.k, offsets.k);
      q = load_io(problem.q, offsets.q);
    }
    if (at.owns_row) v = load_io(problem.v, offsets.v);
    if (threadIdx.x < 32) gates.load(problem.gates, offsets.a, offsets.b, at.h);
  }
};

// What the warps of a block make together: k and q as fp32 and the scalars of the head.
template <class Traits>
struct DecodeShared {
  alignas(16) float k[Traits::kDim];
  alignas(16) float q[Traits::kDim];
  float4 sums[Traits::kWarps];  // k k, q q, k q of each warp's elements
  float alpha, beta;
};

// The factors that stand for l2norm: k and q themselves stay as they came.
struct NormScales {
  float k = 1.0f, q = 1.0f;
  float kq;  // normalised k times normalised q
};

// Ends with the block's barrier.
template <class Traits>
__device__ __forceinline__ void share_operands(DecodeShared<Traits>& shared,
                                               const DecodeProblem& problem,
                                               const DecodeOperands<Traits>& operands) {
  const int i = threadIdx.x;
  if (i < 32) {
    shared.alpha = operands.gates.alpha(problem.gates);
    shared.beta = operands.gates.beta(problem.gates);
  }
  const float k = from_bits(operands.k, problem.io), q = from_bits(operands.q, problem.io);
  if (owns_element<Traits>()) {
    shared.k[i] = k;
    shared.q[i] = q;
  }
  const float4 sums = {warp_sum(k * k), warp_sum(q * q), warp_sum(k * q), 0.0f};
  if (i % 32 == 0) shared.sums[i / 32] = sums;
  __syncthreads();
}

template <class Traits>
__device__ __forceinline__ NormScales norm_scales(const DecodeShared<Traits>& shared,
                                                  bool qk_l2norm) {
  float kk = 0.0f, qq = 0.0f;
  NormScales scales{.kq = 0.0f};
#pragma unroll
  for (int w = 0; w < Traits::kWarps; ++w) {
    const float4 sums = shared.sums[w];
    kk += sums.x;
    qq += sums.y;
    scales.kq += sums.z;
  }
  if (qk_l2norm) {
    scales.k = rsqrtf(kk + 1e-6f);
    scales.q = rsqrtf(qq + 1e-6f);
    scales.kq *= scales.k * scales.q;
  }
  return scales;
}

}  // namespace gdn

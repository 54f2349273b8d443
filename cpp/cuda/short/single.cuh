// One token, as decode has it:
//
//   x = S k,  y = S q,  u = beta (v - alpha x)
//   o = scale (alpha y + u (k q)),  S' = alpha S + u k^T
//
// in fp32 throughout. A warp makes its own copy of k and q, so no warp waits for another.
#pragma once

#include "core/gate.h"
#include "cuda/short/item.cuh"

namespace gdn {

// k and q as fp32, by each warp for itself.
template <class Traits>
struct SingleShared {
  alignas(16) float k[Traits::kDim];
  alignas(16) float q[Traits::kDim];
};

// Four columns of k and of q in each lane, on their way to what the warp shares.
template <class Traits>
struct SingleTokens {
  using Io = typename Traits::Io;
  static constexpr int kLanes = Traits::kDim / 4;
  float k[4] = {}, q[4] = {};
  uint2 k_words{}, q_words{};

  __device__ __forceinline__ void load(const ShortParams& p, int64_t k_row, int64_t q_row) {
    if (this_lane() >= kLanes) return;
    k_words = load_operand(p.problem.k, k_row + 4 * this_lane(), p.vector_qk);
    q_words = load_operand(p.problem.q, q_row + 4 * this_lane(), p.vector_qk);
  }
  static __device__ __forceinline__ void settle(float (&x)[4], uint2 words, bool normalize) {
    const float2 low = unpack2<Io>(words.x), high = unpack2<Io>(words.y);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    if (!normalize) return;
    const float sum = warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]);
    const float inverse_norm = rsqrtf(sum + 1e-6f);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = to_float(from_float<Io>(x[e] * inverse_norm));
  }
  // Returns k q.
  __device__ __forceinline__ float share(SingleShared<Traits>& shared, bool normalize) {
    settle(k, k_words, normalize);
    settle(q, q_words, normalize);
    if (this_lane() < kLanes) {
      *reinterpret_cast<float4*>(shared.k + 4 * this_lane()) = {k[0], k[1], k[2], k[3]};
      *reinterpret_cast<float4*>(shared.q + 4 * this_lane()) = {q[0], q[1], q[2], q[3]};
    }
    return warp_sum(k[0] * q[0] + k[1] * q[1] + k[2] * q[2] + k[3] * q[3]);
  }
};

template <class Traits>
using SingleRows = StateRows<LinePlaces<Traits::kDim>>;

// Four columns of part `part` of k or q, as a lane of SingleRows holds them.
__device__ __forceinline__ void shared_columns(float (&x)[4], const float* row, int part) {
  const float4 y = *reinterpret_cast<const float4*>(row + 32 * part + 4 * (this_lane() % 8));
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

// S k and S q of a lane's four rows, summed over the lanes of a row.
struct SingleProducts {
  float x[4] = {}, y[4] = {};

  template <class Traits>
  __device__ __forceinline__ void form(const SingleShared<Traits>& shared,
                                       const SingleRows<Traits>& state) {
#pragma unroll
    for (int part = 0; part < Traits::kDim / 32; ++part) {
      float k[4], q[4];
      shared_columns(k, shared.k, part);
      shared_columns(q, shared.q, part);
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        const float s = state.x[4 * part + e / 4][e % 4];
        x[e / 4] = fmaf(s, k[e % 4], x[e / 4]);
        y[e / 4] = fmaf(s, q[e % 4], y[e / 4]);
      }
    }
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      x[row] = group_sum<8>(x[row]);
      y[row] = group_sum<8>(y[row]);
    }
  }
};

// alpha and beta of the token.
__device__ __forceinline__ float2 single_gates(const Gates& gates, int64_t token, int32_t h) {
  const float g = gates.g.data ? load_element(gates.g, token, h) : 0.0f;
  const float beta = gates.beta.data ? load_element(gates.beta, token, h) : 1.0f;
  const float A_log = gates.A_log.data ? load_element(gates.A_log, 0, h) : 0.0f;
  const float dt_bias = gates.dt_bias.data ? load_element(gates.dt_bias, 0, h) : 0.0f;
  return {alpha(gates.form, g, A_log, dt_bias), gates.beta_is_logit ? sigmoid(beta) : beta};
}

// alpha S + u k^T to the page that the token ends, and to that of the final state.
template <class Traits>
__device__ __forceinline__ void store_single(const SingleShared<Traits>& shared,
                                             const ShortParams& p, const ShortEntry& s,
                                             const ShortItem& item, const SingleRows<Traits>& state,
                                             float decay, const float (&u)[4]) {
  using Places = LinePlaces<Traits::kDim>;
  const PrefillProblem& problem = p.problem;
  const int64_t page = s.to_page_end == 1 ? checkpoint_of(problem, s, 0) : -1;
  void* pages[2] = {head_state(problem.checkpoints, page, item.h, Traits::kHead),
                    head_state(problem.output_state, s.write_row, item.h, Traits::kHead)};
#pragma unroll
  for (int part = 0; part < Traits::kDim / 32; ++part) {
    float k[4];
    shared_columns(k, shared.k, part);
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = fmaf(u[row], k[e], decay * state.x[4 * part + row][e]);
      }
      const int at = Places::first(item.first_row) + Places::offset(4 * part + row);
      if (pages[0]) store_places(pages[0], problem.checkpoints.dtype, at, x, p.vector_state);
      if (pages[1]) store_places(pages[1], problem.output_state.dtype, at, x, p.vector_state);
    }
  }
}

template <class Traits>
__device__ __forceinline__ void run_single(SingleShared<Traits>& shared, const ShortParams& p,
                                           const ShortEntry& s, uint32_t number, bool has_next) {
  using Io = typename Traits::Io;
  const PrefillProblem& problem = p.problem;
  const DType dtype = problem.initial.dtype;
  const auto item = ShortItem::of(p, number);
  const int row = item.first_row + this_lane() / 8;  // of this lane, and every fourth one
  const auto offset = [&](const Tensor& t, uint32_t head) {
    return s.begin * t.row_stride + head * t.head_stride;
  };

  // Everything that comes from memory is requested before any of it is waited for.
  SingleTokens<Traits> tokens;
  tokens.load(p, offset(problem.k, divide(item.h, p.heads_per_k)),
              offset(problem.q, divide(item.h, p.heads_per_q)));
  const auto* v_row = static_cast<const Io*>(problem.v.data) +
                      offset(problem.v, divide(item.h, p.heads_per_v)) + row;
  const Io v[4] = {v_row[0], v_row[4], v_row[8], v_row[12]};
  SingleRows<Traits> state;
  state.load(head_state(problem.initial, s.read_row, item.h, Traits::kHead), dtype,
             LinePlaces<Traits::kDim>::first(item.first_row), p.vector_state);
  if (has_next) {
    const auto next = ShortItem::of(p, number + 1);
    prefetch_rows<Traits>(head_state(problem.initial, s.read_row, next.h, Traits::kHead), dtype,
                          next.first_row);
  }
  const float2 gates = single_gates(problem.gates, s.begin, item.h);
  __syncwarp();  // the item before has read what is shared
  const float kq = tokens.share(shared, problem.qk_l2norm);
  __syncwarp();

  // A reset discards the old state even if it holds NaN or inf.
  if (gates.x == 0.0f) state.clear();
  SingleProducts products;
  products.form(shared, state);
  auto* to = static_cast<Io*>(const_cast<void*>(problem.output.data)) +
             offset(problem.output, item.h) + row;
  float u[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u[i] = gates.y * (to_float(v[i]) - gates.x * products.x[i]);
    const float out = problem.scale * (gates.x * products.y[i] + u[i] * kq);
    if (this_lane() % 8 == 0) to[4 * i] = from_float<Io>(out);
  }
  store_single(shared, p, s, item, state, gates.x, u);
}

}  // namespace gdn

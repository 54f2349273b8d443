// The arithmetic of one state row, whatever way the row came.
//
//     x = S k,  y = S q,  u = beta (v - alpha x)
//     o = scale (alpha y + u (k q)),  S' = alpha S + u k^T
//
// Both dot products use the row as it was read, so that one reduction serves.
#pragma once

#include "cuda/decode/operands.cuh"

namespace gdn {

// 8 lanes share a row and 4 rows make a group, the unit of a warp.
template <class State_, int kDim_>
struct DecodeTraits {
  using State = State_;
  static constexpr int kDim = kDim_;  // K = V
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kLanes = 8;                 // of one row
  static constexpr int kGroupRows = 32 / kLanes;   // rows of one group
  static constexpr int kElements = kDim / kLanes;  // of one row in one lane
  static constexpr int kWidth = kPerVector<State>;
  static constexpr int kVectors = kElements / kWidth;  // 16-byte accesses per row and lane
  static constexpr int kMaxGroups = kDim / (kWarps * kGroupRows);  // of a warp
  static constexpr int kGroup = kGroupRows * kDim;                 // elements
  static constexpr int kHead = kDim * kDim;
};

// A lane's first column of its j-th 16-byte vector.
template <class Traits>
__device__ __forceinline__ int lane_column(int j) {
  return (j * Traits::kLanes + static_cast<int>(threadIdx.x % Traits::kLanes)) * Traits::kWidth;
}

// A lane's share of some K row.
template <class Traits>
struct LaneRow {
  float values[Traits::kVectors][Traits::kWidth];

  __device__ __forceinline__ explicit LaneRow(const float* shared_row) {
#pragma unroll
    for (int j = 0; j < Traits::kVectors; ++j) {
#pragma unroll
      for (int i = 0; i < Traits::kWidth; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(shared_row + lane_column<Traits>(j) + i);
        values[j][i] = v.x, values[j][i + 1] = v.y, values[j][i + 2] = v.z, values[j][i + 3] = v.w;
      }
    }
  }
};

// What the rows of one (batch row, head) share, and the two ways to update a row.
template <class Traits>
struct DecodeHead {
  using State = typename Traits::State;
  LaneRow<Traits> k, q;
  NormScales norm;
  float alpha, beta, scale;

  __device__ __forceinline__ DecodeHead(const DecodeShared<Traits>& shared,
                                        const DecodeProblem& problem)
      : k(shared.k), q(shared.q), norm(norm_scales(shared, problem.qk_l2norm)), alpha(shared.alpha),
        beta(shared.beta), scale(problem.scale) {}

  // Rewrites this lane's share of one row and returns the row's output; `v` belongs to the row.
  __device__ __forceinline__ float update(float v, uint4 (&row)[Traits::kVectors]) const {
    float s[Traits::kVectors][Traits::kWidth];
    float x = 0.0f, y = 0.0f;
#pragma unroll
    for (int j = 0; j < Traits::kVectors; ++j) {
      unpack<State>(row[j], s[j]);
#pragma unroll
      for (int i = 0; i < Traits::kWidth; ++i) {
        x = fmaf(s[j][i], k.values[j][i], x);
        y = fmaf(s[j][i], q.values[j][i], y);
      }
    }
    x = group_sum<Traits::kLanes>(x) * norm.k;
    y = group_sum<Traits::kLanes>(y) * norm.q;
    const float u = beta * (v - alpha * x);
    const float u_k = u * norm.k;
#pragma unroll
    for (int j = 0; j < Traits::kVectors; ++j) {
#pragma unroll
      for (int i = 0; i < Traits::kWidth; ++i) {
        s[j][i] = fmaf(u_k, k.values[j][i], alpha * s[j][i]);
      }
      row[j] = pack<State>(s[j]);
    }
    return scale * fmaf(u, norm.kq, alpha * y);
  }

  // The same from the zero state.
  __device__ __forceinline__ float start(float v, uint4 (&row)[Traits::kVectors]) const {
    const float u = beta * v;
    const float u_k = u * norm.k;
#pragma unroll
    for (int j = 0; j < Traits::kVectors; ++j) {
      float s[Traits::kWidth];
#pragma unroll
      for (int i = 0; i < Traits::kWidth; ++i) s[i] = u_k * k.values[j][i];
      row[j] = pack<State>(s);
    }
    return scale * u * norm.kq;
  }
};

}  // namespace gdn

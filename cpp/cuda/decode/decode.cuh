// One token of the gated delta rule on paged states, bound by device memory.
//
// Every state row is read once, and both dot products use the row as it was read, so that one
// reduction serves:
//
//     x = S k,  y = S q,  u = beta (v - alpha x)
//     o = scale (alpha y + u (k q)),  S' = alpha S + u k^T
//
// Grid: (batch row, state head, part of the V rows), x only. A warp owns `groups` x 4 rows: 8 lanes
// share a row, 4 rows are one group, and the next groups are on their way while these are worked
// on. A lane reads its own elements before it writes them, so a page may be updated in place.
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/common/pool.cuh"
#include "cuda/decode/operands.cuh"

namespace gdn {

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
  // Bytes in flight: kTile groups are worked on while the next kTile are loading.
  static constexpr int kTile = sizeof(State) == 4 ? 1 : 2;
  static constexpr int kBlocksPerSm = 5;
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
        const float4 v =
            *reinterpret_cast<const float4*>(shared_row + lane_column<Traits>(j) + i);
        values[j][i] = v.x, values[j][i + 1] = v.y, values[j][i + 2] = v.z, values[j][i + 3] = v.w;
      }
    }
  }
};

// kTile row groups as they lie in memory: this lane's vectors.
template <class Traits>
struct StateTile {
  static constexpr int kStride = Traits::kLanes * Traits::kWidth;
  static constexpr int kGroup = Traits::kGroupRows * Traits::kDim;
  uint4 vectors[Traits::kTile][Traits::kVectors];

  __device__ __forceinline__ void load(const Streaming& streaming,
                                       const typename Traits::State* from) {
#pragma unroll
    for (int t = 0; t < Traits::kTile; ++t) {
#pragma unroll
      for (int j = 0; j < Traits::kVectors; ++j) {
        vectors[t][j] = streaming.load(from + t * kGroup + j * kStride);
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
      : k(shared.k),
        q(shared.q),
        norm(norm_scales(shared, problem.qk_l2norm)),
        alpha(shared.alpha),
        beta(shared.beta),
        scale(problem.scale) {}

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

// Where this thread stands. v and the output go through the lanes: lane (r, g) of a warp, r the row
// in a group and g the lane in a row, holds those of row r of group g.
template <class Traits>
struct DecodePlace {
  int64_t b;  // batch row
  int32_t h;  // state head
  int lane_in_row;
  int group_row;  // row of this lane in the warp's first group
  int own_row;    // the row whose v and output this lane holds
  bool owns_row;

  __device__ __forceinline__ explicit DecodePlace(const DecodeParams& p) {
    const uint32_t state = blockIdx.x >> p.parts_log2;
    const int part = blockIdx.x - (state << p.parts_log2);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t row = state / static_cast<uint32_t>(p.problem.heads.state);
    b = row;
    h = static_cast<int32_t>(state - row * p.problem.heads.state);
    lane_in_row = lane % Traits::kLanes;
    const int first = (part * Traits::kWarps + warp) * p.groups * Traits::kGroupRows;
    group_row = first + lane / Traits::kLanes;
    own_row = group_row + lane_in_row * Traits::kGroupRows;
    owns_row = lane_in_row < p.groups;
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

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  using State = typename Traits::State;
  using Tile = StateTile<Traits>;
  constexpr int kTile = Traits::kTile;
  __shared__ DecodeShared<Traits> shared;
  const DecodeProblem& problem = p.problem;

  // Addresses need no memory: they are ready when the predecessor is done.
  const DecodePlace<Traits> at(p);
  const DecodeOffsets<Traits> offsets(p, at);
  // NOTE: never true; without a branch here ptxas 13.0 moves the address arithmetic past the wait.
  if (at.b >= problem.batch) return;
  dependency_wait();
  allow_dependents();

  const bool owns_element = Traits::kThreads == Traits::kDim || threadIdx.x < Traits::kDim;
  const bool makes_gates = threadIdx.x < 32;
  const uint16_t k_bits = owns_element ? load_io(problem.k, offsets.k) : uint16_t{0};
  const uint16_t q_bits = owns_element ? load_io(problem.q, offsets.q) : uint16_t{0};
  const uint16_t v_bits = at.owns_row ? load_io(problem.v, offsets.v) : uint16_t{0};
  GateBits gate_bits;
  if (makes_gates) gate_bits.load(problem.gates, offsets.a, offsets.b, at.h);
  auto* output =
      const_cast<uint16_t*>(static_cast<const uint16_t*>(problem.output.data)) + offsets.output;
  const DecodeRow rows = load_rows(problem, at.b);
  if (!rows.live) {
    if (at.owns_row) *output = 0;
    return;
  }
  const int offset = at.group_row * Traits::kDim + lane_column<Traits>(0);
  constexpr int kHead = Traits::kDim * Traits::kDim;
  const State* from = state_of<State>(problem.initial, rows.read_row, at.h, kHead) + offset;
  State* to = state_of<State>(problem.output_state, rows.write_row, at.h, kHead) + offset;
  const bool reads = rows.read_row >= 0, writes = rows.write_row >= 0;
  const Streaming streaming;
  Tile next;
  if (reads) next.load(streaming, from);

  if (makes_gates) {
    shared.alpha = gate_bits.alpha(problem.gates);
    shared.beta = gate_bits.beta(problem.gates);
  }
  share_operands(shared, from_bits(k_bits, problem.io), from_bits(q_bits, problem.io));
  __syncthreads();
  const DecodeHead<Traits> head(shared, problem);
  const float own_v = from_bits(v_bits, problem.io);
  // A reset discards the old state even if it holds NaN or inf.
  const bool starts_at_zero = !reads || head.alpha == 0.0f;
  float own_output = 0.0f;
#pragma unroll 2
  for (int g = 0; g < p.groups; g += kTile) {
    Tile tile = next;
    from += kTile * Tile::kGroup;
    if (reads && g + kTile < p.groups) next.load(streaming, from);
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      const float row_v = __shfl_sync(kFullWarp, own_v, g + t, Traits::kLanes);
      const float o = starts_at_zero ? head.start(row_v, tile.vectors[t])
                                     : head.update(row_v, tile.vectors[t]);
      if (at.lane_in_row == g + t) own_output = o;
      if (writes) {
#pragma unroll
        for (int j = 0; j < Traits::kVectors; ++j) {
          streaming.store(to + t * Tile::kGroup + j * Tile::kStride, tile.vectors[t][j]);
        }
      }
    }
    to += kTile * Tile::kGroup;
  }
  if (at.owns_row) *output = io_bits(own_output, problem.io);
}

}  // namespace gdn

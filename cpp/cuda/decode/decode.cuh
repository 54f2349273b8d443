// One token of the gated delta rule on paged states, bound by device memory: every state row is
// read once and written once, through registers.
//
// Grid: (batch row, state head, part of the V rows), x only. A warp owns `groups` x 4 rows; the
// next kTile groups are on their way while these are worked on. A lane reads its own elements
// before it writes them, so a page may be updated in place.
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/common/pool.cuh"
#include "cuda/decode/head.cuh"
#include "cuda/decode/prefetch.cuh"

namespace gdn {

template <class State_, int kDim_, int kTile_>
struct StreamTraits : DecodeTraits<State_, kDim_> {
  static constexpr int kTile = kTile_;  // groups in one step
  static constexpr int kBlocksPerSm = 4;
};

// kTile row groups as they lie in memory: this lane's vectors.
template <class Traits>
struct StateTile {
  static constexpr int kStride = Traits::kLanes * Traits::kWidth;
  uint4 vectors[Traits::kTile][Traits::kVectors];

  __device__ __forceinline__ void load(const Streaming& streaming,
                                       const typename Traits::State* from) {
#pragma unroll
    for (int t = 0; t < Traits::kTile; ++t) {
#pragma unroll
      for (int j = 0; j < Traits::kVectors; ++j) {
        vectors[t][j] = streaming.load(from + t * Traits::kGroup + j * kStride);
      }
    }
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
  prefetch_state(p, at, expected_row(p, at));
  const DecodeOffsets<Traits> offsets(p, at);
  // NOTE: never true; without a branch here ptxas 13.0 moves the address arithmetic past the wait.
  if (at.b >= problem.batch) return;
  dependency_wait();
  allow_dependents();

  const DecodeOperands<Traits> operands(problem, at, offsets);
  const DecodeRow rows = SlotBits(problem, at.b).rows(problem, at.b);
  if (!rows.live) {
    if (at.owns_row) store_io(problem.output, offsets.output, 0);
    return;
  }
  const int offset = at.group_row * Traits::kDim + lane_column<Traits>(0);
  const State* from = state_of<State>(problem.initial, rows.read_row, at.h, Traits::kHead) + offset;
  State* to = state_of<State>(problem.output_state, rows.write_row, at.h, Traits::kHead) + offset;
  const bool reads = rows.read_row >= 0, writes = rows.write_row >= 0;
  const Streaming streaming(p.evict_first);
  Tile next;
  if (reads) next.load(streaming, from);

  share_operands(shared, problem, operands);
  const DecodeHead<Traits> head(shared, problem);
  const float own_v = from_bits(operands.v, problem.io);
  // A reset discards the old state even if it holds NaN or inf.
  const bool starts_at_zero = !reads || head.alpha == 0.0f;
  float own_output = 0.0f;
#pragma unroll 2
  for (int g = 0; g < at.groups; g += kTile) {
    Tile tile = next;
    from += kTile * Traits::kGroup;
    if (reads && g + kTile < at.groups) next.load(streaming, from);
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      const float row_v = __shfl_sync(kFullWarp, own_v, g + t, Traits::kLanes);
      const float o =
          starts_at_zero ? head.start(row_v, tile.vectors[t]) : head.update(row_v, tile.vectors[t]);
      if (at.lane_in_row == g + t) own_output = o;
      if (writes) {
#pragma unroll
        for (int j = 0; j < Traits::kVectors; ++j) {
          streaming.store(to + t * Traits::kGroup + j * Tile::kStride, tile.vectors[t][j]);
        }
      }
    }
    to += kTile * Traits::kGroup;
  }
  if (at.owns_row) store_io(problem.output, offsets.output, io_bits(own_output, problem.io));
}

}  // namespace gdn

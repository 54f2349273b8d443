// The same step for large batches on sm_90 and later: the rows of a warp travel in bulk to shared
// memory, are rewritten there and leave in bulk. The copies are on their way before anything is
// computed, and few blocks per SM keep enough bytes in flight.
//
// NOTE: device memory is fastest when all SMs work in a small window of addresses: copying in place
// reached 92 % of a plain copy with 138 MB in work at a time and 97 to 99 % with 9 to 13 MB (H200).
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/dependent.cuh"
#include "cuda/common/pool.cuh"
#include "cuda/decode/head.cuh"
#include "cuda/decode/prefetch.cuh"

namespace gdn {

template <class State_, int kDim_>
struct BulkTraits : DecodeTraits<State_, kDim_> {
  // Groups of one copy. NOTE: 4 KB is the best size of a copy (H200): 8 KB lose 3 %.
  static constexpr int kTile = sizeof(State_) == 4 ? 2 : 4;
  static constexpr int kBlocksPerSm = 5;
};

// A warp's rows in shared memory, one barrier per copy. Warps do not wait for each other.
template <class Traits>
struct WarpRows {
  using State = typename Traits::State;
  static constexpr int kCopy = Traits::kTile * Traits::kGroup;  // elements
  static constexpr int kMaxCopies = Traits::kMaxGroups / Traits::kTile;
  State* rows;
  uint64_t* barriers;
  int copies;

  __device__ __forceinline__ void init() const {
#pragma unroll
    for (int c = 0; c < kMaxCopies; ++c) barrier_init(barriers + c);
    barrier_init_fence();
  }
  __device__ __forceinline__ void load_all(const State* from, uint64_t policy) const {
#pragma unroll 1
    for (int c = 0; c < copies; ++c) {
      barrier_expect(barriers + c, kCopy * sizeof(State));
      bulk_load(rows + c * kCopy, from + c * kCopy, kCopy * sizeof(State), barriers + c, policy);
    }
  }
  // What was loaded of another row has landed: the barriers are in their second phase.
  __device__ __forceinline__ void discard() const {
#pragma unroll 1
    for (int c = 0; c < copies; ++c) barrier_wait(barriers + c, 0);
  }
  __device__ __forceinline__ void store(int c, State* to, uint64_t policy) const {
    bulk_store(to + c * kCopy, rows + c * kCopy, kCopy * sizeof(State), policy);
    bulk_commit();
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    decode_bulk_kernel(const __grid_constant__ DecodeParams p) {
  using State = typename Traits::State;
  constexpr int kTile = Traits::kTile;
  extern __shared__ __align__(128) unsigned char states[];
  __shared__ DecodeShared<Traits> shared;
  __shared__ uint64_t barriers[Traits::kWarps][WarpRows<Traits>::kMaxCopies];
  const DecodeProblem& problem = p.problem;

  // Addresses need no memory: they are ready when the predecessor is done.
  const DecodePlace<Traits> at(p);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const WarpRows<Traits> mine{
      .rows = reinterpret_cast<State*>(states) + warp * at.groups * Traits::kGroup,
      .barriers = barriers[warp],
      .copies = at.groups / kTile};
  if (lane == 0) mine.init();
  const int64_t expected = expected_row(p, at);
  prefetch_state(p, at, expected);
  const DecodeOffsets<Traits> offsets(p, at);
  // NOTE: never true; without a branch here ptxas 13.0 moves the address arithmetic past the wait.
  if (at.b >= problem.batch) return;
  dependency_wait();
  allow_dependents();

  const DecodeOperands<Traits> operands(problem, at, offsets);
  const SlotBits slots(problem, at.b);
  const int first = at.warp_row * Traits::kDim;
  const Streaming streaming(p.evict_first);
  if (expected >= 0 && lane == 0) {  // does not wait for the slot
    mine.load_all(state_of<State>(problem.initial, expected, at.h, Traits::kHead) + first,
                  streaming.policy);
  }
  const DecodeRow rows = slots.rows(problem, at.b);
  const bool loaded = expected >= 0 && rows.live && rows.read_row == expected;
  const uint32_t phase = expected >= 0 && !loaded ? 1 : 0;
  if (phase == 1 && lane == 0) mine.discard();
  if (!rows.live) {
    if (at.owns_row) store_io(problem.output, offsets.output, 0);
    return;
  }
  const State* from = state_of<State>(problem.initial, rows.read_row, at.h, Traits::kHead) + first;
  State* to = state_of<State>(problem.output_state, rows.write_row, at.h, Traits::kHead) + first;
  const bool reads = rows.read_row >= 0, writes = rows.write_row >= 0;
  if (reads && !loaded && lane == 0) mine.load_all(from, streaming.policy);

  share_operands(shared, problem, operands);  // its barrier also publishes mine.init()
  const DecodeHead<Traits> head(shared, problem);
  const float own_v = from_bits(operands.v, problem.io);
  // A reset discards the old state even if it holds NaN or inf.
  const bool starts_at_zero = !reads || head.alpha == 0.0f;
  const int in_warp = lane / Traits::kLanes * Traits::kDim + lane_column<Traits>(0);
  float own_output = 0.0f;
  for (int c = 0; c < mine.copies; ++c) {
    if (reads) barrier_wait(mine.barriers + c, phase);
#pragma unroll 1
    for (int g = c * kTile; g < (c + 1) * kTile; ++g) {
      auto* row = reinterpret_cast<uint4*>(mine.rows + g * Traits::kGroup + in_warp);
      const float row_v = __shfl_sync(kFullWarp, own_v, g, Traits::kLanes);
      uint4 vectors[Traits::kVectors];
      float o;
      if (starts_at_zero) {
        o = head.start(row_v, vectors);
      } else {
#pragma unroll
        for (int j = 0; j < Traits::kVectors; ++j) vectors[j] = row[j * Traits::kLanes];
        o = head.update(row_v, vectors);
      }
      if (at.lane_in_row == g) own_output = o;
#pragma unroll
      for (int j = 0; j < Traits::kVectors; ++j) row[j * Traits::kLanes] = vectors[j];
    }
    if (writes) {
      bulk_fence();
      __syncwarp();
      if (lane == 0) mine.store(c, to, streaming.policy);
    }
  }
  if (at.owns_row) store_io(problem.output, offsets.output, io_bits(own_output, problem.io));
  if (lane == 0) bulk_wait_read();
}

}  // namespace gdn

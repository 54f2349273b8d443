// What a block does before the predecessor is done: it looks which row it will read, and asks L2
// for the first part of the state.
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/pool.cuh"
#include "cuda/decode/operands.cuh"

namespace gdn {

// The row to read as slots stand ahead of dependency_wait(); -1: not known. The predecessor may be
// about to replace the slot: it is read again after the wait, and what was loaded of another row is
// thrown away. Bypasses L1, so that the second read is fresh.
template <class Traits>
__device__ __forceinline__ int64_t expected_row(const DecodeParams& p,
                                                const DecodePlace<Traits>& at) {
  const DecodeProblem& problem = p.problem;
  if (!p.expects_row) return -1;
  int64_t row = at.b;
  if (problem.initial_indices) row = load_index_from_l2(problem.initial_indices, at.b);
  return row >= 0 && row < problem.initial.num_rows ? row : -1;
}

// A hint: a page that changes meanwhile changes in L2 too.
template <class Traits>
__device__ __forceinline__ void prefetch_state(const DecodeParams& p, const DecodePlace<Traits>& at,
                                               int64_t row) {
  using State = typename Traits::State;
  if (row < 0 || threadIdx.x % 32 != 0 || blockIdx.x >= p.prefetch_blocks) return;
  const State* state = state_of<State>(p.problem.initial, row, at.h, Traits::kHead);
  bulk_prefetch(state + at.warp_row * Traits::kDim,
                min(p.prefetch_groups, at.groups) * Traits::kGroup * sizeof(State));
}

}  // namespace gdn

// States on their way to L2 before the predecessor is done.
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/pool.cuh"
#include "cuda/decode/operands.cuh"

namespace gdn {

// Called ahead of dependency_wait(): the slot read here may be one that the predecessor is about
// to replace. It is used for nothing but this hint, bypasses L1, and is read again after the wait.
// A page that changes meanwhile changes in L2 too.
template <class Traits>
__device__ __forceinline__ void prefetch_state(const DecodeParams& p,
                                               const DecodePlace<Traits>& at) {
  using State = typename Traits::State;
  const DecodeProblem& problem = p.problem;
  if (p.prefetch_groups == 0 || threadIdx.x % 32 != 0) return;
  int64_t row = at.b;
  if (problem.initial_indices) row = load_index_from_l2(problem.initial_indices, at.b);
  if (row < 0 || row >= problem.initial.num_rows) return;
  const State* state = state_of<State>(problem.initial, row, at.h, Traits::kHead);
  bulk_prefetch(state + at.warp_row * Traits::kDim,
                min(p.prefetch_groups, at.groups) * Traits::kGroup * sizeof(State));
}

}  // namespace gdn

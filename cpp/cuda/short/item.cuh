// Who works on what, and what every way of running a sequence reads and writes alike.
#pragma once

#include "cuda/short/params.h"
#include "cuda/short/state.cuh"

namespace gdn {

// One warp's part of one state.
struct ShortItem {
  int32_t h;
  int32_t first_row;

  // Item `number` of a sequence, part by part and head by head.
  static __device__ __forceinline__ ShortItem of(const ShortParams& p, uint32_t number) {
    const uint32_t h = number / p.parts, part = number - h * p.parts;
    const int warps = static_cast<int>(blockDim.x / 32);
    return {.h = static_cast<int32_t>(h),
            .first_row = 16 * (static_cast<int>(part) * warps + this_warp())};
  }
};

__device__ __forceinline__ int64_t checkpoint_of(const PrefillProblem& p, const ShortEntry& s,
                                                 int64_t j) {
  const int64_t entry = s.checkpoint_start + j;
  return p.checkpoint_indices ? p.checkpoint_indices[entry] : entry;
}

// A warp's rows of a state on their way to L2; null: none.
template <class Traits>
__device__ __forceinline__ void prefetch_rows(const void* state, DType dtype, int first_row) {
  if (state == nullptr) return;
  const int size = dtype == DType::kFloat32 ? 4 : 2;
  const char* rows = static_cast<const char*>(state) + size * first_row * Traits::kDim;
  for (int at = 128 * this_lane(); at < size * 16 * Traits::kDim; at += 128 * 32) {
    asm volatile("prefetch.global.L2 [%0];" : : "l"(rows + at));
  }
}

// Outputs of a dead sequence, which may be longer than a short one.
__device__ __forceinline__ void zero_outputs(const ShortParams& p, const ShortEntry& s,
                                             const ShortItem& item) {
  const Tensor& o = p.problem.output;
  for (int64_t t = this_lane() / 4; t < s.length; t += 8) {
    const int64_t at = (s.begin + t) * o.row_stride + item.h * o.head_stride + item.first_row;
    store_four(o, at + 4 * (this_lane() % 4), uint2{}, p.vector_v);
  }
}

}  // namespace gdn

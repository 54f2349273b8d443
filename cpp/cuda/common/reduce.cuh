// Sums across the lanes of a warp.
#pragma once

#include <cstdint>

namespace gdn {

inline constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ int this_lane() { return threadIdx.x & 31; }
__device__ __forceinline__ int this_warp() { return threadIdx.x >> 5; }

// Sum over each group of kLanes neighbouring lanes, known to all of them. Every lane adds in the
// same order, so all get the same bits.
template <int kLanes>
__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

__device__ __forceinline__ float warp_sum(float x) { return group_sum<32>(x); }

// Sum of this lane and all lower ones.
__device__ __forceinline__ float warp_inclusive_sum(float x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float lower = __shfl_up_sync(kFullWarp, x, step);
    if (lane >= step) x += lower;
  }
  return x;
}

}  // namespace gdn

// S M + N over the maps of segments, in fp32: what devices exchange of one prompt.
//
// Rows of V are independent: a block carries 8 of them through all maps. A thread has one column of
// M, which it reads from L2 once for its 8 rows.
#include "core/segment.h"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"

namespace gdn {
namespace {

constexpr int kRows = 8;
constexpr int kThreads = 128;

// dim_k floats of each row, [dim_k][kRows], so that a thread reads its rows by two vectors.
__device__ __forceinline__ void multiply_column(const CombineProblem& p, const float* m,
                                                const float* state, float (&sums)[kRows]) {
#pragma unroll 4
  for (int j = 0; j < p.dim_k; ++j) {
    const float x = m[static_cast<int64_t>(j) * p.dim_k];
    const auto* s = reinterpret_cast<const float4*>(state + j * kRows);
    const float4 low = s[0], high = s[1];
    if (x == 0.0f) continue;  // and what is not finite ends there
    sums[0] = fmaf(low.x, x, sums[0]);
    sums[1] = fmaf(low.y, x, sums[1]);
    sums[2] = fmaf(low.z, x, sums[2]);
    sums[3] = fmaf(low.w, x, sums[3]);
    sums[4] = fmaf(high.x, x, sums[4]);
    sums[5] = fmaf(high.y, x, sums[5]);
    sums[6] = fmaf(high.z, x, sums[6]);
    sums[7] = fmaf(high.w, x, sums[7]);
  }
}

__global__ void __launch_bounds__(kThreads) combine_maps(const __grid_constant__ CombineProblem p) {
  extern __shared__ __align__(16) float states[];  // two of [dim_k][kRows]
  const int blocks_per_head = p.dim_v / kRows;
  const int64_t head = blockIdx.x / blocks_per_head;
  const int64_t row = blockIdx.x % blocks_per_head * kRows;
  const int64_t place = (head * p.dim_v + row) * p.dim_k;  // of the rows in [H, V, K]
  float* state = states;
  float* next = states + p.dim_k * kRows;
  for (int c = threadIdx.x; c < p.dim_k; c += kThreads) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      state[c * kRows + r] =
          p.initial_state == nullptr ? 0.0f : p.initial_state[place + r * p.dim_k + c];
    }
  }
  __syncthreads();
  for (int64_t map = 0; map < p.num_maps; ++map) {
    const float* m = p.transitions + map * p.transition_stride + head * p.dim_k * p.dim_k;
    const float* n = p.offsets + map * p.offset_stride + place;
    const bool from_zero = map == 0 && p.initial_state == nullptr;
    for (int c = threadIdx.x; c < p.dim_k; c += kThreads) {
      float sums[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = n[r * p.dim_k + c];
      if (!from_zero) multiply_column(p, m + c, state, sums);
#pragma unroll
      for (int r = 0; r < kRows; ++r) next[c * kRows + r] = sums[r];
    }
    __syncthreads();
    float* const last = state;
    state = next;
    next = last;
  }
  for (int c = threadIdx.x; c < p.dim_k; c += kThreads) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) p.state[place + r * p.dim_k + c] = state[c * kRows + r];
  }
}

}  // namespace

void combine_segments_cuda(const CombineProblem& p) {
  if (p.dim_k % 8 != 0 || p.dim_v % 8 != 0 || p.dim_k > 512) {
    throw Error(GDN_UNSUPPORTED,
                "head_dim_k and head_dim_v: %d and %d given, multiples of 8 and head_dim_k up to "
                "512 expected on CUDA",
                p.dim_k, p.dim_v);
  }
  const LaunchScope scope(p.device);
  launch(combine_maps,
         {.blocks = int64_t{p.heads} * (p.dim_v / kRows),
          .threads = kThreads,
          .shared_bytes = 2 * sizeof(float) * kRows * static_cast<size_t>(p.dim_k),
          .stream = p.device.stream},
         p, "combine_maps");
}

void load_segment_kernels() { load_kernel(combine_maps, "combine_maps"); }

}  // namespace gdn

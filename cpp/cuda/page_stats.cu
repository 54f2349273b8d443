// Health of pages: one block per page counts NaN and inf and takes the largest finite magnitude.
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/common/types.cuh"
#include "cuda/page_table.h"

namespace gdn {
namespace {

constexpr int kThreads = 256;

struct Stats {
  long long nan = 0;
  long long inf = 0;
  float abs_max = 0.0f;
};

__device__ void add(Stats& stats, float x) {
  const float magnitude = fabsf(x);
  if (isnan(x)) {
    ++stats.nan;
  } else if (isinf(x)) {
    ++stats.inf;
  } else {
    stats.abs_max = fmaxf(stats.abs_max, magnitude);
  }
}

__device__ void merge(Stats& stats, const Stats& other) {
  stats.nan += other.nan;
  stats.inf += other.inf;
  stats.abs_max = fmaxf(stats.abs_max, other.abs_max);
}

// Tree over the block; the result is thread 0's.
__device__ Stats block_merge(const Stats& mine) {
  __shared__ Stats shared[kThreads];
  shared[threadIdx.x] = mine;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) merge(shared[threadIdx.x], shared[threadIdx.x + half]);
  }
  return shared[threadIdx.x];
}

__global__ void __launch_bounds__(kThreads)
    page_stats_kernel(const __grid_constant__ PageStatsProblem p) {
  const int64_t page = blockIdx.x;
  const int64_t row = p.page_indices ? p.page_indices[page] : page;
  if (row < 0 || row >= p.pool.num_rows) {  // the same in the whole block
    if (threadIdx.x == 0) {
      p.nan_count[page] = -1;
      p.inf_count[page] = -1;
      p.abs_max[page] = -1.0f;
    }
    return;
  }
  Stats stats;
  const int64_t first = row * p.pool.row_stride;
  for (int64_t i = threadIdx.x; i < p.row_elements; i += kThreads) {
    add(stats, load_element(p.pool.data, p.pool.dtype, first + i));
  }
  stats = block_merge(stats);
  if (threadIdx.x == 0) {
    p.nan_count[page] = stats.nan;
    p.inf_count[page] = stats.inf;
    p.abs_max[page] = stats.abs_max;
  }
}

}  // namespace

void page_stats_cuda(const PageStatsProblem& p) {
  const LaunchScope scope(p.device);
  launch(page_stats_kernel, {.blocks = p.num_pages, .threads = kThreads, .stream = p.device.stream},
         p, "page_stats");
}

void load_page_stats_kernels() { load_kernel(page_stats_kernel, "page_stats"); }

}  // namespace gdn

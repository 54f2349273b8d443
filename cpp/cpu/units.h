// Work of one pass over states: units in ranges over the threads, each with the thread's scratch.
#pragma once

#include <algorithm>
#include <atomic>

#include "core/status.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace gdn::cpu {

inline constexpr int64_t kSerialPassElements = 1 << 17;  // B H K V below which threads cost more
inline constexpr int64_t kRangesPerThread = 8;

// Threads for one pass over so many state elements, `threads->count` of them.
inline int32_t threads_for_pass(int64_t elements, Threads* threads) {
  if (elements <= kSerialPassElements) threads->count = 1;
  return thread_count(*threads);
}

// Runs unit(i, scratch) for i in [0, n) on `count` threads; units must not throw.
template <class Unit>
void for_units(const Threads& threads, int32_t count, int64_t n, size_t scratch_bytes, Unit unit) {
  const int64_t ranges =
      count == 1 ? std::min<int64_t>(n, 1) : std::min(n, kRangesPerThread * count);
  std::atomic<bool> out_of_memory{false};
  parallel_for(threads, ranges, [&](int64_t r) {
    float* scratch = static_cast<float*>(thread_scratch().reserve(scratch_bytes));
    if (scratch == nullptr) {
      out_of_memory = true;
      return;
    }
    for (int64_t i = n * r / ranges; i < n * (r + 1) / ranges; ++i) unit(i, scratch);
  });
  if (out_of_memory) {
    throw Error(GDN_INTERNAL, "out of host memory: %zu bytes of scratch", scratch_bytes);
  }
}

}  // namespace gdn::cpu

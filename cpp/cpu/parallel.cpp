#include "cpu/parallel.h"

#include <thread>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace gdn::cpu {

int32_t thread_count(const Threads& threads) {
  if (threads.count > 0) return threads.count;
  if (threads.parallel_for != nullptr) {
    static const int32_t hardware = static_cast<int32_t>(std::thread::hardware_concurrency());
    return hardware > 0 ? hardware : 1;
  }
#if defined(_OPENMP)
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

void parallel_for(const Threads& threads, int64_t n, void (*body)(void* arg, int64_t i),
                  void* arg) {
  if (n > 1 && threads.parallel_for != nullptr && threads.count != 1) {
    threads.parallel_for(threads.context, n, body, arg);
    return;
  }
#if defined(_OPENMP)
  const int32_t count = thread_count(threads);
  if (n > 1 && count > 1) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(count)
    for (int64_t i = 0; i < n; ++i) body(arg, i);
    return;
  }
#endif
  for (int64_t i = 0; i < n; ++i) body(arg, i);
}

}  // namespace gdn::cpu

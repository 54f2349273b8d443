// What this machine can do, measured: fused multiply-adds in registers and memcpy, per thread
// count. Prints one JSON object. Usage: cpu_peak [threads ...]
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

double now() {
  using clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(clock::now().time_since_epoch()).count();
}

constexpr int kChains = 16;  // enough to hide the latency of two pipes
constexpr int kRounds = 4000000;

template <int kLanes>
struct Register {
  typedef float type __attribute__((vector_size(4 * kLanes)));
};

template <int kLanes>
inline __attribute__((always_inline)) float fma_chains(int rounds) {
  using Vec = typename Register<kLanes>::type;
  Vec x[kChains], a = Vec{} + 0.999f, b = Vec{} + 0.001f;
  asm volatile("" : "+m"(a), "+m"(b));
  const Vec factor = a, term = b;
  for (int i = 0; i < kChains; ++i) x[i] = Vec{} + static_cast<float>(i);
  for (int n = 0; n < rounds; ++n) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) x[i] = x[i] * factor + term;
  }
  float sum = 0;
  for (int i = 0; i < kChains; ++i) sum += x[i][0];
  return sum;
}

struct Isa {
  const char* name;
  int lanes;
  float (*run)(int rounds);
};

__attribute__((noipa)) float run_baseline(int rounds) { return fma_chains<4>(rounds); }
#if defined(__x86_64__)
__attribute__((noipa, target("avx2,fma"))) float run_avx2(int rounds) {
  return fma_chains<8>(rounds);
}
__attribute__((noipa, target("avx512f"))) float run_avx512(int rounds) {
  return fma_chains<16>(rounds);
}
#endif

std::vector<Isa> instruction_sets() {
  std::vector<Isa> all;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) all.push_back({"AVX-512", 16, run_avx512});
  if (__builtin_cpu_supports("fma")) all.push_back({"AVX2", 8, run_avx2});
#endif
  all.push_back({"baseline", 4, run_baseline});
  return all;
}

// Seconds from the first thread's start to the last one's end; the best of `repeats`.
template <class Body>
double best_seconds(int threads, int repeats, Body body) {
  double best = 1e30;
  for (int r = 0; r < repeats; ++r) {
    std::barrier sync(threads);
    std::vector<double> starts(threads), ends(threads);
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t) {
      pool.emplace_back([&, t] {
        sync.arrive_and_wait();
        starts[t] = now();
        body(t);
        ends[t] = now();
      });
    }
    for (std::thread& thread : pool) thread.join();
    best = std::min(best, *std::max_element(ends.begin(), ends.end()) -
                              *std::min_element(starts.begin(), starts.end()));
  }
  return best;
}

double fma_gflops(const Isa& isa, int threads) {
  volatile float sink = 0;
  const int rounds = kRounds / 4;
  const double seconds = best_seconds(threads, 9, [&](int) { sink = isa.run(rounds); });
  return 2.0 * kChains * isa.lanes * rounds * threads / seconds / 1e9;
}

// Bytes read plus bytes written, on buffers far larger than a core's caches.
double memcpy_gb_per_s(int threads) {
  const size_t bytes = size_t{128} << 20;
  std::vector<char> from(bytes, 1), to(bytes, 2);
  const size_t part = bytes / threads;
  const double seconds =
      best_seconds(threads, 9, [&](int t) { std::memcpy(&to[t * part], &from[t * part], part); });
  return 2.0 * part * threads / seconds / 1e9;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> counts;
  for (int i = 1; i < argc; ++i) counts.push_back(std::max(1, std::atoi(argv[i])));
  if (counts.empty()) counts = {1};
  std::printf("{");
  const char* separator = "";
  for (const int threads : counts) {
    std::printf("%s\"%d\": {", separator, threads);
    for (const Isa& isa : instruction_sets()) {
      std::printf("\"%s GFLOP/s\": %.2f, ", isa.name, fma_gflops(isa, threads));
    }
    std::printf("\"memcpy GB/s\": %.2f}", memcpy_gb_per_s(threads));
    separator = ", ";
  }
  std::printf("}\n");
  return 0;
}

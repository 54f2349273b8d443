// The first calls of a process come from eight threads at once; all are right.
#include <atomic>
#include <thread>

#include "calls.h"
#include "check.h"

namespace {

constexpr int kThreads = 8;

// out = scale beta (q k) v and S = beta v k^T of a sequence's first token.
void check_first_token(const gdn_test::PrefillCall& c) {
  using gdn_test::kDim;
  for (int32_t h = 0; h < gdn_test::kHeads; ++h) {
    double qk = 0;
    for (int32_t i = 0; i < kDim; ++i) qk += double{c.q[i]} * c.k[i];
    for (int32_t i = 0; i < kDim; ++i) {
      const double expected = 0.25 * c.beta[h] * qk * c.v[h * kDim + i];
      CHECK(std::fabs(c.output[h * kDim + i] - expected) < 1e-5);
    }
  }
}

}  // namespace

int main() {
  std::atomic<int> ready{0};
  std::vector<std::vector<float>> outputs(kThreads), pools(kThreads), decoded(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([i, &ready, &outputs, &pools, &decoded] {
      gdn_test::PrefillCall prefill;
      gdn_test::DecodeCall decode;
      ready.fetch_add(1);
      while (ready.load() < kThreads) std::this_thread::yield();
      CHECK_OK(gdn_prefill_paged(&prefill.params));
      CHECK_OK(gdn_decode_paged(&decode.params));
      check_first_token(prefill);
      outputs[i] = prefill.output;
      pools[i] = prefill.pool_data;
      decoded[i] = decode.pool_data;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 1; i < kThreads; ++i) {
    CHECK(outputs[i] == outputs[0] && pools[i] == pools[0] && decoded[i] == decoded[0]);
  }
}

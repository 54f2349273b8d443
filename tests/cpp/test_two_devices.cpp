// Two GPUs of one process, from C: calls for a device that is not current, in either order and from
// threads without any device; and two host threads at full speed. Ends with 77 on fewer GPUs.
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "device_batch.h"

namespace {

using gdn_test::Batch;

constexpr int kSkipped = 77;

template <class Function>
Function driver_entry(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  CHECK_CUDA(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found));
  CHECK_EQUAL(found, cudaDriverEntryPointSuccess);
  return reinterpret_cast<Function>(entry);
}

CUcontext current_context() {
  static const auto get = driver_entry<PFN_cuCtxGetCurrent_v4000>("cuCtxGetCurrent");
  CUcontext context = nullptr;
  CHECK_EQUAL(get(&context), CUDA_SUCCESS);
  return context;
}

bool has_context(int device) {
  static const auto get =
      driver_entry<PFN_cuDevicePrimaryCtxGetState_v7000>("cuDevicePrimaryCtxGetState");
  unsigned flags = 0;
  int active = 0;
  CHECK_EQUAL(get(device, &flags, &active), CUDA_SUCCESS);
  return active != 0;
}

void in_a_thread(const std::function<void()>& work) { std::thread(work).join(); }

// Runs first: a process that uses device 1 alone gets no context on device 0.
void test_untouched_device() {
  in_a_thread([] {
    CHECK_OK(gdn_preload(1));
    CHECK(current_context() == nullptr);
    CHECK(!has_context(0) && has_context(1));
  });
  CHECK_CUDA(cudaSetDevice(1));
  Batch batch(1, 3, 300);
  in_a_thread([&batch] {
    batch.prefill();
    batch.decode();
    CHECK(current_context() == nullptr);
    CHECK(!has_context(0));
  });
  batch.wait();
}

// Every call for each device while each device is current.
void test_other_device() {
  std::string expected;
  std::vector<int64_t> expected_numbers;
  for (const int device : {0, 1}) {
    CHECK_OK(gdn_preload(device));
    Batch batch(device, 3, 300);
    for (const int current : {0, 1}) {
      CHECK_CUDA(cudaSetDevice(current));
      const CUcontext before = current_context();
      batch.clear();
      batch.prefill();
      batch.decode();
      const std::vector<int64_t> numbers = batch.table_calls();
      int now = -1;
      CHECK_CUDA(cudaGetDevice(&now));
      CHECK_EQUAL(now, current);
      CHECK(current_context() == before);
      const std::string results = batch.results();
      if (expected.empty()) expected = results, expected_numbers = numbers;
      CHECK(results == expected);
      CHECK(numbers == expected_numbers);
    }
  }
  CHECK(expected.find_first_not_of('\0') != std::string::npos);
}

void test_stream_of_another_device() {
  CHECK_CUDA(cudaSetDevice(0));
  Batch batch(1, 3, 300), other(0, 3, 300);
  batch.clear();
  const std::string before = batch.results();
  gdn_prefill_params_t p = batch.prefill_params();
  p.stream = other.prefill_params().stream;
  CHECK_EQUAL(gdn_prefill_paged(&p), GDN_INVALID_ARGUMENT);
  CHECK_CONTAINS(gdn_last_error(), "stream: ");
  int now = -1;
  CHECK_CUDA(cudaGetDevice(&now));
  CHECK_EQUAL(now, 0);
  CHECK_CUDA(cudaGetLastError());
  CHECK(batch.results() == before);
}

using Clock = std::chrono::steady_clock;

// Microseconds per call: until the launches are made, and until the device is done.
struct Time {
  double host, total;
};

Time timed(const std::function<void()>& call, Batch& batch, int calls) {
  batch.wait();
  const auto start = Clock::now();
  for (int i = 0; i < calls; ++i) call();
  const auto launched = Clock::now();
  batch.wait();
  const std::chrono::duration<double, std::micro> host = launched - start;
  const std::chrono::duration<double, std::micro> total = Clock::now() - start;
  return {host.count() / calls, total.count() / calls};
}

// The slower device's time with one thread each against the slower one alone.
void test_two_threads(const char* name, void (Batch::*call)(), int64_t num_seqs, int64_t length,
                      int calls) {
  Batch first(0, num_seqs, length), second(1, num_seqs, length);
  Batch* const batches[] = {&first, &second};
  const auto run = [&](int i) {
    Batch& batch = *batches[i];
    return timed([&batch, call] { (batch.*call)(); }, batch, calls);
  };
  Time alone = {1e30, 1e30}, together = {1e30, 1e30};
  const auto keep_best = [](Time& best, const Time& a, const Time& b) {
    best.host = std::min(best.host, std::max(a.host, b.host));
    best.total = std::min(best.total, std::max(a.total, b.total));
  };
  for (int repeat = 0; repeat < 9; ++repeat) {
    keep_best(alone, run(0), run(1));
    Time times[2];
    std::atomic<int> ready{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {
        ready.fetch_add(1);
        while (ready.load() < 2) {
        }
        times[i] = run(i);
      });
    }
    for (std::thread& thread : threads) thread.join();
    keep_best(together, times[0], times[1]);
  }
  printf("%-22s alone %8.2f us (host %6.2f), two threads %8.2f us (host %6.2f): %.3f\n", name,
         alone.total, alone.host, together.total, together.host, together.total / alone.total);
  CHECK(together.total <= 1.05 * alone.total);
}

}  // namespace

int main() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count < 2) {
    printf("skipped: %d GPUs, two needed\n", count);
    return kSkipped;
  }
  test_untouched_device();
  test_other_device();
  test_stream_of_another_device();
  test_two_threads("prefill, 8 x 2000", &Batch::prefill, 8, 2000, 100);
  test_two_threads("decode, 256 rows", &Batch::decode, 256, 65, 500);
  test_two_threads("decode, 1 row", &Batch::decode, 1, 65, 2000);
}

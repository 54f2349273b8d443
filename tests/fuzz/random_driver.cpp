// Drives the fuzz target with random bytes of a seed, for compilers without libFuzzer:
//
//   fuzz_api [COUNT [SEED]]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  const long count = argc > 1 ? std::atol(argv[1]) : 20000;
  std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 0) : 20260101);
  std::vector<uint8_t> bytes;
  for (long i = 0; i < count; ++i) {
    bytes.resize(random() % 512);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random() >> 32);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%ld executions\n", count);
}

#include "memory.h"

#include "gdn_paged/gdn_paged.h"

namespace gdn_fuzz {
namespace {

uint64_t next(uint64_t* state) {
  uint64_t x = (*state += 0x9E3779B97F4A7C15u);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Ordinary numbers of any 16-bit or 32-bit format: exponents near that of 1.
uint32_t ordinary(uint64_t* state) {
  const uint64_t x = next(state);
  return (0x3c003c00u + static_cast<uint32_t>(x & 0x01ff01ffu)) |
         (x & 0x100000000 ? 0x80008000u : 0);
}

std::vector<char> content(size_t size, int kind) {
  std::vector<char> bytes(size);
  uint64_t state = 20260101 + static_cast<uint64_t>(kind);
  for (size_t i = 0; i < size; i += 4) {
    uint32_t word = ordinary(&state);
    const auto any = static_cast<uint32_t>(next(&state));
    if (kind == 2 || (kind == 1 && any % 16 == 0)) word = any;  // NaN, inf, denormal numbers
    std::memcpy(&bytes[i], &word, 4);
  }
  return bytes;
}

}  // namespace

Memory::Memory() {
  for (int i = 0; i < 3; ++i) {
    const std::vector<char> bytes = content(inputs[i].size(), i);
    std::memcpy(inputs[i].begin(), bytes.data(), bytes.size());
    inputs[i].protect();
    pools[i].remember(content(pools[i].size(), i));
  }
  output.remember(std::vector<char>(output.size(), '\xa5'));
  for (size_t i = 0; i < kTables; ++i) tables.push_back(new Region(4096));
}

void Memory::check(bool failed) {
  for (int i = 0; i < 4; ++i) {
    Region* region = writable(i);
    if (failed) region->forbid();
    FUZZ_CHECK(region->intact());
  }
}

Memory& memory() {
  static Memory* const instance = new Memory;
  return *instance;
}

}  // namespace gdn_fuzz

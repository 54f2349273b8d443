// The fuzzer's input as numbers. Past its end there are zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gdn_fuzz {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  template <class T>
  T take() {
    T value{};
    const size_t have = static_cast<size_t>(end_ - at_);
    const size_t size = have < sizeof(T) ? have : sizeof(T);
    if (size > 0) std::memcpy(&value, at_, size);
    at_ += size;
    return value;
  }

  int64_t below(int64_t bound) {  // 0 <= result < bound <= 256
    return take<uint8_t>() % bound;
  }
  bool one_in(int64_t n) { return below(n) == n - 1; }  // never at the end of the input
  bool flag() { return one_in(2); }

  // Small, at a boundary, or anything.
  int64_t number() {
    static constexpr int64_t kEdges[] = {-1,        -2,        64,        128,       1 << 16,
                                         INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, 1ll << 32,
                                         1ll << 31, 1ll << 40, 1ll << 62, 65,        63,
                                         0x210,     0x410,     0x220,     0x40,      0x20};
    switch (below(4)) {
      case 0: return below(20);
      case 1: return static_cast<int8_t>(take<uint8_t>());
      case 2: return kEdges[below(sizeof kEdges / sizeof *kEdges)];
      default: return take<int64_t>();
    }
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

// Overwrites some fields, or parts of them, or all of a struct.
template <class Params>
void spoil(Bytes& in, Params* params) {
  auto* bytes = reinterpret_cast<uint8_t*>(params);
  if (in.one_in(64)) {
    for (size_t i = 0; i < sizeof(Params); i += 8) {
      const uint64_t word = in.take<uint64_t>();
      std::memcpy(bytes + i, &word, 8);
    }
    if (in.flag()) params->struct_size = sizeof(Params);
  }
  for (int64_t count = in.flag() ? in.below(4) : 0; count > 0; --count) {
    const size_t width = size_t{1} << in.below(4);
    const size_t field = in.take<uint16_t>() % (sizeof(Params) / width);
    const int64_t value = in.number();
    std::memcpy(bytes + field * width, &value, width);
  }
}

}  // namespace gdn_fuzz

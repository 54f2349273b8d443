// Reads the files that tests/golden.py writes: named arrays, little-endian.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"

namespace gdn_test {

inline double from_bits(uint16_t bits, int32_t dtype) {
  if (dtype == 0x410) {  // bf16: the upper half of an fp32
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double value =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
  if (exponent == 31) value = fraction ? std::nan("") : HUGE_VAL;
  return bits & 0x8000 ? -value : value;
}

// Element i of an array of fp32, bf16 or fp16.
inline double element(const void* data, int32_t dtype, int64_t i) {
  if (dtype == 0x220) return static_cast<const float*>(data)[i];
  return from_bits(static_cast<const uint16_t*>(data)[i], dtype);
}

struct Array {
  std::string type;  // "f32", ...
  std::vector<int64_t> shape;
  std::vector<uint64_t> storage;  // aligned for every type

  int64_t size() const {
    int64_t count = 1;
    for (int64_t n : shape) count *= n;
    return count;
  }
  int64_t element_bytes() const { return std::stoi(type.substr(1)) / 8; }
  template <class T>
  const T* as() const {
    CHECK_EQUAL(sizeof(T), element_bytes());
    return reinterpret_cast<const T*>(storage.data());
  }
  void* data() { return storage.data(); }
};

class Golden {
 public:
  explicit Golden(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    CHECK(file.good());
    std::string line;
    while (std::getline(file, line)) {
      std::istringstream words(line);
      std::string name;
      size_t rank = 0;
      Array array;
      words >> name >> array.type >> rank;
      array.shape.resize(rank);
      for (int64_t& n : array.shape) words >> n;
      const size_t bytes = static_cast<size_t>(array.size() * array.element_bytes());
      array.storage.resize(bytes / 8 + 1);
      file.read(reinterpret_cast<char*>(array.data()), static_cast<std::streamsize>(bytes));
      CHECK(file.good());
      arrays_[name] = std::move(array);
    }
    CHECK(!arrays_.empty());
  }

  bool has(const std::string& name) const { return arrays_.count(name) != 0; }
  Array& operator[](const std::string& name) {
    if (!has(name)) std::fprintf(stderr, "no array %s\n", name.c_str());
    CHECK(has(name));
    return arrays_[name];
  }
  int64_t integer(const std::string& name, int64_t i = 0) { return (*this)[name].as<int64_t>()[i]; }

 private:
  std::map<std::string, Array> arrays_;
};

// Largest relative L2 error of `count` elements, inf where NaN or inf differ from the truth.
inline double relative_error(const void* data, int32_t dtype, const double* truth, int64_t count) {
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double x = element(data, dtype, i), t = truth[i];
    if (!std::isfinite(t)) {
      if (!(x == t || (std::isnan(x) && std::isnan(t)))) return HUGE_VAL;
      continue;
    }
    if (!std::isfinite(x)) return HUGE_VAL;
    difference += (x - t) * (x - t);
    norm += t * t;
  }
  return std::sqrt(difference) / (std::sqrt(norm) + 1e-6);
}

}  // namespace gdn_test

// White box: the kernel table of every instruction set that this machine can run against the rule
// as cpu/recurrence.h writes it, and conversions against every 16-bit number.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "cpu/kernels.h"
#include "cpu/recurrence.h"

using namespace gdn;
using namespace gdn::cpu;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kGuard = -77.0f;

float uniform(uint64_t seed, uint64_t i) {
  uint64_t x = (seed << 32) + i + 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return static_cast<float>((x ^ (x >> 31)) >> 40) / (1 << 23) - 1.0f;
}

std::vector<float> random(uint64_t seed, size_t n, float scale = 1.0f) {
  std::vector<float> x(n);
  for (size_t i = 0; i < n; ++i) x[i] = scale * uniform(seed, i);
  return x;
}

void check_close(const std::vector<float>& got, const std::vector<float>& expected) {
  CHECK_EQUAL(got.size(), expected.size());
  double error = 0, norm = 1e-30;
  for (size_t i = 0; i < got.size(); ++i) {
    CHECK(std::isfinite(got[i]));
    error += std::pow(double{got[i]} - expected[i], 2);
    norm += std::pow(double{expected[i]}, 2);
  }
  CHECK(error <= 1e-10 * norm);
}

struct Case {
  int dim_k, dim_v, tokens, phase;
  bool from_zero;
  int reset = -1;  // token with alpha = 0; the state before it is NaN
};

struct Inputs {
  std::vector<float> q, k, v, alpha, beta, state;

  explicit Inputs(const Case& c)
      : q(random(1, c.tokens * c.dim_k, 0.3f)), k(random(2, c.tokens * c.dim_k, 0.3f)),
        v(random(3, c.tokens * c.dim_v)), alpha(random(4, c.tokens, 0.5f)),
        beta(random(5, c.tokens, 0.5f)), state(random(6, c.dim_v * c.dim_k)) {
    for (float& x : alpha) x += 0.5f;
    for (float& x : beta) x += 0.5f;
    if (c.reset < 0) return;
    alpha[c.reset] = 0.0f;
    for (float& x : state) x = kNan;
  }
  Token token(const Case& c, int t) const {
    return {.q = &q[t * c.dim_k],
            .k = &k[t * c.dim_k],
            .v = &v[t * c.dim_v],
            .alpha = alpha[t],
            .beta = beta[t],
            .scale = 0.25f};
  }
};

// Pads `rows` with a guard row, so that a kernel that writes past its output is seen.
std::vector<float> guarded(size_t n) { return std::vector<float>(n + 64, kGuard); }

void take_guard(std::vector<float>* x) {
  for (size_t i = x->size() - 64; i < x->size(); ++i) CHECK((*x)[i] == kGuard);
  x->resize(x->size() - 64);
}

void test_segment(const Kernels& kernels, const Case& c) {
  const Inputs in(c);
  std::vector<float> expected_state = c.from_zero ? std::vector<float>(in.state.size()) : in.state;
  std::vector<float> expected_output(in.v.size());
  for (int t = 0; t < c.tokens; ++t) {
    recurrence(in.token(c, t), c.dim_k, c.dim_v, expected_state.data(),
               &expected_output[t * c.dim_v]);
  }

  const int tiles_v = (c.dim_v + kTileV - 1) / kTileV * kTileV;
  std::vector<float> tiles(tiles_v * c.dim_k, kNan), kq(2 * kChunk * c.dim_k);
  std::vector<MiniChunk> minis(kSegmentMinis);
  std::vector<float> state = in.state, stored = guarded(state.size()),
                     output = guarded(in.v.size());
  if (!c.from_zero) {
    kernels.load_tiles({state.data(), DType::kFloat32, c.dim_k, c.dim_v}, tiles.data());
  }
  Segment segment{.kq = kq.data(), .minis = minis.data(), .num_minis = 0, .dim_k = 0, .phase = 0};
  kernels.prepare({.q = in.q.data(),
                   .k = in.k.data(),
                   .q_stride = c.dim_k,
                   .k_stride = c.dim_k,
                   .io = DType::kFloat32,
                   .dim_k = c.dim_k,
                   .tokens = c.tokens,
                   .phase = c.phase,
                   .from_zero = c.from_zero,
                   .l2norm = false,
                   .scale = 0.25f,
                   .alpha = in.alpha.data(),
                   .beta = in.beta.data()},
                  &segment);
  kernels.advance(segment,
                  {.v = in.v.data(),
                   .output = output.data(),
                   .v_stride = c.dim_v,
                   .output_stride = c.dim_v,
                   .tokens_left = c.tokens,
                   .io = DType::kFloat32,
                   .dim_v = c.dim_v},
                  Upcoming{},
                  {.to = {stored.data(), DType::kFloat32, c.dim_k, c.dim_v}, .streaming = false},
                  tiles.data());
  take_guard(&output);
  take_guard(&stored);
  const int64_t nan = std::max(c.reset, 0) * c.dim_v;  // what comes before the reset
  for (int64_t i = 0; i < nan; ++i) CHECK(std::isnan(output[i]));
  output.erase(output.begin(), output.begin() + nan);
  expected_output.erase(expected_output.begin(), expected_output.begin() + nan);
  check_close(output, expected_output);
  check_close(stored, expected_state);
}

void test_streaming(const Kernels& kernels) {
  constexpr int kDim = 64;
  alignas(64) static float from[kDim * kDim], to[kDim * kDim];
  std::vector<float> tiles(kDim * kDim);
  for (int i = 0; i < kDim * kDim; ++i) from[i] = static_cast<float>(i);
  kernels.load_tiles({from, DType::kFloat32, kDim, kDim}, tiles.data());
  kernels.store_tiles(tiles.data(), {.to = {to, DType::kFloat32, kDim, kDim}, .streaming = true});
  kernels.finish_streaming();
  CHECK(std::memcmp(from, to, sizeof from) == 0);
}

void test_decode(const Kernels& kernels, const Case& c) {
  const Inputs in(c);
  std::vector<float> expected_state = c.from_zero ? std::vector<float>(in.state.size()) : in.state;
  std::vector<float> expected_output(c.dim_v), scratch(2 * c.dim_k);
  recurrence(in.token(c, 0), c.dim_k, c.dim_v, expected_state.data(), expected_output.data());
  std::vector<float> state = in.state, output = guarded(c.dim_v), written = guarded(state.size());
  const StateRows read{c.from_zero ? nullptr : state.data(), DType::kFloat32, c.dim_k, c.dim_v};
  kernels.decode({.q = in.q.data(),
                  .k = in.k.data(),
                  .v = in.v.data(),
                  .output = output.data(),
                  .io = DType::kFloat32,
                  .scale = 0.25f,
                  .alpha = in.alpha[0],
                  .beta = in.beta[0],
                  .l2norm = false,
                  .read = read,
                  .write = {written.data(), DType::kFloat32, c.dim_k, c.dim_v},
                  .scratch = scratch.data()});
  take_guard(&output);
  take_guard(&written);
  check_close(output, expected_output);
  check_close(written, expected_state);
}

// 16-bit to fp32 as the formats define it.
float widen(uint16_t bits, DType dtype) {
  if (dtype == DType::kBFloat16) return std::bit_cast<float>(uint32_t{bits} << 16);
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? kNan : sign * std::numeric_limits<float>::infinity();
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

// Every 16-bit number through the tiles and back; all but NaN payloads must survive, and the fp32
// values half way between two neighbours must round to the even one.
void test_conversions(const Kernels& kernels, DType dtype) {
  constexpr int kDim = 256;
  std::vector<uint16_t> all(kDim * kDim), back(kDim * kDim);
  std::vector<float> tiles(kDim * kDim), wide(kDim * kDim);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const auto through = [&](const void* data, DType from, void* to, DType as) {
    kernels.load_tiles({const_cast<void*>(data), from, kDim, kDim}, tiles.data());
    kernels.store_tiles(tiles.data(), {.to = {to, as, kDim, kDim}, .streaming = false});
  };
  through(all.data(), dtype, wide.data(), DType::kFloat32);
  through(wide.data(), DType::kFloat32, back.data(), dtype);
  for (size_t i = 0; i < all.size(); ++i) {
    const float expected = widen(all[i], dtype);
    if (std::isnan(expected)) {
      CHECK(std::isnan(wide[i]) && std::isnan(widen(back[i], dtype)));
    } else {
      CHECK(wide[i] == expected && back[i] == all[i]);
    }
  }
  for (size_t i = 0; i < all.size(); ++i) {
    const float next = widen(static_cast<uint16_t>(i + 1), dtype);
    const bool finite = std::isfinite(wide[i]) && std::isfinite(next);
    wide[i] = finite ? (wide[i] + (next - wide[i]) / 2) : 0.0f;
  }
  through(wide.data(), DType::kFloat32, back.data(), dtype);
  for (size_t i = 0; i < all.size(); ++i) {
    if (wide[i] != 0.0f) CHECK_EQUAL(back[i], i % 2 == 0 ? i : i + 1);
  }
}

}  // namespace

int main() {
  const Case cases[] = {
      {.dim_k = 128, .dim_v = 128, .tokens = 64, .phase = 0, .from_zero = false},
      {.dim_k = 128, .dim_v = 128, .tokens = 16, .phase = 0, .from_zero = true},
      {.dim_k = 64, .dim_v = 40, .tokens = 13, .phase = 3, .from_zero = false},
      {.dim_k = 8, .dim_v = 8, .tokens = 1, .phase = 2, .from_zero = false},
      {.dim_k = 80, .dim_v = 24, .tokens = 7, .phase = 1, .from_zero = true},
      {.dim_k = 256, .dim_v = 96, .tokens = 30, .phase = 0, .from_zero = false},
      {.dim_k = 24, .dim_v = 56, .tokens = 1, .phase = 0, .from_zero = true},
  };
  int count = 0;
  for (; const Kernels* table = supported_kernels(count); ++count) {
    for (const Case& c : cases) {
      test_segment(*table, c);
      test_decode(*table, c);
    }
    for (const int reset : {0, 1, 5}) {
      const Case c{
          .dim_k = 64, .dim_v = 48, .tokens = 9, .phase = 2, .from_zero = false, .reset = reset};
      test_segment(*table, c);
      if (reset == 0) test_decode(*table, c);
    }
    test_streaming(*table);
    test_conversions(*table, DType::kBFloat16);
    test_conversions(*table, DType::kFloat16);
    std::printf("%s\n", table->isa);
  }
  CHECK(count >= 1);
  CHECK(&kernels() == supported_kernels(0));
  return 0;
}

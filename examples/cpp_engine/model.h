// A stand-in for a model: fixed-seed tables instead of projections, so that the example is about
// pages and batches. Layer l looks its q, k, v and gate inputs up by the token's byte; the outputs
// of all layers are summed and read out against a table of 256 directions.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

using bfloat16 = uint16_t;

inline bfloat16 to_bfloat16(float value) {  // to nearest, ties to even; the tables hold no NaN
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<bfloat16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float to_float(bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

struct Model {
  static constexpr int kLayers = 3;
  static constexpr int kQkHeads = 2;
  static constexpr int kHeads = 4;  // of v, states, gates and output
  static constexpr int kDim = 64;   // K and V
  static constexpr int kQkWidth = kQkHeads * kDim;
  static constexpr int kWidth = kHeads * kDim;
  static constexpr int kColumns = 2 * kQkWidth + kWidth;  // q, k, v of one token side by side
  static constexpr int64_t kStateElements = int64_t{kHeads} * kDim * kDim;

  struct Layer {
    std::vector<bfloat16> qkv;   // [256, kColumns]
    std::vector<float> a;        // [256, kHeads], raw decay input
    std::vector<float> b;        // [256, kHeads], logit of beta
    std::vector<float> A_log;    // [kHeads]
    std::vector<float> dt_bias;  // [kHeads]
  };

  std::vector<Layer> layers;
  std::vector<float> readout;  // [256, kWidth]

  explicit Model(uint32_t seed = 7) {
    std::mt19937 engine(seed);
    // Not std::normal_distribution: its numbers differ between standard libraries.
    const auto uniform = [&] { return static_cast<float>(engine() / 2147483648.0 - 1.0); };
    const auto fill = [&](std::vector<float>* x, size_t size, float scale, float shift) {
      x->resize(size);
      for (float& value : *x) value = scale * uniform() + shift;
    };
    layers.resize(kLayers);
    for (Layer& layer : layers) {
      layer.qkv.resize(256 * kColumns);
      for (bfloat16& value : layer.qkv) value = to_bfloat16(uniform());
      fill(&layer.a, 256 * kHeads, 1.0f, 0.0f);
      fill(&layer.b, 256 * kHeads, 2.0f, 0.0f);
      fill(&layer.A_log, kHeads, 1.0f, 0.0f);
      fill(&layer.dt_bias, kHeads, 1.0f, -4.0f);  // slow decay: the prefix stays in the state
    }
    fill(&readout, 256 * kWidth, 1.0f, 0.0f);
  }

  // Scores of the next byte from the summed layer outputs of one token, [kWidth].
  std::vector<float> scores(const float* hidden) const {
    std::vector<float> result(256, 0.0f);
    for (int token = 0; token < 256; ++token) {
      for (int i = 0; i < kWidth; ++i) result[token] += readout[token * kWidth + i] * hidden[i];
    }
    return result;
  }
};

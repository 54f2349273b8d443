// Advances the tiles of one head through a segment, four tokens at a time. Per mini-chunk and
// register of V rows: eight dot products over K with the old tile, a 4 x 4 triangular solve, a
// rank-4 update. 12 or 13 operations per four tokens and tile element against 16 token by token.
#pragma once

#include "cpu/kernels.h"
#include "cpu/lanes.h"

namespace gdn::cpu {
namespace {

// Registers of V rows that share the broadcasts of q and k. 8 kWidth accumulators must fit.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kWidth = 2;
#else
constexpr int kWidth = 1;
#endif

// One mini-chunk of one strip (W registers of V rows of a tile) between its two passes.
struct Strip {
  float* tile;                               // [K][kTileV], at the strip's first V row
  int offset;                                // of that row from the tiles' first V row
  int left;                                  // V rows from there on
  Vec weights[kMini][kWidth];                // store_j u_j
};

template <int W>
GDN_INLINE void dots(const float* tile, const float* kq, int dim_k, Vec (&z)[2 * kMini][W]) {
#pragma GCC unroll 8
  for (int r = 0; r < 2 * kMini; ++r) {
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) z[r][w] = Vec{};
  }
  for (int block = 0; block < dim_k / 8; ++block, kq += 16 * kMini, tile += 8 * kTileV) {
#pragma GCC unroll 8
    for (int t = 0; t < 8; ++t) {
      Vec s[W];
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) s[w] = load(tile + t * kTileV + w * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < 2 * kMini; ++r) {
        const Vec x = Vec{} + kq[r * 8 + t];
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) z[r][w] += s[w] * x;
      }
    }
  }
}

// kKeep: 0 the old tile is dropped, 1 it stays as it is, 2 it is multiplied by `keep`.
template <int W, int kKeep>
GDN_INLINE void update(const Strip& strip, const float* kq, int dim_k, float keep) {
  float* tile = strip.tile;
  Vec weights[kMini][W];
#pragma GCC unroll 4
  for (int j = 0; j < kMini; ++j) {
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) weights[j][w] = strip.weights[j][w];
  }
  const Vec factor = Vec{} + keep;
  for (int block = 0; block < dim_k / 8; ++block, kq += 16 * kMini, tile += 8 * kTileV) {
#pragma GCC unroll 8
    for (int t = 0; t < 8; ++t) {
      Vec s[W];
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) {
        s[w] = kKeep == 0 ? Vec{} : load(tile + t * kTileV + w * kLanes);
        if (kKeep == 2) s[w] *= factor;
      }
#pragma GCC unroll 4
      for (int j = 0; j < kMini; ++j) {
        const Vec x = Vec{} + kq[j * 8 + t];
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) s[w] += weights[j][w] * x;
      }
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) store(tile + t * kTileV + w * kLanes, s[w]);
    }
  }
}

// The triangular solve of a mini-chunk whose tokens all exist and never reset.
template <int W>
GDN_INLINE void solve_plain(const MiniChunk& m, const Values& values, int64_t token,
                            const Vec (&z)[2 * kMini][W], Strip* strip) {
#pragma GCC unroll 2
  for (int w = 0; w < W; ++w) {
    const int left = strip->left - w * kLanes;
    const int64_t row = strip->offset + w * kLanes;
    Vec u[kMini];
#pragma GCC unroll 4
    for (int i = 0; i < kMini; ++i) {
      const Vec v = read_lanes(values.v, (token + i) * values.v_stride + row, values.io, left);
      u[i] = v * m.beta[i] - z[i][w] * m.read_k[i];
#pragma GCC unroll 4
      for (int j = 0; j < i; ++j) u[i] -= u[j] * m.solve[i][j];
    }
#pragma GCC unroll 4
    for (int i = 0; i < kMini; ++i) {
      Vec o = z[kMini + i][w] * m.read_q[i];
#pragma GCC unroll 4
      for (int j = 0; j <= i; ++j) o += u[j] * m.mix[i][j];
      write_lanes(values.output, (token + i) * values.output_stride + row, values.io, left, o);
      strip->weights[i][w] = u[i] * m.store[i];
    }
  }
}

// The same with absent tokens and resets. What a reset has cut off is left out, not multiplied by
// zero: it may be NaN.
template <int W>
void solve_any(const MiniChunk& m, const Values& values, int64_t token,
               const Vec (&z)[2 * kMini][W], Strip* strip) {
  for (int w = 0; w < W; ++w) {
    const int left = strip->left - w * kLanes;
    const int64_t row = strip->offset + w * kLanes;
    Vec u[kMini] = {};
    for (int i = m.first; i < m.last; ++i) {
      const int64_t at = (token + i) * values.v_stride + row;
      u[i] = read_lanes(values.v, at, values.io, left) * m.beta[i];
      Vec o{};
      if (m.reset[i] < 0) {
        u[i] -= z[i][w] * m.read_k[i];
        o = z[kMini + i][w] * m.read_q[i];
      }
      const int from = m.reset[i] > m.first ? m.reset[i] : m.first;
      for (int j = from; j < i; ++j) u[i] -= u[j] * m.solve[i][j];
      for (int j = from; j <= i; ++j) o += u[j] * m.mix[i][j];
      write_lanes(values.output, (token + i) * values.output_stride + row, values.io, left, o);
    }
    for (int j = 0; j < kMini; ++j) {
      const bool stored = j >= m.first && j < m.last && j >= m.reset[kMini - 1];
      strip->weights[j][w] = stored ? u[j] * m.store[j] : Vec{};
    }
  }
}

template <int W>
GDN_INLINE void read_strip(const Segment& segment, int n, const Values& values, Strip* strip) {
  const MiniChunk& m = segment.minis[n];
  Vec z[2 * kMini][W];
  dots<W>(strip->tile, segment.kq + static_cast<int64_t>(n) * segment.dim_k * 2 * kMini,
          segment.dim_k, z);
  const int64_t token = n * kMini - segment.phase;
  if (m.plain) {
    solve_plain<W>(m, values, token, z, strip);
  } else {
    solve_any<W>(m, values, token, z, strip);
  }
}

template <int W>
GDN_INLINE void write_strip(const Segment& segment, int n, const Strip& strip) {
  const MiniChunk& m = segment.minis[n];
  const float* kq = segment.kq + static_cast<int64_t>(n) * segment.dim_k * 2 * kMini;
  if (m.reset[kMini - 1] >= 0) {
    update<W, 0>(strip, kq, segment.dim_k, 0.0f);
  } else if (m.rescale) {
    update<W, 2>(strip, kq, segment.dim_k, m.keep);
  } else {
    update<W, 1>(strip, kq, segment.dim_k, 1.0f);
  }
}

// NOTE: strips of up to two tiles advance together, so that the dot products of one run in the
// shadow of the other's solve; more would push the tiles (16 KB each at K = 128) out of L1.
constexpr int kStrips = 2 * kTileV / (kWidth * kLanes);

void advance(const Segment& segment, const Values& values, float* tiles) {
  const int64_t tile_floats = static_cast<int64_t>(segment.dim_k) * kTileV;
  const int per_group = segment.dim_k <= 128 ? kStrips : kStrips / 2;
  constexpr int kStripV = kWidth * kLanes;
  for (int row = 0; row < values.dim_v;) {
    Strip strips[kStrips];
    int count = 0;
    for (; count < per_group && row < values.dim_v; ++count, row += kStripV) {
      strips[count].tile = tiles + row / kTileV * tile_floats + row % kTileV;
      strips[count].offset = row;
      strips[count].left = values.dim_v - row;
    }
    for (int n = 0; n < segment.num_minis; ++n) {
      for (int i = 0; i < count; ++i) {
        if (kWidth == 1 || strips[i].left > kLanes) {
          read_strip<kWidth>(segment, n, values, &strips[i]);
        } else {
          read_strip<1>(segment, n, values, &strips[i]);
        }
      }
      for (int i = 0; i < count; ++i) {
        if (kWidth == 1 || strips[i].left > kLanes) {
          write_strip<kWidth>(segment, n, strips[i]);
        } else {
          write_strip<1>(segment, n, strips[i]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace gdn::cpu

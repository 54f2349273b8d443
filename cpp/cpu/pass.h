// The inner loop of prefill: one pass over a strip of a tile that applies the rank-4 update of one
// mini-chunk and takes the eight dot products of the next, so that the tile is read once per four
// tokens.
#pragma once

#include "cpu/kernels.h"
#include "cpu/lanes.h"

namespace gdn::cpu {
namespace {

// Registers of V rows in a strip; they share the broadcasts of q and k. The pass needs 12 kWidth
// registers for accumulators and weights.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kWidth = 2;
#else
constexpr int kWidth = 1;
#endif

constexpr int kStripV = kWidth * kLanes;

// Cache lines to request during one pass, evenly: a burst would fill the core's few fill buffers
// and stall it.
class Requests {
 public:
  static constexpr int kMax = 128;

  GDN_INLINE void add(uintptr_t line) { lines_[count_++] = line; }

  // To be called before the first issue().
  GDN_INLINE void spread(int blocks) {
    per_block_ = (count_ + blocks - 1) / blocks;
    while (per_block_ > 0 && count_ % per_block_ != 0) add(lines_[0]);
    next_ = lines_;
  }
  GDN_INLINE void issue() {
    if (next_ == lines_ + count_) return;
    for (int i = 0; i < per_block_; ++i) {
      __builtin_prefetch(reinterpret_cast<const void*>(*next_++), 0,
                         2);  // to L2: L1 is full of tiles
    }
  }

 private:
  uintptr_t lines_[kMax + kMax / 2];
  uintptr_t* next_ = lines_;
  int count_ = 0;
  int per_block_ = 0;
};

// What happens to the tile: nothing; replaced, added to, or scaled and added to by the update.
enum class Update { kNone, kReplace, kAdd, kScaleAdd };

template <int W>
struct PassInput {
  float* tile;  // [K][kTileV], at the strip's first V row
  int dim_k;
  const float* old_kq;           // mini-chunk of the update
  const Vec (*weights)[kWidth];  // [kMini][W]
  float keep;
  const float* new_kq;  // mini-chunk of the dot products
};

template <int W, Update kUpdate, bool kDots>
__attribute__((noinline)) void pass(const PassInput<W>& in, Requests* requests, Vec (*z)[kWidth]) {
  float* tile = in.tile;
  const float* old_kq = in.old_kq;
  const float* new_kq = in.new_kq;
  Vec weights[kMini][W], sums[2 * kMini][W];
#pragma GCC unroll 8
  for (int r = 0; r < 2 * kMini; ++r) {
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) {
      sums[r][w] = Vec{};
      if (kUpdate != Update::kNone && r < kMini) weights[r][w] = in.weights[r][w];
    }
  }
  const Vec keep = broadcast(in.keep);
  const int blocks = in.dim_k / 8;
  requests->spread(blocks);
  for (int block = 0; block < blocks; ++block) {
    requests->issue();
    Vec s[2][W];
#pragma GCC unroll 9
    for (int t = 0; t <= 8; ++t) {
      if (t < 8) {
        Vec(&now)[W] = s[t % 2];
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) {
          now[w] = kUpdate == Update::kReplace ? Vec{} : load(tile + t * kTileV + w * kLanes);
          if (kUpdate == Update::kScaleAdd) now[w] *= keep;
        }
        if (kUpdate != Update::kNone) {
#pragma GCC unroll 4
          for (int j = 0; j < kMini; ++j) {
            const Vec k = broadcast(old_kq[j * 8 + t]);
#pragma GCC unroll 2
            for (int w = 0; w < W; ++w) now[w] += weights[j][w] * k;
          }
#pragma GCC unroll 2
          for (int w = 0; w < W; ++w) store(tile + t * kTileV + w * kLanes, now[w]);
        }
      }
      if (kDots && t > 0) {
#pragma GCC unroll 8
        for (int r = 0; r < 2 * kMini; ++r) {
          const Vec x = broadcast(new_kq[r * 8 + t - 1]);
#pragma GCC unroll 2
          for (int w = 0; w < W; ++w) sums[r][w] += s[(t - 1) % 2][w] * x;
        }
      }
    }
    tile += 8 * kTileV;
    old_kq += 16 * kMini;
    new_kq += 16 * kMini;
  }
  if (!kDots) return;
#pragma GCC unroll 8
  for (int r = 0; r < 2 * kMini; ++r) {
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) z[r][w] = sums[r][w];
  }
}

}  // namespace
}  // namespace gdn::cpu

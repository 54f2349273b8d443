// One step of a state through the map of a segment, S <- S M + N, for rows of V that are
// independent.
//
// Operands are split into two bf16 parts and S M = hi hi + hi lo + lo hi is accumulated in fp32:
// 2^-17, far below what the scan adds. The scan goes through the segments of a call in its own way
// (scan_combine.cuh).
#pragma once

#include "cuda/common/copy.cuh"
#include "cuda/common/dependent.cuh"
#include "cuda/sm90/segments.cuh"
#include "cuda/sm90/transition.cuh"

namespace gdn::sm90 {

template <int kTiles>  // of 16 rows of V per block
struct CombineTraits {
  static constexpr int kRows = 16 * kTiles;
  static constexpr int kWarps = 8;  // 16 columns of K each
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerHead = kDim / kRows;
};

// 16 rows x 16 columns of a state, of which a warp has one per tile of rows: d[i][0..1] is row lane
// / 4, columns 8 i + 2 (lane % 4) of the warp's, d[i][2..3] the row 8 below.
using CombineTile = float[2][4];

__device__ __forceinline__ void load_tile(CombineTile& d, const float* state) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 x = *reinterpret_cast<const float2*>(state + 8 * r * kDim + 8 * i);
      d[i][2 * r] = x.x;
      d[i][2 * r + 1] = x.y;
    }
  }
}

__device__ __forceinline__ void store_tile(const CombineTile& d, float* state) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      *reinterpret_cast<float2*>(state + 8 * r * kDim + 8 * i) = {d[i][2 * r], d[i][2 * r + 1]};
    }
  }
}

// The map of one segment as a warp needs it: its 16 columns of M, its tiles of N.
template <int kTiles>
struct SegmentMap {
  uint4 m[8][2];
  CombineTile n[kTiles];
  bool reset;
};

template <int kTiles>
struct CombineWork {
  using Map = SegmentMap<kTiles>;

  const SegmentParams& segments;
  int32_t heads;
  int32_t head;
  int64_t tile;       // this lane's place in a [128, 128] state
  int32_t m_vector;   // and in M
  uint32_t exchange;  // shared: two buffers of [kTiles, 8, 2, 32] vectors
  int warp;
  int lane;

  __device__ __forceinline__ int64_t record(int32_t place) const {
    return static_cast<int64_t>(place) * heads + head;
  }
  __device__ __forceinline__ float* state(int32_t place) const {
    return segments.states + record(place) * (kDim * kDim) + tile;
  }

  __device__ __forceinline__ uint32_t slot(int buffer, int tile, int step) const {
    return exchange + (((buffer * kTiles + tile) * 8 + step) * 64 + lane) * 16;
  }

  __device__ __forceinline__ void load_state(CombineTile (&s)[kTiles], int32_t place) const {
#pragma unroll
    for (int r = 0; r < kTiles; ++r) load_tile(s[r], state(place) + r * (16 * kDim));
  }

  __device__ __forceinline__ void load(Map& map, int32_t place) const {
    const uint4* m = segments.transitions + record(place) * kTransitionVectors + m_vector;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) map.m[k][i] = m[(16 * k + i) * 32];
    }
    load_state(map.n, place + 1);
    map.reset = segments.resets[record(place)] != 0;
  }

  // All warps learn the state, as A fragments: this warp's columns are the k step of its number.
  __device__ __forceinline__ void publish(const CombineTile (&s)[kTiles], int buffer) const {
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      uint32_t hi[4], lo[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        split_pair(s[r][i][0], s[r][i][1], hi[2 * i], lo[2 * i]);
        split_pair(s[r][i][2], s[r][i][3], hi[2 * i + 1], lo[2 * i + 1]);
      }
      store_shared4(slot(buffer, r, warp), {hi[0], hi[1], hi[2], hi[3]});
      store_shared4(slot(buffer, r, warp) + 512, {lo[0], lo[1], lo[2], lo[3]});
    }
  }

  __device__ __forceinline__ void step(CombineTile (&s)[kTiles], const Map& map, int buffer) const {
    // Chains of products are short where few of them run side by side.
    constexpr int kChains = kTiles == 1 ? 2 : 1;
    CombineTile large[kTiles] = {}, small[kChains][kTiles] = {};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        const uint4 hi = load_shared4(slot(buffer, r, k));
        const uint4 lo = load_shared4(slot(buffer, r, k) + 512);
        const uint32_t a_hi[4] = {hi.x, hi.y, hi.z, hi.w}, a_lo[4] = {lo.x, lo.y, lo.z, lo.w};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4& m = map.m[k][i];
          multiply_add<bf16>(large[r][i], a_hi, m.x, m.y);
          multiply_add<bf16>(small[0][r][i], a_hi, m.z, m.w);
          multiply_add<bf16>(small[kChains - 1][r][i], a_lo, m.x, m.y);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // Selected, so that a state that is not finite ends at a reset.
          float rest = small[0][r][i][e];
          if constexpr (kChains == 2) rest += small[1][r][i][e];
          const float sum = large[r][i][e] + rest + map.n[r][i][e];
          s[r][i][e] = map.reset ? map.n[r][i][e] : sum;
        }
      }
    }
  }
};

}  // namespace gdn::sm90

// How a head lies in the lanes of its block. A warp owns 16 V rows of S and walks over K in steps
// of 16 columns, as m16n8k16 takes them. Which columns of S a fragment's 16 places stand for does
// not matter to a product as long as k and q use the same ones, so a lane's places are neighbours
// in memory: one 16-byte vector of S is one step (fp32) or two (16 bits). V rows are named
// likewise: rows r and r + 8 of a fragment are row_of(r) and row_of(r) + 2, which puts four rows of
// v and of the output in one lane after a transposition.
//
// A lane is (r, c) = (lane / 4, lane % 4). Its places of one step:
//   S   rows row_of(r), row_of(r) + 2, columns column(step, c) .. + 3
//   k q token r, the same columns; the words are both B fragments and, with tokens as rows, A
#pragma once

#include <type_traits>

#include "cuda/common/pool.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/row_fragments.cuh"
#include "cuda/verify/params.h"

namespace gdn {

template <class State_, class Io_, int kDim_>
struct VerifyTraits {
  using State = State_;
  using Io = Io_;
  static constexpr int kDim = kDim_;  // K = V
  static constexpr int kSteps = kDim / 16;
  static constexpr int kTiles = 2;  // of 16 rows, one after the other
  static constexpr int kWarps = kDim / (16 * kTiles);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kWide = sizeof(State) == 4;
  static constexpr int kVectorSteps = kWide ? 1 : 2;
  static constexpr int kVectors = kSteps / kVectorSteps;  // per row and lane
  static constexpr int kHead = kDim * kDim;
  static constexpr int kBlocksPerSm = 4 * 128 / kDim;
  // A pool of the io dtype holds what one 16-bit number can; other states are split in two.
  static constexpr bool kSplit = !std::is_same_v<State, Io>;
};

template <class Traits>
__device__ __forceinline__ int column(int step, int c) {
  return Traits::kWide ? 16 * step + 4 * c : 32 * (step / 2) + 8 * c + 4 * (step % 2);
}

// The first column of a lane's vector, from its column 0 on.
template <class Traits>
__device__ __forceinline__ int vector_offset(int vector) {
  return column<Traits>(vector * Traits::kVectorSteps, 0);
}

// This lane's part of 16 rows of S on its way through registers.
template <class Traits>
struct StateTile {
  uint4 vectors[Traits::kVectors][2];

  __device__ __forceinline__ void load(const typename Traits::State* from) {
    const Streaming streaming(true);
#pragma unroll
    for (int i = 0; i < Traits::kVectors; ++i) {
      vectors[i][0] = streaming.load(from + vector_offset<Traits>(i));
      vectors[i][1] = streaming.load(from + vector_offset<Traits>(i) + 2 * Traits::kDim);
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Traits::kVectors; ++i) vectors[i][0] = vectors[i][1] = uint4{};
  }
};

// The accumulators of one vector: S as two 16 x 8 tiles per step.
template <class Traits>
struct StateStep {
  static constexpr int kSteps = Traits::kVectorSteps;
  float left[kSteps][4], right[kSteps][4];

  __device__ __forceinline__ explicit StateStep(const uint4 (&vectors)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float x[4 * kSteps];
      unpack<typename Traits::State>(vectors[row], x);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        left[step][2 * row] = x[4 * step];
        left[step][2 * row + 1] = x[4 * step + 1];
        right[step][2 * row] = x[4 * step + 2];
        right[step][2 * row + 1] = x[4 * step + 3];
      }
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) left[step][i] = right[step][i] = 0.0f;
    }
  }
  template <class Store>  // (row 0 or 1, 16 bytes)
  __device__ __forceinline__ void store(Store store_row) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float x[4 * kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        x[4 * step] = left[step][2 * row];
        x[4 * step + 1] = left[step][2 * row + 1];
        x[4 * step + 2] = right[step][2 * row];
        x[4 * step + 3] = right[step][2 * row + 1];
      }
      store_row(row, pack<typename Traits::State>(x));
    }
  }
};

}  // namespace gdn

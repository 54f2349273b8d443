// Tile sizes and shared-memory maps of the prefill kernels.
#pragma once

#include "cuda/common/tile.cuh"
#include "cuda/common/triangular.cuh"
#include "cuda/sm80/params.h"

namespace gdn {

// [64, D] tile of which lane (r, c) reads the 16-byte pieces c of rows r: eight lanes, two rows of
// four pieces, fall into different banks.
template <int D>
struct PieceTile {
  static constexpr int kRowBytes = 2 * D;
  static constexpr int kBytes = 64 * kRowBytes;

  static __device__ __forceinline__ uint32_t offset(int row, int piece) {
    const int swizzle = (row & 1) << 2 | (row >> 1 & 3);
    return row * kRowBytes + ((piece ^ swizzle) << 4);
  }
  // As in Tile, for rows without bits in common.
  static __device__ __forceinline__ uint32_t flip(int more) {
    return ((more & 1) << 2 | (more >> 1 & 3)) << 4;
  }
};

// kPairs warps form K K^T and invert, as many more form Q K^T and P.
template <int kHeadDim, int kWarpPairs>
struct PrepareTraits {
  static constexpr int D = kHeadDim;
  static constexpr int kPairs = kWarpPairs;
  static constexpr int kThreads = 64 * kPairs;
  static constexpr int kMinBlocks = kPairs == 1 ? 8 : 4;

  static constexpr int kKeys = 0;
  static constexpr int kGram = kKeys + PieceTile<D>::kBytes;
  static constexpr int kDiagonal = kGram + GramTile::kBytes;
  static constexpr int kScratch = kDiagonal + kDiagonalBytes;  // of each warp that inverts
  static constexpr int kEnd = kScratch + kPairs * kInverseScratchBytes;
  // Of each head: beta, GateRecord::resets as one word, and in groups of 16 tokens, in the order of
  // gate_place, cumulative log2 gates and segments. With one head those lie in the upper triangle
  // of K K^T, in pieces 4 to 7 of rows 8i and 8i + 4: eight blocks fit a multiprocessor.
  static constexpr bool kOneHead = kPairs == 1;
  static constexpr int kHeads = kOneHead ? kGram : kEnd, kHeadBytes = kOneHead ? 0 : 784;
  static constexpr int kLog = kOneHead ? 64 : 0, kSegments = kOneHead ? 512 : 256;
  static constexpr int kBeta = kOneHead ? kEnd - kGram : 512, kResets = kBeta + 256;
  static constexpr int kGroupBytes = kOneHead ? 1024 : 64;

  GDN_HOST_DEVICE static constexpr int bytes(int heads) {
    return kEnd + (kOneHead ? 272 : heads * kHeadBytes);
  }
  // From the start of a head's gates to those of the token at `place`.
  GDN_HOST_DEVICE static constexpr int gate_offset(int place) {
    return (place >> 4) * kGroupBytes + (place & 15) * 4;
  }
};

// How a scan block cuts the columns of V: kStateWarps warps hold 16 columns each. kLoaders further
// warps only copy; with none, all warps copy. With kAhead, V, Q and P are copied a chunk ahead like
// K and T; else into the place that the chunk before has left, to fit kBlocks blocks on a
// multiprocessor.
template <int kHeadDim, int kStateWarps, int kLoaders, bool kCopyAhead, int kBlocks>
struct ScanTraits {
  static constexpr int D = kHeadDim;
  static constexpr int kWarps = kStateWarps;
  static constexpr int kThreads = 32 * (kStateWarps + kLoaders);
  static constexpr int kMinBlocks = kBlocks;
  static constexpr bool kAhead = kCopyAhead;
  static constexpr bool kUnaligned = false;
  static constexpr int kFirstCopier = kLoaders > 0 ? 32 * kStateWarps : 0;
  static constexpr int kCopiers = kThreads - kFirstCopier;
  static constexpr int kWarpColumns = 16;
  static constexpr int kColumns = kWarpColumns * kStateWarps;
  static constexpr int kSplits = D / kColumns;
  static_assert(D % kColumns == 0);
  static_assert(kAhead || kLoaders == 0, "copy warps miss the barrier inside a chunk");

  using KeyTile = Tile<2 * D>;
  using ValueTile = ColumnTile<kStateWarps>;

  // Two stages of K, T and gates, then one or two of Q, P and V. Tiles are aligned to their rows.
  static constexpr int kKeys = 0;
  static constexpr int kTriangle = KeyTile::kBytes;
  static constexpr int kGates = kTriangle + kTriangleBytes;
  static constexpr int kStageBytes = (kGates + static_cast<int>(sizeof(GateRecord)) + 255) & ~255;
  static constexpr int kQueries = 2 * kStageBytes;
  static constexpr int kProducts = kQueries + KeyTile::kBytes;
  static constexpr int kValues = kProducts + kTriangleBytes;
  static constexpr int kRestBytes = kValues + ValueTile::kBytes - kQueries;
  static constexpr int kBlock = kQueries + (kAhead ? 2 : 1) * kRestBytes;  // ScanBlock
  static constexpr int kBytes = kBlock + 96;
  static_assert(kRestBytes % 256 == 0);
  static_assert(kBytes <= 99 * 1024, "the limit of consumer GPUs");
};

// The same for pages that are no multiple of 64 tokens.
template <class Traits>
struct UnalignedScan : Traits {
  static constexpr bool kUnaligned = true;
};

}  // namespace gdn

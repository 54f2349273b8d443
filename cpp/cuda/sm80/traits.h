// Tile sizes and shared-memory maps of the prefill kernels.
#pragma once

#include "cuda/common/tile.cuh"
#include "cuda/common/triangular.cuh"
#include "cuda/sm80/params.h"

namespace gdn {

template <int D>
struct PrepareTraits {
  using KeyTile = Tile<2 * D>;
  static constexpr int kNumWarps = 4;
  // Q K^T in fp32 blocks of 1 KB. Row block i of Q is dead once its products are in registers, and
  // for D = 128 they fit its place.
  static constexpr bool kInPlace = D == 128;
  static constexpr int kBlockBytes = 1024;

  static constexpr int kKeys = 0;
  static constexpr int kQueries = kKeys + KeyTile::kBytes;
  static constexpr int kProducts = kInPlace ? kQueries : kQueries + KeyTile::kBytes;
  static constexpr int kGram = kQueries + KeyTile::kBytes + (kInPlace ? 0 : 10 * kBlockBytes);
  static constexpr int kDiagonal = kGram + GramTile::kBytes;
  static constexpr int kWarps = kDiagonal + kDiagonalBytes;
  // Of each warp: cumulative log2 gates, segment starts, scratch of the inverse.
  static constexpr int kLogGates = 0, kSegments = 256, kScratch = 512;
  static constexpr int kWarpBytes = kScratch + kInverseScratchBytes;
  // Of each head: log2 alpha, beta.
  static constexpr int kHeads = kWarps + kNumWarps * kWarpBytes;
  static constexpr int kLogAlpha = 0, kBeta = 256, kHeadBytes = 512;

  GDN_HOST_DEVICE static constexpr int bytes(int heads) { return kHeads + heads * kHeadBytes; }
  GDN_HOST_DEVICE static constexpr int product_block(int i, int j) {
    return kInPlace ? (4 * i + j) * kBlockBytes : (i * (i + 1) / 2 + j) * kBlockBytes;
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

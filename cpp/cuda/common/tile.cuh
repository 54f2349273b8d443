// Swizzled tiles of 16-bit elements in shared memory: indexing only.
//
// A row is cut into 16-byte pieces; piece p of row t lies at place p ^ swizzle(t), so that the
// eight rows one ldmatrix reads at equal p fall into different banks.
#pragma once

#include <cstdint>

namespace gdn {

template <int kBytesPerRow>
struct Tile {
  static_assert(kBytesPerRow == 128 || kBytesPerRow == 256);
  static constexpr int kRowBytes = kBytesPerRow;
  static constexpr int kBytes = 64 * kRowBytes;

  static __device__ __forceinline__ uint32_t offset(int row, int piece) {
    return row * kRowBytes + ((piece ^ (row & 7)) << 4);
  }
  // offset(row + more, piece) = (offset(row, piece) ^ flip(more)) + more kRowBytes if row and more
  // have no bits in common.
  static __device__ __forceinline__ uint32_t flip(int more) { return (more & 7) << 4; }

  // Where a lane points ldmatrix for the 16x16 block at row 0, piece 0. The block at row 16 i and
  // piece 2 j is (address ^ 32 j) + 16 i kRowBytes: tiles are aligned to their row size.
  // Matrices in the order (rows 0-7, left), (rows 8-15, left), (rows 0-7, right), (8-15, right):
  // an A fragment; transposed, the B fragments of two n-tiles with k along the rows.
  static __device__ __forceinline__ uint32_t rows_first(int lane) {
    return offset((lane & 7) + (lane & 8), lane >> 4);
  }
  // In the order (0-7, left), (0-7, right), (8-15, left), (8-15, right): the B fragments of two
  // n-tiles with n along the rows.
  static __device__ __forceinline__ uint32_t pieces_first(int lane) {
    return offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  }
};

// 64 rows of 16 kWarps columns, for warps whose lanes read the pair of columns 2 (lane / 4) of row
// 2 (lane % 4) + e. A row stays within one 128-byte line: a copy that spreads it over more takes as
// many times the cycles of shared memory.
template <int kWarps>
struct ColumnTile {
  static_assert(kWarps == 2 || kWarps == 4);
  static constexpr int kRowBytes = 32 * kWarps;
  static constexpr int kBytes = 64 * kRowBytes;
  static constexpr int kSwizzle = 2 * kWarps - 2;

  // Even rows that follow on each other put a warp's columns into different banks.
  static __device__ __forceinline__ uint32_t offset(int row, int piece) {
    return row * kRowBytes + ((piece ^ (row & kSwizzle)) << 4);
  }
  static __device__ __forceinline__ uint32_t flip(int more) { return (more & kSwizzle) << 4; }
  // The lane's pair in row 2 (lane % 4) + e; rows that are multiples of 8 away are that many
  // kRowBytes away.
  static __device__ __forceinline__ uint32_t pair(int warp, int lane, int e) {
    return offset(2 * (lane & 3) + e, 2 * warp) + 4 * (lane >> 2);
  }
};

}  // namespace gdn

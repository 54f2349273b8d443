// Rows of one head into a swizzled shared-memory tile by plain threads: what the copy engine cannot
// do. Foreign rows become zero without being read, and rows may be normalized on the way.
#pragma once

#include "cuda/common/copy.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/sm90/traits.h"

namespace gdn::sm90 {

// Address of 16-byte piece `piece` of a row in a [64, 128] tile of two panels.
__device__ __forceinline__ uint32_t tile_place(uint32_t tile, int row, int piece) {
  return tile + (piece >> 3) * kPanel + Tile<128>::offset(row, piece & 7);
}

struct RowCopy {
  const Tensor& source;  // [tokens, heads, 128]
  int head;
  uint32_t tile;
  bool normalize;  // l2norm, rounded to the io dtype
};

// Done when all threads of [0, threads) have returned and met at a barrier. Threads come in whole
// warps; a half warp owns a row.
template <class T>
__device__ __forceinline__ void copy_rows(const RowCopy& copy, const ChunkRows& rows, int thread,
                                          int threads) {
  const int piece = thread & 15, step = threads >> 4;
  const T* column =
      static_cast<const T*>(copy.source.data) + copy.head * copy.source.head_stride + 8 * piece;
#pragma unroll 1
  for (int row = thread >> 4; row < kChunk; row += step) {
    copy_async_or_zero(tile_place(copy.tile, row, piece),
                       column + (rows.origin + row) * copy.source.row_stride, rows.valid(row));
  }
  copy_commit();
  copy_wait_all();
  if (!copy.normalize) return;
#pragma unroll 1
  for (int row = thread >> 4; row < kChunk; row += step) {
    const uint32_t place = tile_place(copy.tile, row, piece);
    float x[8];
    unpack<T>(load_shared4(place), x);
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum = fmaf(x[e], x[e], sum);
    const float inverse_norm = rsqrtf(group_sum<16>(sum) + 1e-6f);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] *= inverse_norm;
    store_shared4(place, pack<T>(x));
  }
}

}  // namespace gdn::sm90

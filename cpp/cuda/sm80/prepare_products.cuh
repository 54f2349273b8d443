// Row blocks of K and Q as matrix fragments, and the products of 16x16 blocks.
//
// A product over k may take k in any order that both its factors share. A lane takes 16
// neighbouring bytes of a row: they are its fragments of two steps of 16, as left factor and as
// right one, so rows come as whole vectors, from shared memory without ldmatrix and from global
// memory without a copy.
#pragma once

#include "cuda/common/copy.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/sm80/traits.h"

namespace gdn {

// 32 elements of the 16 rows of a row block: the lane (r, c) holds elements 8c .. 8c + 7 of rows r
// and r + 8.
struct RowFragment {
  uint4 low;
  uint4 high;
};

// d = a b or d += a b.
__device__ __forceinline__ void multiply_or_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1, bool add) {
  if (add) {
    multiply_add<bf16>(d, a, b0, b1);
  } else {
    multiply_bf16(d, a, b0, b1);
  }
}

// acc (+)= a b^T of 16x16 blocks, over the fragments' 32 elements.
__device__ __forceinline__ void multiply_fragments(float (&acc)[2][4], const RowFragment& a,
                                                   const RowFragment& b, bool add) {
  const uint32_t first[4] = {a.low.x, a.high.x, a.low.y, a.high.y};
  const uint32_t second[4] = {a.low.z, a.high.z, a.low.w, a.high.w};
  multiply_or_add(acc[0], first, b.low.x, b.low.y, add);
  multiply_or_add(acc[1], first, b.high.x, b.high.y, add);
  multiply_add<bf16>(acc[0], second, b.low.z, b.low.w);
  multiply_add<bf16>(acc[1], second, b.high.z, b.high.w);
}

template <int D>
struct KeyRows {
  using Tile = PieceTile<D>;
  uint32_t base;

  __device__ __forceinline__ KeyRows(uint32_t keys, int lane)
      : base(keys + Tile::offset(lane >> 2, lane & 3)) {}

  __device__ __forceinline__ RowFragment load(int block, int segment) const {
    const uint32_t at = (base ^ (64 * segment)) + 16 * block * Tile::kRowBytes;
    return {load_shared4(at), load_shared4(at + 8 * Tile::kRowBytes)};
  }
};

// Rows of Q straight from memory. Foreign rows are zero and not read.
struct QueryRows {
  const bf16* from;  // piece c of row r
  int64_t stride;
  int first, last;

  template <int D>
  __device__ __forceinline__ void load(RowFragment (&q)[D / 32], int block, int lane) const {
    const int row = 16 * block + (lane >> 2);
    const bf16* at = from + 16 * block * stride;
    if (16 * block >= first && 16 * block + 16 <= last) {
#pragma unroll
      for (int s = 0; s < D / 32; ++s) {
        q[s].low = *reinterpret_cast<const uint4*>(at + 32 * s);
        q[s].high = *reinterpret_cast<const uint4*>(at + 8 * stride + 32 * s);
      }
      return;
    }
    const bool low = row >= first && row < last, high = row + 8 >= first && row + 8 < last;
#pragma unroll
    for (int s = 0; s < D / 32; ++s) {
      q[s] = {};
      if (low) q[s].low = *reinterpret_cast<const uint4*>(at + 32 * s);
      if (high) q[s].high = *reinterpret_cast<const uint4*>(at + 8 * stride + 32 * s);
    }
  }
};

// The row blocks of K K^T in the set kBlocks: fp16 for the merges of the inverse, and its 8x8
// diagonal blocks in fp32 too.
template <int D, unsigned kBlocks>
struct GramRole {
  float acc[4][4][2][4];

  static __device__ __forceinline__ constexpr bool has(int i) { return kBlocks >> i & 1; }
  // Some row block of the set reaches column block j.
  static __device__ __forceinline__ constexpr bool reaches(int j) { return kBlocks >> j != 0; }

  __device__ __forceinline__ void form(uint32_t keys, int lane) {
    using Tile = PieceTile<D>;
    const uint32_t left = keys + Tile::offset((lane & 7) + (lane & 8), lane >> 4);
    const uint32_t right = keys + Tile::offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!has(i)) continue;
#pragma unroll
      for (int e = 0; e < 8 * (i + 1); ++e) acc[i][e / 8][e / 4 % 2][e % 4] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[4][4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (has(i)) load_matrices(a[i], (left ^ (32 * k)) + 16 * i * Tile::kRowBytes);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!reaches(j)) continue;
        load_matrices(b, (right ^ (32 * k)) + 16 * j * Tile::kRowBytes);
#pragma unroll
        for (int i = j; i < 4; ++i) {
          if (!has(i)) continue;
          multiply_add<bf16>(acc[i][j][0], a[i], b[0], b[1]);
          multiply_add<bf16>(acc[i][j][1], a[i], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void store(uint32_t gram, uint32_t diagonal, int lane) const {
    const int r = lane >> 2, c = lane & 3;
    const uint32_t base = gram + GramTile::offset(r, 0) + 4 * c;
    const uint32_t pair = diagonal + 32 * r + 8 * c;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!has(i)) continue;
#pragma unroll
      for (int j = 0; j <= i; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {  // tile e / 2, row half e % 2
          const float low = acc[i][j][e / 2][2 * (e % 2)];
          const float high = acc[i][j][e / 2][2 * (e % 2) + 1];
          store_shared(
              (base ^ (16 * (2 * j + e / 2))) + (16 * i + 8 * (e % 2)) * GramTile::kRowBytes,
              pack2<fp16>(low, high));
          if (e / 2 != e % 2 || j != i) continue;
          const uint32_t block = pair + (2 * i + e / 2) * kDiagonalBlockBytes;
          store_shared(block, low);
          store_shared(block + 4, high);
        }
      }
    }
  }
};

template <int D, unsigned kBlocks>
__device__ __forceinline__ void form_gram(uint32_t keys, uint32_t gram, uint32_t diagonal) {
  GramRole<D, kBlocks> role;
  role.form(keys, fresh_lane());
  role.store(gram, diagonal, fresh_lane());
}

}  // namespace gdn

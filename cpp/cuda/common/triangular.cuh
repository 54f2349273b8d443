// T = (I + diag(beta) strict_lower(K K^T))^-1 diag(beta) of one 64-token chunk, by one warp and
// without a barrier.
//
// The 8x8 diagonal blocks are solved by fp32 substitution: a power series would blow up on
// correlated keys. Blocks then merge 8 > 16 > 32 > 64 by
//     [T00  0 ; T10 T11],   T10 = -T11 (K K^T)10 T00,
// in fp16 products with fp32 accumulators (fp16 has the 11 bits that bf16 lacks, and |T| is
// bounded by the contraction). beta enters in the diagonal blocks alone, so one K K^T serves all
// value heads that share a key head.
#pragma once

#include <cstdint>

#include "cuda/common/copy.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/tile.cuh"

namespace gdn {

using GramTile = Tile<128>;  // K K^T in fp16, [64, 64]

// 8x8 diagonal blocks of K K^T in fp32; 4 words of padding spread the blocks over the banks.
inline constexpr int kDiagonalBlockBytes = 272;
inline constexpr int kDiagonalBytes = 8 * kDiagonalBlockBytes;
inline constexpr int kInverseScratchBytes = 1024;  // per warp

// Shared addresses of what one inverse reads, and its scratch.
struct InverseInput {
  uint32_t gram;      // GramTile, lower triangle
  uint32_t diagonal;  // kDiagonalBytes
  uint32_t beta;      // fp32 [64]
  uint32_t scratch;   // kInverseScratchBytes
};

// d += a b of 16x16 blocks; b holds the B fragments of its two n-tiles.
__device__ __forceinline__ void multiply_block(float (&d)[2][4], const uint32_t (&a)[4],
                                               const uint32_t (&b)[4]) {
  multiply_add<fp16>(d[0], a, b[0], b[1]);
  multiply_add<fp16>(d[1], a, b[2], b[3]);
}

__device__ __forceinline__ void pack_negative(uint32_t (&a)[4], const float (&d)[2][4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e)
    a[e] = pack2<fp16>(-d[e / 2][2 * (e % 2)], -d[e / 2][2 * (e % 2) + 1]);
}

// Solves the eight 8x8 diagonal blocks: a lane owns one column of two of them. Leaves the blocks
// in `scratch`, fp16, column by column.
__device__ __forceinline__ void solve_diagonal_blocks(const InverseInput& in, int lane) {
  const int column = lane & 7;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int b = (lane >> 3) + 4 * half;
    const uint32_t rows = in.diagonal + b * kDiagonalBlockBytes;
    const float own_beta = load_shared_float(in.beta + (8 * b + column) * 4);
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float beta = load_shared_float(in.beta + (8 * b + i) * 4);
      float sum = 0.0f;
      if (i > 0) {
        const float4 l = load_shared_float4(rows + i * 32);
        const float left[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int j = 0; j < (i < 4 ? i : 4); ++j) sum = fmaf(left[j], x[j], sum);
      }
      if (i > 4) {
        const float4 l = load_shared_float4(rows + i * 32 + 16);
        const float right[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int j = 4; j < i; ++j) sum = fmaf(right[j - 4], x[j], sum);
      }
      x[i] = fmaf(-beta, sum, i == column ? own_beta : 0.0f);
    }
    store_shared4(in.scratch + (8 * b + column) * 16,
                  {pack2<fp16>(x[0], x[1]), pack2<fp16>(x[2], x[3]), pack2<fp16>(x[4], x[5]),
                   pack2<fp16>(x[6], x[7])});
  }
  __syncwarp();
}

// An A fragment as two accumulator tiles.
__device__ __forceinline__ void unpack_a(float (&x)[2][4], const uint32_t (&a)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float2 pair = unpack2<fp16>(a[e]);
    x[e / 2][2 * (e % 2)] = pair.x;
    x[e / 2][2 * (e % 2) + 1] = pair.y;
  }
}

// Calls emit(i, j, x) once for every 16x16 block (i, j), j <= i, of T, x[2][4] its accumulator
// tiles, as soon as the block is known: few blocks live at a time.
template <class Emit>
__device__ __forceinline__ void invert_lower(const InverseInput& in, int lane, Emit emit) {
  solve_diagonal_blocks(in, lane);
  // The 8x8 blocks as halves of A fragments (rows) and as B fragments (columns).
  uint32_t rows[2][4], columns[2][4], corner[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    load_matrices_transposed(rows[half], in.scratch + lane * 16 + half * 512);
    load_matrices(columns[half], in.scratch + lane * 16 + half * 512);
  }
  load_matrices(corner,
                in.gram + GramTile::offset(16 * (lane >> 3) + 8 + (lane & 7), 2 * (lane >> 3)));

  // 8 > 16: the diagonal blocks as left (A) and right (B) factors.
  uint32_t left[4][4], right[4][4];
  float out[2][4];
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const uint32_t row0 = rows[b / 2][2 * (b % 2)], row1 = rows[b / 2][2 * (b % 2) + 1];
    const uint32_t column0 = columns[b / 2][2 * (b % 2)];
    const uint32_t column1 = columns[b / 2][2 * (b % 2) + 1];
    float m[4] = {}, n[4] = {};
    multiply_add_8x8(m, corner[b], column0);
    multiply_add_8x8(n, row1, transpose_matrix(pack2<fp16>(m[2], m[3])));
    const uint32_t t10 = pack2<fp16>(-n[2], -n[3]);
    left[b][0] = row0;
    left[b][1] = t10;
    left[b][2] = 0u;
    left[b][3] = row1;
    right[b][0] = column0;
    right[b][1] = transpose_matrix(t10);
    right[b][2] = 0u;
    right[b][3] = column1;
    unpack_a(out, left[b]);
    emit(b, b, out);
  }

  const uint32_t gram = in.gram + GramTile::rows_first(lane);
  const auto load_gram = [&](uint32_t (&k)[4], int i, int j) {
    load_matrices_transposed(k, (gram ^ (32 * j)) + 16 * i * GramTile::kRowBytes);
  };

  // 16 > 32: (1, 0), a right factor below, and (3, 2), a left one.
  uint32_t k[4], x[4], y[4], right10[4], left32[4];
#pragma unroll
  for (int i = 1; i < 4; i += 2) {
    float m[2][4] = {}, t[2][4] = {};
    load_gram(k, i, i - 1);
    multiply_block(m, left[i], k);
    pack_negative(x, m);
    multiply_block(t, x, right[i - 1]);
    emit(i, i - 1, t);
    if (i == 1) {
      pack_a<fp16>(right10, t[0], t[1]);
#pragma unroll
      for (int e = 0; e < 4; ++e) right10[e] = transpose_matrix(right10[e]);
    } else {
      pack_a<fp16>(left32, t[0], t[1]);
    }
  }

  // 32 > 64: rows 2 and 3 of -[T22 0; T32 T33] [KK20 KK21; KK30 KK31] [T00 0; T10 T11].
#pragma unroll
  for (int i = 2; i < 4; ++i) {
    float m[2][2][4] = {}, t[2][4] = {}, t1[2][4] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      load_gram(k, 2, j);
      if (i == 2) {
        multiply_block(m[j], left[2], k);
      } else {
        multiply_block(m[j], left32, k);
        load_gram(k, 3, j);
        multiply_block(m[j], left[3], k);
      }
    }
    pack_negative(x, m[0]);
    pack_negative(y, m[1]);
    multiply_block(t, x, right[0]);
    multiply_block(t, y, right10);
    multiply_block(t1, y, right[1]);
    emit(i, 0, t);
    emit(i, 1, t1);
  }
}

}  // namespace gdn

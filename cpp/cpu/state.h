// Tiles from and to pool rows: the transposition between [V, K] in memory and [K][kTileV] in work,
// and the conversion of the pool's dtype. Rows of the last tile past dim_v are zero.
#pragma once

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace gdn::cpu {
namespace {

void load_tiles(const StateRows& state, float* tiles) {
  const int64_t tile_floats = static_cast<int64_t>(state.dim_k) * kTileV;
  for (int v = 0; v < (state.dim_v + kTileV - 1) / kTileV * kTileV; v += 8) {
    float* tile = tiles + v / kTileV * tile_floats + v % kTileV;
    for (int k = 0; k < state.dim_k; k += 8) {
      Vec8 columns[8] = {};
      const int64_t at = static_cast<int64_t>(v) * state.dim_k + k;
      if (v >= state.dim_v) {
        // no such rows
      } else if (state.dtype == DType::kFloat32) {
        load_columns8(static_cast<const float*>(state.data) + at, state.dim_k, columns);
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          columns[i] = read8(state.data, at + static_cast<int64_t>(i) * state.dim_k, state.dtype);
        }
        transpose8(columns);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) store8(tile + (k + i) * kTileV, columns[i]);
    }
  }
}

// Eight V rows and 8 or 16 elements of K.
GDN_INLINE void store_block(const float* tile, const StateRows& to, int64_t at, bool wide,
                            bool streaming) {
  Vec8 low[8], high[8] = {};
  load_columns8(tile, kTileV, low);
  if (wide) load_columns8(tile + 8 * kTileV, kTileV, high);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i, at += to.dim_k) {
    if (streaming) {
      stream16(static_cast<float*>(to.data) + at, low[i], high[i]);
    } else {
      write8(to.data, at, to.dtype, low[i]);
      if (wide) write8(to.data, at + 8, to.dtype, high[i]);
    }
  }
}

// Rows [begin, end) of the state, multiples of 8 inside one tile; `tile` is at row `begin`.
GDN_INLINE void store_rows(const float* tile, const StateStore& store, int begin, int end) {
  const StateRows& to = store.to;
  for (int v = begin; v < end; v += 8, tile += 8) {
    for (int k = 0; k < to.dim_k; k += 16) {
      store_block(tile + k * kTileV, to, static_cast<int64_t>(v) * to.dim_k + k, k + 8 < to.dim_k,
                  store.streaming);
    }
  }
}

void store_tiles(const float* tiles, const StateStore& store) {
  const int64_t tile_floats = static_cast<int64_t>(store.to.dim_k) * kTileV;
  for (int v = 0; v < store.to.dim_v; v += kTileV, tiles += tile_floats) {
    store_rows(tiles, store, v, v + kTileV < store.to.dim_v ? v + kTileV : store.to.dim_v);
  }
}

}  // namespace
}  // namespace gdn::cpu

// The auxiliary role of the scan: X and R of every chunk, ahead of the state.
#pragma once

#include "cuda/common/copy.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/sm90/scan_item.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace gdn::sm90 {

template <class T>
struct AuxRole {
  using Traits = ScanTraits;
  using Inverse = Operand<32>;  // four panels of 16 columns

  const HopperParams& p;
  uint32_t shared;
  int warp;
  Ring<Traits::kItemStages> items;
  Ring<Traits::kKeyStages> keys;
  Ring<Traits::kQueryStages> queries;
  Ring<Traits::kInverseStages> inverses;
  Ring<Traits::kGateStages> gates;
  Ring<Traits::kPairStages> pairs;

  // Half of the columns of That^T K.
  static __device__ __forceinline__ void multiply_x(float (&acc)[32], Inverse inverse,
                                                    Operand<> keys, int half) {
    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_ss<T, 1>(acc, inverse.at(k * 512), keys.at(half * kPanelBytes + k * 2048), k != 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void store_x(const float (&acc)[32], uint32_t panel,
                                          uint32_t gate) const {
    const int lane = fresh_lane();
    const uint32_t log2 = gate + offsetof(GateBlock, log2) + (16 * warp + (lane >> 2)) * 4;
    const float end = load_shared_float(gate + offsetof(GateBlock, log2) + kGateSum);
    const float top = exp2_fast(end - load_shared_float(log2));
    const float bottom = exp2_fast(end - load_shared_float(log2 + 32));
    const uint32_t place = panel + 16 * warp * 128 + Tile<128>::rows_first(lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t words[4] = {pack2<T>(acc[8 * j] * top, acc[8 * j + 1] * top),
                                 pack2<T>(acc[8 * j + 2] * bottom, acc[8 * j + 3] * bottom),
                                 pack2<T>(acc[8 * j + 4] * top, acc[8 * j + 5] * top),
                                 pack2<T>(acc[8 * j + 6] * bottom, acc[8 * j + 7] * bottom)};
      store_matrices(place ^ (32 * j), words);
    }
  }

  // lower(Q K^T) as A registers. NOTE: a branch on the warp's row block here costs spills.
  __device__ __forceinline__ void pack_products(uint32_t (&a)[16], const float (&acc)[32]) const {
    const int lane = fresh_lane(), row = lane >> 2, column = 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool below = j < warp, upto = j <= warp;
      const bool first = below || (j == warp && column <= row);
      const bool second = below || (j == warp && column < row);
      a[4 * j] = pack2<T>(first ? acc[8 * j] : 0.0f, second ? acc[8 * j + 1] : 0.0f);
      a[4 * j + 1] = upto ? pack2<T>(acc[8 * j + 2], acc[8 * j + 3]) : 0u;
      a[4 * j + 2] = below ? pack2<T>(acc[8 * j + 4], acc[8 * j + 5]) : 0u;
      a[4 * j + 3] = pack2<T>(first ? acc[8 * j + 6] : 0.0f, second ? acc[8 * j + 7] : 0.0f);
    }
  }

  // R = scale D o (P That) below and on the diagonal; the blocks above are zero from the start.
  // Off the diagonal D is split at the first token of the row block, so that both factors are <= 1
  // and the columns' factors serve all rows.
  __device__ __forceinline__ void store_r(const float (&acc)[32], uint32_t panel,
                                          uint32_t gate) const {
    const int lane = fresh_lane(), row = lane >> 2, column = 2 * (lane & 3);
    const float scale = p.call.scale;
    const uint32_t log2 = gate + offsetof(GateBlock, log2);
    const float top = load_shared_float(log2 + (16 * warp + row) * 4);
    const float bottom = load_shared_float(log2 + (16 * warp + row) * 4 + 32);
    const float split = load_shared_float(log2 + 64 * warp);
    const float top_factor = exp2_fast(top - split) * scale;
    const float bottom_factor = exp2_fast(bottom - split) * scale;
    const uint32_t place = panel + 16 * warp * 128 + Tile<128>::rows_first(lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j > warp) continue;
      const float2 left = load_shared_float2(log2 + (16 * j + column) * 4);
      const float2 right = load_shared_float2(log2 + (16 * j + 8 + column) * 4);
      const float* d = acc + 8 * j;
      uint32_t words[4];
      if (j < warp) {
        const float l0 = exp2_fast(split - left.x), l1 = exp2_fast(split - left.y);
        const float r0 = exp2_fast(split - right.x), r1 = exp2_fast(split - right.y);
        words[0] = pack2<T>(d[0] * top_factor * l0, d[1] * top_factor * l1);
        words[1] = pack2<T>(d[2] * bottom_factor * l0, d[3] * bottom_factor * l1);
        words[2] = pack2<T>(d[4] * top_factor * r0, d[5] * top_factor * r1);
        words[3] = pack2<T>(d[6] * bottom_factor * r0, d[7] * bottom_factor * r1);
      } else {
        // Past the diagonal the exponent is positive and may overflow: selected, not multiplied.
        const bool first = column <= row, second = column < row;
        words[0] = pack2<T>(first ? d[0] * exp2_fast(top - left.x) * scale : 0.0f,
                            second ? d[1] * exp2_fast(top - left.y) * scale : 0.0f);
        words[1] = pack2<T>(d[2] * exp2_fast(bottom - left.x) * scale,
                            d[3] * exp2_fast(bottom - left.y) * scale);
        words[2] = 0u;
        words[3] = pack2<T>(first ? d[6] * exp2_fast(bottom - right.x) * scale : 0.0f,
                            second ? d[7] * exp2_fast(bottom - right.y) * scale : 0.0f);
      }
      store_matrices(place ^ (32 * j), words);
    }
  }

  // One product is always in flight behind an epilogue: Q K^T | X left | X right | R.
  __device__ __forceinline__ void form_chunk() {
    const uint32_t gate = shared + Traits::kGates + gates.stage * sizeof(GateBlock);
    const uint32_t k_place = shared + Traits::kKeys + keys.stage * kTile;
    const Operand<> k_rows = Operand<>::k_major(k_place);
    const Operand<> k_columns = Operand<>::mn_major(k_place);
    const Operand<> q_rows = Operand<>::k_major(shared + Traits::kQueries + queries.stage * kTile);
    const Inverse inverse = Inverse::mn_major(shared + Traits::kInverses + inverses.stage * kPanel);
    const uint32_t x_place = shared + Traits::kX + pairs.stage * kTile;
    const uint32_t r_place = shared + Traits::kR + pairs.stage * kPanel;
    float even[32], odd[32];
    uint32_t a[16];

    barrier_wait(shared + queries.of(Traits::kQueryFull), queries.parity);
    barrier_wait(shared + keys.of(Traits::kKeyFull), keys.parity);
    pin(even);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t step = (k & 3) * 32 + (k >> 2) * kPanelBytes;
      wgmma_ss<T, 0>(even, q_rows.at(step), k_rows.at(step), k != 0);
    }
    wgmma_commit();
    barrier_wait(shared + inverses.of(Traits::kInverseFull), inverses.parity);
    multiply_x(odd, inverse, k_columns, 0);
    wgmma_wait<1>();
    pin(even);
    if (fresh_lane() == 0) barrier_arrive(shared + queries.of(Traits::kQueryEmpty));
    pack_products(a, even);
    multiply_x(even, inverse, k_columns, 1);
    barrier_wait(shared + pairs.of(Traits::kXEmpty), pairs.parity ^ 1);
    wgmma_wait<1>();
    pin(odd);
    store_x(odd, x_place, gate);

    pin(a);
    pin(odd);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_rs<T, 1>(odd, a + 4 * k, inverse.at(k * 512), k != 0);
    wgmma_commit();
    wgmma_wait<1>();
    pin(even);
    if (fresh_lane() == 0) barrier_arrive(shared + keys.of(Traits::kKeyEmpty));
    store_x(even, x_place + kPanel, gate);
    fence_async_proxy();
    __syncwarp();
    if (fresh_lane() == 0) barrier_arrive(shared + pairs.of(Traits::kXFull));

    barrier_wait(shared + pairs.of(Traits::kREmpty), pairs.parity ^ 1);
    wgmma_wait<0>();
    pin(odd);
    pin(a);
    if (fresh_lane() == 0) barrier_arrive(shared + inverses.of(Traits::kInverseEmpty));
    store_r(odd, r_place, gate);
    fence_async_proxy();
    __syncwarp();
    if (fresh_lane() == 0) barrier_arrive(shared + pairs.of(Traits::kRFull));
    keys.advance();
    queries.advance();
    inverses.advance();
    gates.advance();
    pairs.advance();
  }

  __device__ __forceinline__ void run() {
    for (;; items.advance()) {
      barrier_wait(shared + items.of(Traits::kItemFull), items.parity);
      const int chunks = GDN_ITEM(shared + Traits::kItems + items.stage * sizeof(ScanItem), chunks);
      if (chunks == 0) break;
      __syncwarp();
      if (fresh_lane() == 0) barrier_arrive(shared + items.of(Traits::kItemEmpty));
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) form_chunk();
    }
  }
};

}  // namespace gdn::sm90

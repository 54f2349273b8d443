// What the scan needs of a chunk and does not depend on the state or on Q, for all chunks at once:
//
//     That = (I + diag(beta) strict_lower(K K^T))^-1 diag(beta)
//
// as the swizzled tile that wgmma reads, free of gates, and the gate factors of GateBlock.
//
// Grid: one block per (chunk, group of state heads that share a k head). The block forms K K^T
// once; then each warp inverts for heads of its own. A block has as many warps as its group has
// heads, at most 4.
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/common/triangular.cuh"
#include "cuda/sm90/gates.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/rows.cuh"
#include "cuda/sm90/segments.cuh"

namespace gdn::sm90 {

// K is dead once K K^T is formed: the warps' That tiles take its place.
struct PrepareMap {
  static constexpr int kMaxWarps = 4;
  static constexpr int kKeys = 0;
  static constexpr int kWarpScratch = 256 + kInverseScratchBytes;  // beta, inverse

  GDN_HOST_DEVICE static constexpr int tiles_bytes(int warps) {
    return warps * kInverseBytes > kTile ? warps * kInverseBytes : kTile;
  }
  GDN_HOST_DEVICE static constexpr int gram(int warps) { return tiles_bytes(warps); }
  GDN_HOST_DEVICE static constexpr int diagonal(int warps) {
    return gram(warps) + GramTile::kBytes;
  }
  GDN_HOST_DEVICE static constexpr int scratch(int warps) {
    return diagonal(warps) + kDiagonalBytes;
  }
  GDN_HOST_DEVICE static constexpr int bytes(int warps) {
    return scratch(warps) + warps * kWarpScratch;
  }
};

// Row block i of K K^T: fp16 for the merges of the inverse, its 8x8 diagonal blocks in fp32 too.
template <class T>
__device__ __forceinline__ void form_gram(uint32_t keys, uint32_t gram, uint32_t diagonal, int i,
                                          int lane) {
  float acc[4][2][4] = {};
  const uint32_t a_base = keys + Tile<128>::rows_first(lane) + 16 * i * 128;
  const uint32_t b_base = keys + Tile<128>::pieces_first(lane);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const uint32_t panel = (k >> 2) * kPanel, step = 32 * (k & 3);
    uint32_t a[4], b[4];
    load_matrices(a, (a_base ^ step) + panel);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j > i) continue;
      load_matrices(b, (b_base ^ step) + panel + 16 * j * 128);
      multiply_add<T>(acc[j][0], a, b[0], b[1]);
      multiply_add<T>(acc[j][1], a, b[2], b[3]);
    }
  }
  const uint32_t target = gram + GramTile::rows_first(lane) + 16 * i * 128;
  const uint32_t pair = 32 * (lane >> 2) + 8 * (lane & 3);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j > i) continue;
    uint32_t words[4];
    pack_a<fp16>(words, acc[j][0], acc[j][1]);
    store_matrices(target ^ (32 * j), words);
    if (j != i) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t block = diagonal + (2 * i + half) * kDiagonalBlockBytes + pair;
      store_shared(block, acc[j][half][2 * half]);
      store_shared(block + 4, acc[j][half][2 * half + 1]);
    }
  }
}

// Where a lane points stmatrix for a 16x16 block of 32-byte rows: piece p of row t lies at
// p ^ (t / 4 % 2).
__device__ __forceinline__ uint32_t inverse_place(int lane) {
  const int row = lane & 15, piece = lane >> 4;
  return 32 * row + ((piece ^ ((row >> 2) & 1)) << 4);
}

// That of one head, packed, into the warp's tile and from there to memory.
template <class T>
__device__ __forceinline__ void write_inverse(const InverseInput& input, uint32_t tile, int lane,
                                              uint8_t* target) {
  const uint32_t base = tile + inverse_place(lane);
  invert_lower(input, lane, [&](int i, int j, const float (&block)[2][4]) {
    uint32_t words[4];
    pack_a<T>(words, block[0], block[1]);
    store_matrices(base + inverse_panel(j) + 512 * (i - j), words);
  });
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) {
    bulk_store(target, tile, kInverseBytes);
    bulk_commit();
  }
}

// Outputs of a dead sequence are zero.
__device__ __forceinline__ void zero_outputs(const PrefillParams& p, const ChunkRows& rows,
                                             int first_head) {
  auto* output = static_cast<uint16_t*>(const_cast<void*>(p.output.data));
  const int count = (rows.last - rows.first) * 16;
  for (int head = first_head; head < first_head + p.group; ++head) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const int64_t token = rows.origin + rows.first + (i >> 4);
      *reinterpret_cast<uint4*>(output + token * p.output.row_stride + head * p.output.head_stride +
                                8 * (i & 15)) = uint4{};
    }
  }
}

template <class T>
__global__ void __launch_bounds__(32 * PrepareMap::kMaxWarps, 3)
    prepare_inverses(const __grid_constant__ HopperParams params) {
  extern __shared__ __align__(1024) uint8_t storage[];
  const PrefillParams& p = params.call;
  const uint32_t shared = shared_address(storage);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  dependency_wait();
  allow_dependents();
  if (blockIdx.x == 0 && warp == 0) begin_slab(params, lane);

  const int32_t slot = blockIdx.x / p.units, unit = blockIdx.x % p.units;
  const SlabRange slab = slab_range(p.plan->num_chunks, params.slab, params.num_slabs);
  if (slot >= slab.end - slab.begin) return;
  const int32_t number = slab.begin + slot;
  const SequenceEntry sequence =
      p.entries[find_sequence(p.entries, p.plan->num_entries, number, lane)];
  const ChunkRows rows = chunk_rows(sequence, number - sequence.chunk_begin);
  const int first_head = unit * p.group;
  if (!sequence.live()) {
    zero_outputs(p, rows, first_head);
    return;
  }
  // The first head's gates are on their way together with K.
  int head = first_head + (warp < p.group ? warp : 0);
  RawGates raw = load_gates(p.gates, rows, head, lane);
  const RowCopy keys = {.source = p.k,
                        .head = p.heads.k_of(first_head),
                        .tile = shared + PrepareMap::kKeys,
                        .normalize = p.qk_l2norm};
  copy_rows<T>(keys, rows, threadIdx.x, blockDim.x);
  __syncthreads();
  const uint32_t gram = shared + PrepareMap::gram(warps);
  const uint32_t diagonal = shared + PrepareMap::diagonal(warps);
  for (int i = warp; i < 4; i += warps) form_gram<T>(keys.tile, gram, diagonal, i, lane);
  __syncthreads();

  const uint32_t tile = keys.tile + warp * kInverseBytes;
  const uint32_t scratch = shared + PrepareMap::scratch(warps) + warp * PrepareMap::kWarpScratch;
  for (int member = warp; member < p.group; member += warps) {
    if (member != warp) {
      head = first_head + member;
      raw = load_gates(p.gates, rows, head, lane);
    }
    const int64_t record = static_cast<int64_t>(slot) * p.heads.state + head;
    const LaneGates gates = decode_gates(p.gates, raw, rows, head, lane);
    form_gates(gates, p.scale, scratch, lane, params.gates[record]);
    if (lane == 0) bulk_wait_read();  // the tile of the head before has left
    __syncwarp();
    write_inverse<T>(
        {.gram = gram, .diagonal = diagonal, .beta = scratch, .scratch = scratch + 256}, tile, lane,
        params.inverses + record * kInverseBytes);
  }
  if (lane == 0) bulk_wait();
}

}  // namespace gdn::sm90

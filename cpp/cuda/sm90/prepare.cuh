// What the scan needs of a chunk and does not depend on the state or on Q, for all chunks at once:
//
//     That = (I + diag(beta) strict_lower(K K^T))^-1 diag(beta)
//
// as the swizzled tile that wgmma reads, free of gates, and the gate factors of GateBlock.
//
// Grid: a block that begins the slab, and one per (chunk, group of state heads that share a k
// head), which forms K K^T once, all warps together; then each warp inverts for heads of its own. A
// block has as many warps as its group has heads, at most 4: kWarps is 1, 2 or 4.
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/common/triangular.cuh"
#include "cuda/sm90/gates.cuh"
#include "cuda/sm90/pieces.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/rows.cuh"

namespace gdn::sm90 {

// K is dead once K K^T is in registers: what comes after it takes its place.
template <int kWarps>
struct PrepareMap {
  static constexpr int kThreads = 32 * kWarps;
  // NOTE: the time goes with the warps on a multiprocessor, so shared memory and registers are
  // kept small; registers end where spills begin.
  static constexpr int kBlocks = kWarps == 4 ? 6 : kWarps == 2 ? 9 : 12;

  static constexpr int kKeys = 0;
  static constexpr int kGram = 0;
  static constexpr int kDiagonal = kGram + GramTile::kBytes;
  static constexpr int kTiles = kDiagonal + kDiagonalBytes;  // That, a warp each
  static constexpr int kEnd = kTiles + kWarps * kInverseBytes;
  static constexpr int kScratch = kEnd > kTile ? kEnd : kTile;
  static constexpr int kWarpScratch = 256 + kInverseScratchBytes;    // beta, inverse
  static constexpr int kKeyFull = kScratch + kWarps * kWarpScratch;  // mbarrier
  static constexpr int kBytes = kKeyFull + 16;
};

// K K^T, its row blocks shared out so that warps have as many 16x16 blocks as can be: fp16 for the
// merges of the inverse, the 8x8 diagonal blocks in fp32 too. A row block of K is the A fragment of
// its own products and, words exchanged, the B fragment of those below.
template <class T, int kWarps>
struct GramRole {
  static constexpr int kOwn = 4 / kWarps;
  float acc[kOwn][4][2][4];

  // The row block `n` of warp `warp`.
  static __device__ __forceinline__ int row_block(int warp, int n) {
    if constexpr (kWarps == 1) return n;
    if constexpr (kWarps == 4) return warp;
    return n == 0 ? warp : 3 - warp;
  }
  static __device__ __forceinline__ constexpr int most_columns(int n) {
    return kWarps == 1 ? n : kWarps == 2 ? 1 + 2 * n : 3;
  }

  __device__ __forceinline__ void form(uint32_t keys, int warp, int lane) {
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 8; ++e) acc[n][j][e / 4][e % 4] = 0.0f;
      }
    }
    const uint32_t base = keys + Tile<128>::rows_first(lane);
    const int last = row_block(warp, kOwn - 1);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint32_t place = (base ^ (32 * (k & 3))) + (k >> 2) * kPanel;
      uint32_t own[kOwn][4];
#pragma unroll
      for (int n = 0; n < kOwn; ++n) {
        load_matrices(own[n], place + 16 * row_block(warp, n) * 128);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j > last) continue;
        uint32_t b[4];
        if constexpr (kWarps == 1) {
#pragma unroll
          for (int e = 0; e < 4; ++e) b[e] = own[j][e];
        } else {
          load_matrices(b, place + 16 * j * 128);
        }
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
          if (j > most_columns(n) || j > row_block(warp, n)) continue;
          multiply_add<T>(acc[n][j][0], own[n], b[0], b[2]);
          multiply_add<T>(acc[n][j][1], own[n], b[1], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void store(uint32_t gram, uint32_t diagonal, int warp,
                                        int lane) const {
    const uint32_t pair = 32 * (lane >> 2) + 8 * (lane & 3);
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const int i = row_block(warp, n);
      const uint32_t target = gram + GramTile::rows_first(lane) + 16 * i * 128;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j > most_columns(n) || j > i) continue;
        uint32_t words[4];
        pack_a<fp16>(words, acc[n][j][0], acc[n][j][1]);
        store_matrices(target ^ (32 * j), words);
        if (j != i) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t block = diagonal + (2 * i + half) * kDiagonalBlockBytes + pair;
          store_shared(block, acc[n][j][half][2 * half]);
          store_shared(block + 4, acc[n][j][half][2 * half + 1]);
        }
      }
    }
  }
};

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

// K of the block's unit into shared memory; ends with all threads seeing it.
template <class T, int kWarps>
__device__ __forceinline__ void load_keys(const HopperParams& params, const ChunkRows& rows,
                                          int head, uint32_t shared) {
  using Map = PrepareMap<kWarps>;
  const PrefillParams& p = params.call;
  if (p.qk_l2norm || rows.last - rows.first != kChunk) {
    copy_rows<T>(
        {.source = p.k, .head = head, .tile = shared + Map::kKeys, .normalize = p.qk_l2norm}, rows,
        threadIdx.x, Map::kThreads);
    __syncthreads();
    return;
  }
  if (threadIdx.x == 0) {
    const uint32_t full = shared + Map::kKeyFull;
    barrier_arrive_expect(full, kTile);
    tensor_load(shared + Map::kKeys, &params.k_map, 0, head, rows.origin, full);
    tensor_load(shared + Map::kKeys + kPanel, &params.k_map, 64, head, rows.origin, full);
  }
  barrier_wait(shared + Map::kKeyFull, 0);
}

template <class T, int kWarps>
__global__ void __launch_bounds__(PrepareMap<kWarps>::kThreads, PrepareMap<kWarps>::kBlocks)
    prepare_inverses(const __grid_constant__ HopperParams params) {
  using Map = PrepareMap<kWarps>;
  extern __shared__ __align__(1024) uint8_t storage[];
  const PrefillParams& p = params.call;
  const uint32_t shared = shared_address(storage);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
  if (threadIdx.x == 0) {
    barrier_init(shared + Map::kKeyFull, 1);
    barrier_init_fence();
    prefetch_tensor_map(&params.k_map);
  }
  __syncthreads();
  dependency_wait();
  allow_dependents();
  if (blockIdx.x == 0) {  // beside the others, whose work it would delay
    if (warp == 0) begin_slab(params, lane);
    return;
  }

  const int32_t slot = (blockIdx.x - 1) / p.units, unit = (blockIdx.x - 1) % p.units;
  const SlabRange slab = slab_range(p.plan->num_chunks, params.slab, params.num_slabs);
  if (slot >= slab.end - slab.begin) return;
  const int32_t number = slab.begin + slot;
  const SequenceEntry sequence = load_entry(p.plan, p.entries, p.entry_bound, number, lane);
  const ChunkRows rows = chunk_rows(p.grid, sequence, number - sequence.chunk_begin);
  const int first_head = unit * p.group;
  if (!sequence.live()) {
    zero_outputs(p, rows, first_head);
    return;
  }
  // The first head's gates are on their way together with K.
  RawGates raw = load_gates(p.gates, rows, first_head + (warp < p.group ? warp : 0), lane);
  load_keys<T, kWarps>(params, rows, p.heads.k_of(first_head), shared);
  const uint32_t gram = shared + Map::kGram, diagonal = shared + Map::kDiagonal;
  {
    GramRole<T, kWarps> role;
    role.form(shared + Map::kKeys, warp, lane);
    __syncthreads();
    role.store(gram, diagonal, warp, lane);
    __syncthreads();
  }

  const uint32_t tile = shared + Map::kTiles + warp * kInverseBytes;
  const uint32_t scratch = shared + Map::kScratch + warp * Map::kWarpScratch;
#pragma unroll 1
  for (int member = warp; member < p.group; member += kWarps) {
    const int head = first_head + member;
    if (member != warp) raw = load_gates(p.gates, rows, head, lane);
    const int64_t record = static_cast<int64_t>(slot) * p.heads.state + head;
    const LaneGates gates = decode_gates(p.gates, raw, rows, head, lane);
    form_gates(gates, scratch, lane, params.gates[record]);
    if (lane == 0) bulk_wait_read();  // the tile of the head before has left
    __syncwarp();
    write_inverse<T>(
        {.gram = gram, .diagonal = diagonal, .beta = scratch, .scratch = scratch + 256}, tile, lane,
        params.inverses + record * kInverseBytes);
  }
  if (lane == 0) bulk_wait_read();
}

}  // namespace gdn::sm90

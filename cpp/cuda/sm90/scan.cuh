// The serial pass over the chunks of a sequence. With S the [V, K] state before the chunk:
//
//     X = diag(G_C / G) That^T K          R = scale D o (lower(Q K^T) That)
//     Y = V - diag(G) K S^T
//     O = scale diag(G) Q S^T + R Y       S = G_C S + Y^T X
//
// X and R do not depend on the state, so two products per chunk remain on the chain: S k^T, and
// Y^T X. Persistent grid, one block per multiprocessor, over (sequence, state head) items that the
// blocks draw by ticket. Roles, by warpgroup:
//   state (2)  64 rows of V each: S in fp32 accumulators, its bf16 copy and Y as A registers
//   aux        X and R, a chunk or two ahead
//   loader     two warps draw items and load K, Q, That and gates, boundary rows by threads; two
//              warps bring V and take O away, one for each state warpgroup
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/sm90/scan_combine.cuh"
#include "cuda/sm90/scan_load.cuh"
#include "cuda/sm90/scan_products.cuh"
#include "cuda/sm90/scan_state.cuh"
#include "cuda/sm90/scan_values.cuh"

namespace gdn::sm90 {

__device__ __forceinline__ void init_barriers(uint32_t shared) {
  using Traits = ScanTraits;
  constexpr int kStateWarps = 4 * Traits::kStateGroups, kAuxWarps = 4;
  const auto init = [&](uint32_t first, int count, uint32_t arrivals) {
    for (int i = 0; i < count; ++i) barrier_init(shared + first + 8 * i, arrivals);
  };
  init(Traits::kKeyFull, Traits::kKeyStages, 1);
  init(Traits::kKeyEmpty, Traits::kKeyStages, kStateWarps + kAuxWarps);
  init(Traits::kQueryFull, Traits::kQueryStages, 1);
  init(Traits::kQueryEmpty, Traits::kQueryStages, kStateWarps + kAuxWarps);
  init(Traits::kInverseFull, Traits::kInverseStages, 1);
  init(Traits::kInverseEmpty, Traits::kInverseStages, kAuxWarps);
  init(Traits::kValueFull, Traits::kPairStages * Traits::kStateGroups, 1);
  init(Traits::kOutputFull, Traits::kPairStages * Traits::kStateGroups, 4);
  init(Traits::kXFull, Traits::kPairStages, kAuxWarps);
  init(Traits::kXEmpty, Traits::kPairStages, kStateWarps);
  init(Traits::kRFull, Traits::kPairStages, kAuxWarps);
  init(Traits::kREmpty, Traits::kPairStages, kStateWarps);
  init(Traits::kItemFull, Traits::kItemStages, 1);
  init(Traits::kItemEmpty, Traits::kItemStages, kStateWarps + kAuxWarps + Traits::kStateGroups);
  barrier_init_fence();
}

template <class T, bool kUnaligned>
__global__ void __launch_bounds__(ScanTraits::kThreads, 1)
    scan_chunks(const __grid_constant__ HopperParams p) {
  using Traits = ScanTraits;
  extern __shared__ __align__(1024) uint8_t scan_storage[];
  const uint32_t shared = shared_address(scan_storage);
  // From a shuffle, so that the compiler knows warp numbers to be uniform.
  const int warp_id = __shfl_sync(kFullWarp, threadIdx.x >> 5, 0);
  const int group = warp_id >> 2, warp = warp_id & 3;
  if (threadIdx.x == 0) init_barriers(shared);
  // The blocks of R and That above the diagonal stay zero.
  for (int i = Traits::kR + 16 * threadIdx.x; i < Traits::kGates; i += 16 * Traits::kThreads) {
    store_shared4(shared + i, {});
  }
  fence_async_proxy();
  if (threadIdx.x == 32) {
    prefetch_tensor_map(&p.k_map);
    prefetch_tensor_map(&p.q_map);
    prefetch_tensor_map(&p.v_map);
    prefetch_tensor_map(&p.output_map);
  }
  __syncthreads();
  // Behind the summary, which has waited for prepare, only the states are still to come. Behind
  // prepare, which has waited for the plan, items are known if they are whole sequences.
  const bool segments = p.segments.steps != nullptr;
  const bool planned = p.segments.capacity == 0 && p.pieces.count == 0 && p.num_slabs == 1;
  if (!segments && !planned) dependency_wait();

  if (group < Traits::kStateGroups) {
    take_registers<Traits::kStateRegisters>();
    if (segments) CombineRole<false>{.p = p, .shared = shared, .warp = 4 * group + warp}.run();
    if (planned) dependency_wait();
    allow_dependents();
    StateRole<T, kUnaligned>{.p = p, .shared = shared, .group = group, .warp = warp}.run();
  } else if (group == Traits::kAuxGroup) {
    give_registers<Traits::kAuxRegisters>();
    AuxRole<T>{.p = p, .shared = shared, .warp = warp}.run();
  } else {
    give_registers<Traits::kLoaderRegisters>();
    if (warp >= Traits::kLoaderWarps) {
      if (segments && warp == Traits::kLoaderWarps) {
        CombineRole<true>{.p = p, .shared = shared}.run();
      } else if (segments && p.state->num_combinations > 0) {
        sync_threads(Traits::kValuesFree, 32 * (Traits::kStateWarps + Traits::kStateGroups));
      }
      ValueRole<T, kUnaligned>{.p = p, .shared = shared, .group = warp - Traits::kLoaderWarps}
          .run();
      return;
    }
    auto* slab = reinterpret_cast<SlabState*>(scan_storage + Traits::kSlab);
    if (warp == 0) copy_slab(p, *slab, planned, fresh_lane());
    LoaderRole<T, kUnaligned>{
        .p = p,
        .shared = shared,
        .item_slots = reinterpret_cast<ScanItem*>(scan_storage + Traits::kItems),
        .warp = warp,
        .slab = *slab,
        .waits = planned}
        .run();
  }
}

}  // namespace gdn::sm90

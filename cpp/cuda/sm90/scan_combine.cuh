// The state at the start of every segment: S_next = S M + N, segment after segment, for each
// sequence that is cut and each head. The state warps of the scan do it before their items, while
// the other roles fill the first stages; each segment starts as soon as its state is there.
//
// Rows of V are independent: a block carries 16 of them through the segments of one sequence and
// head, so that 8 heads already make 64 blocks' work, dealt by ticket. Operands are split into two
// bf16 parts and S M = hi hi + hi lo + lo hi is accumulated in fp32: 2^-17, far below what the scan
// adds. What a step waits for is M, 64 KB from L2: its registers are filled with the next M as soon
// as they have been used.
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/sm90/combine.cuh"
#include "cuda/sm90/scan_item.cuh"

namespace gdn::sm90 {

// 16 rows of V of one sequence and head, by the eight state warps, 16 columns of K each.
struct StateChain {
  using Traits = ScanTraits;

  const SegmentParams& segments;
  int32_t heads;
  int32_t head;
  int32_t first_place;
  int32_t count;      // of segments
  int32_t row_tile;   // of 16 rows of V
  uint32_t exchange;  // shared: two buffers of [8, 2, 32] vectors
  int warp;
  int lane;

  // The map of one segment as a warp needs it: its 16 columns of M, its tile of N.
  struct Map {
    uint4 m[8][2];
    CombineTile n;
    int32_t reset;
  };

  __device__ __forceinline__ int64_t record(int32_t index) const {
    return static_cast<int64_t>(first_place + index) * heads + head;
  }
  __device__ __forceinline__ float* state(int32_t index) const {
    return segments.states + record(index) * (kDim * kDim) + (16 * row_tile + (lane >> 2)) * kDim +
           16 * warp + 2 * (lane & 3);
  }
  __device__ __forceinline__ const uint4* transition(int32_t index) const {
    return segments.transitions + record(index) * kTransitionVectors + 2 * warp * 32 + lane;
  }
  __device__ __forceinline__ uint32_t slot(int buffer, int step) const {
    return exchange + ((buffer * 8 + step) * 64 + lane) * 16;
  }

  __device__ __forceinline__ void load(Map& map, int32_t index) const {
    const uint4* m = transition(index);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) map.m[k][i] = m[(16 * k + i) * 32];
    }
    load_tile(map.n, state(index + 1));
    map.reset = segments.resets[record(index)];
  }

  static __device__ __forceinline__ void meet() {
    sync_threads(Traits::kCombineSync, 32 * (Traits::kStateWarps + 1));
  }

  // All warps learn the state, as A fragments: this warp's columns are the k step of its number.
  __device__ __forceinline__ void publish(const CombineTile& s, int buffer) const {
    uint32_t hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      split_pair(s[i][0], s[i][1], hi[2 * i], lo[2 * i]);
      split_pair(s[i][2], s[i][3], hi[2 * i + 1], lo[2 * i + 1]);
    }
    store_shared4(slot(buffer, warp), {hi[0], hi[1], hi[2], hi[3]});
    store_shared4(slot(buffer, warp) + 512, {lo[0], lo[1], lo[2], lo[3]});
    meet();
  }

  // The state as A fragments of two k steps: hi, lo.
  struct Fragments {
    uint32_t a[2][2][4];
  };
  __device__ __forceinline__ Fragments fragments(int buffer, int k) const {
    Fragments f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 x = load_shared4(slot(buffer, k + (i >> 1)) + 512 * (i & 1));
      f.a[i >> 1][i & 1][0] = x.x;
      f.a[i >> 1][i & 1][1] = x.y;
      f.a[i >> 1][i & 1][2] = x.z;
      f.a[i >> 1][i & 1][3] = x.w;
    }
    return f;
  }

  // S becomes S M + N; the map becomes that of segment `next`.
  __device__ __forceinline__ void step(CombineTile& s, Map& map, int buffer, int32_t next) const {
    CombineTile large = {}, small[2] = {};
    const uint4* m_next = transition(next);
    Fragments now = fragments(buffer, 0);
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      Fragments then = now;
      if (k < 6) then = fragments(buffer, k + 2);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 m = map.m[k + j][i];
          multiply_add<bf16>(large[i], now.a[j][0], m.x, m.y);
          multiply_add<bf16>(small[0][i], now.a[j][0], m.z, m.w);
          multiply_add<bf16>(small[1][i], now.a[j][1], m.x, m.y);
          map.m[k + j][i] = m_next[(16 * (k + j) + i) * 32];
        }
      }
      __syncwarp();  // or else the compiler asks for the next M when it is due
      now = then;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // Selected, so that a state that is not finite ends at a reset.
        const float sum = large[i][e] + (small[0][i][e] + small[1][i][e]) + map.n[i][e];
        s[i][e] = map.reset != 0 ? map.n[i][e] : sum;
      }
    }
    load_tile(map.n, state(next + 1));
    map.reset = segments.resets[record(next)];
  }

  // From the state after the first segment to the one before the last. Whoever announces meets the
  // warps at every step.
  __device__ __forceinline__ void run() const {
    Map map;
    CombineTile s;
    load_tile(s, state(1));
    load(map, 1);
#pragma unroll 1
    for (int32_t i = 1; i < count - 1; ++i) {
      publish(s, i & 1);
      step(s, map, i & 1, min(i + 1, count - 2));
      store_tile(s, state(i + 1));
    }
    meet();
  }

  // By one more warp: the fence, which the others would wait in for the M they have asked for.
  __device__ __forceinline__ void run_announcer() const {
    int32_t* steps = segments.steps + record(0) * Traits::kStateWarps + row_tile;
    meet();
#pragma unroll 1
    for (int32_t i = 1; i < count - 1; ++i) {
      meet();
      if (lane == 0) add_release(steps, 1);
    }
  }
};

// By the state warps, and the first value warp, which announces.
template <bool kAnnounces>
struct CombineRole {
  using Traits = ScanTraits;

  const HopperParams& p;
  uint32_t shared;
  int warp;

  // Work `ticket`: the sequences with steps, their heads, eight row tiles each.
  __device__ __forceinline__ void work(int32_t ticket) const {
    const int lane = fresh_lane();
    const int32_t heads = p.call.heads.state, each = heads * Traits::kStateWarps;
    int32_t place = 0, count = 0;
#pragma unroll 1
    for (int32_t sequence = 0; sequence < kMaxCutSequences; ++sequence) {
      count = p.state->segments[sequence];
      if (count > 2 && ticket < each) break;
      if (count > 2) ticket -= each;
      if (count > 1) place += count;
    }
    const StateChain work = {.segments = p.segments,
                             .heads = heads,
                             .head = ticket / Traits::kStateWarps,
                             .first_place = place,
                             .count = count,
                             .row_tile = ticket % Traits::kStateWarps,
                             .exchange = shared + Traits::kValues,
                             .warp = warp,
                             .lane = lane};
    if constexpr (kAnnounces) {
      work.run_announcer();
    } else {
      work.run();
    }
  }

  __device__ __forceinline__ void run() const {
    const uint32_t slot = shared + Traits::kValues + 2 * 8 * 64 * 16;
    const int lane = fresh_lane();
    const bool draws = !kAnnounces && warp == 0 && lane == 0;
    int32_t ticket = 0;
    if (draws) ticket = atomicAdd(&p.state->next_combination, 1);
    const bool none = p.state->num_combinations == 0;
    dependency_wait();
    if (none) return;
    for (;;) {
      if (draws) store_shared(slot, static_cast<uint32_t>(ticket));
      StateChain::meet();
      ticket = load_shared_int(slot);
      if (ticket >= p.state->num_combinations) break;
      work(ticket);
      if (draws) ticket = atomicAdd(&p.state->next_combination, 1);
    }
    fence_async_proxy();  // V is next in the place of the exchange
    if constexpr (kAnnounces) {
      sync_threads(Traits::kValuesFree, 32 * (Traits::kStateWarps + Traits::kStateGroups));
    } else {
      arrive_threads(Traits::kValuesFree, 32 * (Traits::kStateWarps + Traits::kStateGroups));
    }
  }
};

}  // namespace gdn::sm90

// A part of a prompt (segment.cu): from the maps of its pieces to the map of all of it, and from
// the state before it to the states before every piece. The steps are those of combine.cuh.
//
//   begin, start known    states[i + 1] = states[i] M_i + N_i from states[1] on; the last is the
//                         state after the part
//   begin, start open     the same on the rows of N, and on those of M = M_0 M_1 .. without N;
//                         only the last is kept
//   finish, start open    states[0] = the state before the part, and states[i + 1] as above
//
// Grid: 16 or 32 rows of one of these per turn of a block, as in combine.cuh.
#pragma once

#include "cuda/sm90/combine.cuh"

namespace gdn::sm90 {

struct CarryParams {
  SegmentParams segments;
  const SlabState* state;
  int32_t heads;
  const float* initial;  // [H, 128, 128]: finish; null: begin
  float* transition;     // [H, 128, 128]: begin, open and mapped
  float* offset;         // [H, 128, 128]: begin, mapped
};

// Rows of one state carried through maps.
template <int kTiles>
struct Carry {
  const CombineWork<kTiles>& work;
  const CarryParams& p;
  int32_t pieces;

  using State = CombineTile[kTiles];

  __device__ __forceinline__ void load(State& s, const float* states) const {
    const float* own = states + static_cast<int64_t>(work.head) * (kDim * kDim) + work.tile;
#pragma unroll
    for (int r = 0; r < kTiles; ++r) load_tile(s[r], own + r * (16 * kDim));
  }
  __device__ __forceinline__ void store(const State& s, float* states) const {
    float* own = states + static_cast<int64_t>(work.head) * (kDim * kDim) + work.tile;
#pragma unroll
    for (int r = 0; r < kTiles; ++r) store_tile(s[r], own + r * (16 * kDim));
  }
  __device__ __forceinline__ void store_place(const State& s, int32_t place) const {
#pragma unroll
    for (int r = 0; r < kTiles; ++r) store_tile(s[r], work.state(place) + r * (16 * kDim));
  }

  // Every element of the tiles becomes element(row, column) of a [128, 128] state.
  template <class Element>
  __device__ __forceinline__ void fill(State& s, Element element) const {
    const auto row0 = static_cast<int>(work.tile / kDim),
               column0 = static_cast<int>(work.tile % kDim);
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        s[r][e >> 2][e & 3] =
            element(row0 + 16 * r + 8 * ((e >> 1) & 1), column0 + 8 * (e >> 2) + (e & 1));
      }
    }
  }

  // M of the first piece, back from the fragments of transition.cuh.
  __device__ __forceinline__ void load_first_transition(State& s) const {
    const auto* words =
        reinterpret_cast<const bf16*>(p.segments.transitions + work.record(0) * kTransitionVectors);
    const bool reset = p.segments.resets[work.record(0)] != 0;
    const auto part = [&](int row, int column) {
      const int vector =
          ((row >> 4) * 16 + (column >> 3)) * 32 + (column & 7) * 4 + ((row & 7) >> 1);
      return words + 8 * vector + 2 * ((row >> 3) & 1) + (row & 1);
    };
    fill(s, [&](int row, int column) {
      const bf16* x = part(row, column);
      const float value = __bfloat162float(x[0]) + __bfloat162float(x[4]);
      return reset ? 0.0f : value;
    });
  }

  // Through the maps [first, last).
  template <bool kStore, bool kOffset>
  __device__ __forceinline__ void run(State& s, int32_t first, int32_t last) const {
    SegmentMap<kTiles> map;
#pragma unroll 1
    for (int32_t i = first; i < last; ++i) {
      work.load(map, i);
      if constexpr (!kOffset) {
#pragma unroll
        for (int r = 0; r < kTiles; ++r) {
#pragma unroll
          for (int e = 0; e < 8; ++e) map.n[r][e >> 2][e & 3] = 0.0f;
        }
      }
      work.publish(s, i & 1);
      __syncthreads();
      work.step(s, map, i & 1);
      if constexpr (kStore) store_place(s, i + 1);
    }
  }

  __device__ __forceinline__ void finish() const {
    State s;
    load(s, p.initial);
    store_place(s, 0);
    run<true, true>(s, 0, pieces - 1);
  }

  __device__ __forceinline__ void begin_known() const {
    State s;
    work.load_state(s, 1);
    run<true, true>(s, 1, p.segments.mapped ? pieces : pieces - 1);
    if (p.segments.mapped) store(s, p.offset);
  }

  __device__ __forceinline__ void begin_open(bool is_offset) const {
    State s;
    if (is_offset) {
      work.load_state(s, 1);
      run<false, true>(s, 1, pieces);
      store(s, p.offset);
    } else {
      load_first_transition(s);
      run<false, false>(s, 1, pieces);
      store(s, p.transition);
    }
  }

  // Of a broken sequence: no token.
  __device__ __forceinline__ void begin_empty() const {
    State s = {};
    if (p.segments.mapped) store(s, p.offset);
    if (p.transition == nullptr) return;
    fill(s, [](int row, int column) { return row == column ? 1.0f : 0.0f; });
    store(s, p.transition);
  }
};

template <int kTiles>
__global__ void __launch_bounds__(CombineTraits<kTiles>::kThreads, 1)
    carry_states(const __grid_constant__ CarryParams p) {
  using Traits = CombineTraits<kTiles>;
  __shared__ __align__(16) uint8_t exchange[2 * kTiles * 8 * 64 * 16];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  dependency_wait();
  allow_dependents();
  const int32_t pieces = p.state->segments[0];
  const bool finishes = p.initial != nullptr, both = !finishes && p.segments.open;
  const int32_t items = p.heads * Traits::kBlocksPerHead;
  for (int32_t next = blockIdx.x; next < (both ? 2 * items : items); next += gridDim.x) {
    const int32_t i = next % items;
    const int32_t rows = (i % Traits::kBlocksPerHead) * Traits::kRows;
    const CombineWork<kTiles> work = {
        .segments = p.segments,
        .heads = p.heads,
        .head = i / Traits::kBlocksPerHead,
        .tile = (rows + (lane >> 2)) * kDim + 16 * warp + 2 * (lane & 3),
        .m_vector = 2 * warp * 32 + lane,
        .exchange = shared_address(exchange),
        .warp = warp,
        .lane = lane};
    const Carry<kTiles> carry = {.work = work, .p = p, .pieces = pieces};
    __syncthreads();  // the exchange is free again
    if (finishes) {
      if (pieces > 0) carry.finish();
    } else if (pieces == 0) {
      carry.begin_empty();
    } else if (both) {
      carry.begin_open(next < items);
    } else {
      carry.begin_known();
    }
  }
}

}  // namespace gdn::sm90

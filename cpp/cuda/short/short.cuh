// Up to 16 new tokens on a paged state in one pass: S is read once into registers, gives all
// products that the tokens need, takes the tokens in, and is written once for each page end that
// they reach and for their last one. All products with S are matrix instructions on S split in two
// 16-bit numbers; everything between the tokens is fp32.
//
// Items are (sequence, state head, part of the V rows). A warp owns 16 rows of S, and a lane reads
// its own elements before it writes them, so pages are updated in place.
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/short/tokens.cuh"

namespace gdn {

// By one warp, for its block: the tables that `resolve_sequence` reads one after the other are
// brought to L1 together.
__device__ __forceinline__ void touch(const IndexTable& table, int64_t i) {
  if (!table) return;
  const auto* words = static_cast<const int32_t*>(table.data) + (table.is_int64 ? 2 * i : i);
  asm volatile("{ .reg .b32 unused; ld.global.b32 unused, [%0]; }" : : "l"(words));
}

__device__ __forceinline__ void touch_tables(const PrefillProblem& p, int64_t b) {
  switch (this_lane()) {
    case 0: return touch(p.cu_seqlens, b);
    case 1: return touch(p.cu_seqlens, b + 1);
    case 2: return touch(p.table.indptr, b);
    case 3: return touch(p.table.indptr, b + 1);
    case 4: return touch(p.table.last_page_len, b);
    case 5: return touch(p.state_indices, b);
    case 6: return touch(p.output_state_indices, b);
    case 7: return touch(p.checkpoint_starts, b);
    case 8: return touch(p.prefix_lens, b);
    case 9: return touch(p.table.initial_pages, b);
    default: return;
  }
}

// What one block works on.
struct ShortItem {
  uint32_t sequence;
  int32_t h;
  int32_t first_row;  // of this warp

  template <class Traits>
  static __device__ __forceinline__ ShortItem of(const ShortParams& p, uint32_t number) {
    const auto heads = static_cast<uint32_t>(p.problem.heads.state);
    const uint32_t state = number / p.parts, part = number - state * p.parts;
    const uint32_t sequence = state / heads;
    const int warps = static_cast<int>(blockDim.x / 32);
    return {.sequence = sequence,
            .h = static_cast<int32_t>(state - sequence * heads),
            .first_row = 16 * (static_cast<int>(part) * warps + this_warp())};
  }
};

__device__ __forceinline__ int64_t checkpoint_of(const PrefillProblem& p, const ShortEntry& s,
                                                 int64_t j) {
  const int64_t entry = s.checkpoint_start + j;
  return p.checkpoint_indices ? p.checkpoint_indices[entry] : entry;
}

// Outputs of a dead sequence, which may be longer than a short one, for a warp's rows.
__device__ __forceinline__ void zero_outputs(const ShortParams& p, const ShortEntry& s, int32_t h,
                                             int first_row) {
  const Tensor& o = p.problem.output;
  for (int64_t t = this_lane() / 4; t < s.length; t += 8) {
    const int64_t at = (s.begin + t) * o.row_stride + h * o.head_stride + first_row;
    store_four(o, at + 4 * (this_lane() % 4), uint2{}, p.vector_v);
  }
}

// v of tokens r and r + 8, four rows each.
__device__ __forceinline__ void load_values(uint2 (&v)[2], const ShortParams& p,
                                            const ShortEntry& s, const ShortItem& item) {
  const Tensor& t = p.problem.v;
  const int r = this_lane() / 4, c = this_lane() % 4;
  const int64_t head = divide(item.h, p.heads_per_v) * t.head_stride + item.first_row + 4 * c;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    v[j] = uint2{};
    if (r + 8 * j >= s.length) continue;
    v[j] = load_operand(t, (s.begin + r + 8 * j) * t.row_stride + head, p.vector_v);
  }
}

// S k^T and S q^T for a warp's rows.
template <class Traits>
__device__ __forceinline__ void multiply_state(const ShortShared<Traits>& shared,
                                               const StateRows<Traits::kDim>& state, bool split,
                                               bool wide, float (&sk)[2][4], float (&sq)[2][4]) {
  using Io = typename Traits::Io;
  const uint32_t keys = shared.k.place(this_lane()), queries = shared.q.place(this_lane());
#pragma unroll
  for (int step = 0; step < Traits::kSteps; ++step) {
    uint32_t head[4], rest[4], k[4], q[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // row e % 2, half e / 2
      const float* x = state.x[step][e % 2] + 2 * (e / 2);
      head[e] = split_pair<Io>(x[0], x[1], &rest[e]);
    }
    load_matrices(k, keys + step * TokenTile<Traits>::kStep);
    load_matrices(q, queries + step * TokenTile<Traits>::kStep);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (j == 1 && !wide) continue;
      multiply_add<Io>(sk[j], head, k[j], k[2 + j]);
      multiply_add<Io>(sq[j], head, q[j], q[2 + j]);
      if (!split) continue;
      multiply_add<Io>(sk[j], rest, k[j], k[2 + j]);
      multiply_add<Io>(sq[j], rest, q[j], q[2 + j]);
    }
  }
}

// The state after token `last` of the sequence, G S + sum_t D u_t k_t^T, to a page.
template <class Traits>
__device__ __forceinline__ void store_state(const ShortShared<Traits>& shared, const ShortParams& p,
                                            const StateRows<Traits::kDim>& state,
                                            const TileTokens& tokens, int last, bool wide,
                                            void* page, DType dtype, int place) {
  using Io = typename Traits::Io;
  const int c = this_lane() % 4;
  const int reset = shared.reset[last], first = max(reset, 0);
  const float keep = shared.decay[last];
  uint32_t head[2][2], rest[2][2], mask[2];  // [half of the tokens][row]
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int t = 8 * j + 2 * c;
    // Other tokens may hold anything, NaN included: left out, and their keys too.
    const bool holds[2] = {t >= first && t <= last, t + 1 >= first && t + 1 <= last};
    mask[j] = (holds[0] ? 0xffffu : 0u) | (holds[1] ? 0xffff0000u : 0u);
    const float weights[2] = {shared.between[t][last], shared.between[t + 1][last]};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float x = holds[0] ? tokens.u[j][2 * row] * weights[0] : 0.0f;
      const float y = holds[1] ? tokens.u[j][2 * row + 1] * weights[1] : 0.0f;
      head[j][row] = split_pair<Io>(x, y, &rest[j][row]);
    }
  }
  const uint32_t keys = shared.k.place(this_lane());
#pragma unroll
  for (int step = 0; step < Traits::kSteps; ++step) {
    uint32_t k[4];
    load_matrices_transposed(k, keys + step * TokenTile<Traits>::kStep);
    float sums[2][4];  // left and right half of the columns
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = state.x[step][e / 2][2 * half + e % 2];
        sums[half][e] = reset < 0 ? keep * x : 0.0f;
      }
      const uint32_t low = k[2 * half] & mask[0], high = k[2 * half + 1] & mask[1];
      if (wide) {
        multiply_add<Io>(sums[half], {head[0][0], head[0][1], head[1][0], head[1][1]}, low, high);
        multiply_add<Io>(sums[half], {rest[0][0], rest[0][1], rest[1][0], rest[1][1]}, low, high);
      } else {
        multiply_add<Io>(sums[half], {head[0][0], head[0][1], rest[0][0], rest[0][1]}, low, low);
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float x[4] = {sums[0][2 * row], sums[0][2 * row + 1], sums[1][2 * row],
                          sums[1][2 * row + 1]};
      store_places(page, dtype, place + StateRows<Traits::kDim>::step_offset(2 * step + row), x,
                   p.vector_state);
    }
  }
}

template <class Io>
__device__ __forceinline__ void store_outputs(const ShortParams& p, const ShortEntry& s,
                                              const ShortItem& item, const TileTokens& x) {
  const Tensor& t = p.problem.output;
  const int r = this_lane() / 4, c = this_lane() % 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint2 out = {transpose_matrix(pack2<Io>(x.o[j][0], x.o[j][1])),
                       transpose_matrix(pack2<Io>(x.o[j][2], x.o[j][3]))};
    if (r + 8 * j >= s.length) continue;
    store_four(
        t, (s.begin + r + 8 * j) * t.row_stride + item.h * t.head_stride + item.first_row + 4 * c,
        out, p.vector_v);
  }
}

template <class Traits>
__device__ __forceinline__ void run_short(ShortShared<Traits>& shared, const ShortParams& p,
                                          const ShortEntry& s, const ShortItem& item) {
  using Io = typename Traits::Io;
  constexpr int kDim = Traits::kDim;
  const PrefillProblem& problem = p.problem;
  const bool wide = s.length > 8;
  const int place = lane_place<kDim>(item.first_row);

  // Everything that comes from memory is requested before any of it is waited for.
  uint2 v[2];
  load_values(v, p, s, item);
  StateRows<kDim> state;
  state.load(head_state(problem.initial, s.read_row, item.h, Traits::kHead), problem.initial.dtype,
             place, p.vector_state);
  int64_t page = s.to_page_end <= s.length ? checkpoint_of(problem, s, 0) : -1;
  if (this_warp() == 0) stage_gates(shared, problem.gates, s, item.h);
  stage_tokens(shared, p, s, item.h);
  __syncthreads();
  make_triangles(shared, problem.scale, wide);

  state.unpack();
  const DType io = std::is_same_v<Io, bf16> ? DType::kBFloat16 : DType::kFloat16;
  float sk[2][4] = {}, sq[2][4] = {};
  multiply_state(shared, state, state.dtype != io, wide, sk, sq);
  TileTokens tokens;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float2 low = unpack2<Io>(transpose_matrix(v[j].x));
    const float2 high = unpack2<Io>(transpose_matrix(v[j].y));
    tokens.u[j][0] = low.x, tokens.u[j][1] = low.y;
    tokens.u[j][2] = high.x, tokens.u[j][3] = high.y;
  }
  __syncthreads();  // the triangles are there
  solve_tile(shared, problem.scale, s.length, tokens, sk, sq);
  store_outputs<Io>(p, s, item, tokens);

  // Every page end that the tokens reach, then the final state.
  int64_t end = s.to_page_end;
  for (int64_t j = 1; end <= s.length; ++j, end += problem.checkpoint_every) {
    void* to = head_state(problem.checkpoints, page, item.h, Traits::kHead);
    if (to != nullptr) {
      store_state(shared, p, state, tokens, static_cast<int>(end) - 1, wide, to,
                  problem.checkpoints.dtype, place);
    }
    if (end + problem.checkpoint_every <= s.length) page = checkpoint_of(problem, s, j);
  }
  void* to = head_state(problem.output_state, s.write_row, item.h, Traits::kHead);
  if (to == nullptr) return;
  store_state(shared, p, state, tokens, s.length - 1, wide, to, problem.output_state.dtype, place);
}

template <class Traits>
__global__ void __launch_bounds__(32 * Traits::kMaxWarps, Traits::kRegisterBlocks)
    short_kernel(const __grid_constant__ ShortParams p) {
  __shared__ ShortShared<Traits> shared;
  const bool alone = p.plan == nullptr;
  if (alone) dependency_wait();
  // Beside the scan, too: the next kernel waits for the end of this one, which comes after that of
  // the scan.
  allow_dependents();
  // Beside the chunk kernels nothing is waited for: all blocks of the scan before it run, so
  // whatever lies before the scan is done, and the scan has no page or output of a short sequence.
  const uint32_t per_sequence = p.problem.heads.state * p.parts;
  const uint32_t items = alone ? gridDim.x : p.plan->num_short * per_sequence;
  for (uint32_t number = blockIdx.x; number < items; number += gridDim.x) {
    const ShortItem item = ShortItem::of<Traits>(p, number);
    if (alone && this_warp() == 0) {
      touch_tables(p.problem, item.sequence);
      if (this_lane() == 0) {
        shared.entry = short_entry(p.problem, resolve_sequence(p.problem, item.sequence));
      }
    }
    if (alone) __syncthreads();
    const ShortEntry s = alone ? shared.entry : *(p.entries - item.sequence);
    if (s.live) {
      run_short(shared, p, s, item);
    } else {
      zero_outputs(p, s, item.h, item.first_row);
    }
    __syncthreads();  // what is shared makes room for the next item
  }
  // The end of this kernel is the end of the call, so it comes after that of the scan.
  if (!alone && blockIdx.x == gridDim.x - 1) dependency_wait();
}

}  // namespace gdn

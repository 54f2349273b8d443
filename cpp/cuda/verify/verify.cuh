// One step of speculative decoding on paged states, one block per (sequence, state head): fold the
// accepted draft tokens, store the pages, run up to 8 new tokens. S is read once into registers and
// written once; all products with it are matrix instructions on S split in two 16-bit numbers.
//
// A warp owns 16 V rows; warps meet twice, for what they share of k, q and gates (triangle.cuh). A
// lane reads its own elements of S and u before it writes them, and the record's keys are read
// before the first barrier and written after it, so pages and records are updated in place.
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/verify/fold.cuh"
#include "cuda/verify/resolve.cuh"
#include "cuda/verify/triangle.cuh"

namespace gdn {

// The draft record of this (slot, head).
struct Record {
  char* base;  // null: none
  DraftLayout layout;

  __device__ __forceinline__ DraftHeader* header() const {
    return reinterpret_cast<DraftHeader*>(base);
  }
  // Two neighbouring tokens of one column of k.
  __device__ __forceinline__ uint32_t* keys(int col, int c) const {
    return reinterpret_cast<uint32_t*>(base + layout.k) + col * (layout.tokens / 2) + c;
  }
  __device__ __forceinline__ float2* updates(int row, int c) const {
    return reinterpret_cast<float2*>(base + layout.u) + row * (layout.tokens / 2) + c;
  }
  __device__ __forceinline__ bool has_pair(int c) const { return 2 * c < layout.tokens; }
};

__device__ __forceinline__ bool needs_state(const VerifySequence& s) {
  return s.length > 0 || s.accepted > 0;
}

// By one warp, for its block: what the tables and the record's header say of the sequence.
template <class Traits>
__device__ __forceinline__ void resolve_block(VerifyShared<Traits>& shared, const VerifyParams& p,
                                              int64_t b, int32_t h) {
  const VerifyProblem& problem = p.problem;
  const int lane = this_lane();
  VerifyEntries entries;
  VerifySequence s = resolve_numbers(problem, load_numbers(problem, b), &entries);
  int folds = 0;
  if (s.live) {
    const int64_t own_row = load_row(problem, entries);
    int32_t word = 0;  // of the header: alpha in lanes 0 .. 7, the count in lane 8
    if (s.accepted > 0 && lane <= kMaxDraft) {
      const char* header = draft_record(problem, p.layout, s.slot, h);
      const int64_t offset = lane < kMaxDraft ? offsetof(DraftHeader, alpha) + 4 * lane : 0;
      word = *reinterpret_cast<const int32_t*>(header + offset);
    }
    set_rows(problem, shuffle(own_row, 0), shuffle(own_row, 1), shuffle(own_row, 2), &s);
    if (s.accepted > 0) {
      s.live = s.live && covers(__shfl_sync(kFullWarp, word, kMaxDraft), s);
      const float alpha = __int_as_float(word);
      const int cut = s.boundary > 0 ? s.boundary : s.accepted;
      make_fold(alpha, 0, cut, &shared.folds[folds++]);
      if (cut < s.accepted) make_fold(alpha, cut, s.accepted, &shared.folds[folds++]);
    }
  }
  if (lane > 0) return;
  shared.sequence = s;
  shared.num_folds = folds;
}

// One step of k, q and the draft's keys: into shared memory as fragments.
template <class Traits>
struct StepKeys {
  int step;
  int record_col;  // of the record, this lane's column of two
  uint2 k{}, q{}, old{};

  __device__ __forceinline__ void load(const VerifyParams& p, const VerifySequence& s, int32_t h,
                                       const Record& record) {
    const int r = this_lane() / 4, c = this_lane() % 4;
    record_col = column<Traits>(step, r / 2) + r % 2;
    if (r < s.length) {
      const Tensor &tq = p.problem.q, &tk = p.problem.k;
      const int64_t token = s.begin + r, col = column<Traits>(step, c);
      q = load_operand(tq, token * tq.row_stride + divide(h, p.heads_per_q) * tq.head_stride + col,
                       p.vectors);
      k = load_operand(tk, token * tk.row_stride + divide(h, p.heads_per_k) * tk.head_stride + col,
                       p.vectors);
    }
    if (s.accepted > 0 && record.has_pair(c)) {
      old = {*record.keys(record_col, c), *record.keys(record_col + 2, c)};
    }
  }
  __device__ __forceinline__ void stage(VerifyShared<Traits>& shared) const {
    shared.old_k[step][this_lane()] = old;
    shared.k[step][this_lane()] = k;
    shared.q[step][this_lane()] = q;
  }
  // The new keys into the record, transposed: a lane's word holds two tokens of one column.
  __device__ __forceinline__ void store(const Record& record) const {
    const int c = this_lane() % 4;
    const uint2 transposed = {transpose_matrix(k.x), transpose_matrix(k.y)};
    if (record.base == nullptr || !record.has_pair(c)) return;
    *record.keys(record_col, c) = transposed.x;
    *record.keys(record_col + 2, c) = transposed.y;
  }
};

// What belongs to the V rows of one tile: S, the draft's u and v.
template <class Traits>
struct TileRows {
  StateTile<Traits> state;
  float2 old_u[2];
  uint2 v;

  __device__ __forceinline__ void load(const VerifyParams& p, const VerifySequence& s, int32_t h,
                                       const Record& record, int first_row) {
    using State = typename Traits::State;
    const int r = this_lane() / 4, c = this_lane() % 4, row = first_row + row_of(r);
    state.clear();
    if (s.read_row >= 0) {
      const State* from = state_of<State>(p.problem.pool, s.read_row, h, Traits::kHead);
      state.load(from + row * Traits::kDim + column<Traits>(0, c));
    }
    old_u[0] = old_u[1] = float2{};
    if (s.accepted > 0 && record.has_pair(c)) {
      old_u[0] = *record.updates(row, c);
      old_u[1] = *record.updates(row + 2, c);
    }
    v = uint2{};
    if (r >= s.length) return;
    const Tensor& t = p.problem.v;
    v = load_operand(
        t,
        (s.begin + r) * t.row_stride + divide(h, p.heads_per_v) * t.head_stride + first_row + 4 * c,
        p.vectors);
  }
};

template <class Traits>
__device__ void zero_outputs(const VerifyParams& p, const VerifySequence& s, int32_t h) {
  const Tensor& out = p.problem.output;
  const int c = 4 * (threadIdx.x % (Traits::kDim / 4));
  for (int t = threadIdx.x / (Traits::kDim / 4); t < s.length;
       t += 4 * Traits::kThreads / Traits::kDim) {
    store_four(out, (s.begin + t) * out.row_stride + h * out.head_stride + c, uint2{}, p.vectors);
  }
}

// The page that takes the state after fold f; -1: none.
__device__ __forceinline__ int64_t fold_page(const VerifySequence& s, int f) {
  return f == 0 && s.boundary > 0 ? s.boundary_row : s.write_row;
}

// S k and S q of all tokens for a tile of rows, on the folded state, which is stored on the way.
template <class Traits>
__device__ __forceinline__ void pass_over_state(const VerifyShared<Traits>& shared,
                                                const VerifyParams& p, int32_t h,
                                                const TileRows<Traits>& rows, int first_row,
                                                float (&sk)[4], float (&sq)[4]) {
  using State = typename Traits::State;
  using Io = typename Traits::Io;
  const VerifySequence& sequence = shared.sequence;
  const int lane = this_lane(), c = lane % 4;
  const int at = (first_row + row_of(lane / 4)) * Traits::kDim + column<Traits>(0, c);
  const Streaming streaming(true);
  const bool has_tokens = sequence.length > 0;
  const int num_folds = shared.num_folds;
  uint32_t u[2][4] = {}, mask[2] = {};
  State* to[2] = {};
#pragma unroll
  for (int f = 0; f < 2; ++f) {
    if (f >= num_folds) break;
    weigh_updates<Io>(rows.old_u, shared.folds[f], c, u[f]);
    mask[f] = shared.folds[f].mask(c);
    const int64_t page = fold_page(sequence, f);
    if (page >= 0) to[f] = state_of<State>(p.problem.pool, page, h, Traits::kHead) + at;
  }
#pragma unroll
  for (int i = 0; i < Traits::kVectors; ++i) {
    const int step = i * Traits::kVectorSteps, offset = vector_offset<Traits>(i);
    StateStep<Traits> s(rows.state.vectors[i]);
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      if (f >= num_folds) break;
      apply_fold<Traits>(s, shared.folds[f], u[f], &shared.old_k[step][lane], mask[f]);
      if (to[f] == nullptr) continue;
      s.store([&](int row, const uint4& x) {
        streaming.store(to[f] + offset + row * 2 * Traits::kDim, x);
      });
    }
    if (!has_tokens) continue;
#pragma unroll
    for (int j = 0; j < Traits::kVectorSteps; ++j) {
      uint32_t head[4], rest[4];
      head[0] = split_pair<Io>(s.left[j][0], s.left[j][1], &rest[0]);
      head[1] = split_pair<Io>(s.left[j][2], s.left[j][3], &rest[1]);
      head[2] = split_pair<Io>(s.right[j][0], s.right[j][1], &rest[2]);
      head[3] = split_pair<Io>(s.right[j][2], s.right[j][3], &rest[3]);
      const uint2 k = shared.k[step + j][lane], q = shared.q[step + j][lane];
      multiply_add<Io>(sk, head, k.x, k.y);
      multiply_add<Io>(sq, head, q.x, q.y);
      if constexpr (Traits::kSplit) {
        multiply_add<Io>(sk, rest, k.x, k.y);
        multiply_add<Io>(sq, rest, q.x, q.y);
      }
    }
  }
}

// u and the outputs of one tile of rows, from its products with S.
template <class Traits>
__device__ __forceinline__ void finish_tile(const VerifyShared<Traits>& shared,
                                            const VerifyParams& p, int32_t h, const Record& record,
                                            int first_row, uint2 v, const float (&sk)[4],
                                            const float (&sq)[4]) {
  using Io = typename Traits::Io;
  const VerifySequence& s = shared.sequence;
  const int r = this_lane() / 4, c = this_lane() % 4, row = first_row + row_of(r);
  const float2 v_rows[2] = {unpack2<Io>(transpose_matrix(v.x)), unpack2<Io>(transpose_matrix(v.y))};
  RowTokens rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) rows[i].u[0] = v_rows[i].x, rows[i].u[1] = v_rows[i].y;
  solve_rows(shared, static_cast<int>(s.length), rows, sk, sq);
  if (record.base != nullptr && record.has_pair(c)) {
    const float norms[2] = {shared.k_norm[2 * c], shared.k_norm[2 * c + 1]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *record.updates(row + 2 * i, c) = {rows[i].u[0] * norms[0], rows[i].u[1] * norms[1]};
    }
  }
  const uint2 out = {transpose_matrix(pack2<Io>(rows[0].o[0], rows[0].o[1])),
                     transpose_matrix(pack2<Io>(rows[1].o[0], rows[1].o[1]))};
  if (r >= s.length) return;
  const Tensor& o = p.problem.output;
  store_four(o, (s.begin + r) * o.row_stride + h * o.head_stride + first_row + 4 * c, out,
             p.vectors);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    verify_kernel(const __grid_constant__ VerifyParams p) {
  __shared__ VerifyShared<Traits> shared;
  const VerifyProblem& problem = p.problem;
  const Heads& heads = problem.heads;
  const uint32_t b = blockIdx.x / static_cast<uint32_t>(heads.state);
  const int32_t h = static_cast<int32_t>(blockIdx.x - b * heads.state);
  const int first_tile = this_warp() * Traits::kTiles;
  dependency_wait();
  allow_dependents();

  if (this_warp() == 0) resolve_block(shared, p, b, h);
  __syncthreads();
  const VerifySequence& s = shared.sequence;
  if (!s.live) return zero_outputs<Traits>(p, s, h);
  const bool has_tokens = s.length > 0;

  // Everything that comes from memory is requested before any of it is waited for.
  Record record{nullptr, p.layout};
  if (s.slot >= 0) record.base = draft_record(problem, p.layout, s.slot, h);
  TileRows<Traits> rows;
  rows.load(p, s, h, record, 16 * first_tile);
  StepKeys<Traits> keys[Traits::kTiles];
#pragma unroll
  for (int i = 0; i < Traits::kTiles; ++i) {
    keys[i].step = first_tile + i;
    keys[i].load(p, s, h, record);
  }
  if (this_warp() == Traits::kWarps - 1 && has_tokens) stage_gates(shared, problem, s, h);
#pragma unroll
  for (int i = 0; i < Traits::kTiles; ++i) keys[i].stage(shared);
  if (has_tokens) {
    TokenProducts<Traits> products;
#pragma unroll
    for (int i = 0; i < Traits::kTiles; ++i) products.add(keys[i].k, keys[i].q);
    products.stage(shared);
  }
  __syncthreads();

  if (record.base != nullptr) {
    if (threadIdx.x == 0) record.header()->count = static_cast<int32_t>(s.length);
    if (threadIdx.x < kMaxDraft && has_tokens) {
      record.header()->alpha[threadIdx.x] = shared.alpha[threadIdx.x];
    }
  }
  if (has_tokens) {
#pragma unroll
    for (int i = 0; i < Traits::kTiles; ++i) keys[i].store(record);
    make_triangle(shared, problem);
  }
  if (!needs_state(s)) return;
#pragma unroll 1
  for (int i = 0; i < Traits::kTiles; ++i) {
    const int first_row = 16 * (first_tile + i);
    if (i > 0) rows.load(p, s, h, record, first_row);
    float sk[4] = {}, sq[4] = {};
    pass_over_state(shared, p, h, rows, first_row, sk, sq);
    if (!has_tokens) continue;
    if (i == 0) __syncthreads();  // the triangle is ready
    finish_tile(shared, p, h, record, first_row, rows.v, sk, sq);
  }
}

}  // namespace gdn

// One step of speculative decoding on paged states, one block per (sequence, state head): fold the
// accepted draft tokens, store the pages, run up to 8 new tokens. S is read once into registers and
// written once; all products with it are matrix instructions on S split in two 16-bit numbers.
//
// A warp owns 16 V rows, or 32 in two tiles. Warps meet three times: when the sequence is resolved,
// when k, q and gates are in shared memory (triangle.cuh) and when the triangle is made. A lane
// reads its own elements of S and u before it writes them, and the record's keys are read before
// the second barrier and written after it, so pages and records are updated in place.
#pragma once

#include "cuda/common/dependent.cuh"
#include "cuda/verify/fold.cuh"
#include "cuda/verify/resolve.cuh"
#include "cuda/verify/solve.cuh"

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
  bool resets = false;
  if (s.live) {
    const int64_t own_row = load_row(problem, entries);
    int32_t word = 0;  // of the header: alpha in lanes 0 .. 7, the count in lane 8
    if (s.accepted > 0 && lane <= kMaxDraft) {
      const char* header = draft_record(problem, p.layout, s.slot, h);
      const int64_t offset = lane < kMaxDraft ? offsetof(DraftHeader, alpha) + 4 * lane : 0;
      word = *reinterpret_cast<const int32_t*>(header + offset);
    }
    set_rows(problem, shuffle(own_row, 0), shuffle(own_row, 1), shuffle(own_row, 2), &s);
    if (s.accepted > 0) s.live = s.live && covers(__shfl_sync(kFullWarp, word, kMaxDraft), s);
    const float alpha = __int_as_float(word);
    // The page of the last token gets one fold of all tokens; the one that ends before it, another.
    const bool crosses = s.boundary > 0 && s.boundary < s.accepted;
    if (s.boundary > 0 && !crosses) s.write_row = s.boundary_row;
    if (!crosses) s.boundary_row = -1;
    make_fold(alpha, s.accepted, &shared.fold);
    if (s.boundary_row >= 0) make_fold(alpha, s.boundary, &shared.boundary_fold);
    // A reset discards the state, whatever it holds.
    const unsigned reset_tokens = __ballot_sync(kFullWarp, lane < s.accepted && alpha == 0.0f);
    const int first_part = s.boundary_row >= 0 ? s.boundary : s.accepted;
    if ((reset_tokens & ((1u << first_part) - 1)) != 0) s.read_row = -1;
    resets = reset_tokens != 0;
  }
  if (lane > 0) return;
  shared.sequence = s;
  shared.resets = resets;
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

// What belongs to the V rows of one tile on its way through registers: S, the draft's u and v.
template <class Traits>
struct TileRows {
  uint4 vectors[Traits::kVectors][2];
  float2 old_u[2];
  uint2 v;

  __device__ __forceinline__ void load(const VerifyParams& p, const VerifySequence& s, int32_t h,
                                       const Record& record, int first_row) {
    using State = typename Traits::State;
    const int r = this_lane() / 4, c = this_lane() % 4, row = first_row + row_of(r);
    const Streaming streaming(p.evict_first);
#pragma unroll
    for (int i = 0; i < Traits::kVectors; ++i) vectors[i][0] = vectors[i][1] = uint4{};
    if (s.read_row >= 0) {
      const State* from = state_of<State>(p.problem.pool, s.read_row, h, Traits::kHead) +
                          row * Traits::kDim + column<Traits>(0, c);
#pragma unroll
      for (int i = 0; i < Traits::kVectors; ++i) {
        vectors[i][0] = streaming.load(from + vector_offset<Traits>(i));
        vectors[i][1] = streaming.load(from + vector_offset<Traits>(i) + 2 * Traits::kDim);
      }
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
  // This lane's elements to page `row` of the pool.
  __device__ __forceinline__ void store(const VerifyParams& p, int64_t row, int32_t h,
                                        int first_row) const {
    using State = typename Traits::State;
    const int r = this_lane() / 4, c = this_lane() % 4;
    const Streaming streaming(p.evict_first);
    State* to = state_of<State>(p.problem.pool, row, h, Traits::kHead) +
                (first_row + row_of(r)) * Traits::kDim + column<Traits>(0, c);
#pragma unroll
    for (int i = 0; i < Traits::kVectors; ++i) {
      streaming.store(to + vector_offset<Traits>(i), vectors[i][0]);
      streaming.store(to + vector_offset<Traits>(i) + 2 * Traits::kDim, vectors[i][1]);
    }
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

// S k and S q of the new tokens.
template <class Traits>
struct StateProducts {
  // Two sums each, of neighbouring steps or of both parts of S, so that none waits for the other.
  float sk[2][4] = {}, sq[2][4] = {};

  __device__ __forceinline__ void add(const StateStep<Traits>& s, int j, uint2 k, uint2 q) {
    using Io = typename Traits::Io;
    uint32_t front[4], rest[4];
    front[0] = split_pair<Io>(s.left[j][0], s.left[j][1], &rest[0]);
    front[1] = split_pair<Io>(s.left[j][2], s.left[j][3], &rest[1]);
    front[2] = split_pair<Io>(s.right[j][0], s.right[j][1], &rest[2]);
    front[3] = split_pair<Io>(s.right[j][2], s.right[j][3], &rest[3]);
    const int sum = Traits::kSplit ? 0 : j % 2;
    multiply_add<Io>(sk[sum], front, k.x, k.y);
    multiply_add<Io>(sq[sum], front, q.x, q.y);
    if constexpr (Traits::kSplit) {
      multiply_add<Io>(sk[1], rest, k.x, k.y);
      multiply_add<Io>(sq[1], rest, q.x, q.y);
    }
  }
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < 4; ++i) sk[0][i] += sk[1][i], sq[0][i] += sq[1][i];
  }
};

// Folds the accepted tokens into a tile of rows and multiplies it with the new ones.
// NOTE: no branch and no store between the products: in-order issue hides their latency only then.
template <class Traits>
__device__ __forceinline__ void pass_over_state(const VerifyShared<Traits>& shared,
                                                TileRows<Traits>& rows,
                                                StateProducts<Traits>* products) {
  const int lane = this_lane();
  FoldRows<Traits> fold;
  fold.load(shared.fold, rows.old_u);
#pragma unroll
  for (int i = 0; i < Traits::kVectors; ++i) {
    const int step = i * Traits::kVectorSteps;
    StateStep<Traits> s(rows.vectors[i]);
    fold.apply(s, &shared.old_k[step][lane]);
    s.pack_into(rows.vectors[i]);
#pragma unroll
    for (int j = 0; j < Traits::kVectorSteps; ++j) {
      products->add(s, j, shared.k[step + j][lane], shared.q[step + j][lane]);
    }
  }
  products->finish();
}

// A tile of rows as it is at the page end that the fold crosses; if a reset follows, the rows begin
// at zero from there on.
template <class Traits>
__device__ __forceinline__ void store_boundary(const VerifyShared<Traits>& shared,
                                               const VerifyParams& p, int32_t h,
                                               TileRows<Traits>& rows, int first_row) {
  FoldRows<Traits> fold;
  fold.load(shared.boundary_fold, rows.old_u);
  TileRows<Traits> folded;
#pragma unroll
  for (int i = 0; i < Traits::kVectors; ++i) {
    StateStep<Traits> s(rows.vectors[i]);
    fold.apply(s, &shared.old_k[i * Traits::kVectorSteps][this_lane()]);
    s.pack_into(folded.vectors[i]);
    if (shared.resets) rows.vectors[i][0] = rows.vectors[i][1] = uint4{};
  }
  folded.store(p, shared.sequence.boundary_row, h, first_row);
}

// u and the outputs of one tile of rows, from its products with S.
template <class Traits>
__device__ __forceinline__ void finish_tile(const VerifyShared<Traits>& shared,
                                            const VerifyParams& p, int32_t h, const Record& record,
                                            int first_row, uint2 v,
                                            const StateProducts<Traits>& products) {
  using Io = typename Traits::Io;
  const VerifySequence& s = shared.sequence;
  const int r = this_lane() / 4, c = this_lane() % 4, row = first_row + row_of(r);
  const float2 v_rows[2] = {unpack2<Io>(transpose_matrix(v.x)), unpack2<Io>(transpose_matrix(v.y))};
  RowTokens rows;
  solve_rows(shared, v_rows, products.sk[0], products.sq[0], &rows);
  if (record.base != nullptr && record.has_pair(c)) {
    const TokenPair& pair = shared.tokens[c];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *record.updates(row + 2 * i, c) = {rows.u[2 * i] * pair.k_norm[0],
                                         rows.u[2 * i + 1] * pair.k_norm[1]};
    }
  }
  const uint2 out = {transpose_matrix(pack2<Io>(rows.o[0], rows.o[1])),
                     transpose_matrix(pack2<Io>(rows.o[2], rows.o[3]))};
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
    TokenProducts products;
#pragma unroll
    for (int i = 0; i < Traits::kTiles; ++i) {
      products.add<typename Traits::Io>(keys[i].k, keys[i].q);
    }
    const int warp = this_warp(), lane = this_lane();
    shared.products[warp][lane] = {products.d[0], products.d[1], products.d[2], products.d[3]};
    shared.squares[warp][lane] = {products.k_squares, products.q_squares};
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
    if (this_warp() == 0) make_triangle(shared, problem);
  }
  if (!needs_state(s)) return;
#pragma unroll 1
  for (int i = 0; i < Traits::kTiles; ++i) {
    const int first_row = 16 * (first_tile + i);
    if (i > 0) rows.load(p, s, h, record, first_row);
    StateProducts<Traits> products;
    if (s.boundary_row >= 0) store_boundary(shared, p, h, rows, first_row);
    pass_over_state(shared, rows, &products);
    if (s.write_row >= 0) rows.store(p, s.write_row, h, first_row);
    if (i == 0) __syncthreads();  // the triangle is ready
    if (has_tokens) finish_tile(shared, p, h, record, first_row, rows.v, products);
  }
}

}  // namespace gdn

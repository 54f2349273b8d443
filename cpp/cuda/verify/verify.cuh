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

// The folds of a step: up to the page end that is crossed, and to the last accepted token.
struct Folds {
  Fold parts[2];
  int count = 0;

  __device__ __forceinline__ Folds(const VerifySequence& s, const Record& record, int c) {
    if (s.accepted == 0) return;
    float alpha[kMaxDraft];
#pragma unroll
    for (int t = 0; t < kMaxDraft; ++t) alpha[t] = record.header()->alpha[t];
    const int cut = s.boundary > 0 ? s.boundary : s.accepted;
    parts[0] = Fold(alpha, 0, cut, c);
    count = 1;
    if (cut == s.accepted) return;
    parts[1] = Fold(alpha, cut, s.accepted, c);
    count = 2;
  }
};

// The keys of the draft tokens, transposed in the record: this warp's step of them.
template <class Traits>
__device__ __forceinline__ void stage_old_keys(VerifyShared<Traits>& shared, const Folds& folds,
                                               const Record& record) {
  const int step = this_warp(), lane = this_lane(), r = lane / 4, c = lane % 4;
  if (folds.count == 0) return;
  uint2 k{};
  if (record.has_pair(c)) {
    const int col = column<Traits>(step, r / 2) + r % 2;
    k = {*record.keys(col, c), *record.keys(col + 2, c)};
  }
#pragma unroll
  for (int f = 0; f < 2; ++f) {
    const uint32_t mask = folds.parts[f].mask(c);
    if (f < folds.count) shared.old_k[f][step][lane] = {k.x & mask, k.y & mask};
  }
}

template <class Traits>
__device__ __forceinline__ void store_keys(const Record& record, uint2 k) {
  const int step = this_warp(), lane = this_lane(), r = lane / 4, c = lane % 4;
  const uint2 transposed = {transpose_matrix(k.x), transpose_matrix(k.y)};
  if (record.base == nullptr || !record.has_pair(c)) return;
  const int col = column<Traits>(step, r / 2) + r % 2;
  *record.keys(col, c) = transposed.x;
  *record.keys(col + 2, c) = transposed.y;
}

template <class Traits>
__device__ void zero_outputs(const VerifyParams& p, const VerifySequence& s, int32_t h) {
  const Tensor& out = p.problem.output;
  const int c = 4 * (threadIdx.x % (Traits::kDim / 4));
  for (int t = threadIdx.x / (Traits::kDim / 4); t < s.length;
       t += 4 * Traits::kThreads / Traits::kDim) {
    store_four(out, (s.begin + t) * out.row_stride + h * out.head_stride + c, uint2{}, p.vectors);
  }
}

// S k and S q of all tokens for this warp's rows, on the folded state, which is stored on the way.
template <class Traits>
__device__ __forceinline__ void pass_over_state(const VerifyShared<Traits>& shared,
                                                const StateTile<Traits>& tile, const Folds& folds,
                                                const uint32_t (&u)[2][4],
                                                typename Traits::State* const (&to)[2],
                                                const Streaming& streaming, bool has_tokens,
                                                float (&sk)[4], float (&sq)[4]) {
  using Io = typename Traits::Io;
  const int lane = this_lane();
#pragma unroll
  for (int i = 0; i < Traits::kVectors; ++i) {
    const int step = i * Traits::kVectorSteps;
    StateStep<Traits> s(tile.vectors[i]);
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      if (f >= folds.count) break;
      apply_fold<Traits>(s, folds.parts[f], u[f], &shared.old_k[f][step][lane]);
      if (to[f] != nullptr) s.store(streaming, to[f] + StateTile<Traits>::offset(i));
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
      multiply_add<Io>(sk, rest, k.x, k.y);
      multiply_add<Io>(sq, rest, q.x, q.y);
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    verify_kernel(const __grid_constant__ VerifyParams p) {
  using State = typename Traits::State;
  using Io = typename Traits::Io;
  __shared__ VerifyShared<Traits> shared;
  const VerifyProblem& problem = p.problem;
  const Heads& heads = problem.heads;
  const uint32_t b = blockIdx.x / static_cast<uint32_t>(heads.state);
  const int32_t h = static_cast<int32_t>(blockIdx.x - b * heads.state);
  const int lane = this_lane(), r = lane / 4, c = lane % 4, warp_row = 16 * this_warp();
  dependency_wait();
  allow_dependents();

  VerifySequence s = resolve_verify(problem, b);
  Record record{nullptr, p.layout};
  if (s.live && s.slot >= 0) record.base = draft_record(problem, p.layout, s.slot, h);
  if (s.accepted > 0) s.live = s.live && covers(*record.header(), s);
  if (!s.live) return zero_outputs<Traits>(p, s, h);
  const bool has_tokens = s.length > 0;

  // Everything that comes from memory is requested before anything is waited for.
  const Streaming streaming(true);
  const int row = warp_row + row_of(r);
  const int at = row * Traits::kDim + column<Traits>(0, c);
  StateTile<Traits> tile;
  if (s.read_row >= 0) {
    tile.load(streaming, state_of<State>(problem.pool, s.read_row, h, Traits::kHead) + at);
  } else {
    tile.clear();
  }
  uint2 k{}, q{}, v{};
  if (r < s.length) {
    const int64_t t = s.begin + r;
    const int col = column<Traits>(this_warp(), c);
    const Tensor &tq = problem.q, &tk = problem.k, &tv = problem.v;
    k = load_four(tk, t * tk.row_stride + heads.k_of(h) * tk.head_stride + col, p.vectors);
    q = load_four(tq, t * tq.row_stride + heads.q_of(h) * tq.head_stride + col, p.vectors);
    v = load_four(tv, t * tv.row_stride + heads.v_of(h) * tv.head_stride + warp_row + 4 * c,
                  p.vectors);
  }
  const Folds folds(s, record, c);
  float2 old_u[2] = {};
  if (folds.count > 0 && record.has_pair(c)) {
    old_u[0] = *record.updates(row, c);
    old_u[1] = *record.updates(row + 2, c);
  }
  stage_old_keys(shared, folds, record);
  shared.k[this_warp()][lane] = k;
  shared.q[this_warp()][lane] = q;
  if (has_tokens) {
    stage_products(shared, k, q);
    if (threadIdx.x < kMaxDraft) stage_gates(shared, problem, s, h, threadIdx.x);
  }
  __syncthreads();

  if (record.base != nullptr) {
    if (threadIdx.x == 0) record.header()->count = static_cast<int32_t>(s.length);
    if (threadIdx.x < kMaxDraft && has_tokens) {
      record.header()->alpha[threadIdx.x] = shared.alpha[threadIdx.x];
    }
  }
  if (has_tokens) {
    store_keys<Traits>(record, k);
    make_triangle(shared, problem);
  }
  uint32_t u[2][4];
  State* to[2];
#pragma unroll
  for (int f = 0; f < 2; ++f) {
    weigh_updates<Io>(old_u, folds.parts[f], c, u[f]);
    const int64_t page = f == 0 && s.boundary > 0 ? s.boundary_row : s.write_row;
    to[f] = page < 0 ? nullptr : state_of<State>(problem.pool, page, h, Traits::kHead) + at;
  }
  float sk[4] = {}, sq[4] = {};
  pass_over_state(shared, tile, folds, u, to, streaming, has_tokens, sk, sq);
  if (!has_tokens) return;
  __syncthreads();

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
  const Tensor& o = problem.output;
  store_four(o, (s.begin + r) * o.row_stride + h * o.head_stride + warp_row + 4 * c, out,
             p.vectors);
}

}  // namespace gdn

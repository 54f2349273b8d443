// A verify step on one state head: every row of S is read once and written once; the rows of a
// block of eight go through the folds, the dot products with all new tokens and the triangular
// part.
#pragma once

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace gdn::cpu {
namespace {

// What the rows of a head share.
struct VerifyHead {
  const float* old_k;                 // [kMaxDraft, K]
  const float* k;                     // [kMaxDraft, K], as it came
  const float* q;                     // [kMaxDraft, K], normalised, times scale
  float norm[kMaxDraft];              // of k
  float decay[kMaxDraft];             // G_t
  float solve[kMaxDraft][kMaxDraft];  // beta_t D_ts (k_t.k_s), s < t
  float mix[kMaxDraft][kMaxDraft];    // D_ts (q_t.k_s), s <= t
  int reset[kMaxDraft];               // latest token <= t with alpha = 0, or -1
};

GDN_INLINE float dot(const float* x, const float* y, int size) {
  Vec8 products{};
  for (int i = 0; i < size; i += 8) products += load8(x + i) * load8(y + i);
  return sum(products);
}

GDN_INLINE float verify_norm(const float* x, const VerifyStep& step) {
  return step.l2norm ? 1.0f / __builtin_sqrtf(dot(x, x, step.read.dim_k) + 1e-6f) : 1.0f;
}

GDN_INLINE void read_tokens(const VerifyStep& step, VerifyHead* head) {
  const int dim_k = step.read.dim_k;
  float* old_k = step.scratch;
  float* k = old_k + kMaxDraft * dim_k;
  float* q = k + kMaxDraft * dim_k;
  head->old_k = old_k, head->k = k, head->q = q;
  const int old_tokens = step.num_folds > 0 ? step.folds[step.num_folds - 1].last : 0;
  for (int i = 0; i < dim_k && old_tokens > 0; i += 8 / step.draft_tokens) {
    const Vec8 x = read8(step.draft_k, static_cast<int64_t>(i) * step.draft_tokens, step.io);
    for (int j = 0; j < 8; ++j) {
      old_k[j % step.draft_tokens * dim_k + i + j / step.draft_tokens] = x[j];
    }
  }
  for (int t = 0; t < step.tokens; ++t) {
    float* kt = k + t * dim_k;
    float* qt = q + t * dim_k;
    for (int i = 0; i < dim_k; i += 8) {
      store8(kt + i, read8(step.k, t * step.k_stride + i, step.io));
      store8(qt + i, read8(step.q, t * step.q_stride + i, step.io));
    }
    head->norm[t] = verify_norm(kt, step);
    const float q_scale = verify_norm(qt, step) * step.scale;
    for (int i = 0; i < dim_k; i += 8) store8(qt + i, load8(qt + i) * q_scale);
  }
}

GDN_INLINE void make_triangles(const VerifyStep& step, VerifyHead* head) {
  const int dim_k = step.read.dim_k;
  float decay = 1.0f;
  int reset = -1;
  for (int t = 0; t < step.tokens; ++t) {
    decay *= step.alpha[t];
    if (step.alpha[t] == 0.0f) reset = t;
    head->decay[t] = decay;
    head->reset[t] = reset;
    float between = 1.0f;
    for (int s = t; s >= 0; --s) {
      const float* ks = head->k + s * dim_k;
      const float weight = between * head->norm[s];
      head->mix[t][s] = weight * dot(head->q + t * dim_k, ks, dim_k);
      head->solve[t][s] =
          step.beta[t] * weight * head->norm[t] * dot(head->k + t * dim_k, ks, dim_k);
      between *= step.alpha[s];
    }
  }
}

// Eight V rows of the draft's u, by token.
GDN_INLINE void read_updates(const VerifyStep& step, int row, Vec8 (&u)[kMaxDraft]) {
  const float* from = step.draft_u + static_cast<int64_t>(row) * step.draft_tokens;
  Vec8 x[8] = {};
  for (int r = 0; r < 8; ++r) {
    for (int t = 0; t < step.draft_tokens; ++t) x[r][t] = from[r * step.draft_tokens + t];
  }
  transpose8(x);
  for (int t = 0; t < kMaxDraft; ++t) u[t] = x[t];
}

GDN_INLINE void write_updates(const VerifyStep& step, int row, const Vec8 (&u)[kMaxDraft]) {
  float* to = step.draft_u + static_cast<int64_t>(row) * step.draft_tokens;
  for (int r = 0; r < 8; ++r) {
    for (int t = 0; t < step.tokens; ++t) to[r * step.draft_tokens + t] = u[t][r];
  }
}

// Folds one row, stores it where a fold ends, and takes the dot products of the new tokens: x[t] =
// S.k_t, y[t] = S.q_t. Returns false if the row is the zero state, whose products are zero.
template <int kTokens>
GDN_INLINE void pass_row(const VerifyStep& step, const VerifyHead& head, int row,
                         const Vec8 (&u)[kMaxDraft], Vec8* x, Vec8* y) {
  const int dim_k = step.read.dim_k;
  const int64_t base = static_cast<int64_t>(row) * dim_k;
  Vec8 sk[kMaxDraft] = {}, sq[kMaxDraft] = {};
  for (int i = 0; i < dim_k; i += 8) {
    Vec8 s{};
    if (step.read.data != nullptr) s = read8(step.read.data, base + i, step.read.dtype);
    for (int f = 0; f < step.num_folds; ++f) {
      const Fold& fold = step.folds[f];
      s = fold.replace ? Vec8{} : s * fold.keep;
      for (int t = fold.first; t < fold.last; ++t) {
        s += load8(head.old_k + t * dim_k + i) * (fold.weight[t] * u[t][row % 8]);
      }
      if (fold.write.data != nullptr) write8(fold.write.data, base + i, fold.write.dtype, s);
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      sk[t] += s * load8(head.k + t * dim_k + i);
      sq[t] += s * load8(head.q + t * dim_k + i);
    }
  }
  if (kTokens == 0) return;
  *x = sums(sk);
  *y = sums(sq);
}

template <int kTokens>
GDN_INLINE void verify_rows(const VerifyStep& step, const VerifyHead& head, int row) {
  Vec8 old_u[kMaxDraft] = {}, x[8] = {}, y[8] = {}, u[kMaxDraft] = {};
  if (step.num_folds > 0) read_updates(step, row, old_u);
  for (int r = 0; r < 8; ++r) pass_row<kTokens>(step, head, row + r, old_u, &x[r], &y[r]);
  transpose8(x);
  transpose8(y);
  for (int t = 0; t < step.tokens; ++t) {
    const Vec8 v = read8(step.v, t * step.v_stride + row, step.io);
    Vec8 change = v * step.beta[t], output{};
    if (head.reset[t] < 0) {
      change -= x[t] * (step.beta[t] * head.decay[t] * head.norm[t]);
      output = y[t] * head.decay[t];
    }
    const int first = head.reset[t] < 0 ? 0 : head.reset[t];
    for (int s = first; s < t; ++s) change -= u[s] * head.solve[t][s];
    u[t] = change;
    for (int s = first; s <= t; ++s) output += u[s] * head.mix[t][s];
    write8(step.output, t * step.output_stride + row, step.io, output);
  }
  if (step.draft_tokens == 0) return;
  for (int t = 0; t < step.tokens; ++t) u[t] *= head.norm[t];
  write_updates(step, row, u);
}

// k goes into the record as it came: read as 16 bits and written back it is exact.
GDN_INLINE void write_keys(const VerifyStep& step, const VerifyHead& head) {
  if (step.draft_tokens == 0) return;
  const int dim_k = step.read.dim_k, columns = 8 / step.draft_tokens;
  for (int i = 0; i < dim_k; i += columns) {
    Vec8 x{};
    for (int j = 0; j < 8; ++j) {
      const int t = j % step.draft_tokens;
      if (t < step.tokens) x[j] = head.k[t * dim_k + i + j / step.draft_tokens];
    }
    write8(step.draft_k, static_cast<int64_t>(i) * step.draft_tokens, step.io, x);
  }
}

void verify(const VerifyStep& step) {
  VerifyHead head;
  read_tokens(step, &head);
  make_triangles(step, &head);
  for (int row = 0; row < step.read.dim_v; row += 8) {
    if (step.tokens == 0) {
      verify_rows<0>(step, head, row);
    } else if (step.tokens <= 4) {
      verify_rows<4>(step, head, row);
    } else {
      verify_rows<8>(step, head, row);
    }
  }
  write_keys(step, head);
}

}  // namespace
}  // namespace gdn::cpu

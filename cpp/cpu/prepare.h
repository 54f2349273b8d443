// The part of a segment that all tiles of a head share: q and k in fp32, their dot products within
// each mini-chunk, and the mini-chunk's scalars.
#pragma once

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace gdn::cpu {
namespace {

// Reads one row of K elements into row `slot` of a mini-chunk; null data is an absent token.
GDN_INLINE void read_row(const void* row, DType io, int dim_k, bool l2norm, float scale, int slot,
                         float* kq) {
  float* to = kq + slot * 8;
  if (row == nullptr) {
    for (int k = 0; k < dim_k; k += 8) store8(to + k * 2 * kMini, Vec8{});
    return;
  }
  if (!l2norm) {
    for (int k = 0; k < dim_k; k += 8) store8(to + k * 2 * kMini, read8(row, k, io) * scale);
    return;
  }
  Vec8 squares{};
  for (int k = 0; k < dim_k; k += 8) {
    const Vec8 x = read8(row, k, io);
    squares += x * x;
  }
  const float norm = 1.0f / __builtin_sqrtf(sum(squares) + 1e-6f);
  for (int k = 0; k < dim_k; k += 8) {
    store8(to + k * 2 * kMini, round8(read8(row, k, io) * norm, io) * scale);
  }
}

// kk[i][j] = k_i.k_j for j < i, qk[i][j] = q_i.k_j for j <= i.
GDN_INLINE void dot_products(const float* kq, int dim_k, float (&kk)[kMini][kMini],
                             float (&qk)[kMini][kMini]) {
  Vec8 kk8[6] = {}, qk8[10] = {};
  for (int block = 0; block < dim_k / 8; ++block, kq += 16 * kMini) {
    Vec8 k[kMini];
#pragma GCC unroll 4
    for (int j = 0; j < kMini; ++j) k[j] = load8(kq + j * 8);
#pragma GCC unroll 4
    for (int i = 0; i < kMini; ++i) {
      const Vec8 q = load8(kq + (kMini + i) * 8);
#pragma GCC unroll 4
      for (int j = 0; j < i; ++j) kk8[i * (i - 1) / 2 + j] += k[i] * k[j];
#pragma GCC unroll 4
      for (int j = 0; j <= i; ++j) qk8[i * (i + 1) / 2 + j] += q * k[j];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kMini; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < i; ++j) kk[i][j] = sum(kk8[i * (i - 1) / 2 + j]);
#pragma GCC unroll 4
    for (int j = 0; j <= i; ++j) qk[i][j] = sum(qk8[i * (i + 1) / 2 + j]);
  }
}

// Fills the scalars from alpha and beta of the four tokens; returns the new running factor. `reset`
// is the token from which on the tile does not count, or -1.
GDN_INLINE float finish_mini(const float (&alpha)[kMini], const float (&kk)[kMini][kMini],
                             const float (&qk)[kMini][kMini], float factor, int reset,
                             bool last_of_segment, MiniChunk* m) {
  float decay = factor;  // c A_i
  for (int i = 0; i < kMini; ++i) {
    decay *= alpha[i];
    if (alpha[i] == 0.0f) reset = i;
    m->reset[i] = static_cast<int8_t>(reset);
    m->read_q[i] = decay;
    m->read_k[i] = m->beta[i] * decay;
    float between = 1.0f;  // D_ij, never a quotient: alpha may be tiny
    for (int j = i; j >= 0; --j) {
      m->mix[i][j] = between * qk[i][j];
      m->solve[i][j] = j < i ? m->beta[i] * between * kk[i][j] : 0.0f;
      between *= alpha[j];
    }
  }
  // A NaN factor fails both comparisons and is brought back to 1 at once.
  const bool in_bounds = decay >= 1.0f / 256 && decay <= 256.0f;
  m->rescale = last_of_segment || !in_bounds;
  m->keep = decay;
  const float next = m->rescale ? 1.0f : decay;
  float after = 1.0f / next;  // D_3j / c
  for (int j = kMini - 1; j >= 0; --j) {
    m->store[j] = after;
    after *= alpha[j];
  }
  m->plain = m->first == 0 && m->last == kMini && reset < 0;
  return next;
}

void prepare(const SegmentInput& in, Segment* segment) {
  const int64_t bytes = in.io == DType::kFloat32 ? 4 : 2;
  const int mini_floats = in.dim_k * 2 * kMini;
  segment->num_minis = (in.phase + in.tokens + kMini - 1) / kMini;
  segment->dim_k = in.dim_k;
  segment->phase = in.phase;
  float factor = 1.0f;
  for (int n = 0; n < segment->num_minis; ++n) {
    MiniChunk& m = segment->minis[n];
    float* kq = segment->kq + static_cast<int64_t>(n) * mini_floats;
    float alpha[kMini];
    m.first = static_cast<int8_t>(n == 0 ? in.phase : 0);
    const int left = in.phase + in.tokens - n * kMini;
    m.last = static_cast<int8_t>(left < kMini ? left : kMini);
    for (int i = 0; i < kMini; ++i) {
      const int64_t token = n * kMini + i - in.phase;
      const bool exists = i >= m.first && i < m.last;
      const void* q = exists ? static_cast<const char*>(in.q) + token * in.q_stride * bytes : nullptr;
      const void* k = exists ? static_cast<const char*>(in.k) + token * in.k_stride * bytes : nullptr;
      read_row(k, in.io, in.dim_k, in.l2norm, 1.0f, i, kq);
      read_row(q, in.io, in.dim_k, in.l2norm, in.scale, kMini + i, kq);
      alpha[i] = exists ? in.alpha[token] : 1.0f;
      m.beta[i] = exists ? in.beta[token] : 0.0f;
    }
    float kk[kMini][kMini], qk[kMini][kMini];
    dot_products(kq, in.dim_k, kk, qk);
    factor = finish_mini(alpha, kk, qk, factor, in.from_zero && n == 0 ? m.first : -1,
                         n + 1 == segment->num_minis, &m);
  }
}

}  // namespace
}  // namespace gdn::cpu

// The part of a segment that all tiles of a head share: q and k in fp32, their dot products within
// each mini-chunk, and the mini-chunk's scalars.
#pragma once

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace gdn::cpu {
namespace {

// Reads one row of K elements into row `slot` of a mini-chunk.
template <DType kIo>
GDN_INLINE void read_row_as(const void* row, const SegmentInput& in, float scale, float* to) {
  float norm = 1.0f;
  if (in.l2norm) {
    Vec8 squares{};
    for (int k = 0; k < in.dim_k; k += 8) {
      const Vec8 x = read8(row, k, kIo);
      squares += x * x;
    }
    norm = 1.0f / __builtin_sqrtf(sum(squares) + 1e-6f);
    for (int k = 0; k < in.dim_k; k += 8) {
      store8(to + k * 2 * kMini, round8(read8(row, k, kIo) * norm, kIo) * scale);
    }
    return;
  }
  for (int k = 0; k < in.dim_k; k += 8) store8(to + k * 2 * kMini, read8(row, k, kIo) * scale);
}

// The same for a row of any dtype; null data is an absent token.
void read_row(const void* row, const SegmentInput& in, float scale, float* to) {
  if (row == nullptr) {
    for (int k = 0; k < in.dim_k; k += 8) store8(to + k * 2 * kMini, Vec8{});
    return;
  }
  switch (in.io) {
    case DType::kBFloat16: return read_row_as<DType::kBFloat16>(row, in, scale, to);
    case DType::kFloat16: return read_row_as<DType::kFloat16>(row, in, scale, to);
    default: return read_row_as<DType::kFloat32>(row, in, scale, to);
  }
}

// Dot products within a mini-chunk, the pairs (i, j) with j < i and j <= i packed row by row.
struct DotProducts {
  float kk[6];   // k_i.k_j
  float qk[10];  // q_i.k_j

  GDN_INLINE float k_k(int i, int j) const { return kk[i * (i - 1) / 2 + j]; }
  GDN_INLINE float q_k(int i, int j) const { return qk[i * (i + 1) / 2 + j]; }
};

DotProducts dot_products(const float* kq, int dim_k) {
  Vec8 kk[6] = {}, qk[10] = {};
  for (int block = 0; block < dim_k / 8; ++block, kq += 16 * kMini) {
    Vec8 k[kMini];
#pragma GCC unroll 4
    for (int i = 0; i < kMini; ++i) {
      k[i] = load8(kq + i * 8);
      const Vec8 q = load8(kq + (kMini + i) * 8);
#pragma GCC unroll 4
      for (int j = 0; j < i; ++j) kk[i * (i - 1) / 2 + j] += k[i] * k[j];
#pragma GCC unroll 4
      for (int j = 0; j <= i; ++j) qk[i * (i + 1) / 2 + j] += q * k[j];
    }
  }
  Vec8 first[8] = {kk[0], kk[1], kk[2], kk[3], kk[4], kk[5], qk[0], qk[1]};
  Vec8 second[8] = {qk[2], qk[3], qk[4], qk[5], qk[6], qk[7], qk[8], qk[9]};
  DotProducts products;
  static_assert(sizeof products == 16 * sizeof(float));
  float packed[16];
  store8(packed, sums(first));
  store8(packed + 8, sums(second));
  __builtin_memcpy(&products, packed, sizeof packed);
  return products;
}

// Fills the scalars from alpha and beta of the four tokens; returns the new running factor. `reset`
// is the token from which on the tile does not count, or -1.
GDN_INLINE float finish_mini(const float (&alpha)[kMini], const DotProducts& dots, float factor,
                             int reset, bool last_of_segment, MiniChunk* m) {
  float decay = factor;  // c A_i
  for (int i = 0; i < kMini; ++i) {
    decay *= alpha[i];
    if (alpha[i] == 0.0f) reset = i;
    m->reset[i] = static_cast<int8_t>(reset);
    m->read_q[i] = decay;
    m->read_k[i] = m->beta[i] * decay;
    float between = 1.0f;  // D_ij, never a quotient: alpha may be tiny
    for (int j = i; j >= 0; --j) {
      m->mix[i][j] = between * dots.q_k(i, j);
      m->solve[i][j] = j < i ? m->beta[i] * between * dots.k_k(i, j) : 0.0f;
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
      const void* q =
          exists ? static_cast<const char*>(in.q) + token * in.q_stride * bytes : nullptr;
      const void* k =
          exists ? static_cast<const char*>(in.k) + token * in.k_stride * bytes : nullptr;
      read_row(k, in, 1.0f, kq + i * 8);
      read_row(q, in, in.scale, kq + (kMini + i) * 8);
      alpha[i] = exists ? in.alpha[token] : 1.0f;
      m.beta[i] = exists ? in.beta[token] : 0.0f;
    }
    factor = finish_mini(alpha, dot_products(kq, in.dim_k), factor,
                         in.from_zero && n == 0 ? m.first : -1, n + 1 == segment->num_minis, &m);
  }
}

}  // namespace
}  // namespace gdn::cpu

// One decode token on V rows of one state head: every row of S is read once and written once, in
// the pool's own order, because decode is bound by memory and not by arithmetic.
#pragma once

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace gdn::cpu {
namespace {

GDN_INLINE void read_operand(const DecodeStep& step, const void* row, float scale, float* to) {
  const int dim_k = step.read.dim_k;
  float norm = 1.0f;
  if (step.l2norm) {
    Vec8 squares{};
    for (int k = 0; k < dim_k; k += 8) {
      const Vec8 x = read8(row, k, step.io);
      squares += x * x;
    }
    norm = 1.0f / __builtin_sqrtf(sum(squares) + 1e-6f);
  }
  for (int k = 0; k < dim_k; k += 8) store8(to + k, read8(row, k, step.io) * norm * scale);
}

// Eight V rows, so that v and output move as one vector. S.k and S.q of all eight first, then the
// update from L1.
template <DType kRead, DType kWrite>
GDN_INLINE void decode_rows(const DecodeStep& step, int row, const float* k, const float* q,
                            float qk) {
  const int dim_k = step.read.dim_k;
  const int64_t base = static_cast<int64_t>(row) * dim_k;
  const bool from_zero = step.read.data == nullptr || step.alpha == 0.0f;
  Vec8 v = read8(step.v, row, step.io), output{}, u;
  if (from_zero) {
    u = v * step.beta;
    output = u * qk;
  } else {
    Vec8 sk[8] = {}, sq[8] = {};
    for (int i = 0; i < dim_k; i += 8) {
      const Vec8 k8 = load8(k + i), q8 = load8(q + i);
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) {
        const Vec8 s = read8(step.read.data, base + static_cast<int64_t>(r) * dim_k + i, kRead);
        sk[r] += s * k8;
        sq[r] += s * q8;
      }
    }
    const Vec8 zk = sums(sk), zq = sums(sq);
    u = (v - zk * step.alpha) * step.beta;
    output = zq * step.alpha + u * qk;
  }
  write8(step.output, row, step.io, output);
  if (step.write.data == nullptr) return;
  for (int r = 0; r < 8; ++r) {
    const int64_t at = base + static_cast<int64_t>(r) * dim_k;
    for (int i = 0; i < dim_k; i += 8) {
      Vec8 s = load8(k + i) * u[r];
      if (!from_zero) s += read8(step.read.data, at + i, kRead) * step.alpha;
      write8(step.write.data, at + i, kWrite, s);
    }
  }
}

template <DType kRead, DType kWrite>
void decode_as(const DecodeStep& step) {
  const int dim_k = step.read.dim_k;
  float* k = step.scratch;
  float* q = k + dim_k;
  read_operand(step, step.k, 1.0f, k);
  read_operand(step, step.q, step.scale, q);
  Vec8 products{};
  for (int i = 0; i < dim_k; i += 8) products += load8(k + i) * load8(q + i);
  const float qk = sum(products);
  for (int row = 0; row < step.read.dim_v; row += 8) {
    decode_rows<kRead, kWrite>(step, row, k, q, qk);
  }
}

template <DType kRead>
void decode_from(const DecodeStep& step) {
  switch (step.write.dtype) {
    case DType::kFloat16: return decode_as<kRead, DType::kFloat16>(step);
    case DType::kBFloat16: return decode_as<kRead, DType::kBFloat16>(step);
    default: return decode_as<kRead, DType::kFloat32>(step);
  }
}

void decode(const DecodeStep& step) {
  switch (step.read.dtype) {
    case DType::kFloat16: return decode_from<DType::kFloat16>(step);
    case DType::kBFloat16: return decode_from<DType::kBFloat16>(step);
    default: return decode_from<DType::kFloat32>(step);
  }
}

}  // namespace
}  // namespace gdn::cpu

// Small calls that are valid as built; a test changes one field and looks at what happens.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "gdn_paged/gdn_paged.h"

namespace gdn_test {

// Portable values in [-1, 1): splitmix64 of (seed << 32) + i on a 24-bit grid.
inline std::vector<float> uniform(uint64_t seed, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    uint64_t x = (seed << 32) + static_cast<uint64_t>(i) + 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    values[static_cast<size_t>(i)] = static_cast<float>(x >> 40) / 8388608.0f - 1.0f;
  }
  return values;
}

constexpr int32_t kHeads = 2, kDim = 16;
constexpr int64_t kState = int64_t{kHeads} * kDim * kDim;

template <class Params>
void set_shape(Params* p) {
  p->num_q_heads = p->num_k_heads = 1;
  p->num_v_heads = kHeads;
  p->head_dim_k = p->head_dim_v = kDim;
  p->io_dtype = GDN_FLOAT32;
}

// Two sequences of 3 and 5 first tokens on pages 2 and 0 of a pool of 4.
struct PrefillCall {
  static constexpr int64_t kTokens = 8;
  std::vector<float> q = uniform(1, kTokens* kDim), k = uniform(2, kTokens* kDim);
  std::vector<float> v = uniform(3, kTokens * kHeads * kDim);
  std::vector<float> g = uniform(4, kTokens* kHeads), beta = uniform(5, kTokens* kHeads);
  std::vector<float> output = std::vector<float>(kTokens * kHeads * kDim, 7.0f);
  std::vector<float> pool_data = uniform(6, 4 * kState);
  std::vector<int32_t> cu_seqlens = {0, 3, 8}, page_indices = {2, 0}, page_indptr = {0, 1, 2};
  std::vector<int32_t> last_page_len = {3, 5}, rows = {2, 0};
  gdn_pool_t pool = GDN_POOL_INIT;
  gdn_prefill_params_t params = GDN_PREFILL_PARAMS_INIT;

  PrefillCall() {
    for (float& x : g) x = 0.95f + 0.05f * x;
    pool.data = pool_data.data();
    pool.num_rows = 4;
    set_shape(&params);
    params.num_seqs = 2;
    params.num_tokens = kTokens;
    params.q = q.data();
    params.k = k.data();
    params.v = v.data();
    params.output = output.data();
    params.g = g.data();
    params.beta = beta.data();
    params.cu_seqlens = cu_seqlens.data();
    params.state_pool = &pool;
    params.page_indices = page_indices.data();
    params.page_indptr = page_indptr.data();
    params.last_page_len = last_page_len.data();
    params.num_indices = 2;
    params.page_size = 64;
  }
  PrefillCall(const PrefillCall&) = delete;

  // The same rows in the slot form.
  void use_slots() {
    params.state_pool = nullptr;
    params.page_indices = params.page_indptr = params.last_page_len = nullptr;
    params.num_indices = params.page_size = 0;
    params.output_state = &pool;
    params.state_indices = rows.data();
  }
};

// Two rows: one opens page 3 after page 1, one continues page 0.
struct DecodeCall {
  static constexpr int64_t kBatch = 2;
  std::vector<float> q = uniform(11, kBatch* kDim), k = uniform(12, kBatch* kDim);
  std::vector<float> v = uniform(13, kBatch * kHeads * kDim);
  std::vector<float> a = uniform(14, kBatch* kHeads), b = uniform(15, kBatch* kHeads);
  std::vector<float> A_log = uniform(16, kHeads), dt_bias = uniform(17, kHeads);
  std::vector<float> output = std::vector<float>(kBatch * kHeads * kDim, 7.0f);
  std::vector<float> pool_data = uniform(18, 4 * kState);
  std::vector<int32_t> page_indices = {1, 3, 0}, page_indptr = {0, 2, 3}, last_page_len = {1, 9};
  std::vector<int32_t> read_rows = {1, 0}, write_rows = {3, 0};
  gdn_pool_t pool = GDN_POOL_INIT;
  gdn_decode_params_t params = GDN_DECODE_PARAMS_INIT;

  DecodeCall() {
    pool.data = pool_data.data();
    pool.num_rows = 4;
    set_shape(&params);
    params.batch_size = kBatch;
    params.q = q.data();
    params.k = k.data();
    params.v = v.data();
    params.output = output.data();
    params.a = a.data();
    params.b = b.data();
    params.A_log = A_log.data();
    params.dt_bias = dt_bias.data();
    params.state_pool = &pool;
    params.page_indices = page_indices.data();
    params.page_indptr = page_indptr.data();
    params.last_page_len = last_page_len.data();
    params.num_indices = 3;
  }
  DecodeCall(const DecodeCall&) = delete;

  void use_slots() {
    params.state_pool = nullptr;
    params.page_indices = params.page_indptr = params.last_page_len = nullptr;
    params.num_indices = 0;
    params.initial_state = &pool;
    params.initial_state_indices = read_rows.data();
    params.output_state_indices = write_rows.data();
  }
};

// A page table with its slots: page_size 64, 16 pages.
struct TableCall {
  std::vector<int64_t> cu_seqlens;
  std::vector<int32_t> page_indices, page_indptr, last_page_len;
  std::vector<int32_t> read, write, starts, prefix;
  gdn_page_table_params_t params = GDN_PAGE_TABLE_PARAMS_INIT;

  TableCall(std::vector<int64_t> cu, std::vector<int32_t> indices, std::vector<int32_t> indptr,
            std::vector<int32_t> last)
      : cu_seqlens(cu), page_indices(indices), page_indptr(indptr), last_page_len(last) {
    const size_t n = last.size();
    read.assign(n, 99), write.assign(n, 99), starts.assign(n, 99), prefix.assign(n, 99);
    params.num_seqs = static_cast<int64_t>(n);
    params.num_indices = static_cast<int64_t>(indices.size());
    params.num_pages = 16;
    params.page_size = 64;
    params.cu_seqlens = cu_seqlens.empty() ? nullptr : cu_seqlens.data();
    params.cu_seqlens_dtype = GDN_INT64;
    params.page_indices = page_indices.data();
    params.page_indptr = page_indptr.data();
    params.last_page_len = last_page_len.data();
    params.state_indices = read.data();
    params.output_state_indices = write.data();
    params.checkpoint_cu_starts = starts.data();
    params.prefix_lens = prefix.data();
  }
  TableCall(const TableCall&) = delete;
};

}  // namespace gdn_test

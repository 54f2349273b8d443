// A batch of sequences in the memory of one GPU, and every call on it.
#ifndef GDN_TESTS_DEVICE_BATCH_H_
#define GDN_TESTS_DEVICE_BATCH_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "gdn_paged/gdn_paged.h"

#define CHECK_CUDA(call)                                                              \
  do {                                                                                \
    const cudaError_t error_ = (call);                                                \
    if (error_ != cudaSuccess) {                                                      \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
      exit(1);                                                                        \
    }                                                                                 \
  } while (0)

namespace gdn_test {

constexpr int32_t kQkHeads = 4, kHeads = 8, kDim = 128, kPageSize = 128;

// One batch on one device: the same numbers on each. Built and ended with the device current.
class Batch {
 public:
  Batch(int device, int64_t num_seqs, int64_t length) : device_(device), num_seqs_(num_seqs) {
    int previous = 0;
    CHECK_CUDA(cudaGetDevice(&previous));
    CHECK_CUDA(cudaSetDevice(device));
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    make_table(length);
    set_prefill(num_seqs * length);
    set_decode();
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaSetDevice(previous));
  }
  ~Batch() {
    for (void* memory : memory_) cudaFree(memory);
    cudaStreamDestroy(stream_);
  }
  Batch(const Batch&) = delete;

  gdn_prefill_params_t& prefill_params() { return prefill_; }
  void prefill() { CHECK_OK(gdn_prefill_paged(&prefill_)); }
  void decode() { CHECK_OK(gdn_decode_paged(&decode_)); }
  void wait() { CHECK_CUDA(cudaStreamSynchronize(stream_)); }

  // The calls on page tables: rows of the slots, the report's rule, NaN counts.
  std::vector<int64_t> table_calls() {
    const size_t count = static_cast<size_t>(num_seqs_);
    gdn_page_table_params_t p = table_;
    std::vector<int32_t*> slots;
    for (int i = 0; i < 4; ++i) slots.push_back(space<int32_t>(count));
    p.state_indices = slots[0], p.output_state_indices = slots[1];
    p.checkpoint_cu_starts = slots[2], p.prefix_lens = slots[3];
    CHECK_OK(gdn_prefill_slots(&p));
    p.report = space<gdn_page_table_report_t>(1);
    CHECK_OK(gdn_validate_page_table_workspace_size(&p, &p.workspace_bytes));
    p.workspace = space<char>(p.workspace_bytes);
    CHECK_OK(gdn_validate_page_table(&p, 0));
    gdn_page_stats_params_t stats = GDN_PAGE_STATS_PARAMS_INIT;
    stats.device_type = GDN_CUDA_DEVICE, stats.device_id = device_, stats.stream = stream_;
    stats.pool = &pool_, stats.num_pages = pool_.num_rows;
    stats.row_elements = int64_t{kHeads} * kDim * kDim;
    stats.nan_count = space<int64_t>(static_cast<size_t>(pool_.num_rows));
    stats.inf_count = space<int64_t>(static_cast<size_t>(pool_.num_rows));
    stats.abs_max = space<float>(static_cast<size_t>(pool_.num_rows));
    CHECK_OK(gdn_page_stats(&stats));
    wait();
    std::vector<int64_t> numbers;
    for (const int32_t* rows : slots) {
      for (int32_t row : on_host(rows, count)) numbers.push_back(row);
    }
    numbers.push_back(on_host(p.report, 1)[0].rule);
    for (int64_t n : on_host(stats.nan_count, static_cast<size_t>(pool_.num_rows))) {
      numbers.push_back(n);
    }
    return numbers;
  }

  // Outputs of both calls and the pool, as bytes.
  std::string results() {
    wait();
    std::string bytes;
    append(bytes, prefill_.output, static_cast<size_t>(prefill_.num_tokens) * kHeads * kDim * 2);
    append(bytes, decode_.output, static_cast<size_t>(num_seqs_) * kHeads * kDim * 2);
    append(bytes, pool_.data,
           static_cast<size_t>(pool_.num_rows) * kHeads * kDim * kDim * sizeof(float));
    return bytes;
  }
  void clear() {
    CHECK_CUDA(cudaMemsetAsync(
        pool_.data, 0, static_cast<size_t>(pool_.num_rows) * kHeads * kDim * kDim * 4, stream_));
    wait();
  }

 private:
  template <class T>
  T* space(size_t count) {
    void* memory = nullptr;
    int previous = 0;
    CHECK_CUDA(cudaGetDevice(&previous));
    if (previous != device_) CHECK_CUDA(cudaSetDevice(device_));
    CHECK_CUDA(cudaMalloc(&memory, std::max<size_t>(count * sizeof(T), 256)));
    if (previous != device_) CHECK_CUDA(cudaSetDevice(previous));
    memory_.push_back(memory);
    return static_cast<T*>(memory);
  }
  template <class T>
  T* on_device(const std::vector<T>& values) {
    T* memory = space<T>(values.size());
    CHECK_CUDA(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyDefault));
    return memory;
  }
  template <class T>
  static std::vector<T> on_host(const T* memory, size_t count) {
    std::vector<T> values(count);
    CHECK_CUDA(cudaMemcpy(values.data(), memory, count * sizeof(T), cudaMemcpyDefault));
    return values;
  }
  static void append(std::string& bytes, const void* memory, size_t count) {
    const std::vector<char> part = on_host(static_cast<const char*>(memory), count);
    bytes.append(part.data(), part.size());
  }
  // bf16 in [-scale, scale]
  uint16_t* numbers(int64_t count, float scale) {
    std::vector<uint16_t> values(static_cast<size_t>(count));
    for (uint16_t& value : values) {
      seed_ = seed_ * 1664525u + 1013904223u;
      const float x = scale * (static_cast<float>(seed_ >> 8) / 8388608.0f - 1.0f);
      uint32_t bits;
      memcpy(&bits, &x, sizeof bits);
      value = static_cast<uint16_t>(bits >> 16);
    }
    return on_device(values);
  }

  // Sequence b owns consecutive pages; its last page has room for one more token.
  void make_table(int64_t length) {
    const int64_t pages = length / kPageSize + 1;
    std::vector<int32_t> indices, indptr, last, next, cu_seqlens;
    for (int64_t b = 0; b <= num_seqs_; ++b) {
      indptr.push_back(static_cast<int32_t>(b * pages));
      cu_seqlens.push_back(static_cast<int32_t>(b * length));
    }
    for (int64_t i = 0; i < num_seqs_ * pages; ++i) indices.push_back(static_cast<int32_t>(i));
    CHECK(length % kPageSize != 0);
    last.assign(static_cast<size_t>(num_seqs_), static_cast<int32_t>(length % kPageSize));
    next.assign(static_cast<size_t>(num_seqs_), static_cast<int32_t>(length % kPageSize + 1));
    pool_.dtype = GDN_FLOAT32, pool_.num_rows = num_seqs_ * pages;
    pool_.data = space<float>(static_cast<size_t>(pool_.num_rows) * kHeads * kDim * kDim);
    table_.device_type = GDN_CUDA_DEVICE, table_.device_id = device_, table_.stream = stream_;
    table_.num_seqs = num_seqs_, table_.num_indices = num_seqs_ * pages;
    table_.page_size = kPageSize;
    table_.cu_seqlens = on_device(cu_seqlens), table_.page_indices = on_device(indices);
    table_.page_indptr = on_device(indptr), table_.last_page_len = on_device(last);
    decode_last_ = on_device(next);
  }

  void set_prefill(int64_t tokens) {
    gdn_prefill_params_t& p = prefill_;
    p.device_type = GDN_CUDA_DEVICE, p.device_id = device_, p.stream = stream_;
    p.num_seqs = num_seqs_, p.num_tokens = tokens;
    p.num_q_heads = p.num_k_heads = kQkHeads, p.num_v_heads = kHeads;
    p.head_dim_k = p.head_dim_v = kDim, p.io_dtype = GDN_BFLOAT16;
    p.q = numbers(tokens * kQkHeads * kDim, 0.1f), p.k = numbers(tokens * kQkHeads * kDim, 0.1f);
    p.v = numbers(tokens * kHeads * kDim, 1.0f);
    p.beta = numbers(tokens * kHeads, 1.0f), p.beta_dtype = GDN_BFLOAT16;
    p.flags = GDN_QK_L2NORM | GDN_BETA_IS_LOGIT;
    p.output = space<uint16_t>(static_cast<size_t>(tokens) * kHeads * kDim);
    p.state_pool = &pool_, p.page_size = kPageSize, p.num_indices = table_.num_indices;
    p.cu_seqlens = table_.cu_seqlens, p.page_indices = table_.page_indices;
    p.page_indptr = table_.page_indptr, p.last_page_len = table_.last_page_len;
    CHECK_OK(gdn_prefill_workspace_size(&p, &p.workspace_bytes));
    p.workspace = space<char>(p.workspace_bytes);
  }

  void set_decode() {
    gdn_decode_params_t& p = decode_;
    p.device_type = GDN_CUDA_DEVICE, p.device_id = device_, p.stream = stream_;
    p.batch_size = num_seqs_, p.num_q_heads = p.num_k_heads = kQkHeads, p.num_v_heads = kHeads;
    p.head_dim_k = p.head_dim_v = kDim, p.io_dtype = GDN_BFLOAT16;
    p.q = prefill_.q, p.k = prefill_.k, p.v = prefill_.v, p.flags = GDN_QK_L2NORM;
    p.output = space<uint16_t>(static_cast<size_t>(num_seqs_) * kHeads * kDim);
    p.a = numbers(num_seqs_ * kHeads, 1.0f), p.b = numbers(num_seqs_ * kHeads, 1.0f);
    p.a_dtype = p.b_dtype = GDN_BFLOAT16;
    p.A_log = on_device(std::vector<float>(kHeads, 0.0f));
    p.state_pool = &pool_, p.num_indices = table_.num_indices;
    p.page_indices = table_.page_indices, p.page_indptr = table_.page_indptr;
    p.last_page_len = decode_last_;
  }

  int device_;
  int64_t num_seqs_;
  uint32_t seed_ = 1;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> memory_;
  int32_t* decode_last_ = nullptr;
  gdn_pool_t pool_ = GDN_POOL_INIT;
  gdn_page_table_params_t table_ = GDN_PAGE_TABLE_PARAMS_INIT;
  gdn_prefill_params_t prefill_ = GDN_PREFILL_PARAMS_INIT;
  gdn_decode_params_t decode_ = GDN_DECODE_PARAMS_INIT;
};

}  // namespace gdn_test

#endif  // GDN_TESTS_DEVICE_BATCH_H_

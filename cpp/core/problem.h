// What a checked call is: plain structs, the same for every backend and passed to kernels by value.
// core/validate.cpp builds them from the C params; nothing past it looks at the C params again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gdn_paged/gdn_paged.h"

#if defined(__CUDACC__)
#define GDN_HOST_DEVICE __host__ __device__
#else
#define GDN_HOST_DEVICE
#endif

namespace gdn {

inline constexpr int64_t kChunk = 64;  // tokens of a chunk (core/chunks.h)

enum class DType : int32_t {
  kInt32 = GDN_INT32,
  kInt64 = GDN_INT64,
  kFloat16 = GDN_FLOAT16,
  kFloat32 = GDN_FLOAT32,
  kBFloat16 = GDN_BFLOAT16,
};

// A strided operand whose last dimension is dense. Rows are tokens (prefill) or batch rows
// (decode).
struct Tensor {
  const void* data = nullptr;  // [rows, heads, dim] or [rows, heads]
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0;   // elements; 0 does not move (broadcast)
  int64_t head_stride = 0;  // elements
};

// A dense table of int32 or int64; null data is an absent table.
struct IndexTable {
  const void* data = nullptr;
  int64_t size = 0;
  bool is_int64 = false;

  GDN_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  GDN_HOST_DEVICE int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// Rows of states, each a dense [H, V, K] block.
struct Pool {
  void* data = nullptr;  // [num_rows, H, V, K]
  DType dtype = DType::kFloat32;
  int64_t num_rows = 0;
  int64_t row_stride = 0;  // elements

  GDN_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  // -1 is a legal id (zero in, skip out); anything else outside the pool is not.
  GDN_HOST_DEVICE bool accepts(int64_t row) const { return row >= -1 && row < num_rows; }
};

// Heads and their dims. State head h reads q, k and v of these heads:
struct Heads {
  int32_t q = 0, k = 0, v = 0;  // operand heads
  int32_t state = 0;            // H = max(q, v)
  int32_t dim_k = 0, dim_v = 0;

  GDN_HOST_DEVICE int32_t q_of(int32_t h) const { return h / (state / q); }
  GDN_HOST_DEVICE int32_t k_of(int32_t h) const { return h / (state / k); }
  GDN_HOST_DEVICE int32_t v_of(int32_t h) const { return h / (state / v); }
  GDN_HOST_DEVICE int64_t state_elements() const {
    return static_cast<int64_t>(state) * dim_v * dim_k;
  }
};

enum class GateForm : int32_t { kNone, kLinear, kLog, kRaw };

// Gate and beta as they came; core/gate.h turns them into one alpha (or log alpha) and one beta.
struct Gates {
  GateForm form = GateForm::kNone;
  bool beta_is_logit = false;
  Tensor g;        // [rows, H]; null data with kNone
  Tensor beta;     // [rows, H]; null data: 1
  Tensor A_log;    // [H]
  Tensor dt_bias;  // [H]; null data: 0
};

// CSR page table, with the lengths that go with it.
struct PageTable {
  IndexTable indices;             // [num_indices]
  IndexTable indptr;              // [num_seqs + 1]
  IndexTable last_page_len;       // [num_seqs]
  IndexTable initial_pages = {};  // [num_seqs], -1: the own page; absent: all -1
  int64_t page_size = 0;          // 0 in decode
};

struct Device {
  int32_t type = GDN_CPU;
  int32_t id = 0;
  CUstream_st* stream = nullptr;
};

// The CPU threads of a call.
struct Threads {
  gdn_parallel_for_t parallel_for = nullptr;
  void* context = nullptr;
  int32_t count = 0;  // 0: all
};

struct PrefillProblem {
  Device device;
  Threads threads;
  const char* backend = nullptr;  // null: auto
  Heads heads;
  int64_t num_seqs = 0;
  int64_t num_tokens = 0;
  int64_t max_seqlen = 0;  // 0: unknown
  DType io = DType::kFloat32;
  Tensor q, k, v;
  Tensor output;  // written
  Gates gates;
  float scale = 1.0f;
  bool qk_l2norm = false;
  bool batch_invariant = false;
  bool paged = false;  // the page table gives the rows, unless `slots_given`
  bool slots_given = false;
  int32_t use_cp = GDN_CP_AUTO;
  IndexTable cu_seqlens;                    // [num_seqs + 1]
  IndexTable cu_seqlens_host;               // or absent
  PageTable table;                          // paged form
  Pool initial, output_state, checkpoints;  // paged form: one pool, three times
  IndexTable state_indices;                 // [num_seqs]; absent: row b
  IndexTable output_state_indices;          // [num_seqs]; absent: row b (packed form)
  IndexTable checkpoint_indices;  // paged form: table.indices; absent: the rows themselves
  IndexTable checkpoint_starts;   // [num_seqs]
  IndexTable prefix_lens;         // [num_seqs]; absent: 0
  int64_t checkpoint_every = 0;   // paged form: page_size; 0: none
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* plan = nullptr;
  size_t plan_bytes = 0;
};

struct DecodeProblem {
  Device device;
  Threads threads;
  const char* backend = nullptr;
  Heads heads;
  int64_t batch = 0;
  DType io = DType::kFloat32;
  Tensor q, k, v;
  Tensor output;  // written
  Gates gates;    // form kRaw with g = a, beta = b as a logit
  float scale = 1.0f;
  bool qk_l2norm = false;
  bool batch_invariant = false;
  bool paged = false;
  bool slots_given = false;
  PageTable table;
  Pool initial, output_state;
  IndexTable initial_indices;  // [batch]; absent: row b
  IndexTable output_indices;   // [batch]; absent: the row that was read
};

// gdn_prefill_slots, gdn_decode_slots and gdn_validate_page_table.
struct PageTableProblem {
  Device device;
  Threads threads;
  PageTable table;
  IndexTable cu_seqlens;  // absent in decode
  int64_t num_seqs = 0;
  int64_t num_tokens = INT64_MAX;
  int64_t num_pages = INT64_MAX;
  bool is_decode = false;
  bool allow_padding = false;
  int32_t* state_indices = nullptr;
  int32_t* output_state_indices = nullptr;
  int32_t* checkpoint_starts = nullptr;
  int32_t* prefix_lens = nullptr;
  gdn_page_table_report_t* report = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

struct PageStatsProblem {
  Device device;
  Threads threads;
  Pool pool;
  int64_t row_elements = 0;
  int64_t num_pages = 0;
  IndexTable page_indices;  // absent: rows 0 .. num_pages
  int64_t* nan_count = nullptr;
  int64_t* inf_count = nullptr;
  float* abs_max = nullptr;
};

}  // namespace gdn

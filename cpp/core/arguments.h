// Checks of single arguments, shared by the validators: struct sizes, operands, tables, pools.
#pragma once

#include <cstddef>

#include "core/problem.h"
#include "core/status.h"

namespace gdn {

// Copies the part of a params struct that this library knows over zero defaults. A larger struct
// is a newer caller's: it is accepted as long as the fields this library does not know are zero.
void read_struct_bytes(const char* name, const void* given, void* copy, size_t size);

template <class T>
T read_struct(const char* name, const T* given) {
  T copy{};
  read_struct_bytes(name, given, &copy, sizeof(T));
  return copy;
}

const char* dtype_name(gdn_dtype_t dtype);

// fp32, bf16 or fp16; `or_default` also takes 0 for fp32.
DType check_float_dtype(const char* name, gdn_dtype_t dtype, bool or_default);

// One strided operand as it came. A stride of 0 is dense, GDN_STRIDE_BROADCAST does not move.
struct Operand {
  const char* name = nullptr;      // "q"
  const char* row_name = nullptr;  // "token" or "batch": the stride is q_token_stride
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t heads = 1;
  int64_t dim = 1;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
  bool required = true;
  bool written = false;
};
Tensor check_operand(const Operand& operand);

struct TableArgument {
  const char* name = nullptr;
  const void* data = nullptr;
  gdn_dtype_t dtype = GDN_DTYPE_DEFAULT;
  int64_t size = 0;
  bool required = true;
};
IndexTable check_table(const TableArgument& table);

// initial_page_indices of the params that have a page table.
template <class Params>
IndexTable check_initial_pages(const Params& c, int64_t num_seqs) {
  return check_table({.name = "initial_page_indices",
                      .data = c.initial_page_indices,
                      .dtype = c.initial_page_indices_dtype,
                      .size = num_seqs,
                      .required = false});
}

struct PoolArgument {
  const char* name = nullptr;
  const gdn_pool_t* pool = nullptr;
  int64_t elements = 0;       // H V K
  bool required = true;       // the struct
  bool data_required = true;  // its data
};
Pool check_pool(const PoolArgument& argument);

Heads check_heads(const Heads& given);
Device check_device(gdn_device_type_t type, int32_t id, CUstream_st* stream);
Threads check_threads(gdn_parallel_for_t parallel_for, void* context, int32_t count);
const char* check_backend(const char* backend);  // null for "auto"
void check_flags(uint64_t flags, uint64_t known);
void check_count(const char* name, int64_t count);  // 0 <= count < 2^31
void check_page_size(int64_t page_size, uint64_t flags);
void check_absent(const char* name, const void* given, const char* form);  // of the other form
void check_no_slots(const void* initial_page_indices, bool slots_given);
float check_scale(double scale, bool is_explicit, int32_t head_dim_k);

int64_t element_size(DType dtype);

// Fields that the params of several operations name alike.
template <class Params, class Problem>
void read_launch(const Params& c, Problem* p) {
  p->device = check_device(c.device_type, c.device_id, c.stream);
  p->threads = check_threads(c.parallel_for, c.parallel_for_context, c.num_threads);
  p->backend = check_backend(c.backend);
}

template <class Params, class Problem>
void read_heads(const Params& c, Problem* p) {
  p->heads = check_heads({.q = c.num_q_heads,
                          .k = c.num_k_heads,
                          .v = c.num_v_heads,
                          .dim_k = c.head_dim_k,
                          .dim_v = c.head_dim_v});
  p->io = check_float_dtype("io_dtype", c.io_dtype, false);
  p->scale = check_scale(c.scale, c.flags & GDN_EXPLICIT_SCALE, c.head_dim_k);
  p->qk_l2norm = c.flags & GDN_QK_L2NORM;
}

// q, k, v and output of the operations whose rows are tokens.
template <class Params, class Problem>
void read_token_operands(const Params& c, bool required, Problem* p) {
  Operand o = {.row_name = "token", .dtype = p->io, .rows = p->num_tokens, .required = required};
  o.name = "q", o.data = c.q, o.heads = p->heads.q, o.dim = p->heads.dim_k;
  o.row_stride = c.q_token_stride, o.head_stride = c.q_head_stride;
  p->q = check_operand(o);
  o.name = "k", o.data = c.k, o.heads = p->heads.k;
  o.row_stride = c.k_token_stride, o.head_stride = c.k_head_stride;
  p->k = check_operand(o);
  o.name = "v", o.data = c.v, o.heads = p->heads.v, o.dim = p->heads.dim_v;
  o.row_stride = c.v_token_stride, o.head_stride = c.v_head_stride;
  p->v = check_operand(o);
  o.name = "output", o.data = c.output, o.heads = p->heads.state, o.written = true;
  o.row_stride = c.output_token_stride, o.head_stride = c.output_head_stride;
  p->output = check_operand(o);
}

}  // namespace gdn

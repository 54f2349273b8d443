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
void check_page_size(int64_t page_size);
void check_absent(const char* name, const void* given, const char* form);  // of the other form
float check_scale(double scale, bool is_explicit, int32_t head_dim_k);

int64_t element_size(DType dtype);

}  // namespace gdn

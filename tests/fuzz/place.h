// Puts valid buffers behind the pointers of a params struct. A call is trusted to own the memory
// that its sizes claim; a struct of arbitrary bytes may claim more than there is, and is then only
// passed on if the library has already refused it (`oversized`).
#pragma once

#include <algorithm>
#include <vector>

#include "bytes.h"
#include "gdn_paged/gdn_paged.h"
#include "memory.h"

namespace gdn_fuzz {

using Wide = __int128;

// Elements of a state row; beyond 2^56 just that many.
inline Wide state_elements(Wide heads, Wide dim_v, Wide dim_k) {
  return std::min(heads * dim_v * dim_k, Wide{1} << 56);
}

// A strided operand, as the header describes it.
struct Shape {
  int64_t rows, heads, dim;
  int64_t row_stride, head_stride;
  gdn_dtype_t dtype;

  int64_t size() const { return dtype == GDN_FLOAT16 || dtype == GDN_BFLOAT16 ? 2 : 4; }
  int64_t head_step() const;
  int64_t row_step() const;
  Wide bytes() const;  // up to the last element
};

// Operands that every operation names alike; A_log and dt_bias are [H].
template <class Params>
struct HeadShapes {
  Shape A_log, dt_bias;
  Wide elements;

  explicit HeadShapes(const Params& p) {
    const int32_t heads = state_heads(p);
    A_log = {1, heads, 1, 0, 0, p.A_log_dtype};
    dt_bias = {1, heads, 1, 0, 0, p.dt_bias_dtype};
    elements = state_elements(heads, p.head_dim_v, p.head_dim_k);
  }
  static int32_t state_heads(const Params& p) { return std::max(p.num_q_heads, p.num_v_heads); }
};

// The same with the operands of those whose rows are tokens.
template <class Params>
struct TokenShapes : HeadShapes<Params> {
  Shape q, k, v, output;

  explicit TokenShapes(const Params& p) : HeadShapes<Params>(p) {
    const int32_t heads = this->state_heads(p);
    const gdn_dtype_t io = p.io_dtype;
    q = {p.num_tokens, p.num_q_heads, p.head_dim_k, p.q_token_stride, p.q_head_stride, io};
    k = {p.num_tokens, p.num_k_heads, p.head_dim_k, p.k_token_stride, p.k_head_stride, io};
    v = {p.num_tokens, p.num_v_heads, p.head_dim_v, p.v_token_stride, p.v_head_stride, io};
    output = {p.num_tokens, heads, p.head_dim_v, p.output_token_stride, p.output_head_stride, io};
  }
};

// Few heads of small sizes, mostly equal.
template <class Params>
void ordinary_heads(Bytes& in, Params* p) {
  static constexpr gdn_dtype_t kFloats[] = {GDN_FLOAT32, GDN_BFLOAT16, GDN_FLOAT16};
  p->num_q_heads = p->num_k_heads = p->num_v_heads = 1;
  if (in.one_in(4)) p->num_v_heads = 2;
  p->head_dim_k = p->head_dim_v = 8;
  if (in.one_in(8)) p->head_dim_k = 24;
  if (in.one_in(8)) p->head_dim_v = 16;
  p->io_dtype = kFloats[in.below(3)];
}

struct Place {
  Bytes& in;
  bool oversized = false;
  bool long_tables = false;  // a table claims too much: gdn_explain reads cu_seqlens
  int tables_used = 0, pools_used = 0;

  bool at_end() { return !in.one_in(8); }
  size_t misaligned() { return in.one_in(64) ? 1 + static_cast<size_t>(in.below(3)) : 0; }

  // Each leaves a null pointer null and gives every other one a place.
  template <class T>
  void operand(T** field, const Shape& shape) {
    if (*field != nullptr) *field = at(input(), shape.bytes(), static_cast<size_t>(shape.size()));
  }
  void output(void** field, const Shape& shape) {
    if (*field == nullptr) return;
    *field = at(memory().output, shape.bytes(), static_cast<size_t>(shape.size()));
  }
  // `entries` numbers of the table's dtype; those past `values` are zero.
  void table(const void** field, gdn_dtype_t dtype, Wide entries,
             const std::vector<int64_t>& values);
  // `pool` is a (spoiled) struct; a place for it and its rows.
  void pool(const gdn_pool_t** field, gdn_pool_t pool, int index, Wide elements);
  void scratch(void** field, size_t bytes);
  void name(const char** field);
  void threads(gdn_parallel_for_t* field);
  // fp32 matrices [heads, rows, columns]; those to be written get a region of their own.
  void matrices(const float** field, Wide elements);
  void matrices(float** field, Region& region, Wide elements);

  // The place of a params struct: what lies behind struct_size is not readable.
  template <class Params>
  Params* params(const Params& given) {
    return reinterpret_cast<Params*>(struct_at(memory().params, &given, sizeof given));
  }
  // The same of a second struct, of a call that takes no fourth pool.
  template <class Params>
  Params* second(const Params& given) {
    return reinterpret_cast<Params*>(struct_at(memory().nested[3], &given, sizeof given));
  }

 private:
  Region& input() { return memory().inputs[in.below(16) < 13 ? 0 : 1 + in.below(2)]; }
  char* at(Region& region, Wide bytes, size_t alignment);
  char* struct_at(Region& region, const void* given, size_t size);
};

// The part of a struct that the library may look at; zero behind struct_size.
template <class Params>
Params visible(const Params& given) {
  Params seen{};
  const size_t size = given.struct_size < sizeof given ? given.struct_size : sizeof given;
  std::memcpy(static_cast<void*>(&seen), &given, size < 8 ? 8 : size);
  return seen;
}

// A table that has a place.
struct Reader {
  const void* data;
  gdn_dtype_t dtype;
  int64_t operator[](int64_t i) const {
    return dtype == GDN_INT64 ? static_cast<const int64_t*>(data)[i]
                              : static_cast<const int32_t*>(data)[i];
  }
};

// The bytes of an operand that a call may write, for one row.
void allow_row(const Shape& shape, void* data, int64_t row);
// The dense block of one row of a placed pool; other ids are nobody's.
void allow_pool_row(const gdn_pool_t* pool, Wide elements, int64_t row);

// A status is one of the header's, and a failure says why.
void check_status(gdn_status_t status);

}  // namespace gdn_fuzz

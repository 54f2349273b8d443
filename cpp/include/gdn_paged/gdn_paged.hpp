// gdn_paged for C++17: the C API with exceptions. Header-only; every call is the C call of that
// name and costs nothing beside it. Params are the C structs: `gdn_prefill_params_t p =
// GDN_PREFILL_PARAMS_INIT;`.
//
// SPDX-License-Identifier: Apache-2.0
#ifndef GDN_PAGED_GDN_PAGED_HPP_
#define GDN_PAGED_GDN_PAGED_HPP_

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "gdn_paged/gdn_paged.h"

namespace gdn {
inline namespace v0 {

// What a failed call throws: the status, and the text of gdn_last_error.
class Error : public std::runtime_error {
 public:
  Error(gdn_status_t status, const char* text) : std::runtime_error(text), status_(status) {}
  gdn_status_t status() const noexcept { return status_; }

 private:
  gdn_status_t status_;
};

inline void check(gdn_status_t status) {
  if (status != GDN_OK) throw Error(status, gdn_last_error());
}

// The dtype of a C++ element type; 16-bit floats have none, so they are named by hand.
template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr gdn_dtype_t value = GDN_FLOAT32;
};
template <>
struct dtype_of<int32_t> {
  static constexpr gdn_dtype_t value = GDN_INT32;
};
template <>
struct dtype_of<int64_t> {
  static constexpr gdn_dtype_t value = GDN_INT64;
};

// A pool of states [num_rows, H, V, K]; row_stride 0 is dense.
inline gdn_pool_t pool(void* data, gdn_dtype_t dtype, int64_t num_rows, int64_t row_stride = 0) {
  gdn_pool_t result = GDN_POOL_INIT;
  result.data = data;
  result.dtype = dtype;
  result.num_rows = num_rows;
  result.row_stride = row_stride;
  return result;
}

// Operand heads and their dims, as every params struct names them.
struct HeadShape {
  int32_t num_q_heads;
  int32_t num_k_heads;
  int32_t num_v_heads;
  int32_t head_dim_k;
  int32_t head_dim_v;
};

template <class Params>
void set_heads(Params& params, const HeadShape& heads) {
  params.num_q_heads = heads.num_q_heads;
  params.num_k_heads = heads.num_k_heads;
  params.num_v_heads = heads.num_v_heads;
  params.head_dim_k = heads.head_dim_k;
  params.head_dim_v = heads.head_dim_v;
}

// ---- calls -----------------------------------------------------------------------------------

inline void prefill_paged(const gdn_prefill_params_t& params) { check(gdn_prefill_paged(&params)); }
inline void prefill(const gdn_prefill_params_t& params) { check(gdn_prefill(&params)); }
inline void prefill_plan(const gdn_prefill_params_t& params) { check(gdn_prefill_plan(&params)); }
inline void decode_paged(const gdn_decode_params_t& params) { check(gdn_decode_paged(&params)); }
inline void decode(const gdn_decode_params_t& params) { check(gdn_decode(&params)); }
inline void verify_paged(const gdn_verify_params_t& params) { check(gdn_verify_paged(&params)); }
inline void commit_paged(const gdn_verify_params_t& params) { check(gdn_commit_paged(&params)); }
inline void segment_begin(const gdn_prefill_params_t& params, const gdn_segment_t& segment) {
  check(gdn_segment_begin(&params, &segment));
}
inline void segment_finish(const gdn_prefill_params_t& params, const gdn_segment_t& segment) {
  check(gdn_segment_finish(&params, &segment));
}
inline void segment_combine(const gdn_segment_combine_params_t& params) {
  check(gdn_segment_combine(&params));
}
inline void prefill_slots(const gdn_page_table_params_t& params) {
  check(gdn_prefill_slots(&params));
}
inline void decode_slots(const gdn_page_table_params_t& params) {
  check(gdn_decode_slots(&params));
}
inline void page_stats(const gdn_page_stats_params_t& params) { check(gdn_page_stats(&params)); }
inline void preload(int32_t device_id) { check(gdn_preload(device_id)); }

// Throws GDN_PAGE_TABLE with sequence, entry and value (host arrays).
inline void validate_page_table(const gdn_page_table_params_t& params, bool is_decode) {
  check(gdn_validate_page_table(&params, is_decode ? 1 : 0));
}

inline size_t workspace_size(const gdn_prefill_params_t& params) {
  size_t bytes = 0;
  check(gdn_prefill_workspace_size(&params, &bytes));
  return bytes;
}

inline size_t plan_size(const gdn_prefill_params_t& params) {
  size_t bytes = 0;
  check(gdn_prefill_plan_size(&params, &bytes));
  return bytes;
}

inline size_t verify_draft_size(const gdn_verify_params_t& params) {
  size_t bytes = 0;
  check(gdn_verify_draft_size(&params, &bytes));
  return bytes;
}

inline size_t segment_workspace_size(const gdn_prefill_params_t& params,
                                     const gdn_segment_t& segment) {
  size_t bytes = 0;
  check(gdn_segment_workspace_size(&params, &segment, &bytes));
  return bytes;
}

inline size_t validate_workspace_size(const gdn_page_table_params_t& params) {
  size_t bytes = 0;
  check(gdn_validate_page_table_workspace_size(&params, &bytes));
  return bytes;
}

// ---- words -----------------------------------------------------------------------------------

// The status the call would return, and which row serves it or why none does.
struct Explanation {
  gdn_status_t status;
  std::string text;
};

inline Explanation explain(gdn_op_t op, const void* params) {
  size_t need = 0;
  gdn_explain(op, params, nullptr, 0, &need);
  std::string text(need, '\0');
  const gdn_status_t status = gdn_explain(op, params, &text[0], text.size(), &need);
  if (!text.empty()) text.pop_back();  // the final 0
  return {status, text};
}

inline std::string report_text(const gdn_page_table_report_t& report) {
  size_t need = 0;
  check(gdn_page_table_report_text(&report, nullptr, 0, &need));
  std::string text(need, '\0');
  check(gdn_page_table_report_text(&report, &text[0], text.size(), &need));
  text.pop_back();
  return text;
}

struct KernelRow {
  std::string name;
  std::string description;
};

// The rows of an operation in the order of preference.
inline std::vector<KernelRow> kernel_rows(gdn_op_t op) {
  std::vector<KernelRow> rows;
  for (int32_t i = 0; gdn_kernel_row_name(op, i) != nullptr; ++i) {
    rows.push_back({gdn_kernel_row_name(op, i), gdn_kernel_row_description(op, i)});
  }
  return rows;
}

}  // namespace v0
}  // namespace gdn

#endif  // GDN_PAGED_GDN_PAGED_HPP_

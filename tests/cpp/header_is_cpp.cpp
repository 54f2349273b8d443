// Both headers compile as C++17, and the C++ one turns a status into an exception.
#include "check.h"
#include "gdn_paged/gdn_paged.hpp"

int main() {
  gdn_decode_params_t params = GDN_DECODE_PARAMS_INIT;
  CHECK_EQUAL(params.struct_size, sizeof params);
  gdn::set_heads(params, {2, 2, 4, 64, 32});
  CHECK_EQUAL(params.num_v_heads, 4);
  CHECK_EQUAL(params.head_dim_v, 32);
  CHECK_EQUAL(gdn::dtype_of<float>::value, GDN_FLOAT32);
  const gdn_pool_t pool = gdn::pool(nullptr, GDN_BFLOAT16, 3, 100);
  CHECK(pool.struct_size == sizeof pool && pool.num_rows == 3 && pool.row_stride == 100);

  bool thrown = false;
  try {
    gdn::decode_paged(params);
  } catch (const gdn::Error& error) {
    thrown = true;
    CHECK_EQUAL(error.status(), GDN_INVALID_ARGUMENT);
    CHECK_CONTAINS(error.what(), "io_dtype");
  }
  CHECK(thrown);

  const gdn::Explanation why = gdn::explain(GDN_OP_DECODE_PAGED, &params);
  CHECK_EQUAL(why.status, GDN_INVALID_ARGUMENT);
  CHECK_CONTAINS(why.text.c_str(), "io_dtype");
  CHECK(!gdn::kernel_rows(GDN_OP_PREFILL).empty());
  CHECK(gdn::kernel_rows(GDN_OP_DECODE).back().name == "cpu");

  gdn_page_table_report_t report = {};
  report.rule = GDN_PAGE_TABLE_TOO_MANY_NEW;
  report.value = 200;
  report.expected = 72;
  CHECK(gdn::report_text(report) == "sequence 0 has 200 new tokens but its table holds 72");
}

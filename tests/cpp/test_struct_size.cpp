// Params of another version: an older caller's struct is smaller, a newer one's is larger.
#include <cstring>

#include "calls.h"
#include "check.h"

using gdn_test::DecodeCall;
using gdn_test::PrefillCall;

namespace {

template <class Params>
struct Larger {
  Params params;
  unsigned char tail[24];
};

// A newer struct is served as long as it asks for nothing that this library does not know.
void test_larger() {
  DecodeCall call;
  Larger<gdn_decode_params_t> newer;
  std::memset(&newer, 0, sizeof newer);
  newer.params = call.params;
  newer.params.struct_size = sizeof newer;
  CHECK_OK(gdn_decode_paged(&newer.params));
  newer.tail[23] = 1;
  call.output.assign(call.output.size(), 7.0f);
  CHECK_EQUAL(gdn_decode_paged(&newer.params), GDN_INVALID_ARGUMENT);
  CHECK_CONTAINS(gdn_last_error(), "gdn_decode_params_t: struct_size");
  CHECK_CONTAINS(gdn_last_error(), "newer version");
  CHECK(call.output[0] == 7.0f);
}

// An older struct ends before num_threads; what follows it in memory is not read.
void test_smaller() {
  PrefillCall call;
  gdn_prefill_params_t older = call.params;
  older.struct_size = offsetof(gdn_prefill_params_t, num_threads);
  older.num_threads = -5;
  older.reserved = -1;
  CHECK_OK(gdn_prefill_paged(&older));
  older.struct_size = sizeof older;
  CHECK_EQUAL(gdn_prefill_paged(&older), GDN_INVALID_ARGUMENT);
  // Cut before the last page lengths: they count as absent, and are named.
  older.struct_size = offsetof(gdn_prefill_params_t, last_page_len);
  CHECK_EQUAL(gdn_prefill_paged(&older), GDN_INVALID_ARGUMENT);
  CHECK_CONTAINS(gdn_last_error(), "page_size: 0 given");
}

void expect_refused(size_t struct_size) {
  PrefillCall call;
  call.params.struct_size = struct_size;
  CHECK_EQUAL(gdn_prefill_paged(&call.params), GDN_INVALID_ARGUMENT);
  CHECK_CONTAINS(gdn_last_error(), "gdn_prefill_params_t: struct_size");
  CHECK_CONTAINS(gdn_last_error(), "expected");
}

void test_senseless() {
  expect_refused(0);
  expect_refused(sizeof(size_t) - 1);
  expect_refused(sizeof(size_t));
  expect_refused(sizeof(gdn_prefill_params_t) - 3);
  expect_refused(SIZE_MAX - 7);
}

void test_nested() {
  PrefillCall call;
  struct {
    gdn_pool_t pool;
    int64_t unknown;
  } newer = {call.pool, 0};
  newer.pool.struct_size = sizeof newer;
  call.params.state_pool = &newer.pool;
  CHECK_OK(gdn_prefill_paged(&call.params));
  newer.unknown = 1;
  CHECK_EQUAL(gdn_prefill_paged(&call.params), GDN_INVALID_ARGUMENT);
  CHECK_CONTAINS(gdn_last_error(), "state_pool: struct_size");
  gdn_pool_t older = call.pool;  // an older pool without a row stride is dense
  older.struct_size = offsetof(gdn_pool_t, row_stride);
  older.row_stride = 1;
  call.params.state_pool = &older;
  CHECK_OK(gdn_prefill_paged(&call.params));
  older.struct_size = 0;
  CHECK_EQUAL(gdn_prefill_paged(&call.params), GDN_INVALID_ARGUMENT);
}

}  // namespace

int main() {
  test_larger();
  test_smaller();
  test_senseless();
  test_nested();
}

// Calls that succeed take no memory from the heap: every allocation of this process is counted.
// CPU prefill keeps scratch per thread, so it is asked from its second call on.
#include <atomic>
#include <cstdlib>
#include <functional>

#include "calls.h"
#include "check.h"

extern "C" void* __libc_malloc(size_t bytes);  // glibc's own, behind the counted one

namespace {

std::atomic<int64_t> allocations{0};

void expect_none(const char* what, const std::function<gdn_status_t()>& call) {
  CHECK_OK(call());
  const int64_t before = allocations.load();
  CHECK_OK(call());
  const int64_t count = allocations.load() - before;
  if (count != 0) std::fprintf(stderr, "%s: %lld allocations\n", what, (long long)count);
  CHECK(count == 0);
}

}  // namespace

extern "C" [[gnu::visibility("default")]] void* malloc(size_t bytes) {
  allocations.fetch_add(1);
  return __libc_malloc(bytes);
}

int main() {
  gdn_test::DecodeCall decode;
  gdn_test::PrefillCall prefill;
  gdn_test::TableCall table({0, 5, 75}, {7, 3, 12, 7, 3, 1, 14}, {0, 3, 7}, {5, 6});
  const int64_t start = allocations.load();
  CHECK_EQUAL(gdn_preload(-1), GDN_INVALID_ARGUMENT);  // an exception inside the library
  CHECK(allocations.load() > start);                   // the counter sees it

  decode.params.num_threads = prefill.params.num_threads = 1;
  expect_none("decode_paged", [&] { return gdn_decode_paged(&decode.params); });
  expect_none("prefill_paged", [&] { return gdn_prefill_paged(&prefill.params); });
  expect_none("prefill_slots", [&] { return gdn_prefill_slots(&table.params); });
  expect_none("decode_slots", [&] { return gdn_decode_slots(&table.params); });
  size_t bytes = 0;
  expect_none("workspace_size",
              [&] { return gdn_prefill_workspace_size(&prefill.params, &bytes); });
  expect_none("plan", [&] { return gdn_prefill_plan(&prefill.params); });
  decode.use_slots();
  prefill.use_slots();
  expect_none("decode", [&] { return gdn_decode(&decode.params); });
  expect_none("prefill", [&] { return gdn_prefill(&prefill.params); });
  char text[512];
  expect_none("explain", [&] {
    return gdn_explain(GDN_OP_DECODE, &decode.params, text, sizeof text, nullptr);
  });
}

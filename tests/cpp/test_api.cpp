// Errors of the C API: every status, the text, its lifetime, and that a failed call writes nothing.
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "calls.h"
#include "check.h"

using gdn_test::DecodeCall;
using gdn_test::PrefillCall;
using gdn_test::TableCall;

namespace {

using ChangePrefill = std::function<void(PrefillCall&)>;
using ChangeDecode = std::function<void(DecodeCall&)>;

// The changed call fails with `status`, names what it should, and leaves output and pool alone.
template <class Call, class Change, class Function>
void expect(const Change& change, Function function, gdn_status_t status, const char* text) {
  Call call;
  change(call);
  const std::vector<float> output = call.output, pool = call.pool_data;
  const gdn_status_t got = function(&call.params);
  if (got != status) {
    std::fprintf(stderr, "%s, expected %s for \"%s\": %s\n", gdn_status_string(got),
                 gdn_status_string(status), text, gdn_last_error());
    std::exit(1);
  }
  CHECK_CONTAINS(gdn_last_error(), text);
  CHECK(call.output == output && call.pool_data == pool);
}

void prefill_fails(const char* text, const ChangePrefill& change,
                   gdn_status_t status = GDN_INVALID_ARGUMENT) {
  expect<PrefillCall>(change, gdn_prefill_paged, status, text);
}

void slots_fail(const char* text, const ChangePrefill& change) {
  const auto as_slots = [&change](PrefillCall& c) {
    c.use_slots();
    change(c);
  };
  expect<PrefillCall>(as_slots, gdn_prefill, GDN_INVALID_ARGUMENT, text);
}

void decode_fails(const char* text, const ChangeDecode& change,
                  gdn_status_t status = GDN_INVALID_ARGUMENT) {
  expect<DecodeCall>(change, gdn_decode_paged, status, text);
}

void decode_slots_fail(const char* text, const ChangeDecode& change) {
  const auto as_slots = [&change](DecodeCall& c) {
    c.use_slots();
    change(c);
  };
  expect<DecodeCall>(as_slots, gdn_decode, GDN_INVALID_ARGUMENT, text);
}

void test_sizes() {
  prefill_fails("num_seqs: -1 given", [](auto& c) { c.params.num_seqs = -1; });
  prefill_fails("num_tokens: 2147483648 given", [](auto& c) { c.params.num_tokens = 1ll << 31; });
  prefill_fails("max_seqlen: -2 given", [](auto& c) { c.params.max_seqlen = -2; });
  prefill_fails("num_q_heads: 0 given", [](auto& c) { c.params.num_q_heads = 0; });
  prefill_fails("num_k_heads: 2 given, num_q_heads = 1 expected",
                [](auto& c) { c.params.num_k_heads = 2; });
  prefill_fails("num_v_heads: 6 given, a multiple of num_q_heads = 4 expected", [](auto& c) {
    c.params.num_q_heads = c.params.num_k_heads = 4;
    c.params.num_v_heads = 6;
  });
  prefill_fails("num_q_heads: 8 given, a multiple of num_v_heads = 3 expected", [](auto& c) {
    c.params.num_q_heads = 8;
    c.params.num_k_heads = c.params.num_v_heads = 3;
  });
  prefill_fails("head_dim_k: 0 given", [](auto& c) { c.params.head_dim_k = 0; });
  prefill_fails("fewer than 2^60", [](auto& c) {
    c.params.num_v_heads = c.params.head_dim_k = c.params.head_dim_v = INT32_MAX;
  });
  prefill_fails("num_threads: -1 given", [](auto& c) { c.params.num_threads = -1; });
  prefill_fails("num_threads: 2147483647 given, 0 (all) to 1024 expected",
                [](auto& c) { c.params.num_threads = INT32_MAX; });
  prefill_fails("scale: nan given", [](auto& c) { c.params.scale = std::nan(""); });
  prefill_fails("scale: 1e+300 given", [](auto& c) { c.params.scale = 1e300; });
  for (const int64_t page_size : {0, -64, 63, 96, 528}) {
    const std::string text = "page_size: " + std::to_string(page_size) + " given, a positive";
    prefill_fails(text.c_str(), [page_size](auto& c) { c.params.page_size = page_size; });
  }
}

void test_enums() {
  prefill_fails("io_dtype: 0x0 (default) given", [](auto& c) { c.params.io_dtype = 0; });
  prefill_fails("io_dtype: 0x640 (unknown) given", [](auto& c) { c.params.io_dtype = 0x640; });
  prefill_fails("g_dtype: 0x20 (int32) given", [](auto& c) { c.params.g_dtype = GDN_INT32; });
  prefill_fails("cu_seqlens_dtype: 0x220 (fp32) given",
                [](auto& c) { c.params.cu_seqlens_dtype = GDN_FLOAT32; });
  prefill_fails("state_pool.dtype: 0x40 (int64) given", [](auto& c) { c.pool.dtype = GDN_INT64; });
  prefill_fails("gate: 3 given", [](auto& c) { c.params.gate = 3; });
  prefill_fails("use_cp: -1 given", [](auto& c) { c.params.use_cp = -1; });
  prefill_fails("device_type: 7 given", [](auto& c) { c.params.device_type = 7; });
  prefill_fails("device_id: -1 given", [](auto& c) { c.params.device_id = -1; });
  prefill_fails("flags: 0x100 given", [](auto& c) { c.params.flags = 0x100; });
  prefill_fails("flags: 0x10 given", [](auto& c) { c.params.flags = GDN_ALLOW_PADDING; });
  decode_fails("flags: 0x2 given", [](auto& c) { c.params.flags = GDN_BETA_IS_LOGIT; });
  prefill_fails("reserved: 1 given", [](auto& c) { c.params.reserved = 1; });
  prefill_fails("state_pool.reserved: 1 given", [](auto& c) { c.pool.reserved = 1; });
  decode_fails("reserved2: 1 given", [](auto& c) { c.params.reserved2 = 1; });
  prefill_fails("backend: 'fast' given, a row of prefill expected: 'auto', ",
                [](auto& c) { c.params.backend = "fast"; });
  decode_fails("backend: 'cuda_sm90' given, a row of decode expected",
               [](auto& c) { c.params.backend = "cuda_sm90"; });
}

void test_pointers() {
  CHECK_EQUAL(gdn_prefill_paged(nullptr), GDN_INVALID_ARGUMENT);
  CHECK_CONTAINS(gdn_last_error(), "gdn_prefill_params_t: NULL given");
  prefill_fails("q: NULL given, [8, 1, 16] expected", [](auto& c) { c.params.q = nullptr; });
  prefill_fails("output: NULL given", [](auto& c) { c.params.output = nullptr; });
  prefill_fails("cu_seqlens: NULL given, [3]", [](auto& c) { c.params.cu_seqlens = nullptr; });
  prefill_fails("page_indptr: NULL given", [](auto& c) { c.params.page_indptr = nullptr; });
  prefill_fails("last_page_len: NULL given", [](auto& c) { c.params.last_page_len = nullptr; });
  prefill_fails("state_pool: NULL given", [](auto& c) { c.params.state_pool = nullptr; });
  prefill_fails("state_pool.data: NULL given", [](auto& c) { c.pool.data = nullptr; });
  prefill_fails("state_pool.num_rows: -4 given", [](auto& c) { c.pool.num_rows = -4; });
  prefill_fails("state_pool.row_stride: 511 given, at least H * V * K = 512",
                [](auto& c) { c.pool.row_stride = 511; });
  prefill_fails("state_pool: 4 rows", [](auto& c) { c.pool.row_stride = INT64_MAX; });
  prefill_fails("v: address",
                [](auto& c) { c.params.v = reinterpret_cast<const char*>(c.v.data()) + 2; });
  decode_fails("a: NULL given, [2, 2, 1] expected", [](auto& c) { c.params.a = nullptr; });
  decode_fails("A_log: NULL given", [](auto& c) { c.params.A_log = nullptr; });
}

void test_strides() {
  prefill_fails("q_token_stride: -16 given", [](auto& c) { c.params.q_token_stride = -16; });
  prefill_fails("output: token stride 0",
                [](auto& c) { c.params.output_token_stride = GDN_STRIDE_BROADCAST; });
  prefill_fails("output: token stride 32 and head stride 8 overlap", [](auto& c) {
    c.params.output_head_stride = 8, c.params.output_token_stride = 32;
  });
  prefill_fails("v: [8, 2, 16] with token stride",
                [](auto& c) { c.params.v_token_stride = INT64_MAX / 4; });
  decode_fails("b_batch_stride: -1 given", [](auto& c) { c.params.b_batch_stride = -1; });
  prefill_fails("overlaps v", [](auto& c) { c.params.v = c.output.data(); });
  prefill_fails("overlaps state_pool",
                [](auto& c) { c.params.output = c.pool_data.data() + gdn_test::kState; });
  prefill_fails("overlaps g", [](auto& c) { c.params.g = c.output.data() + 100; });
  slots_fail("overlaps state_indices",
             [](auto& c) { c.params.state_indices = c.output.data() + 250; });
  decode_fails("overlaps q", [](auto& c) { c.params.q = c.output.data() + 8; });
}

void test_gates() {
  prefill_fails("A_log: NULL given with gate = GDN_GATE_RAW",
                [](auto& c) { c.params.gate = GDN_GATE_RAW; });
  prefill_fails("dt_bias", [](auto& c) { c.params.dt_bias = c.g.data(); });
  prefill_fails("g: NULL given with gate = GDN_GATE_RAW",
                [](auto& c) { c.params.gate = GDN_GATE_RAW, c.params.g = nullptr; });
  prefill_fails("beta: NULL given with GDN_BETA_IS_LOGIT",
                [](auto& c) { c.params.flags = GDN_BETA_IS_LOGIT, c.params.beta = nullptr; });
}

void test_slot_needs() {
  prefill_fails("output_state_indices: NULL given, all of",
                [](auto& c) { c.params.state_indices = c.rows.data(); });
  prefill_fails("initial_state:", [](auto& c) { c.params.initial_state = &c.pool; });
  slots_fail("state_pool:", [](auto& c) { c.params.state_pool = &c.pool; });
  slots_fail("page_size: 64 given, 0 expected", [](auto& c) { c.params.page_size = 64; });
  slots_fail("output_state_indices: given without state_indices", [](auto& c) {
    c.params.output_state_indices = c.params.state_indices;
    c.params.state_indices = nullptr;
  });
  slots_fail("output_state: NULL given", [](auto& c) {
    c.params.output_state_indices = c.rows.data();
    c.params.output_state = nullptr;
  });
  slots_fail("initial_state: NULL given", [](auto& c) { c.params.output_state = nullptr; });
  slots_fail("checkpoint_every_n_tokens: 32 given",
             [](auto& c) { c.params.checkpoint_every_n_tokens = 32; });
  slots_fail("state_checkpoints: NULL given",
             [](auto& c) { c.params.checkpoint_every_n_tokens = 64; });
  slots_fail("checkpoint_every_n_tokens: 0 given with state_checkpoints",
             [](auto& c) { c.params.state_checkpoints = &c.pool; });
  slots_fail("checkpoint_every_n_tokens: 0 given with checkpoint_state_indices",
             [](auto& c) { c.params.checkpoint_state_indices = c.rows.data(); });
  slots_fail("checkpoint_every_n_tokens: 0 given with prefix_lens",
             [](auto& c) { c.params.prefix_lens = c.rows.data(); });
  slots_fail("checkpoint_cu_starts: NULL given", [](auto& c) {
    c.params.state_checkpoints = &c.pool;
    c.params.checkpoint_every_n_tokens = 64;
  });
  slots_fail("output_state.num_rows: 1 given, a row per sequence (2) expected", [](auto& c) {
    c.params.state_indices = nullptr;
    c.pool.num_rows = 1;
  });
  decode_slots_fail("initial_state: NULL given", [](auto& c) { c.params.initial_state = nullptr; });
  decode_slots_fail("initial_state.num_rows: 1 given, a row per batch entry (2)", [](auto& c) {
    c.params.initial_state_indices = nullptr;
    c.pool.num_rows = 1;
  });
  decode_fails("output_state_indices: NULL given",
               [](auto& c) { c.params.initial_state_indices = c.read_rows.data(); });
}

// The statuses that are not about an argument.
void test_causes() {
  decode_fails(
      "head_dim_v = 12, io fp32, state fp32, on the CPU): ",
      [](auto& c) { c.params.head_dim_v = 12; }, GDN_UNSUPPORTED);
  decode_fails(
      "backend: 'cpu' refuses this decode",
      [](auto& c) { c.params.head_dim_v = 12, c.params.backend = "cpu"; }, GDN_UNSUPPORTED);
  if (gdn_kernel_row_name(GDN_OP_DECODE, 1) == nullptr) {  // a build without CUDA
    decode_fails(
        "device_type: GDN_CUDA_DEVICE", [](auto& c) { c.params.device_type = GDN_CUDA_DEVICE; },
        GDN_NOT_BUILT);
    decode_fails(
        "backend: 'cuda' given", [](auto& c) { c.params.backend = "cuda"; }, GDN_NOT_BUILT);
    CHECK_EQUAL(gdn_preload(0), GDN_NOT_BUILT);
    CHECK_CONTAINS(gdn_build_info(), "cuda: not built");
  }
  CHECK_EQUAL(gdn_preload(-1), GDN_INVALID_ARGUMENT);
  TableCall table({0, 200}, {0, 1}, {0, 2}, {8});
  CHECK_EQUAL(gdn_validate_page_table(&table.params, 0), GDN_PAGE_TABLE);
  CHECK_CONTAINS(gdn_last_error(), "sequence 0 has 200 new tokens but its table holds 72");
  table.params.prefix_lens = nullptr;
  CHECK_EQUAL(gdn_prefill_slots(&table.params), GDN_INVALID_ARGUMENT);
  CHECK_CONTAINS(gdn_last_error(), "prefix_lens: NULL given, int32 [1] expected");
  CHECK_CONTAINS(gdn_status_string(GDN_PAGE_TABLE), "GDN_PAGE_TABLE");
  CHECK_CONTAINS(gdn_status_string(99), "UNKNOWN");
}

// Nothing to do is no error, and then no data is needed.
void test_empty() {
  PrefillCall call;
  gdn_prefill_params_t params = GDN_PREFILL_PARAMS_INIT;
  gdn_test::set_shape(&params);
  params.page_size = 64;
  CHECK_OK(gdn_prefill_paged(&params));
  call.params.num_tokens = 0;
  call.params.q = call.params.k = call.params.v = nullptr;
  CHECK_OK(gdn_prefill_paged(&call.params));
  CHECK(call.output[0] == 7.0f);
  gdn_decode_params_t decode = GDN_DECODE_PARAMS_INIT;
  gdn_test::set_shape(&decode);
  CHECK_OK(gdn_decode_paged(&decode));
  CHECK_OK(gdn_decode(&decode));
  gdn_page_table_params_t table = GDN_PAGE_TABLE_PARAMS_INIT;
  table.page_size = 64;
  CHECK_OK(gdn_prefill_slots(&table));
  CHECK_OK(gdn_validate_page_table(&table, 0));
}

// Sizes come from host integers alone.
void test_size_queries() {
  PrefillCall call;
  gdn_prefill_params_t params = GDN_PREFILL_PARAMS_INIT;
  gdn_test::set_shape(&params);
  params.num_seqs = 3;
  params.num_tokens = 1000;
  size_t bytes = 99;
  CHECK_OK(gdn_prefill_workspace_size(&params, &bytes));
  params.page_size = 64;
  CHECK_OK(gdn_prefill_workspace_size(&params, &bytes));
  bytes = 99;
  CHECK_OK(gdn_prefill_plan_size(&params, &bytes));
  CHECK_EQUAL(bytes, 0);
  CHECK_OK(gdn_prefill_plan(&call.params));
  CHECK_EQUAL(gdn_prefill_workspace_size(&params, nullptr), GDN_INVALID_ARGUMENT);
  CHECK_CONTAINS(gdn_last_error(), "bytes: NULL given");
  call.use_slots();  // rows are still unknown here, so none can be missing
  call.params.state_indices = nullptr;
  call.pool.num_rows = 1;
  CHECK_OK(gdn_prefill_workspace_size(&call.params, &bytes));
  params.page_size = 100;
  CHECK_EQUAL(gdn_prefill_workspace_size(&params, &bytes), GDN_INVALID_ARGUMENT);
}

void test_explain() {
  PrefillCall call;
  const std::vector<float> before = call.output;
  char text[2048];
  size_t need = 0;
  CHECK_OK(gdn_explain(GDN_OP_PREFILL_PAGED, &call.params, text, sizeof text, &need));
  CHECK_CONTAINS(text, "prefill: served by cpu");
  CHECK_CONTAINS(text, "sequences: 2, of 3 to 5 new tokens");
  CHECK_CONTAINS(text, "call: num_q_heads = 1, num_k_heads = 1, num_v_heads = 2, head_dim_k = 16");
  CHECK_CONTAINS(text, "cuda_portable refuses: ");
  CHECK_EQUAL(need, std::strlen(text) + 1);
  CHECK(call.output == before);
  call.params.head_dim_k = 12;
  CHECK_EQUAL(gdn_explain(GDN_OP_PREFILL_PAGED, &call.params, text, sizeof text, &need),
              GDN_UNSUPPORTED);
  CHECK_CONTAINS(text, "no kernel row serves this prefill");
  CHECK_CONTAINS(text, "cpu: ");
  CHECK_EQUAL(gdn_explain(9, &call.params, text, sizeof text, nullptr), GDN_INVALID_ARGUMENT);
  CHECK(gdn_kernel_row_name(9, 0) == nullptr && gdn_kernel_row_name(GDN_OP_DECODE, -1) == nullptr);
  CHECK(gdn_kernel_row_description(GDN_OP_PREFILL, 0) != nullptr);
}

// The text belongs to its thread and lives until that thread's next call.
void test_error_text() {
  PrefillCall call;
  call.params.page_size = 63;
  CHECK_EQUAL(gdn_prefill_paged(&call.params), GDN_INVALID_ARGUMENT);
  std::thread([] {
    CHECK_EQUAL(std::strlen(gdn_last_error()), 0);
    CHECK_EQUAL(gdn_preload(-7), GDN_INVALID_ARGUMENT);
    CHECK_CONTAINS(gdn_last_error(), "device_id: -7 given");
  }).join();
  CHECK_CONTAINS(gdn_last_error(), "page_size: 63 given");
  call.params.page_size = 64;
  CHECK_OK(gdn_prefill_paged(&call.params));
  CHECK_EQUAL(std::strlen(gdn_last_error()), 0);
}

}  // namespace

int main() {
  test_sizes();
  test_enums();
  test_pointers();
  test_strides();
  test_gates();
  test_slot_needs();
  test_causes();
  test_empty();
  test_size_queries();
  test_explain();
  test_error_text();
}

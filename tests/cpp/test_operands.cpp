// Strides, broadcast operands, table types and threads: other ways to say the same call give the
// same bytes.
#include <atomic>
#include <cstring>
#include <thread>

#include "calls.h"
#include "check.h"

using gdn_test::DecodeCall;
using gdn_test::PrefillCall;

namespace {

using Floats = std::vector<float>;

constexpr int64_t kTokens = PrefillCall::kTokens, kHeads = gdn_test::kHeads, kDim = gdn_test::kDim;

struct Result {
  Floats output, pool;
  bool operator==(const Result& other) const {
    return output == other.output && pool == other.pool;
  }
};

Result run(PrefillCall& call) {
  CHECK_OK(gdn_prefill_paged(&call.params));
  return {call.output, call.pool_data};
}

// q, k, v and the output as columns of one wide row, as a fused projection leaves them.
void test_interleaved() {
  PrefillCall dense;
  const Result expected = run(dense);
  PrefillCall call;
  constexpr int64_t kGap = 3, kWidth = 2 * (kDim + kGap) + 2 * kHeads * (kDim + kGap);
  Floats fused(kTokens * kWidth, -55.0f);
  const int64_t k_at = kDim + kGap, v_at = 2 * k_at, out_at = v_at + kHeads * (kDim + kGap);
  for (int64_t t = 0; t < kTokens; ++t) {
    float* row = &fused[static_cast<size_t>(t * kWidth)];
    std::memcpy(row, &call.q[t * kDim], kDim * sizeof(float));
    std::memcpy(row + k_at, &call.k[t * kDim], kDim * sizeof(float));
    for (int64_t h = 0; h < kHeads; ++h) {
      std::memcpy(row + v_at + h * (kDim + kGap), &call.v[(t * kHeads + h) * kDim],
                  kDim * sizeof(float));
    }
  }
  gdn_prefill_params_t& p = call.params;
  p.q = fused.data();
  p.k = fused.data() + k_at;
  p.v = fused.data() + v_at;
  p.output = fused.data() + out_at;
  p.q_token_stride = p.k_token_stride = p.v_token_stride = p.output_token_stride = kWidth;
  p.v_head_stride = p.output_head_stride = kDim + kGap;
  CHECK(run(call).pool == expected.pool);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const float* got = &fused[static_cast<size_t>(t * kWidth + out_at + h * (kDim + kGap))];
      CHECK(std::memcmp(got, &expected.output[(t * kHeads + h) * kDim], kDim * sizeof(float)) == 0);
      for (int64_t i = 0; i < kGap; ++i) CHECK(got[kDim + i] == -55.0f);
    }
  }
}

// Head-major v: the head stride is the larger one.
void test_swapped() {
  PrefillCall dense, call;
  Floats swapped(call.v.size());
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      std::memcpy(&swapped[(h * kTokens + t) * kDim], &call.v[(t * kHeads + h) * kDim],
                  kDim * sizeof(float));
    }
  }
  call.params.v = swapped.data();
  call.params.v_token_stride = kDim;
  call.params.v_head_stride = kTokens * kDim;
  CHECK(run(call) == run(dense));
}

void test_broadcast() {
  PrefillCall expanded, call;
  expanded.g.assign(expanded.g.size(), 0.75f);
  for (int64_t t = 0; t < kTokens; ++t) {
    expanded.beta[t * kHeads + 1] = expanded.beta[t * kHeads];
    std::memcpy(&expanded.q[t * kDim], &call.q[0], kDim * sizeof(float));
  }
  Floats beta;
  for (int64_t t = 0; t < kTokens; ++t) beta.push_back(expanded.beta[t * kHeads]);
  call.g = {0.75f};
  call.params.g = call.g.data();
  call.params.g_token_stride = call.params.g_head_stride = GDN_STRIDE_BROADCAST;
  call.params.beta = beta.data();
  call.params.beta_head_stride = GDN_STRIDE_BROADCAST;  // then a dense token stride is 1
  call.params.q_token_stride = GDN_STRIDE_BROADCAST;
  CHECK(run(call) == run(expanded));
}

// Values that bf16 and fp16 hold exactly are read as the same numbers.
void test_gate_dtypes() {
  PrefillCall wide, call;
  std::vector<uint16_t> g, beta;
  for (size_t i = 0; i < wide.g.size(); ++i) {
    wide.g[i] = 0.5f + 0.0625f * static_cast<float>(i % 8);
    wide.beta[i] = 0.25f + 0.0625f * static_cast<float>(i % 4);
    uint32_t bits;
    std::memcpy(&bits, &wide.g[i], sizeof bits);
    g.push_back(static_cast<uint16_t>(bits >> 16));
    std::memcpy(&bits, &wide.beta[i], sizeof bits);
    const uint32_t exponent = (bits >> 23 & 255) - 112;  // fp16: bias 15 instead of 127
    beta.push_back(static_cast<uint16_t>(exponent << 10 | (bits >> 13 & 1023)));
  }
  call.params.g = g.data();
  call.params.g_dtype = GDN_BFLOAT16;
  call.params.beta = beta.data();
  call.params.beta_dtype = GDN_FLOAT16;
  CHECK(run(call) == run(wide));
}

template <class T>
std::vector<int64_t> widened(const std::vector<T>& table) {
  return {table.begin(), table.end()};
}

void test_int64_tables() {
  PrefillCall narrow, call;
  const auto cu = widened(call.cu_seqlens), indices = widened(call.page_indices);
  const auto indptr = widened(call.page_indptr), last = widened(call.last_page_len);
  gdn_prefill_params_t& p = call.params;
  p.cu_seqlens = cu.data();
  p.page_indices = indices.data();
  p.page_indptr = indptr.data();
  p.last_page_len = last.data();
  p.cu_seqlens_dtype = p.page_indices_dtype = p.page_indptr_dtype = GDN_INT64;
  p.last_page_len_dtype = GDN_INT64;
  CHECK(run(call) == run(narrow));
}

// Slots computed before the call, and the slot form of the same rows.
void test_slots_given() {
  PrefillCall derived, given;
  const std::vector<int32_t> read = {-1, -1}, starts = {0, 1}, prefix = {0, 0};
  gdn_prefill_params_t& p = given.params;
  p.state_indices = read.data();
  p.output_state_indices = given.rows.data();
  p.checkpoint_cu_starts = starts.data();
  p.prefix_lens = prefix.data();
  const Result expected = run(derived);
  CHECK(run(given) == expected);
  PrefillCall slots;
  slots.use_slots();
  CHECK_OK(gdn_prefill(&slots.params));
  CHECK((Result{slots.output, slots.pool_data}) == expected);
  DecodeCall paged, rows;
  CHECK_OK(gdn_decode_paged(&paged.params));
  rows.use_slots();
  CHECK_OK(gdn_decode(&rows.params));
  CHECK(paged.output == rows.output && paged.pool_data == rows.pool_data);
}

std::atomic<int64_t> bodies_run{0};

// A caller's thread pool: every second body on another thread.
void parallel_for(void* context, int64_t n, void (*fn)(void*, int64_t), void* arg) {
  CHECK(context == &bodies_run);
  std::thread other([=] {
    for (int64_t i = 1; i < n; i += 2) fn(arg, i);
  });
  for (int64_t i = 0; i < n; i += 2) fn(arg, i);
  other.join();
  bodies_run += n;
}

// Heads of 256: enough work that threads are worth starting.
void enlarge(PrefillCall* call) {
  constexpr int64_t kWide = 256;
  call->q = gdn_test::uniform(21, kTokens * kWide);
  for (float& x : call->q) x /= 16;  // about unit keys
  call->v = gdn_test::uniform(22, kTokens * kHeads * kWide);
  call->output.assign(call->v.size(), 7.0f);
  call->pool_data = gdn_test::uniform(23, 4 * kHeads * kWide * kWide);
  call->pool.data = call->pool_data.data();
  call->params.q = call->params.k = call->q.data();
  call->params.v = call->v.data();
  call->params.output = call->output.data();
  call->params.head_dim_k = call->params.head_dim_v = kWide;
}

void test_threads() {
  PrefillCall one, two, own;
  for (PrefillCall* call : {&one, &two, &own}) enlarge(call);
  one.params.num_threads = 1;
  two.params.num_threads = 2;
  own.params.parallel_for = parallel_for;
  own.params.parallel_for_context = &bodies_run;
  own.params.num_threads = 2;
  const Result expected = run(one);
  CHECK(run(two) == expected);
  CHECK(run(own) == expected);
  CHECK(bodies_run > 1);
}

}  // namespace

int main() {
  test_interleaved();
  test_swapped();
  test_broadcast();
  test_gate_dtypes();
  test_int64_tables();
  test_slots_given();
  test_threads();
}

// Two requests share a full page: one prefill call writes it, a second one continues from it twice,
// and a decode step branches off. The results are those of each request alone.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <gdn_paged/gdn_paged.hpp>
#include <stdexcept>
#include <vector>

namespace {

constexpr gdn::HeadShape kHeads = {1, 1, 2, 16, 16};
constexpr int64_t kPageSize = 64, kPages = 6;
constexpr int64_t kRow = int64_t{kHeads.num_v_heads} * kHeads.head_dim_v;
constexpr int64_t kState = kRow * kHeads.head_dim_k;

struct Pages {
  std::vector<float> data = std::vector<float>(kPages * kState, NAN);  // as freed pages may be
  gdn_pool_t pool = gdn::pool(data.data(), gdn::dtype_of<float>::value, kPages);

  std::vector<float> page(int64_t id) const {
    return {data.begin() + id * kState, data.begin() + (id + 1) * kState};
  }
};

std::vector<float> values(int64_t count, double step) {
  std::vector<float> x(static_cast<size_t>(count));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(0.3 * std::sin(step * i + step));
  return x;
}

// `tokens` new tokens of one request that lives on `pages`, `before` of them processed already.
std::vector<float> run(Pages& memory, std::vector<int32_t> pages, int64_t before, int64_t tokens) {
  const auto q = values(200 * 16, 0.7), k = values(200 * 16, 1.3), v = values(200 * kRow, 0.9);
  std::vector<float> output(static_cast<size_t>(tokens * kRow));
  const std::vector<int64_t> cu_seqlens = {0, tokens};
  const std::vector<int32_t> indptr = {0, static_cast<int32_t>(pages.size())};
  const std::vector<int32_t> last = {static_cast<int32_t>(before + tokens) -
                                     static_cast<int32_t>(kPageSize * (indptr[1] - 1))};
  gdn_page_table_params_t table = GDN_PAGE_TABLE_PARAMS_INIT;
  gdn_prefill_params_t p = GDN_PREFILL_PARAMS_INIT;
  table.num_seqs = p.num_seqs = 1;
  table.page_size = p.page_size = kPageSize;
  table.num_indices = p.num_indices = indptr[1];
  table.cu_seqlens = p.cu_seqlens = cu_seqlens.data();
  table.cu_seqlens_dtype = p.cu_seqlens_dtype = gdn::dtype_of<int64_t>::value;
  table.page_indices = p.page_indices = pages.data();
  table.page_indptr = p.page_indptr = indptr.data();
  table.last_page_len = p.last_page_len = last.data();
  table.num_pages = kPages;
  gdn::validate_page_table(table, false);

  gdn::set_heads(p, kHeads);
  p.num_tokens = tokens;
  p.io_dtype = GDN_FLOAT32;
  p.q = q.data() + before * 16;
  p.k = k.data() + before * 16;
  p.v = v.data() + before * kRow;
  p.output = output.data();
  p.state_pool = &memory.pool;
  std::vector<char> workspace(gdn::workspace_size(p) + 256);
  const auto address = reinterpret_cast<uintptr_t>(workspace.data());
  p.workspace = workspace.data() + (256 - address % 256) % 256;
  p.workspace_bytes = workspace.size() - 256;
  gdn::prefill_paged(p);
  return output;
}

// One token by decode with alpha = 1 and beta = 1/2.
std::vector<float> step(Pages& memory, std::vector<int32_t> pages, int32_t last_page_len) {
  const auto q = values(16, 0.5), v = values(kRow, 0.4), zeros = std::vector<float>(2, 0.0f);
  const std::vector<float> never(2, -1000.0f);  // softplus(-1000) = 0: no decay
  std::vector<float> output(static_cast<size_t>(kRow));
  const std::vector<int32_t> indptr = {0, static_cast<int32_t>(pages.size())};
  gdn_decode_params_t p = GDN_DECODE_PARAMS_INIT;
  gdn::set_heads(p, kHeads);
  p.batch_size = 1;
  p.io_dtype = GDN_FLOAT32;
  p.q = p.k = q.data();
  p.v = v.data();
  p.a = never.data();
  p.b = p.A_log = zeros.data();
  p.output = output.data();
  p.state_pool = &memory.pool;
  p.page_indices = pages.data();
  p.page_indptr = indptr.data();
  p.last_page_len = &last_page_len;
  p.num_indices = indptr[1];
  gdn::decode_paged(p);
  return output;
}

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

bool close(const std::vector<float>& x, const std::vector<float>& y) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    difference += (x[i] - y[i]) * (x[i] - y[i]);
    norm += y[i] * y[i];
  }
  return x.size() == y.size() && norm > 0 && difference < 1e-10 * norm;
}

void test_shared_prefix() {
  Pages shared, alone;
  run(shared, {4}, 0, 64);  // the common prefix fills page 4
  const std::vector<float> prefix = shared.page(4);
  const auto first = run(shared, {4, 0}, 64, 30);  // two requests continue from it
  const auto second = run(shared, {4, 5}, 64, 41);
  const auto whole = run(alone, {1, 2}, 0, 105);  // one of them without sharing
  require(shared.page(4) == prefix, "the shared page changed");
  require(close({whole.begin() + 64 * kRow, whole.end()}, second), "output with a shared prefix");
  require(close(first, {second.begin(), second.begin() + 30 * kRow}), "outputs of both requests");
  require(close(shared.page(5), alone.page(2)), "state with a shared prefix");
  require(close(step(shared, {4, 3}, 1), step(alone, {1, 3}, 1)), "decode from a full page");
  require(close(shared.page(3), alone.page(3)), "state of the decode step");
  require(std::isnan(alone.data[0]), "a page of nobody changed");
}

void test_errors() {
  Pages memory;
  try {
    run(memory, {0, 1}, -128, 200);  // more new tokens than two pages with 8 in the last hold
    require(false, "a broken page table passed");
  } catch (const gdn::Error& error) {
    require(error.status() == GDN_PAGE_TABLE, "status of a broken page table");
    require(std::strstr(error.what(), "200 new tokens but its table holds 72"), error.what());
  }
}

}  // namespace

int main() {
  try {
    test_shared_prefix();
    test_errors();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "failed: %s\n", error.what());
    return 1;
  }
  std::printf("prefill row: %s\n", gdn::kernel_rows(GDN_OP_PREFILL_PAGED).back().name.c_str());
}

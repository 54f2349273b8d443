// The case list of tests/cases.py through the C API, against the float64 truth that
// tests/golden.py wrote.   test_golden DIRECTORY
#include <algorithm>

#include "gdn_paged/gdn_paged.h"
#include "golden.h"

using gdn_test::Array;
using gdn_test::Golden;

namespace {

constexpr unsigned char kSentinel = 0x5a;

// The pool with its rows `row_padding` elements apart, and the bytes it started with.
struct PoolMemory {
  std::vector<unsigned char> bytes, before;
  gdn_pool_t pool = GDN_POOL_INIT;
  int64_t row_elements = 1, element_bytes;

  explicit PoolMemory(Golden& g) {
    Array& values = g["pool"];
    element_bytes = values.element_bytes();
    for (size_t i = 1; i < values.shape.size(); ++i) row_elements *= values.shape[i];
    pool.num_rows = values.shape[0];
    pool.dtype = static_cast<gdn_dtype_t>(g.integer("state_dtype"));
    pool.row_stride = row_elements + g.integer("row_padding");
    bytes.assign(static_cast<size_t>(pool.num_rows * row_bytes()), kSentinel);
    const auto* source = static_cast<const unsigned char*>(values.data());
    for (int64_t row = 0; row < pool.num_rows; ++row) {
      std::memcpy(&bytes[static_cast<size_t>(row * row_bytes())],
                  source + row * row_elements * element_bytes,
                  static_cast<size_t>(row_elements * element_bytes));
    }
    before = bytes;
    pool.data = bytes.data();
  }
  PoolMemory(const PoolMemory&) = delete;

  int64_t row_bytes() const { return pool.row_stride * element_bytes; }
  bool same(int64_t row, int64_t first, int64_t count) const {
    const auto at = static_cast<size_t>(row * row_bytes() + first * element_bytes);
    return std::memcmp(&bytes[at], &before[at], static_cast<size_t>(count * element_bytes)) == 0;
  }
};

template <class Params>
void set_common(Golden& g, const std::string& call, Params* p) {
  p->flags = static_cast<uint64_t>(g.integer(call + "sizes", 1));
  p->io_dtype = static_cast<gdn_dtype_t>(g.integer(call + "sizes", 4));
  p->scale = g[call + "scale"].as<double>()[0];
  p->num_q_heads = static_cast<int32_t>(g[call + "q"].shape[1]);
  p->num_k_heads = static_cast<int32_t>(g[call + "k"].shape[1]);
  p->num_v_heads = static_cast<int32_t>(g[call + "v"].shape[1]);
  p->head_dim_k = static_cast<int32_t>(g[call + "k"].shape[2]);
  p->head_dim_v = static_cast<int32_t>(g[call + "v"].shape[2]);
  p->q = g[call + "q"].data();
  p->k = g[call + "k"].data();
  p->v = g[call + "v"].data();
  if (g.has(call + "A_log")) p->A_log = g[call + "A_log"].data();
  if (g.has(call + "dt_bias")) p->dt_bias = g[call + "dt_bias"].data();
  const gdn_dtype_t table = g[call + "indptr"].type == "i64" ? GDN_INT64 : GDN_INT32;
  p->page_indices_dtype = p->page_indptr_dtype = p->last_page_len_dtype = table;
  p->page_indices = g[call + "indices"].data();
  p->page_indptr = g[call + "indptr"].data();
  p->last_page_len = g[call + "last_page_len"].data();
  p->num_indices = g[call + "indices"].size();
}

gdn_status_t run_prefill(Golden& g, const std::string& call, PoolMemory& pool, void* output) {
  gdn_prefill_params_t p = GDN_PREFILL_PARAMS_INIT;
  set_common(g, call, &p);
  p.num_seqs = g[call + "last_page_len"].size();
  p.num_tokens = g[call + "q"].shape[0];
  p.gate = static_cast<gdn_gate_t>(g.integer(call + "sizes", 2));
  p.page_size = g.integer(call + "sizes", 3);
  if (g.has(call + "g")) p.g = g[call + "g"].data();
  if (g.has(call + "beta")) p.beta = g[call + "beta"].data();
  p.cu_seqlens = g[call + "cu_seqlens"].data();
  p.cu_seqlens_dtype = p.page_indptr_dtype;
  p.state_pool = &pool.pool;
  p.output = output;
  return gdn_prefill_paged(&p);
}

gdn_status_t run_decode(Golden& g, const std::string& call, PoolMemory& pool, void* output) {
  gdn_decode_params_t p = GDN_DECODE_PARAMS_INIT;
  set_common(g, call, &p);
  p.batch_size = g[call + "q"].shape[0];
  p.a = g[call + "a"].data();
  p.b = g[call + "b"].data();
  p.state_pool = &pool.pool;
  p.output = output;
  return gdn_decode_paged(&p);
}

bool holds(Array& list, int64_t value) {
  const auto* values = list.as<int64_t>();
  return std::find(values, values + list.size(), value) != values + list.size();
}

// Runs call number `index`, compares every token, returns the number of faults.
int run_call(const std::string& name, Golden& g, int64_t index, PoolMemory& pool) {
  const std::string call = std::to_string(index) + ".";
  Array& truth = g[call + "true_out"];
  const auto dtype = static_cast<gdn_dtype_t>(g.integer(call + "sizes", 4));
  const int64_t row = truth.shape[1] * truth.shape[2];
  std::vector<unsigned char> output(static_cast<size_t>(truth.size()) * (dtype & 0xff) / 8);
  std::fill(output.begin(), output.end(), kSentinel);
  CHECK_OK((g.integer(call + "sizes") ? run_prefill : run_decode)(g, call, pool, output.data()));
  int faults = 0;
  const double allowed = g["bars"].as<double>()[0];
  const bool last = index + 1 == g.integer("calls");
  for (int64_t t = 0; t < truth.shape[0]; ++t) {
    if (last && holds(g["ignored_tokens"], t)) continue;
    const unsigned char* values = &output[static_cast<size_t>(t * row * (dtype & 0xff) / 8)];
    const double error = gdn_test::relative_error(values, dtype, truth.as<double>() + t * row, row);
    if (error <= allowed) continue;
    ++faults;
    std::fprintf(stderr, "%s: call %lld, token %lld off by %.3g, allowed %.3g\n", name.c_str(),
                 static_cast<long long>(index), static_cast<long long>(t), error, allowed);
  }
  return faults;
}

int check_pool(const std::string& name, Golden& g, const PoolMemory& pool) {
  int faults = 0;
  Array &written = g["written"], &truth = g["true_rows"];
  const double allowed = g["bars"].as<double>()[1];
  const auto fault = [&](const char* what, int64_t row, double error) {
    ++faults;
    std::fprintf(stderr, "%s: row %lld %s (%.3g, allowed %.3g)\n", name.c_str(),
                 static_cast<long long>(row), what, error, allowed);
  };
  for (int64_t row = 0; row < pool.pool.num_rows; ++row) {
    const int64_t gap = pool.pool.row_stride - pool.row_elements;
    if (gap > 0 && !pool.same(row, pool.row_elements, gap)) fault("changed its padding", row, 0);
    if (holds(g["ignored_rows"], row) || holds(written, row)) continue;
    if (!pool.same(row, 0, pool.row_elements)) fault("changed, nothing may write it", row, 0);
  }
  for (int64_t i = 0; i < written.size(); ++i) {
    const int64_t row = written.as<int64_t>()[i];
    if (holds(g["ignored_rows"], row)) continue;
    const double error = gdn_test::relative_error(
        &pool.bytes[static_cast<size_t>(row * pool.row_bytes())], pool.pool.dtype,
        truth.as<double>() + i * pool.row_elements, pool.row_elements);
    if (!(error <= allowed)) fault("is off", row, error);
  }
  return faults;
}

}  // namespace

int main(int argc, char** argv) {
  CHECK_EQUAL(argc, 2);
  const std::string directory = std::string(argv[1]) + "/";
  std::ifstream index(directory + "index.txt");
  std::string name;
  int cases = 0, faults = 0;
  for (; std::getline(index, name); ++cases) {
    Golden golden(directory + name);
    PoolMemory pool(golden);
    for (int64_t i = 0; i < golden.integer("calls"); ++i) faults += run_call(name, golden, i, pool);
    faults += check_pool(name, golden, pool);
  }
  std::printf("%d cases, %d faults\n", cases, faults);
  CHECK(cases >= 30);
  return faults != 0;
}

// Random nonsense in every table: no access out of range, nothing stored by a broken sequence, its
// outputs zero, tokens of nobody and rows of nobody untouched. Meant to run under sanitizers too.
//
//   test_hostile_tables [rounds]
#include <cstring>
#include <random>

#include "calls.h"
#include "check.h"
#include "core/slots.h"

using namespace gdn;

namespace {

constexpr int64_t kTokens = 80, kSeqs = 3, kRows = 5, kIndices = 6, kMargin = 64;
constexpr int64_t kOut = gdn_test::kHeads * gdn_test::kDim, kState = gdn_test::kState;
constexpr float kSentinel = 123.0f;

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  // Mostly a sensible value, at times one that must not be followed.
  int64_t value(int64_t sensible) {
    static constexpr int64_t kWild[] = {
        INT64_MIN, INT64_MAX,      -1, -2, -64, 0, 1, 5, 6, 64, 65, 1000, INT32_MAX,
        1LL << 32, (1LL << 32) + 1};
    return below(5) == 0 ? kWild[below(std::size(kWild))] : sensible;
  }

 private:
  std::mt19937_64 engine_;
};

struct Hostile {
  std::vector<float> q = gdn_test::uniform(1, kTokens* gdn_test::kDim);
  std::vector<float> v = gdn_test::uniform(2, kTokens* kOut);
  std::vector<float> gate = std::vector<float>(kTokens * gdn_test::kHeads, -0.1f);
  std::vector<float> output = std::vector<float>(kTokens * kOut + 2 * kMargin, kSentinel);
  std::vector<float> pool_data, before;
  std::vector<int64_t> cu, indices, indptr, last, read, write, starts, prefix, checkpoint_rows;
  gdn_pool_t pool = GDN_POOL_INIT;

  explicit Hostile(Random& random) {
    pool_data.assign(kRows * kState + 2 * kMargin, kSentinel);
    before = pool_data;
    pool.data = pool_data.data() + kMargin;
    pool.num_rows = kRows;
    const auto fill = [&random](std::vector<int64_t>* table, int64_t count, int64_t limit) {
      for (int64_t i = 0; i < count; ++i) table->push_back(random.value(random.below(limit)));
    };
    for (int64_t b = 0; b <= kSeqs; ++b) {
      cu.push_back(random.value(b * kTokens / kSeqs - random.below(3)));
      indptr.push_back(random.value(b * kIndices / kSeqs));
    }
    cu[0] = random.value(0);
    fill(&indices, kIndices, kRows);
    fill(&last, kSeqs, 65);
    fill(&read, kSeqs, kRows);
    fill(&write, kSeqs, kRows);
    fill(&starts, kSeqs, kIndices);
    fill(&prefix, kSeqs, 130);
    fill(&checkpoint_rows, kIndices, kRows);
  }
  Hostile(const Hostile&) = delete;

  bool row_kept(int64_t row) const {
    const auto at = static_cast<size_t>(kMargin + row * kState);
    return std::memcmp(&pool_data[at], &before[at], kState * sizeof(float)) == 0;
  }
  bool tokens_are(int64_t first, int64_t count, float value) const {
    for (int64_t i = first * kOut; i < (first + count) * kOut; ++i) {
      if (output[static_cast<size_t>(kMargin + i)] != value) return false;
    }
    return true;
  }
  void check_margins() const {
    for (const std::vector<float>* x : {&output, &pool_data}) {
      for (size_t i = 0; i < kMargin; ++i) {
        CHECK((*x)[i] == kSentinel && (*x)[x->size() - 1 - i] == kSentinel);
      }
    }
  }
};

IndexTable table_of(const std::vector<int64_t>& x) {
  return {.data = x.data(), .size = static_cast<int64_t>(x.size()), .is_int64 = true};
}

// Rows and tokens that the call may touch, by the rules of core/slots.h.
void check_prefill(const Hostile& h, const PrefillProblem& p) {
  std::vector<bool> row_used(kRows, false), owned(kTokens, false), live(kTokens, false);
  for (int64_t b = 0; b < kSeqs; ++b) {
    const Sequence s = resolve_sequence(p, b);
    for (int64_t t = s.begin; t < s.begin + s.length; ++t) {
      owned[static_cast<size_t>(t)] = true;
      if (s.live) live[static_cast<size_t>(t)] = true;
    }
    if (!s.live) continue;
    if (s.write_row >= 0) row_used[static_cast<size_t>(s.write_row)] = true;
    for (int64_t j = 0; j < checkpoint_count(s.prefix, s.length, p.checkpoint_every); ++j) {
      const int64_t row = checkpoint_row(p, s, j);
      if (row >= 0) row_used[static_cast<size_t>(row)] = true;
    }
  }
  for (int64_t row = 0; row < kRows; ++row)
    CHECK(row_used[static_cast<size_t>(row)] || h.row_kept(row));
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto i = static_cast<size_t>(t);
    if (!owned[i]) CHECK(h.tokens_are(t, 1, kSentinel));
    if (owned[i] && !live[i]) CHECK(h.tokens_are(t, 1, 0.0f));
  }
}

void prefill(Random& random, bool paged) {
  Hostile h(random);
  gdn_prefill_params_t c = GDN_PREFILL_PARAMS_INIT;
  gdn_test::set_shape(&c);
  c.num_threads = 1;  // sequences may share rows here
  c.num_seqs = kSeqs;
  c.num_tokens = kTokens;
  c.q = c.k = h.q.data();
  c.v = h.v.data();
  c.output = h.output.data() + kMargin;
  c.g = h.gate.data();
  c.gate = GDN_GATE_LOG;
  c.cu_seqlens = h.cu.data();
  c.cu_seqlens_dtype = c.page_indices_dtype = c.page_indptr_dtype = GDN_INT64;
  c.last_page_len_dtype = c.state_indices_dtype = c.output_state_indices_dtype = GDN_INT64;
  c.checkpoint_state_indices_dtype = c.checkpoint_cu_starts_dtype = GDN_INT64;
  c.prefix_lens_dtype = GDN_INT64;
  PrefillProblem p;
  p.num_seqs = kSeqs;
  p.num_tokens = kTokens;
  p.cu_seqlens = table_of(h.cu);
  p.initial = p.output_state =
      p.checkpoints = {.data = h.pool.data, .num_rows = kRows, .row_stride = kState};
  p.checkpoint_every = 64;
  if (paged) {
    c.state_pool = &h.pool;
    c.page_indices = h.indices.data();
    c.page_indptr = h.indptr.data();
    c.last_page_len = h.last.data();
    c.num_indices = kIndices;
    c.page_size = 64;
    p.paged = true;
    p.table = {.indices = table_of(h.indices),
               .indptr = table_of(h.indptr),
               .last_page_len = table_of(h.last),
               .page_size = 64};
    p.checkpoint_indices = p.table.indices;
  } else {
    c.initial_state = c.output_state = c.state_checkpoints = &h.pool;
    c.state_indices = h.read.data();
    c.output_state_indices = h.write.data();
    c.checkpoint_cu_starts = h.starts.data();
    c.checkpoint_state_indices = h.checkpoint_rows.data();
    c.num_checkpoint_indices = kIndices;
    c.prefix_lens = h.prefix.data();
    c.checkpoint_every_n_tokens = 64;
    p.state_indices = table_of(h.read);
    p.output_state_indices = table_of(h.write);
    p.checkpoint_starts = table_of(h.starts);
    p.checkpoint_indices = table_of(h.checkpoint_rows);
    p.prefix_lens = table_of(h.prefix);
  }
  CHECK_OK(paged ? gdn_prefill_paged(&c) : gdn_prefill(&c));
  h.check_margins();
  check_prefill(h, p);
}

void decode(Random& random, bool paged) {
  Hostile h(random);
  gdn_decode_params_t c = GDN_DECODE_PARAMS_INIT;
  gdn_test::set_shape(&c);
  c.num_threads = 1;  // sequences may share rows here
  c.batch_size = kSeqs;
  c.q = c.k = h.q.data();
  c.v = h.v.data();
  c.output = h.output.data() + kMargin;
  c.a = c.b = c.A_log = h.gate.data();
  c.page_indices_dtype = c.page_indptr_dtype = c.last_page_len_dtype = GDN_INT64;
  c.initial_state_indices_dtype = c.output_state_indices_dtype = GDN_INT64;
  DecodeProblem p;
  p.initial = p.output_state = {.data = h.pool.data, .num_rows = kRows, .row_stride = kState};
  p.paged = paged;
  if (paged) {
    c.state_pool = &h.pool;
    c.page_indices = h.indices.data();
    c.page_indptr = h.indptr.data();
    c.last_page_len = h.last.data();
    c.num_indices = kIndices;
    p.table = {.indices = table_of(h.indices),
               .indptr = table_of(h.indptr),
               .last_page_len = table_of(h.last)};
  } else {
    c.initial_state = &h.pool;
    c.initial_state_indices = h.read.data();
    c.output_state_indices = h.write.data();
    p.initial_indices = table_of(h.read);
    p.output_indices = table_of(h.write);
  }
  CHECK_OK(paged ? gdn_decode_paged(&c) : gdn_decode(&c));
  h.check_margins();
  std::vector<bool> used(kRows, false);
  for (int64_t b = 0; b < kSeqs; ++b) {
    const DecodeRow row = resolve_decode(p, b);
    if (!row.live) CHECK(h.tokens_are(b, 1, 0.0f));
    if (row.live && row.write_row >= 0) used[static_cast<size_t>(row.write_row)] = true;
  }
  for (int64_t row = 0; row < kRows; ++row)
    CHECK(used[static_cast<size_t>(row)] || h.row_kept(row));
}

// The checker itself must survive what it checks, and slots must say what the call would do.
void check_tables(Random& random) {
  Hostile h(random);
  std::vector<int32_t> read(kSeqs), write(kSeqs), starts(kSeqs), prefix(kSeqs);
  gdn_page_table_params_t c = GDN_PAGE_TABLE_PARAMS_INIT;
  c.num_seqs = kSeqs;
  c.num_tokens = kTokens;
  c.num_indices = kIndices;
  c.num_pages = kRows;
  c.page_size = 64;
  c.cu_seqlens = h.cu.data();
  c.page_indices = h.indices.data();
  c.page_indptr = h.indptr.data();
  c.last_page_len = h.last.data();
  c.cu_seqlens_dtype = c.page_indices_dtype = c.page_indptr_dtype = GDN_INT64;
  c.last_page_len_dtype = GDN_INT64;
  c.state_indices = read.data();
  c.output_state_indices = write.data();
  c.checkpoint_cu_starts = starts.data();
  c.prefix_lens = prefix.data();
  CHECK_OK(gdn_prefill_slots(&c));
  for (int64_t b = 0; b < kSeqs; ++b) {
    const auto i = static_cast<size_t>(b);
    CHECK(read[i] >= -1 && read[i] < kRows && write[i] >= -1 && write[i] < kRows);
    CHECK(prefix[i] >= -1 && starts[i] >= 0 && starts[i] <= kIndices);
  }
  CHECK_OK(gdn_decode_slots(&c));
  for (int32_t row : read) CHECK(row >= -1 && row < kRows);
  for (const int32_t is_decode : {0, 1}) {
    for (const uint64_t flags : {0, int{GDN_ALLOW_PADDING}}) {
      c.flags = flags;
      const gdn_status_t status = gdn_validate_page_table(&c, is_decode);
      CHECK(status == GDN_OK || (status == GDN_PAGE_TABLE && std::strlen(gdn_last_error()) > 20));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  Random random(20260101);
  for (int i = 0; i < rounds; ++i) {
    for (const bool paged : {true, false}) {
      prefill(random, paged);
      decode(random, paged);
    }
    for (int j = 0; j < 10; ++j) check_tables(random);
  }
}

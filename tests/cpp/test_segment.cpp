// One prompt in two segments through the C API: equal to a prefill of all tokens, page for page.
#include <algorithm>

#include "calls.h"
#include "check.h"
#include "gdn_paged/gdn_paged.hpp"

using gdn_test::kDim;
using gdn_test::kHeads;
using gdn_test::kState;
using gdn_test::uniform;

namespace {

constexpr int64_t kTokens = 150, kCut = 100, kPage = 64;
constexpr int64_t kSquare = int64_t{kHeads} * kDim * kDim;

struct Prompt {
  std::vector<float> q = uniform(1, kTokens* kDim), k = uniform(2, kTokens* kDim);
  std::vector<float> v = uniform(3, kTokens * kHeads * kDim);
  std::vector<float> g = uniform(4, kTokens* kHeads), beta = uniform(5, kTokens* kHeads);

  Prompt() {
    for (float& x : g) x = 0.95f + 0.05f * x;
    for (float& x : k) x *= 0.25f;
  }
};

// Tokens [begin, end) on pages 0, 1, 2 of a pool of its own; pages that end before them are -1.
struct Part {
  std::vector<float> pool_data = uniform(6, 3 * kState);
  std::vector<float> output, transition = std::vector<float>(kSquare, 7.0f);
  std::vector<float> offset = std::vector<float>(kState, 7.0f);
  std::vector<float> state = std::vector<float>(kState, 7.0f);
  std::vector<int32_t> cu_seqlens, page_indices, page_indptr, last_page_len;
  std::vector<char> memory;
  gdn_pool_t pool = GDN_POOL_INIT;
  gdn_prefill_params_t params = GDN_PREFILL_PARAMS_INIT;
  gdn_segment_t segment = GDN_SEGMENT_INIT;

  Part(const Prompt& x, int64_t begin, int64_t end) {
    const auto pages = static_cast<int32_t>((end + kPage - 1) / kPage);
    cu_seqlens = {0, static_cast<int32_t>(end - begin)};
    for (int32_t i = 0; i < pages; ++i) page_indices.push_back((i + 1) * kPage <= begin ? -1 : i);
    page_indptr = {0, pages};
    last_page_len = {static_cast<int32_t>(end - (pages - 1) * kPage)};
    output.assign(static_cast<size_t>((end - begin) * kHeads * kDim), 7.0f);
    pool.data = pool_data.data();
    pool.num_rows = 3;
    gdn_test::set_shape(&params);
    params.num_seqs = 1;
    params.num_tokens = end - begin;
    params.q = x.q.data() + begin * kDim;
    params.k = x.k.data() + begin * kDim;
    params.v = x.v.data() + begin * kHeads * kDim;
    params.g = x.g.data() + begin * kHeads;
    params.beta = x.beta.data() + begin * kHeads;
    params.output = output.data();
    params.cu_seqlens = cu_seqlens.data();
    params.state_pool = &pool;
    params.page_indices = page_indices.data();
    params.page_indptr = page_indptr.data();
    params.last_page_len = last_page_len.data();
    params.num_indices = pages;
    params.page_size = kPage;
  }
  Part(const Part&) = delete;

  void give_workspace() {
    params.workspace_bytes = gdn::segment_workspace_size(params, segment);
    memory.resize(params.workspace_bytes + 256);
    const auto base = reinterpret_cast<uintptr_t>(memory.data());
    params.workspace = reinterpret_cast<void*>((base + 255) / 256 * 256);
  }
};

bool near(const float* x, const float* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!(std::abs(x[i] - y[i]) <= 1e-4f * (1.0f + std::abs(y[i])))) return false;
  }
  return true;
}

void test_two_segments() {
  const Prompt prompt;
  Part whole(prompt, 0, kTokens), first(prompt, 0, kCut), last(prompt, kCut, kTokens);
  CHECK_OK(gdn_prefill_paged(&whole.params));
  first.segment.offset = first.offset.data();
  last.segment.initial_state = last.state.data();
  for (Part* part : {&first, &last}) {
    part->give_workspace();
    const std::vector<float> pool = part->pool_data, output = part->output;
    CHECK_OK(gdn_segment_begin(&part->params, &part->segment));
    CHECK(pool == part->pool_data && output == part->output);
  }
  last.state = first.offset;
  CHECK_OK(gdn_segment_finish(&first.params, &first.segment));
  CHECK_OK(gdn_segment_finish(&last.params, &last.segment));
  const int64_t cut = kCut * kHeads * kDim;
  CHECK(near(first.output.data(), whole.output.data(), cut));
  CHECK(near(last.output.data(), whole.output.data() + cut, kTokens * kHeads * kDim - cut));
  CHECK(near(first.pool_data.data(), whole.pool_data.data(), kState));
  CHECK(near(last.pool_data.data() + kState, whole.pool_data.data() + kState, 2 * kState));
}

// The map of the middle tokens takes the state before them to the state after.
void test_map() {
  const Prompt prompt;
  Part before(prompt, 0, 70), both(prompt, 0, kTokens), middle(prompt, 70, kTokens);
  before.segment.offset = before.offset.data();
  both.segment.offset = both.offset.data();
  middle.segment.initial_state = middle.state.data();
  middle.segment.transition = middle.transition.data();
  middle.segment.offset = middle.offset.data();
  for (Part* part : {&before, &both, &middle}) {
    part->give_workspace();
    gdn::segment_begin(part->params, part->segment);
  }
  gdn_segment_combine_params_t p = GDN_SEGMENT_COMBINE_PARAMS_INIT;
  p.num_maps = 1;
  p.num_heads = kHeads;
  p.head_dim_k = p.head_dim_v = kDim;
  p.transitions = middle.transition.data();
  p.offsets = middle.offset.data();
  p.initial_state = p.state = before.offset.data();
  gdn::segment_combine(p);
  CHECK(near(before.offset.data(), both.offset.data(), kState));
}

template <class Change>
void expect_refused(const char* text, Change change) {
  const Prompt prompt;
  Part part(prompt, kCut, kTokens);
  part.segment.initial_state = part.state.data();
  part.segment.transition = part.transition.data();
  part.segment.offset = part.offset.data();
  part.give_workspace();
  change(part);
  CHECK(gdn_segment_begin(&part.params, &part.segment) != GDN_OK);
  CHECK_CONTAINS(gdn_last_error(), text);
  CHECK(part.offset[0] == 7.0f && part.output[0] == 7.0f);
}

void test_refusals() {
  expect_refused("gdn_segment_t: struct_size", [](Part& p) { p.segment.struct_size = 4; });
  expect_refused("num_seqs: 0 given, 1 expected", [](Part& p) { p.params.num_seqs = 0; });
  expect_refused("num_tokens: 0 given", [](Part& p) { p.params.num_tokens = 0; });
  expect_refused("plan:", [](Part& p) { p.params.plan = p.memory.data(); });
  expect_refused("use_cp: GDN_CP_OFF", [](Part& p) { p.params.use_cp = GDN_CP_OFF; });
  expect_refused("offset: NULL given", [](Part& p) { p.segment.offset = nullptr; });
  expect_refused("transition: NULL given", [](Part& p) { p.segment.transition = nullptr; });
  expect_refused("given without initial_state", [](Part& p) { p.segment.initial_state = nullptr; });
  expect_refused("offset: address", [](Part& p) { p.segment.offset += 1; });
  expect_refused("workspace: 0 bytes given", [](Part& p) { p.params.workspace = nullptr; });
  expect_refused("backend: 'cuda_sm90'", [](Part& p) { p.params.backend = "cuda_sm90"; });
}

void test_words() {
  const Prompt prompt;
  const Part part(prompt, kCut, kTokens);
  const gdn::Explanation found = gdn::explain(GDN_OP_SEGMENT, &part.params);
  CHECK_EQUAL(found.status, GDN_OK);
  CHECK_CONTAINS(found.text.c_str(), "segment: served by cpu");
  CHECK(gdn::kernel_rows(GDN_OP_SEGMENT).back().name == "cpu");
}

}  // namespace

int main() {
  test_two_segments();
  test_map();
  test_refusals();
  test_words();
}

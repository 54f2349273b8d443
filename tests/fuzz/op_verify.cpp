// gdn_verify_paged and gdn_commit_paged: a step that leaves drafts, then one that folds them.
#include <algorithm>

#include "batch.h"
#include "ops.h"
#include "place.h"

namespace gdn_fuzz {
namespace {

using Params = gdn_verify_params_t;

alignas(256) char set;  // the address of a field that is to get a place

struct Shapes : TokenShapes<Params> {
  Shape a, b;

  explicit Shapes(const Params& p) : TokenShapes(p) {
    const int32_t heads = state_heads(p);
    a = {p.num_tokens, heads, 1, p.a_token_stride, p.a_head_stride, p.a_dtype};
    b = {p.num_tokens, heads, 1, p.b_token_stride, p.b_head_stride, p.b_dtype};
  }
};

// Lengths of a batch whose sequences have up to 4 new tokens and keep some of them.
struct Drafts {
  Table cu_seqlens{0}, seq_lens, accepted, slots;

  Drafts(Bytes& in, const Batch& batch) {
    for (int64_t b = 0; b < batch.num_seqs; ++b) {
      cu_seqlens.push_back(cu_seqlens.back() + in.below(4));
      seq_lens.push_back(batch.totals[static_cast<size_t>(b)] - in.below(8));
      accepted.push_back(in.below(5));
      slots.push_back(b);
    }
    Table* const tables[] = {&cu_seqlens, &seq_lens, &accepted, &slots};
    for (int64_t count = in.one_in(4) ? 1 + in.below(3) : 0; count > 0; --count) {
      Table& table = *tables[in.below(4)];
      table[static_cast<size_t>(in.below(static_cast<int64_t>(table.size())))] = in.number();
    }
  }
};

Params ordinary(Bytes& in, const Batch& batch, const Drafts& drafts) {
  Params p = GDN_VERIFY_PARAMS_INIT;
  p.num_seqs = batch.num_seqs, p.num_tokens = std::min<int64_t>(drafts.cu_seqlens.back(), 60) & 63;
  p.max_draft = 4;
  ordinary_heads(in, &p);
  p.q = p.k = p.v = p.a = p.b = p.A_log = &set;
  p.output = p.drafts = &set;
  if (in.flag()) p.dt_bias = &set;
  if (in.one_in(4)) p.flags = GDN_QK_L2NORM;
  p.cu_seqlens = p.page_indices = p.page_indptr = p.seq_lens = &set;
  p.state_pool = reinterpret_cast<gdn_pool_t*>(&set);
  p.num_indices = static_cast<int64_t>(batch.indices.size());
  p.flags |= batch.page_flags();
  p.page_size = std::max<int64_t>(batch.page_size, 9), p.num_drafts = batch.num_seqs + in.below(2);
  if (in.flag()) p.draft_indices = &set;
  return p;
}

Params* place_all(Place& place, Bytes& in, const Batch& batch, const Drafts& drafts, Params p) {
  const Params seen = visible(p);
  const Shapes shapes(seen);
  place.operand(&p.q, shapes.q);
  place.operand(&p.k, shapes.k);
  place.operand(&p.v, shapes.v);
  place.output(&p.output, shapes.output);
  place.operand(&p.a, shapes.a);
  place.operand(&p.b, shapes.b);
  place.operand(&p.A_log, shapes.A_log);
  place.operand(&p.dt_bias, shapes.dt_bias);
  const Wide seqs = seen.num_seqs;
  place.table(&p.cu_seqlens, seen.cu_seqlens_dtype, seqs + 1, drafts.cu_seqlens);
  place.table(&p.page_indices, seen.page_indices_dtype, seen.num_indices, batch.indices);
  place.table(&p.page_indptr, seen.page_indptr_dtype, seqs + 1, batch.indptr);
  place.table(&p.seq_lens, seen.seq_lens_dtype, seqs, drafts.seq_lens);
  place.table(&p.accepted, seen.accepted_dtype, seqs, drafts.accepted);
  place.table(&p.draft_indices, seen.draft_indices_dtype, seqs, drafts.slots);
  place.name(&p.backend);
  place.threads(&p.parallel_for);
  gdn_pool_t pool = GDN_POOL_INIT;
  pool.data = &set, pool.num_rows = batch.num_rows;
  spoil(in, &pool);
  place.pool(&p.state_pool, pool, 0, shapes.elements);
  if (p.drafts != nullptr) {
    size_t bytes = 0;
    Params query = seen;
    query.struct_size = sizeof query, query.backend = nullptr;
    Region& region = memory().scratch;
    const bool known = gdn_verify_draft_size(&query, &bytes) == GDN_OK;
    if (known && bytes > region.size()) place.oversized = true;
    p.drafts = region.place(known ? bytes : 0, 16, true);
  }
  return place.params(p);
}

void allow_pages(const Params& p, int64_t b) {
  const Reader indptr{p.page_indptr, p.page_indptr_dtype};
  const int64_t first = indptr[b], end = indptr[b + 1];
  const int64_t length = Reader{p.seq_lens, p.seq_lens_dtype}[b];
  const int64_t kept = p.accepted ? Reader{p.accepted, p.accepted_dtype}[b] : 0;
  if (first < 0 || end <= first || end > p.num_indices) return;
  if (kept <= 0 || kept > 8 || length < kept) return;
  const Reader indices{p.page_indices, p.page_indices_dtype};
  for (int64_t i = (length - kept) / p.page_size; i <= (length - 1) / p.page_size; ++i) {
    if (i < end - first) allow_pool_row(p.state_pool, Shapes(p).elements, indices[first + i]);
  }
}

void check_call(const Params* placed, gdn_status_t status, bool writes_output) {
  check_status(status);
  const Params p = visible(*placed);
  for (int64_t b = 0; status == GDN_OK && p.num_seqs > 0 && b < p.num_seqs; ++b) {
    allow_pages(p, b);
    if (!writes_output || p.num_tokens == 0) continue;
    const Reader cu{p.cu_seqlens, p.cu_seqlens_dtype};
    if (cu[b] < 0 || cu[b] > p.num_tokens || cu[b + 1] < cu[b]) continue;
    for (int64_t t = cu[b]; t < std::min(cu[b + 1], p.num_tokens); ++t) {
      allow_row(Shapes(p).output, p.output, t);
    }
  }
  memory().check(status != GDN_OK);
}

}  // namespace

void verify(Bytes& in) {
  const Batch batch(in, true);
  const Drafts drafts(in, batch);
  Params p = ordinary(in, batch, drafts);
  Place first{in};
  const Params* placed = place_all(first, in, batch, drafts, p);
  if (!first.oversized && !first.long_tables) check_call(placed, gdn_verify_paged(placed), true);
  p.accepted = &set;
  spoil(in, &p);
  Place second{in};
  placed = place_all(second, in, batch, drafts, p);
  if (second.long_tables) return;
  const size_t cap = static_cast<size_t>(in.below(256)) * 4;
  size_t need = 0;
  const gdn_status_t explained =
      gdn_explain(GDN_OP_VERIFY_PAGED, placed, memory().text.place(cap, 1, true), cap, &need);
  check_status(explained);
  if (second.oversized) return;  // the claim cannot be kept
  if (in.flag()) check_call(placed, gdn_commit_paged(placed), false);
  const gdn_status_t status = gdn_verify_paged(placed);
  FUZZ_CHECK(explained == GDN_OK || status != GDN_OK);
  check_call(placed, status, true);
}

}  // namespace gdn_fuzz

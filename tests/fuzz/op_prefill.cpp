// gdn_prefill_paged and gdn_prefill, with the size queries, the plan and gdn_explain of the call.
#include <algorithm>

#include "batch.h"
#include "ops.h"
#include "place.h"

namespace gdn_fuzz {
namespace {

using Params = gdn_prefill_params_t;

alignas(256) char set;  // the address of a field that is to get a place

struct Shapes : TokenShapes<Params> {
  Shape g, beta;

  explicit Shapes(const Params& p) : TokenShapes(p) {
    const int32_t heads = state_heads(p);
    g = {p.num_tokens, heads, 1, p.g_token_stride, p.g_head_stride, p.g_dtype};
    beta = {p.num_tokens, heads, 1, p.beta_token_stride, p.beta_head_stride, p.beta_dtype};
  }
};

// Valid as built: shapes, dtypes, and which optional operands there are.
Params ordinary(Bytes& in, const Batch& batch) {
  Params p = GDN_PREFILL_PARAMS_INIT;
  p.num_seqs = batch.num_seqs, p.num_tokens = batch.num_tokens;
  ordinary_heads(in, &p);
  p.q = p.k = p.v = p.cu_seqlens = &set;
  p.output = &set;
  if (in.flag()) p.g = &set, p.gate = static_cast<gdn_gate_t>(in.below(3));
  if (p.gate == GDN_GATE_RAW) p.A_log = &set;
  if (p.gate == GDN_GATE_RAW && in.flag()) p.dt_bias = &set;
  if (in.flag()) p.beta = &set;
  if (in.one_in(4)) p.flags = static_cast<uint64_t>(in.below(16)) & ~uint64_t{p.beta ? 0u : 2u};
  p.flags |= batch.page_flags();
  if (in.one_in(8)) p.cu_seqlens_dtype = GDN_INT64;
  if (in.one_in(8)) p.parallel_for = [](void*, int64_t, void (*)(void*, int64_t), void*) {};
  if (in.one_in(16)) p.backend = &set;
  p.workspace = &set;
  return p;
}

void place_operands(Place& place, const Batch& batch, const Params& seen, Params* p) {
  const Shapes shapes(seen);
  place.operand(&p->q, shapes.q);
  place.operand(&p->k, shapes.k);
  place.operand(&p->v, shapes.v);
  place.output(&p->output, shapes.output);
  place.operand(&p->g, shapes.g);
  place.operand(&p->beta, shapes.beta);
  place.operand(&p->A_log, shapes.A_log);
  place.operand(&p->dt_bias, shapes.dt_bias);
  const Wide seqs = seen.num_seqs;
  place.table(&p->cu_seqlens, seen.cu_seqlens_dtype, seqs + 1, batch.cu_seqlens);
  place.table(&p->cu_seqlens_host, seen.cu_seqlens_host_dtype, seqs + 1, batch.cu_seqlens);
  place.table(&p->page_indices, seen.page_indices_dtype, seen.num_indices, batch.indices);
  place.table(&p->page_indptr, seen.page_indptr_dtype, seqs + 1, batch.indptr);
  place.table(&p->last_page_len, seen.last_page_len_dtype, seqs, batch.last_page_len);
  place.table(&p->state_indices, seen.state_indices_dtype, seqs, batch.read_rows);
  place.table(&p->output_state_indices, seen.output_state_indices_dtype, seqs, batch.write_rows);
  place.table(&p->checkpoint_state_indices, seen.checkpoint_state_indices_dtype,
              seen.num_checkpoint_indices, batch.checkpoint_rows);
  place.table(&p->checkpoint_cu_starts, seen.checkpoint_cu_starts_dtype, seqs,
              batch.checkpoint_starts);
  place.table(&p->prefix_lens, seen.prefix_lens_dtype, seqs, batch.prefix_lens);
  place.table(&p->initial_page_indices, seen.initial_page_indices_dtype, seqs, batch.initial_pages);
  place.scratch(&p->workspace, seen.workspace_bytes);
  place.scratch(&p->plan, seen.plan_bytes);
  place.name(&p->backend);
  place.threads(&p->parallel_for);
}

void place_pools(Place& place, Bytes& in, const Batch& batch, const Params& seen, Params* p) {
  const Shapes shapes(seen);
  gdn_pool_t pool = GDN_POOL_INIT;
  pool.data = &set, pool.num_rows = batch.num_rows;
  if (in.one_in(4)) pool.dtype = in.flag() ? GDN_BFLOAT16 : GDN_FLOAT16;
  if (in.one_in(4)) pool.row_stride = static_cast<int64_t>(shapes.elements) + in.below(40);
  const bool one = in.flag();  // one pool in all places
  const gdn_pool_t** const fields[] = {&p->state_pool, &p->initial_state, &p->output_state,
                                       &p->state_checkpoints};
  for (int i = 0; i < 4; ++i) {
    gdn_pool_t given = pool;
    spoil(in, &given);
    place.pool(fields[i], given, one || i == 0 ? 0 : i - 1, shapes.elements);
  }
}

// Rows that a sequence may write by the header's words; more than that is a fault.
void allow_sequence(const Params& p, bool paged, int64_t b, int64_t length) {
  const Shapes shapes(p);
  const gdn_pool_t* pool = paged ? p.state_pool : p.output_state;
  const Reader indices{p.page_indices, p.page_indices_dtype};
  const int64_t every = paged ? p.page_size : p.checkpoint_every_n_tokens;
  if (paged && p.state_indices == nullptr) {
    const Reader indptr{p.page_indptr, p.page_indptr_dtype};
    const int64_t first = indptr[b], end = indptr[b + 1];
    const int64_t last = Reader{p.last_page_len, p.last_page_len_dtype}[b];
    if (first < 0 || end <= first || end > p.num_indices || last < 1 || last > every) return;
    const int64_t prefix = (end - first - 1) * every + last - length;
    if (prefix < 0) return;
    for (int64_t i = first + prefix / every; i < end; ++i) {
      allow_pool_row(pool, shapes.elements, indices[i]);
    }
    return;
  }
  const bool packed = p.state_indices == nullptr;
  const Reader writes = p.output_state_indices
                            ? Reader{p.output_state_indices, p.output_state_indices_dtype}
                            : Reader{p.state_indices, p.state_indices_dtype};
  allow_pool_row(pool, shapes.elements, packed ? b : writes[b]);
  const gdn_pool_t* checkpoints = paged ? p.state_pool : p.state_checkpoints;
  if (checkpoints == nullptr || every <= 0) return;
  const int64_t prefix = p.prefix_lens ? Reader{p.prefix_lens, p.prefix_lens_dtype}[b] : 0;
  const int64_t start = Reader{p.checkpoint_cu_starts, p.checkpoint_cu_starts_dtype}[b];
  if (prefix < 0 || prefix > INT64_MAX - length || start < 0) return;
  const Reader table =
      paged ? indices : Reader{p.checkpoint_state_indices, p.checkpoint_state_indices_dtype};
  const int64_t entries = paged ? p.num_indices : p.num_checkpoint_indices;
  for (int64_t j = 0; j < (prefix + length) / every - prefix / every; ++j) {
    if (table.data != nullptr && start > entries - 1 - j) return;
    if (start > INT64_MAX - j) return;
    allow_pool_row(checkpoints, shapes.elements, table.data ? table[start + j] : start + j);
  }
}

void allow_call(const Params& p, bool paged) {
  if (p.num_seqs == 0 || p.num_tokens == 0) return;
  const Shapes shapes(p);
  const Reader cu{p.cu_seqlens, p.cu_seqlens_dtype};
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    const int64_t begin = cu[b], end = cu[b + 1];
    if (begin < 0 || begin > p.num_tokens || end < begin) continue;
    for (int64_t t = begin; t < std::min(end, p.num_tokens); ++t) {
      allow_row(shapes.output, p.output, t);
    }
    if (end <= p.num_tokens && end > begin) allow_sequence(p, paged, b, end - begin);
  }
}

void call(Bytes& in, const Place& place, const Params* p, bool paged) {
  size_t bytes = 0, need = 0;
  check_status(gdn_prefill_workspace_size(p, &bytes));
  check_status(gdn_prefill_plan_size(p, &bytes));
  if (place.long_tables) return;
  const size_t cap = static_cast<size_t>(in.below(256)) * 4;
  Region& text = memory().text;
  gdn_status_t status = gdn_explain(paged ? GDN_OP_PREFILL_PAGED : GDN_OP_PREFILL, p,
                                    text.place(cap, 1, true), cap, &need);
  check_status(status);
  if (status == GDN_OK && place.oversized) return;  // the claim cannot be kept
  const bool explained = status == GDN_OK;
  check_status(gdn_prefill_plan(p));
  status = paged ? gdn_prefill_paged(p) : gdn_prefill(p);
  check_status(status);
  FUZZ_CHECK(explained || status != GDN_OK);
  if (status == GDN_OK) allow_call(visible(*p), paged);
  memory().check(status != GDN_OK);
}

void give_workspace(Params* p) {
  size_t bytes = 0;
  Params query = *p;
  query.backend = nullptr;
  query.workspace = query.plan = nullptr;
  query.state_pool = query.initial_state = query.output_state = query.state_checkpoints = nullptr;
  if (gdn_prefill_workspace_size(&query, &bytes) == GDN_OK) p->workspace_bytes = bytes;
}

Params paged(Bytes& in, const Batch& batch) {
  Params p = ordinary(in, batch);
  p.state_pool = reinterpret_cast<gdn_pool_t*>(&set);
  p.page_indices = p.page_indptr = p.last_page_len = &set;
  p.num_indices = static_cast<int64_t>(batch.indices.size());
  p.page_size = batch.page_size;
  if (in.one_in(4)) p.page_indices_dtype = p.page_indptr_dtype = GDN_INT64;
  if (in.one_in(4)) {
    p.state_indices = p.output_state_indices = p.checkpoint_cu_starts = p.prefix_lens = &set;
  } else if (in.one_in(4)) {
    p.initial_page_indices = &set;
  }
  return p;
}

// Begin may write the map, finish what a prefill may.
void call_segment(const Place& place, const Params* p, const gdn_segment_t* segment) {
  size_t bytes = 0, need = 0;
  char text[64];
  check_status(gdn_segment_workspace_size(p, segment, &bytes));
  if (place.long_tables) return;
  const bool explained = gdn_explain(GDN_OP_SEGMENT, p, text, sizeof text, &need) == GDN_OK;
  if (explained && place.oversized) return;  // the claim cannot be kept
  gdn_status_t status = gdn_segment_begin(p, segment);
  check_status(status);
  FUZZ_CHECK(explained || status != GDN_OK);
  const Params seen = visible(*p);
  const gdn_segment_t map = visible(*segment);
  const Shapes shapes(seen);
  const Wide square = Wide{seen.head_dim_k} * seen.head_dim_k;
  const Wide sizes[] = {shapes.state_heads(seen) * square, shapes.elements};
  float* const written[] = {map.transition, map.offset};
  for (int i = 0; status == GDN_OK && i < 2; ++i) {
    if (written[i] == nullptr) continue;
    memory().pools[1 + i].allow(reinterpret_cast<char*>(written[i]),
                                static_cast<size_t>(4 * sizes[i]));
  }
  memory().check(status != GDN_OK);
  status = gdn_segment_finish(p, segment);
  check_status(status);
  FUZZ_CHECK(explained || status != GDN_OK);
  if (status == GDN_OK) allow_call(seen, true);
  memory().check(status != GDN_OK);
}

}  // namespace

void prefill_paged(Bytes& in) {
  const Batch batch(in, false);
  Params p = paged(in, batch);
  give_workspace(&p);
  spoil(in, &p);
  Place place{in};
  const Params seen = visible(p);
  place_operands(place, batch, seen, &p);
  place_pools(place, in, batch, seen, &p);
  call(in, place, place.params(p), true);
}

void segment(Bytes& in) {
  const Batch batch(in, false);
  Params p = paged(in, batch);
  if (!in.one_in(8)) p.num_seqs = 1;
  p.workspace_bytes = 1 << 12;
  gdn_segment_t map = GDN_SEGMENT_INIT;
  auto* const placed = reinterpret_cast<float*>(&set);
  if (!in.one_in(4)) map.offset = placed;
  if (in.flag()) map.initial_state = placed;
  if (map.offset && map.initial_state) map.transition = placed;
  spoil(in, &p);
  spoil(in, &map);
  Place place{in};
  const Params seen = visible(p);
  place_operands(place, batch, seen, &p);
  place_pools(place, in, batch, seen, &p);
  const Shapes shapes(seen);
  const Wide square = Wide{seen.head_dim_k} * seen.head_dim_k;
  place.matrices(&map.initial_state, shapes.elements);
  place.matrices(&map.transition, memory().pools[1], shapes.state_heads(seen) * square);
  place.matrices(&map.offset, memory().pools[2], shapes.elements);
  call_segment(place, place.params(p), place.second(map));
}

void prefill_slots(Bytes& in) {
  const Batch batch(in, false);
  Params p = ordinary(in, batch);
  auto* const pool = reinterpret_cast<gdn_pool_t*>(&set);
  if (in.flag()) p.initial_state = pool;
  if (!in.one_in(4)) p.output_state = pool;
  if (in.flag()) p.state_checkpoints = pool, p.checkpoint_every_n_tokens = batch.page_size;
  if (p.state_checkpoints) p.checkpoint_cu_starts = &set;
  if ((p.initial_state || p.output_state) && !in.one_in(4)) {
    p.state_indices = &set;
    if (p.output_state && in.flag()) p.output_state_indices = &set;
    if (p.state_checkpoints && in.flag()) p.prefix_lens = &set;
    if (p.state_checkpoints && in.flag()) p.checkpoint_state_indices = &set;
  }
  if (p.checkpoint_state_indices) {
    p.num_checkpoint_indices = static_cast<int64_t>(batch.checkpoint_rows.size());
  }
  give_workspace(&p);
  spoil(in, &p);
  Place place{in};
  const Params seen = visible(p);
  place_operands(place, batch, seen, &p);
  place_pools(place, in, batch, seen, &p);
  call(in, place, place.params(p), false);
}

}  // namespace gdn_fuzz

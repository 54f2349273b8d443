// gdn_decode_paged and gdn_decode.
#include <algorithm>

#include "batch.h"
#include "ops.h"
#include "place.h"

namespace gdn_fuzz {
namespace {

using Params = gdn_decode_params_t;

alignas(256) char set;  // the address of a field that is to get a place

struct Shapes : HeadShapes<Params> {
  Shape q, k, v, output, a, b;

  explicit Shapes(const Params& p) : HeadShapes(p) {
    const int32_t heads = state_heads(p);
    const gdn_dtype_t io = p.io_dtype;
    q = {p.batch_size, p.num_q_heads, p.head_dim_k, p.q_batch_stride, p.q_head_stride, io};
    k = {p.batch_size, p.num_k_heads, p.head_dim_k, p.k_batch_stride, p.k_head_stride, io};
    v = {p.batch_size, p.num_v_heads, p.head_dim_v, p.v_batch_stride, p.v_head_stride, io};
    output = {p.batch_size, heads, p.head_dim_v, p.output_batch_stride, p.output_head_stride, io};
    a = {p.batch_size, heads, 1, p.a_batch_stride, p.a_head_stride, p.a_dtype};
    b = {p.batch_size, heads, 1, p.b_batch_stride, p.b_head_stride, p.b_dtype};
  }
};

Params ordinary(Bytes& in, const Batch& batch) {
  Params p = GDN_DECODE_PARAMS_INIT;
  p.batch_size = batch.num_seqs;
  ordinary_heads(in, &p);
  p.q = p.k = p.v = p.a = p.b = p.A_log = &set;
  p.output = &set;
  if (in.flag()) p.dt_bias = &set;
  if (in.one_in(4)) p.flags = static_cast<uint64_t>(in.below(16)) & ~uint64_t{2};
  if (in.one_in(8)) p.parallel_for = [](void*, int64_t, void (*)(void*, int64_t), void*) {};
  if (in.one_in(16)) p.backend = &set;
  return p;
}

void place_all(Place& place, Bytes& in, const Batch& batch, Params* p) {
  const Params seen = visible(*p);
  const Shapes shapes(seen);
  place.operand(&p->q, shapes.q);
  place.operand(&p->k, shapes.k);
  place.operand(&p->v, shapes.v);
  place.output(&p->output, shapes.output);
  place.operand(&p->a, shapes.a);
  place.operand(&p->b, shapes.b);
  place.operand(&p->A_log, shapes.A_log);
  place.operand(&p->dt_bias, shapes.dt_bias);
  const Wide rows = seen.batch_size;
  place.table(&p->page_indices, seen.page_indices_dtype, seen.num_indices, batch.indices);
  place.table(&p->page_indptr, seen.page_indptr_dtype, rows + 1, batch.indptr);
  place.table(&p->last_page_len, seen.last_page_len_dtype, rows, batch.last_page_len);
  place.table(&p->initial_state_indices, seen.initial_state_indices_dtype, rows, batch.read_rows);
  place.table(&p->output_state_indices, seen.output_state_indices_dtype, rows, batch.write_rows);
  place.table(&p->initial_page_indices, seen.initial_page_indices_dtype, rows, batch.initial_pages);
  place.name(&p->backend);
  place.threads(&p->parallel_for);
  gdn_pool_t pool = GDN_POOL_INIT;
  pool.data = &set, pool.num_rows = batch.num_rows;
  if (in.one_in(4)) pool.dtype = in.flag() ? GDN_BFLOAT16 : GDN_FLOAT16;
  if (in.one_in(4)) pool.row_stride = static_cast<int64_t>(shapes.elements) + in.below(40);
  const bool one = in.flag();
  const gdn_pool_t** const fields[] = {&p->state_pool, &p->initial_state, &p->output_state};
  for (int i = 0; i < 3; ++i) {
    gdn_pool_t given = pool;
    spoil(in, &given);
    place.pool(fields[i], given, one ? 0 : i, shapes.elements);
  }
}

// The row that batch entry b may write by the header's words.
int64_t written_row(const Params& p, bool paged, int64_t b) {
  if (p.output_state_indices != nullptr) {
    return Reader{p.output_state_indices, p.output_state_indices_dtype}[b];
  }
  if (p.initial_state_indices != nullptr) {
    return Reader{p.initial_state_indices, p.initial_state_indices_dtype}[b];
  }
  if (!paged) return b;
  const Reader indptr{p.page_indptr, p.page_indptr_dtype};
  const int64_t first = indptr[b], end = indptr[b + 1];
  if (first < 0 || end <= first || end > p.num_indices) return -1;
  if (Reader{p.last_page_len, p.last_page_len_dtype}[b] < 1) return -1;
  return Reader{p.page_indices, p.page_indices_dtype}[end - 1];
}

void call(Bytes& in, const Place& place, const Params* p, bool paged) {
  const size_t cap = static_cast<size_t>(in.below(256)) * 4;
  size_t need = 0;
  gdn_status_t status = gdn_explain(paged ? GDN_OP_DECODE_PAGED : GDN_OP_DECODE, p,
                                    memory().text.place(cap, 1, true), cap, &need);
  check_status(status);
  if (status == GDN_OK && place.oversized) return;  // the claim cannot be kept
  const bool explained = status == GDN_OK;
  status = paged ? gdn_decode_paged(p) : gdn_decode(p);
  check_status(status);
  FUZZ_CHECK(explained || status != GDN_OK);
  if (status == GDN_OK) {
    const Params seen = visible(*p);
    const Shapes shapes(seen);
    const gdn_pool_t* pool = paged               ? seen.state_pool
                             : seen.output_state ? seen.output_state
                                                 : seen.initial_state;
    for (int64_t b = 0; b < seen.batch_size; ++b) {
      allow_row(shapes.output, seen.output, b);
      allow_pool_row(pool, shapes.elements, written_row(seen, paged, b));
    }
  }
  memory().check(status != GDN_OK);
}

}  // namespace

void decode_paged(Bytes& in) {
  const Batch batch(in, true);
  Params p = ordinary(in, batch);
  p.state_pool = reinterpret_cast<gdn_pool_t*>(&set);
  p.page_indices = p.page_indptr = p.last_page_len = &set;
  p.num_indices = static_cast<int64_t>(batch.indices.size());
  if (in.one_in(4)) p.page_indices_dtype = p.page_indptr_dtype = GDN_INT64;
  if (in.one_in(4)) {
    p.initial_state_indices = p.output_state_indices = &set;
  } else if (in.one_in(4)) {
    p.initial_page_indices = &set;
  }
  spoil(in, &p);
  Place place{in};
  place_all(place, in, batch, &p);
  call(in, place, place.params(p), true);
}

void decode_slots(Bytes& in) {
  const Batch batch(in, true);
  Params p = ordinary(in, batch);
  p.initial_state = reinterpret_cast<gdn_pool_t*>(&set);
  if (in.flag()) p.output_state = p.initial_state;
  if (!in.one_in(4)) p.initial_state_indices = &set;
  if (!in.one_in(4)) p.output_state_indices = &set;
  if (in.one_in(4)) p.initial_state_indices_dtype = GDN_INT64;
  spoil(in, &p);
  Place place{in};
  place_all(place, in, batch, &p);
  call(in, place, place.params(p), false);
}

}  // namespace gdn_fuzz

// gdn_prefill_params_t: sequences, page table, slots and pools.
#include "core/validate_prefill.h"

namespace gdn {
namespace {

void read_sequences(const gdn_prefill_params_t& c, bool required, PrefillProblem* p) {
  p->cu_seqlens = check_table({.name = "cu_seqlens",
                               .data = c.cu_seqlens,
                               .dtype = c.cu_seqlens_dtype,
                               .size = p->num_seqs + 1,
                               .required = required});
  p->cu_seqlens_host = check_table({.name = "cu_seqlens_host",
                                    .data = c.cu_seqlens_host,
                                    .dtype = c.cu_seqlens_host_dtype,
                                    .size = p->num_seqs + 1,
                                    .required = false});
}

// The slot arrays of either form; absent ones stay absent.
void read_slot_tables(const gdn_prefill_params_t& c, PrefillProblem* p) {
  TableArgument t = {.size = p->num_seqs, .required = false};
  t.name = "state_indices", t.data = c.state_indices, t.dtype = c.state_indices_dtype;
  p->state_indices = check_table(t);
  t.name = "output_state_indices", t.data = c.output_state_indices;
  t.dtype = c.output_state_indices_dtype;
  p->output_state_indices = check_table(t);
  t.name = "checkpoint_cu_starts", t.data = c.checkpoint_cu_starts;
  t.dtype = c.checkpoint_cu_starts_dtype;
  p->checkpoint_starts = check_table(t);
  t.name = "prefix_lens", t.data = c.prefix_lens, t.dtype = c.prefix_lens_dtype;
  p->prefix_lens = check_table(t);
  check_count("num_checkpoint_indices", c.num_checkpoint_indices);
  t.name = "checkpoint_state_indices", t.data = c.checkpoint_state_indices;
  t.dtype = c.checkpoint_state_indices_dtype, t.size = c.num_checkpoint_indices;
  p->checkpoint_indices = check_table(t);
}

void read_page_table(const gdn_prefill_params_t& c, bool required, PrefillProblem* p) {
  check_count("num_indices", c.num_indices);
  check_page_size(c.page_size, c.flags);
  p->table.page_size = c.page_size;
  TableArgument t = {.required = required};
  t.name = "page_indices", t.data = c.page_indices, t.dtype = c.page_indices_dtype;
  t.size = c.num_indices, t.required = required && c.num_indices > 0;
  p->table.indices = check_table(t);
  t.name = "page_indptr", t.data = c.page_indptr, t.dtype = c.page_indptr_dtype;
  t.size = p->num_seqs + 1, t.required = required;
  p->table.indptr = check_table(t);
  t.name = "last_page_len", t.data = c.last_page_len, t.dtype = c.last_page_len_dtype;
  t.size = p->num_seqs;
  p->table.last_page_len = check_table(t);
  p->table.initial_pages = check_initial_pages(c, p->num_seqs);
}

void read_paged(const gdn_prefill_params_t& c, PrefillStateUse use, PrefillProblem* p) {
  check_absent("initial_state", c.initial_state, "paged");
  check_absent("output_state", c.output_state, "paged");
  check_absent("state_checkpoints", c.state_checkpoints, "paged");
  check_absent("checkpoint_state_indices", c.checkpoint_state_indices, "paged");
  read_page_table(c, use.tables, p);
  GDN_REQUIRE(c.checkpoint_every_n_tokens == 0 || c.checkpoint_every_n_tokens == c.page_size,
              "checkpoint_every_n_tokens: %lld given, 0 or page_size = %lld expected",
              static_cast<long long>(c.checkpoint_every_n_tokens),
              static_cast<long long>(c.page_size));
  const int given =
      !!p->state_indices + !!p->output_state_indices + !!p->checkpoint_starts + !!p->prefix_lens;
  GDN_REQUIRE(given == 0 || given == 4,
              "%s: NULL given, all of state_indices, output_state_indices, checkpoint_cu_starts "
              "and prefix_lens or none of them expected",
              !p->state_indices          ? "state_indices"
              : !p->output_state_indices ? "output_state_indices"
              : !p->checkpoint_starts    ? "checkpoint_cu_starts"
                                         : "prefix_lens");
  p->slots_given = given == 4;
  check_no_slots(c.initial_page_indices, p->slots_given);
  p->initial = check_pool({.name = "state_pool",
                           .pool = c.state_pool,
                           .elements = p->heads.state_elements(),
                           .required = use.tables,
                           .data_required = use.data});
  p->output_state = p->checkpoints = p->initial;
  p->checkpoint_indices = p->table.indices;
  p->checkpoint_every = c.page_size;
}

// A row per sequence is needed where no array says which.
void check_packed_rows(const char* name, const Pool& pool, bool has_indices, int64_t num_seqs) {
  GDN_REQUIRE(!pool || has_indices || pool.num_rows >= num_seqs,
              "%s.num_rows: %lld given, a row per sequence (%lld) expected without indices", name,
              static_cast<long long>(pool.num_rows), static_cast<long long>(num_seqs));
}

void check_checkpoints(const gdn_prefill_params_t& c, bool required, const PrefillProblem& p) {
  const int64_t every = c.checkpoint_every_n_tokens;
  const bool any = c.flags & GDN_ALLOW_UNALIGNED_PAGES;
  GDN_REQUIRE(every >= 0 && every <= INT32_MAX && (any || every % kChunk == 0),
              "checkpoint_every_n_tokens: %lld given, 0 or a positive multiple of 64 expected%s",
              static_cast<long long>(every), every > 0 ? ", or allow_unaligned_pages" : "");
  GDN_REQUIRE(every > 0 || c.state_checkpoints == nullptr,
              "checkpoint_every_n_tokens: 0 given with state_checkpoints, a positive multiple of "
              "64 expected");
  GDN_REQUIRE(every > 0 || !p.checkpoint_indices,
              "checkpoint_every_n_tokens: 0 given with checkpoint_state_indices, a positive "
              "multiple of 64 expected");
  GDN_REQUIRE(every > 0 || !p.prefix_lens,
              "checkpoint_every_n_tokens: 0 given with prefix_lens, a positive multiple of 64 "
              "expected");
  if (!required || every == 0) return;
  GDN_REQUIRE(
      c.state_checkpoints != nullptr,
      "state_checkpoints: NULL given, a pool expected with checkpoint_every_n_tokens = %lld",
      static_cast<long long>(every));
  GDN_REQUIRE(p.checkpoint_starts,
              "checkpoint_cu_starts: NULL given, [%lld] expected with "
              "state_checkpoints",
              static_cast<long long>(p.num_seqs));
}

void check_slot_needs(const gdn_prefill_params_t& c, const PrefillProblem& p) {
  GDN_REQUIRE(p.state_indices || !p.output_state_indices,
              "output_state_indices: given without state_indices, both or state_indices alone "
              "expected");
  GDN_REQUIRE(p.state_indices || !p.checkpoint_indices,
              "checkpoint_state_indices: given without state_indices, both expected");
  GDN_REQUIRE(p.state_indices || !p.prefix_lens,
              "prefix_lens: given without state_indices, both expected");
  GDN_REQUIRE(c.output_state != nullptr || !p.output_state_indices,
              "output_state: NULL given with output_state_indices, a pool expected");
  GDN_REQUIRE(c.initial_state != nullptr || c.output_state != nullptr || !p.state_indices,
              "initial_state: NULL given with state_indices, a pool here or in output_state "
              "expected");
}

void read_slots(const gdn_prefill_params_t& c, PrefillStateUse use, PrefillProblem* p) {
  check_absent("state_pool", c.state_pool, "slot");
  check_absent("page_indices", c.page_indices, "slot");
  check_absent("page_indptr", c.page_indptr, "slot");
  check_absent("last_page_len", c.last_page_len, "slot");
  check_absent("initial_page_indices", c.initial_page_indices, "slot");
  GDN_REQUIRE(c.page_size == 0, "page_size: %lld given, 0 expected in the slot form",
              static_cast<long long>(c.page_size));
  if (use.tables) check_slot_needs(c, *p);
  check_checkpoints(c, use.tables, *p);
  p->checkpoint_every = c.checkpoint_every_n_tokens;
  PoolArgument a = {.elements = p->heads.state_elements(), .required = false};
  a.data_required = use.data;
  a.name = "initial_state", a.pool = c.initial_state;
  p->initial = check_pool(a);
  a.name = "output_state", a.pool = c.output_state;
  p->output_state = check_pool(a);
  a.name = "state_checkpoints", a.pool = c.state_checkpoints;
  p->checkpoints = check_pool(a);
  if (!p->output_state_indices) p->output_state_indices = p->state_indices;
  const bool has_rows = !use.tables || p->state_indices;
  check_packed_rows("initial_state", p->initial, has_rows, p->num_seqs);
  check_packed_rows("output_state", p->output_state, has_rows, p->num_seqs);
}

}  // namespace

void read_prefill_state(const gdn_prefill_params_t& c, PrefillStateUse use, PrefillProblem* p) {
  read_sequences(c, use.tables, p);
  read_slot_tables(c, p);
  if (p->paged) {
    read_paged(c, use, p);
  } else {
    read_slots(c, use, p);
  }
}

}  // namespace gdn

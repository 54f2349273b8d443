// gdn_verify_params_t to VerifyProblem.
#include "core/arguments.h"
#include "core/overlap.h"
#include "core/validate.h"
#include "core/verify.h"

namespace gdn {
namespace {

constexpr uint64_t kFlags =
    GDN_QK_L2NORM | GDN_EXPLICIT_SCALE | GDN_BATCH_INVARIANT | GDN_ALLOW_UNALIGNED_PAGES;

void read_sizes(const gdn_verify_params_t& c, VerifyProblem* p) {
  check_flags(c.flags, kFlags);
  GDN_REQUIRE(c.reserved == 0, "reserved: %d given, 0 expected", c.reserved);
  GDN_REQUIRE(c.reserved2 == 0, "reserved2: %d given, 0 expected", c.reserved2);
  read_launch(c, p);
  check_count("num_seqs", c.num_seqs);
  check_count("num_tokens", c.num_tokens);
  check_count("num_drafts", c.num_drafts);
  GDN_REQUIRE(c.max_draft >= 1 && c.max_draft <= kMaxDraft,
              "max_draft: %d given, 1 to %d tokens expected", c.max_draft, kMaxDraft);
  p->num_seqs = c.num_seqs;
  p->num_tokens = c.num_tokens;
  p->num_drafts = c.num_drafts;
  p->max_draft = c.max_draft;
  read_heads(c, p);
  int64_t bytes = 0;
  GDN_REQUIRE(!__builtin_mul_overflow(
                  p->num_drafts, draft_layout(p->heads, p->io, p->max_draft).slot_bytes, &bytes),
              "num_drafts: %lld given, fewer than 2^63 bytes of drafts expected",
              static_cast<long long>(p->num_drafts));
}

void read_gates(const gdn_verify_params_t& c, bool required, VerifyProblem* p) {
  Gates& gates = p->gates;
  gates.form = GateForm::kRaw;
  gates.beta_is_logit = true;
  Operand o = {.row_name = "token", .heads = p->heads.state, .required = required};
  o.rows = p->num_tokens;
  o.name = "a", o.data = c.a, o.dtype = check_float_dtype("a_dtype", c.a_dtype, true);
  o.row_stride = c.a_token_stride, o.head_stride = c.a_head_stride;
  gates.g = check_operand(o);
  o.name = "b", o.data = c.b, o.dtype = check_float_dtype("b_dtype", c.b_dtype, true);
  o.row_stride = c.b_token_stride, o.head_stride = c.b_head_stride;
  gates.beta = check_operand(o);
  o.rows = 1, o.row_stride = 0, o.head_stride = 0;
  o.name = "A_log", o.data = c.A_log;
  o.dtype = check_float_dtype("A_log_dtype", c.A_log_dtype, true);
  gates.A_log = check_operand(o);
  o.name = "dt_bias", o.data = c.dt_bias, o.required = false;
  o.dtype = check_float_dtype("dt_bias_dtype", c.dt_bias_dtype, true);
  gates.dt_bias = check_operand(o);
}

void read_tables(const gdn_verify_params_t& c, bool required, VerifyProblem* p) {
  check_count("num_indices", c.num_indices);
  check_page_size(c.page_size, c.flags);
  GDN_REQUIRE(c.page_size > kMaxDraft, "page_size: %lld given, more than %d tokens expected",
              static_cast<long long>(c.page_size), kMaxDraft);
  p->table.page_size = c.page_size;
  TableArgument t = {.size = c.num_indices, .required = required && c.num_indices > 0};
  t.name = "page_indices", t.data = c.page_indices, t.dtype = c.page_indices_dtype;
  p->table.indices = check_table(t);
  t.name = "page_indptr", t.data = c.page_indptr, t.dtype = c.page_indptr_dtype;
  t.size = p->num_seqs + 1, t.required = required;
  p->table.indptr = check_table(t);
  t.name = "seq_lens", t.data = c.seq_lens, t.dtype = c.seq_lens_dtype;
  t.size = p->num_seqs;
  p->seq_lens = check_table(t);
  t.name = "accepted", t.data = c.accepted, t.dtype = c.accepted_dtype, t.required = false;
  p->accepted = check_table(t);
  t.name = "draft_indices", t.data = c.draft_indices, t.dtype = c.draft_indices_dtype;
  p->draft_indices = check_table(t);
}

void read_memory(const gdn_verify_params_t& c, bool required, VerifyProblem* p) {
  p->pool = check_pool({.name = "state_pool",
                        .pool = c.state_pool,
                        .elements = p->heads.state_elements(),
                        .required = required,
                        .data_required = required});
  p->drafts = c.drafts;
  GDN_REQUIRE(c.drafts != nullptr || !required || c.num_drafts == 0,
              "drafts: NULL given, %lld slots expected", static_cast<long long>(c.num_drafts));
  GDN_REQUIRE(reinterpret_cast<uintptr_t>(c.drafts) % kDraftAlignment == 0,
              "drafts: address %p given, a multiple of %lld expected", c.drafts,
              static_cast<long long>(kDraftAlignment));
  GDN_REQUIRE(p->draft_indices || !required || p->num_drafts >= p->num_seqs,
              "num_drafts: %lld given, a slot per sequence (%lld) expected without draft_indices",
              static_cast<long long>(p->num_drafts), static_cast<long long>(p->num_seqs));
}

void check_output_overlap(const VerifyProblem& p) {
  const Heads& h = p.heads;
  const int64_t tokens = p.num_tokens;
  const Span output = span_of("output", p.output, tokens, h.state, h.dim_v);
  check_no_overlap(output, span_of("q", p.q, tokens, h.q, h.dim_k));
  check_no_overlap(output, span_of("k", p.k, tokens, h.k, h.dim_k));
  check_no_overlap(output, span_of("v", p.v, tokens, h.v, h.dim_v));
  check_no_overlap(output, span_of("a", p.gates.g, tokens, h.state, 1));
  check_no_overlap(output, span_of("b", p.gates.beta, tokens, h.state, 1));
  check_no_overlap(output, span_of("A_log", p.gates.A_log, 1, h.state, 1));
  check_no_overlap(output, span_of("dt_bias", p.gates.dt_bias, 1, h.state, 1));
  check_no_overlap(output, span_of("cu_seqlens", p.cu_seqlens));
  check_no_overlap(output, span_of("page_indices", p.table.indices));
  check_no_overlap(output, span_of("page_indptr", p.table.indptr));
  check_no_overlap(output, span_of("seq_lens", p.seq_lens));
  check_no_overlap(output, span_of("accepted", p.accepted));
  check_no_overlap(output, span_of("draft_indices", p.draft_indices));
  check_no_overlap(output, span_of("state_pool", p.pool, h.state_elements()));
  const int64_t slot_bytes = draft_layout(h, p.io, p.max_draft).slot_bytes;
  check_no_overlap(output, {.name = "drafts",
                            .begin = reinterpret_cast<uintptr_t>(p.drafts),
                            .row_bytes = p.num_drafts * slot_bytes});
}

}  // namespace

VerifyProblem verify_problem(const gdn_verify_params_t* params, VerifyUse use) {
  const auto c = read_struct("gdn_verify_params_t", params);
  VerifyProblem p;
  read_sizes(c, &p);
  if (use == VerifyUse::kSize) return p;
  const bool required = p.num_seqs > 0;
  read_tables(c, required, &p);
  read_memory(c, required, &p);
  if (use == VerifyUse::kCommit) {
    p.num_tokens = 0;
    return p;
  }
  read_token_operands(c, required && p.num_tokens > 0, &p);
  read_gates(c, required && p.num_tokens > 0, &p);
  p.cu_seqlens = check_table({.name = "cu_seqlens",
                              .data = c.cu_seqlens,
                              .dtype = c.cu_seqlens_dtype,
                              .size = p.num_seqs + 1,
                              .required = required});
  if (p.num_tokens > 0) check_output_overlap(p);
  return p;
}

}  // namespace gdn

// Speculative decoding: Python arrays to gdn_verify_params_t.
#include "tokens.h"

namespace gdn::python {
namespace {

// Positions in the argument tuples; python/gdn_paged/verify.py packs them in this order.
// clang-format off
enum Verify : int {
  kQ, kK, kV, kALog, kA, kDtBias, kB, kScale, kOutput, kUseQkL2norm, kStream, kDeterministic,
  kNumThreads, kBackend, kCuSeqlens, kStatePool, kPageIndices, kPageIndptr, kPageSize, kSeqLens,
  kDrafts, kMaxDraft, kAccepted, kDraftIndices, kAllowUnaligned, kVerifyCount
};
enum Commit : int {
  kCommitPool, kCommitIndices, kCommitIndptr, kCommitPageSize, kCommitSeqLens, kCommitDrafts,
  kCommitMaxDraft, kCommitAccepted, kCommitDraftIndices, kCommitDtype, kCommitStream,
  kCommitNumThreads, kCommitBackend, kCommitAllowUnaligned, kCommitCount
};
// clang-format on

// A call that owns what its params point to.
struct VerifyCall {
  VerifyCall(const Arguments& arguments, const char* name, nb::handle first)
      : args(arguments), call(name, first) {}

  const Arguments& args;
  Call call;
  HeadCounts heads{};
  gdn_verify_params_t p = GDN_VERIFY_PARAMS_INIT;
  gdn_pool_t pool = GDN_POOL_INIT;
  nb::object output;
};

// What a verify and a commit have in common, wherever it stands in their tuples.
struct PagedArguments {
  nb::handle pool, indices, indptr, page_size, seq_lens, drafts, max_draft, accepted, draft_indices,
      allow_unaligned_pages;
};

void set_gates(VerifyCall& c) {
  gdn_verify_params_t& p = c.p;
  const Shape shape{{p.num_tokens, c.heads.state}, "[tokens, H]"};
  for (int i : {kA, kB, kALog}) {
    const char* name = i == kA ? "a" : i == kB ? "b" : "A_log";
    if (c.args[i].is_none()) fail("%s: None; expected an array", name);
  }
  const Operand a = c.call.gate("a", c.args[kA], shape);
  const Operand b = c.call.gate("b", c.args[kB], shape);
  const Operand A_log = c.call.per_head("A_log", c.args[kALog], c.heads.state);
  const Operand dt_bias = c.call.per_head("dt_bias", c.args[kDtBias], c.heads.state);
  p.a = a.data;
  p.a_dtype = a.dtype;
  p.a_token_stride = a.row_stride;
  p.a_head_stride = a.head_stride;
  p.b = b.data;
  p.b_dtype = b.dtype;
  p.b_token_stride = b.row_stride;
  p.b_head_stride = b.head_stride;
  p.A_log = A_log.data;
  p.A_log_dtype = A_log.dtype;
  p.dt_bias = dt_bias.data;
  p.dt_bias_dtype = dt_bias.dtype;
}

void set_drafts(VerifyCall& c, const PagedArguments& args) {
  gdn_verify_params_t& p = c.p;
  p.max_draft = to_int32("max_draft", args.max_draft);
  p.num_drafts = 1;
  size_t slot_bytes = 0;
  check_status(gdn_verify_draft_size(&p, &slot_bytes));
  const ArrayView drafts = c.call.array(
      "drafts", args.drafts,
      {{kAny, static_cast<int64_t>(slot_bytes)}, "[slots, verify_draft_size(...)] of uint8"},
      Access::kWrite);
  if (drafts.dtype != (kDLUInt << 8 | 8)) {
    fail("drafts: %s; expected uint8 [slots, verify_draft_size(...)]", describe(drafts).c_str());
  }
  if (drafts.strides[1] != 1 || (drafts.shape[0] > 1 && drafts.strides[0] != drafts.shape[1])) {
    fail("drafts: %s with strides; expected a dense array", describe(drafts).c_str());
  }
  p.num_drafts = drafts.shape[0];
  p.drafts = drafts.data;
  if (!args.draft_indices.is_none()) {
    const Table slots = c.call.table("draft_indices", args.draft_indices, p.num_seqs);
    p.draft_indices = slots.data;
    p.draft_indices_dtype = slots.dtype;
  }
}

// After the sizes of the heads are known.
void set_paged(VerifyCall& c, const PagedArguments& args) {
  gdn_verify_params_t& p = c.p;
  const Table lengths = c.call.table("seq_lens", args.seq_lens, kAny);
  p.num_seqs = lengths.size;
  p.seq_lens = lengths.data;
  p.seq_lens_dtype = lengths.dtype;
  const Table indices = c.call.table("page_indices", args.indices, kAny);
  const Table indptr = c.call.table("page_indptr", args.indptr, p.num_seqs + 1);
  p.page_indices = indices.data;
  p.page_indices_dtype = indices.dtype;
  p.num_indices = indices.size;
  p.page_indptr = indptr.data;
  p.page_indptr_dtype = indptr.dtype;
  p.page_size = to_int64("page_size", args.page_size);
  if (to_bool("allow_unaligned_pages", args.allow_unaligned_pages)) {
    p.flags |= GDN_ALLOW_UNALIGNED_PAGES;
  }
  if (!args.accepted.is_none()) {
    const Table accepted = c.call.table("accepted", args.accepted, p.num_seqs);
    p.accepted = accepted.data;
    p.accepted_dtype = accepted.dtype;
  }
  c.pool = c.call.pool("state_pool", args.pool, c.heads, Access::kWrite);
  p.state_pool = &c.pool;
  set_drafts(c, args);
}

void set_verify(VerifyCall& c) {
  gdn_verify_params_t& p = c.p;
  set_launch(p, c.call,
             {.stream = c.args[kStream],
              .deterministic = c.args[kDeterministic],
              .num_threads = c.args[kNumThreads],
              .backend = c.args[kBackend]});
  c.heads = set_token_operands(c.call, c.args[kQ], c.args[kK], c.args[kV], p);
  set_gates(c);
  set_paged(c, {.pool = c.args[kStatePool],
                .indices = c.args[kPageIndices],
                .indptr = c.args[kPageIndptr],
                .page_size = c.args[kPageSize],
                .seq_lens = c.args[kSeqLens],
                .drafts = c.args[kDrafts],
                .max_draft = c.args[kMaxDraft],
                .accepted = c.args[kAccepted],
                .draft_indices = c.args[kDraftIndices],
                .allow_unaligned_pages = c.args[kAllowUnaligned]});
  const Table cu = c.call.table("cu_seqlens", c.args[kCuSeqlens], p.num_seqs + 1);
  p.cu_seqlens = cu.data;
  p.cu_seqlens_dtype = cu.dtype;
  if (!c.args[kScale].is_none()) {  // as in decode a scale of 0 is 0
    p.scale = to_double("scale", c.args[kScale]);
    p.flags |= GDN_EXPLICIT_SCALE;
  }
  if (to_bool("use_qk_l2norm", c.args[kUseQkL2norm])) p.flags |= GDN_QK_L2NORM;
  c.output = set_token_output(c.call, c.args[kOutput], c.heads, p);
}

// Heads and sizes are those of the pool's rows.
void set_commit(VerifyCall& c) {
  gdn_verify_params_t& p = c.p;
  set_launch(p, c.call,
             {.stream = c.args[kCommitStream],
              .deterministic = nb::none(),
              .num_threads = c.args[kCommitNumThreads],
              .backend = c.args[kCommitBackend]});
  const ArrayView& pool = c.call.first();
  if (pool.rank != 4) {
    fail("state_pool: %s; expected [num_pages, H, V, K]", describe(pool).c_str());
  }
  c.heads = {.q = pool.shape[1],
             .k = pool.shape[1],
             .v = pool.shape[1],
             .state = pool.shape[1],
             .dim_k = pool.shape[3],
             .dim_v = pool.shape[2]};
  set_heads(c.heads, to_int32("dtype", c.args[kCommitDtype]), p);
  set_paged(c, {.pool = c.args[kCommitPool],
                .indices = c.args[kCommitIndices],
                .indptr = c.args[kCommitIndptr],
                .page_size = c.args[kCommitPageSize],
                .seq_lens = c.args[kCommitSeqLens],
                .drafts = c.args[kCommitDrafts],
                .max_draft = c.args[kCommitMaxDraft],
                .accepted = c.args[kCommitAccepted],
                .draft_indices = c.args[kCommitDraftIndices],
                .allow_unaligned_pages = c.args[kCommitAllowUnaligned]});
}

nb::object run_verify(const nb::tuple& tuple) {
  const Arguments args(tuple, kVerifyCount);
  VerifyCall c(args, "q", args[kQ]);
  set_verify(c);
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_verify_paged(&c.p);
  }
  check_status(status);
  return c.output;
}

void run_commit(const nb::tuple& tuple) {
  const Arguments args(tuple, kCommitCount);
  VerifyCall c(args, "state_pool", args[kCommitPool]);
  set_commit(c);
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_commit_paged(&c.p);
  }
  check_status(status);
}

nb::str explain_verify(const nb::tuple& tuple) {
  const Arguments args(tuple, kVerifyCount);
  VerifyCall c(args, "q", args[kQ]);
  set_verify(c);
  return explain(GDN_OP_VERIFY_PAGED, c.p);
}

// Bytes of one slot: max_draft, heads, head_dim_k, head_dim_v, dtype.
size_t draft_size(int32_t max_draft, int32_t heads, int32_t dim_k, int32_t dim_v, int32_t dtype) {
  gdn_verify_params_t p = GDN_VERIFY_PARAMS_INIT;
  p.max_draft = max_draft;
  p.num_q_heads = p.num_k_heads = p.num_v_heads = heads;
  p.head_dim_k = dim_k;
  p.head_dim_v = dim_v;
  p.io_dtype = dtype;
  p.num_drafts = 1;
  size_t bytes = 0;
  check_status(gdn_verify_draft_size(&p, &bytes));
  return bytes;
}

}  // namespace

void define_verify(nb::module_& m) {
  m.def("verify_paged", &run_verify, nb::arg("arguments"),
        nb::sig("def verify_paged(arguments: tuple) -> typing.Any"));
  m.def("commit_paged", &run_commit, nb::arg("arguments"));
  m.def("explain_verify_paged", &explain_verify, nb::arg("arguments"));
  m.def("verify_draft_size", &draft_size, nb::arg("max_draft"), nb::arg("num_heads"),
        nb::arg("head_dim_k"), nb::arg("head_dim_v"), nb::arg("dtype"));
}

}  // namespace gdn::python

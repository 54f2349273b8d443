// Prefill by pool rows (slot form) and of packed sequences: gdn_prefill.
#include "prefill_call.h"

namespace gdn::python {
namespace {

// clang-format off
enum Flat : int {
  kInitialState = kCommonCount, kOutputFinalState, kOutputState, kStateCheckpoints,
  kCheckpointCuStarts, kCheckpointEvery, kUseCp, kStateIndices, kMaxSeqlen, kCuSeqlensCpu,
  kOutputStateIndices, kCheckpointStateIndices, kPrefixLens, kAllowUnaligned, kFlatCount
};
// clang-format on

void set_initial_state(PrefillCall& c, bool by_slots) {
  nb::handle initial = c.args[kInitialState];
  if (initial.is_none()) {
    if (by_slots) fail("initial_state: None; state_indices expects the pool that it points into");
    return;
  }
  c.pool =
      c.call.pool("initial_state", initial, c.heads, Access::kRead, by_slots ? kAny : c.p.num_seqs);
  c.p.initial_state = &c.pool;
}

// What the index arguments need beside them.
void check_needs(const PrefillCall& c, bool has_final_state) {
  static const struct {
    int position;
    const char* name;
  } kNeedy[] = {{kOutputStateIndices, "output_state_indices"},
                {kCheckpointStateIndices, "checkpoint_state_indices"},
                {kPrefixLens, "prefix_lens"}};
  for (const auto& argument : kNeedy) {
    if (c.args[argument.position].is_none()) continue;
    if (c.args[kStateIndices].is_none()) {
      fail("%s: given; expected state_indices with it", argument.name);
    }
    if (argument.position == kOutputStateIndices) {
      if (!has_final_state || c.args[kOutputState].is_none()) {
        fail("%s: given; expected output_state and output_final_state=True with it", argument.name);
      }
    } else if (c.p.checkpoint_every_n_tokens == 0) {
      fail("%s: given; expected checkpoint_every_n_tokens > 0 with it", argument.name);
    }
  }
}

void set_indices(PrefillCall& c) {
  gdn_prefill_params_t& p = c.p;
  if (!c.args[kStateIndices].is_none()) {
    const Table rows = c.call.table("state_indices", c.args[kStateIndices], p.num_seqs);
    p.state_indices = rows.data;
    p.state_indices_dtype = rows.dtype;
  }
  if (!c.args[kOutputStateIndices].is_none()) {
    const Table rows =
        c.call.table("output_state_indices", c.args[kOutputStateIndices], p.num_seqs);
    p.output_state_indices = rows.data;
    p.output_state_indices_dtype = rows.dtype;
  }
  if (!c.args[kPrefixLens].is_none()) {
    const Table lens = c.call.table("prefix_lens", c.args[kPrefixLens], p.num_seqs);
    p.prefix_lens = lens.data;
    p.prefix_lens_dtype = lens.dtype;
  }
}

void set_checkpoints(PrefillCall& c) {
  gdn_prefill_params_t& p = c.p;
  const bool by_rows = !c.args[kCheckpointStateIndices].is_none();
  if (p.checkpoint_every_n_tokens == 0) {
    if (!c.args[kStateCheckpoints].is_none() || !c.args[kCheckpointCuStarts].is_none()) {
      fail(
          "state_checkpoints, checkpoint_cu_starts: given; expected checkpoint_every_n_tokens > 0 "
          "with them");
    }
    return;
  }
  if (c.args[kStateCheckpoints].is_none() || c.args[kCheckpointCuStarts].is_none()) {
    fail(
        "checkpoint_every_n_tokens: %lld; expected state_checkpoints and checkpoint_cu_starts "
        "with it",
        static_cast<long long>(p.checkpoint_every_n_tokens));
  }
  c.checkpoints =
      c.call.pool("state_checkpoints", c.args[kStateCheckpoints], c.heads, Access::kWrite);
  p.state_checkpoints = &c.checkpoints;
  const Table starts = c.call.table("checkpoint_cu_starts", c.args[kCheckpointCuStarts], kAny);
  if (starts.size != p.num_seqs + 1 && !(by_rows && starts.size == p.num_seqs)) {
    fail("checkpoint_cu_starts: %lld entries; expected %lld", static_cast<long long>(starts.size),
         static_cast<long long>(p.num_seqs + 1));
  }
  p.checkpoint_cu_starts = starts.data;
  p.checkpoint_cu_starts_dtype = starts.dtype;
  if (!by_rows) return;
  const Table rows =
      c.call.table("checkpoint_state_indices", c.args[kCheckpointStateIndices], kAny);
  p.checkpoint_state_indices = rows.data;
  p.checkpoint_state_indices_dtype = rows.dtype;
  p.num_checkpoint_indices = rows.size;
}

void set_output_state(PrefillCall& c) {
  nb::handle given = c.args[kOutputState];
  const bool by_slots = !c.args[kStateIndices].is_none();
  if (given.is_none() && by_slots) {
    fail(
        "output_state: None; output_final_state=True with state_indices expects the pool to write");
  }
  c.final_state = nb::borrow(given);
  if (given.is_none()) {
    const HeadCounts& h = c.heads;
    c.final_state = c.call.empty({c.p.num_seqs, h.state, h.dim_v, h.dim_k}, "float32");
    if (c.use == Use::kLaunch) {
      nb::module_::import_("gdn_paged._frameworks")
          .attr("start_from")(c.final_state, c.args[kInitialState], c.call.stream_object());
    }
  }
  c.output_state = c.call.pool("output_state", c.final_state, c.heads, Access::kWrite,
                               by_slots ? kAny : c.p.num_seqs);
  c.p.output_state = &c.output_state;
}

void set_hints(PrefillCall& c) {
  gdn_prefill_params_t& p = c.p;
  nb::handle use_cp = c.args[kUseCp];
  if (use_cp.is(Py_True) || use_cp.is(Py_False)) {
    p.use_cp = use_cp.is(Py_True) ? GDN_CP_ON : GDN_CP_OFF;
  } else if (!nb::isinstance<nb::str>(use_cp) || nb::cast<std::string>(use_cp) != "auto") {
    fail("use_cp: got %s; expected \"auto\", True or False",
         nb::cast<std::string>(nb::repr(use_cp)).c_str());
  }
  if (!c.args[kMaxSeqlen].is_none()) p.max_seqlen = to_int64("max_seqlen", c.args[kMaxSeqlen]);
  if (c.args[kCuSeqlensCpu].is_none()) return;
  Call host("cu_seqlens_cpu", c.args[kCuSeqlensCpu]);
  if (host.on_cuda()) fail("cu_seqlens_cpu: on CUDA; expected a host array");
  const Table cu = host.table("cu_seqlens_cpu", c.args[kCuSeqlensCpu], p.num_seqs + 1);
  p.cu_seqlens_host = cu.data;
  p.cu_seqlens_host_dtype = cu.dtype;
}

void set_flat(PrefillCall& c) {
  set_common(c);
  c.p.checkpoint_every_n_tokens = to_int64("checkpoint_every_n_tokens", c.args[kCheckpointEvery]);
  if (to_bool("allow_unaligned_pages", c.args[kAllowUnaligned])) {
    c.p.flags |= GDN_ALLOW_UNALIGNED_PAGES;
  }
  const bool has_final_state = to_bool("output_final_state", c.args[kOutputFinalState]);
  check_needs(c, has_final_state);
  set_initial_state(c, !c.args[kStateIndices].is_none());
  set_indices(c);
  set_checkpoints(c);
  set_hints(c);
  if (has_final_state) set_output_state(c);
  set_output(c);
  set_scratch(c);
}

// output, or (output, final_state) with output_final_state.
nb::object run_flat(const nb::tuple& tuple) {
  const Arguments args(tuple, kFlatCount);
  PrefillCall c(args, Use::kLaunch);
  set_flat(c);
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_prefill(&c.p);
  }
  check_status(status);
  if (!c.final_state.is_valid()) return c.output;
  return nb::make_tuple(c.output, c.final_state);
}

nb::str explain_flat(const nb::tuple& tuple) {
  const Arguments args(tuple, kFlatCount);
  PrefillCall c(args, Use::kExplain);
  set_flat(c);
  return explain(GDN_OP_PREFILL, c.p);
}

}  // namespace

void define_prefill(nb::module_& m) {
  define_prefill_paged(m);
  m.def("prefill", &run_flat, nb::arg("arguments"),
        nb::sig("def prefill(arguments: tuple) -> typing.Any"));
  m.def("explain_prefill", &explain_flat, nb::arg("arguments"));
}

}  // namespace gdn::python

// One prompt over several devices: Python arrays to gdn_segment_t and its calls.
#include "prefill_call.h"

namespace gdn::python {
namespace {

// Positions in the second tuple, after the one of a paged prefill.
enum Part : int { kInitialState, kTransition, kOffset, kPartWorkspace, kPartCount };

float* state_array(Call& call, const char* name, nb::handle object, const Shape& shape,
                   Access access) {
  const ArrayView view = call.array(name, object, shape, access);
  bool dense = true;
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    dense = dense && (view.shape[i] <= 1 || view.strides[i] == stride);
    stride *= view.shape[i];
  }
  if (view.dtype != GDN_FLOAT32 || !dense) {
    fail("%s: %s; expected a dense float32 array %s", name, describe(view).c_str(), shape.meaning);
  }
  return static_cast<float*>(view.data);
}

// The two structs of a call; `parts` may be rewritten by what was allocated.
struct SegmentCall {
  SegmentCall(const nb::tuple& paged, const nb::tuple& part, Use use)
      : args(paged, kPagedArguments), parts(part, kPartCount), c(args, use) {
    set_paged_call(c);
  }

  Arguments args;
  Arguments parts;
  PrefillCall c;
  gdn_segment_t segment = GDN_SEGMENT_INIT;

  void set_states(nb::handle transition, nb::handle offset) {
    const HeadCounts& h = c.heads;
    const Shape state{{h.state, h.dim_v, h.dim_k}, "[H, V, K]"};
    if (!parts[kInitialState].is_none()) {
      segment.initial_state =
          state_array(c.call, "initial_state", parts[kInitialState], state, Access::kRead);
    }
    if (!transition.is_none()) {
      segment.transition = state_array(c.call, "transition", transition,
                                       {{h.state, h.dim_k, h.dim_k}, "[H, K, K]"}, Access::kWrite);
    }
    if (!offset.is_none()) {
      segment.offset = state_array(c.call, "offset", offset, state, Access::kWrite);
    }
  }

  // Scratch memory of any address: what is before the first multiple of 256 is not used.
  void set_workspace(nb::handle workspace) {
    size_t bytes = 0;
    const auto base = reinterpret_cast<uintptr_t>(c.call.scratch("workspace", workspace, &bytes));
    const uintptr_t skipped = (base + 255) / 256 * 256 - base;
    c.p.workspace = reinterpret_cast<void*>(base + skipped);
    c.p.workspace_bytes = bytes > skipped ? bytes - skipped : 0;
  }
};

// (output, workspace, transition, offset); transition is None where the start is known.
nb::tuple begin(const nb::tuple& paged, const nb::tuple& part, bool last) {
  SegmentCall s(paged, part, Use::kExplain);
  PrefillCall& c = s.c;
  const HeadCounts& h = c.heads;
  nb::object transition = nb::borrow(s.parts[kTransition]);
  nb::object offset = nb::borrow(s.parts[kOffset]);
  if (!last && offset.is_none()) {
    offset = c.call.empty({h.state, h.dim_v, h.dim_k}, "float32");
  }
  if (!last && transition.is_none() && !s.parts[kInitialState].is_none()) {
    transition = c.call.empty({h.state, h.dim_k, h.dim_k}, "float32");
  }
  s.set_states(transition, offset);
  nb::object workspace = nb::borrow(s.parts[kPartWorkspace]);
  if (workspace.is_none()) {
    size_t bytes = 0;
    check_status(gdn_segment_workspace_size(&c.p, &s.segment, &bytes));
    workspace = c.call.empty({static_cast<int64_t>(bytes) + 256}, "uint8");
  }
  s.set_workspace(workspace);
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_segment_begin(&c.p, &s.segment);
  }
  check_status(status);
  return nb::make_tuple(c.output, workspace, transition, offset);
}

nb::object finish(const nb::tuple& paged, const nb::tuple& part) {
  SegmentCall s(paged, part, Use::kExplain);
  s.set_states(s.parts[kTransition], s.parts[kOffset]);
  s.set_workspace(s.parts[kPartWorkspace]);
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_segment_finish(&s.c.p, &s.segment);
  }
  check_status(status);
  return s.c.output;
}

nb::str explain_begin(const nb::tuple& paged) {
  const Arguments args(paged, kPagedArguments);
  PrefillCall c(args, Use::kExplain);
  set_paged_call(c);
  return explain(GDN_OP_SEGMENT, c.p);
}

// Positions in the tuple of a combination.
enum Combine : int {
  kTransitions,
  kOffsets,
  kCombineInitial,
  kState,
  kCombineStream,
  kCombineThreads,
  kCombineCount
};

// [num_maps, H, rows, K] of float32, dense but for the stride from map to map.
const float* map_array(const ArrayView& view, int64_t* stride) {
  bool dense = view.rank == 4;
  int64_t expected = 1;
  for (int i = view.rank - 1; i > 0; --i) {
    dense = dense && (view.shape[i] <= 1 || view.strides[i] == expected);
    expected *= view.shape[i];
  }
  dense = dense && (view.shape[0] <= 1 || view.strides[0] >= expected);
  if (view.dtype != GDN_FLOAT32 || (view.shape[0] > 0 && !dense)) {
    fail("%s: %s; expected float32 [num_maps, H, rows, K], each map dense", view.name,
         describe(view).c_str());
  }
  *stride = view.shape[0] > 1 ? view.strides[0] : 0;
  return static_cast<const float*>(view.data);
}

nb::object combine(const nb::tuple& tuple) {
  const Arguments args(tuple, kCombineCount);
  Call call("offsets", args[kOffsets]);
  call.use_stream(args[kCombineStream]);
  const ArrayView& offsets = call.first();
  if (offsets.rank != 4) {
    fail("offsets: %s; expected [num_maps, H, V, K]", describe(offsets).c_str());
  }
  const int64_t maps = offsets.shape[0], heads = offsets.shape[1];
  const int64_t v = offsets.shape[2], k = offsets.shape[3];
  gdn_segment_combine_params_t p = GDN_SEGMENT_COMBINE_PARAMS_INIT;
  p.device_type = offsets.device_type;
  p.device_id = offsets.device_id;
  p.stream = call.stream();
  p.num_threads = to_int32("num_threads", args[kCombineThreads]);
  p.num_maps = maps;
  p.num_heads = static_cast<int32_t>(heads);
  p.head_dim_k = static_cast<int32_t>(k);
  p.head_dim_v = static_cast<int32_t>(v);
  p.offsets = map_array(offsets, &p.offset_stride);
  const ArrayView transitions =
      call.array("transitions", args[kTransitions], {{maps, heads, k, k}, "[num_maps, H, K, K]"});
  p.transitions = map_array(transitions, &p.transition_stride);
  const Shape shape{{heads, v, k}, "[H, V, K]"};
  if (!args[kCombineInitial].is_none()) {
    p.initial_state =
        state_array(call, "initial_state", args[kCombineInitial], shape, Access::kRead);
  }
  nb::object state = nb::borrow(args[kState]);
  if (state.is_none()) state = call.empty({heads, v, k}, "float32");
  p.state = state_array(call, "state", state, shape, Access::kWrite);
  gdn_status_t status;
  {
    nb::gil_scoped_release release;
    status = gdn_segment_combine(&p);
  }
  check_status(status);
  return state;
}

}  // namespace

void define_segment(nb::module_& m) {
  m.def("segment_begin", &begin, nb::arg("arguments"), nb::arg("part"), nb::arg("last"),
        nb::sig("def segment_begin(arguments: tuple, part: tuple, last: bool) -> tuple"));
  m.def("segment_finish", &finish, nb::arg("arguments"), nb::arg("part"),
        nb::sig("def segment_finish(arguments: tuple, part: tuple) -> typing.Any"));
  m.def("explain_segment_begin", &explain_begin, nb::arg("arguments"));
  m.def("segment_combine", &combine, nb::arg("arguments"),
        nb::sig("def segment_combine(arguments: tuple) -> typing.Any"));
}

}  // namespace gdn::python

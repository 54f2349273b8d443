// gdn_segment_t and gdn_segment_combine_params_t.
#include "core/arguments.h"
#include "core/segment.h"
#include "core/validate.h"

namespace gdn {
namespace {

// Copies of states move 16 bytes at once on CUDA.
void check_map_pointer(const char* name, const void* data) {
  GDN_REQUIRE(reinterpret_cast<uintptr_t>(data) % 16 == 0,
              "%s: address %p given, a multiple of 16 expected", name, data);
}

void check_sizes(const PrefillProblem& p) {
  GDN_REQUIRE(p.num_seqs == 1, "num_seqs: %lld given, 1 expected, a segment is of one sequence",
              static_cast<long long>(p.num_seqs));
  GDN_REQUIRE(p.num_tokens > 0, "num_tokens: 0 given, at least one new token expected");
  GDN_REQUIRE(p.plan == nullptr,
              "plan: given, NULL expected, gdn_segment_begin plans into the workspace");
  GDN_REQUIRE(p.use_cp != GDN_CP_OFF,
              "use_cp: GDN_CP_OFF (1) given, GDN_CP_AUTO (0) or GDN_CP_ON (2) expected");
}

}  // namespace

SegmentProblem segment_problem(const gdn_prefill_params_t* params, const gdn_segment_t* segment,
                               SegmentPhase phase) {
  const auto c = read_struct("gdn_segment_t", segment);
  SegmentProblem p;
  static_cast<PrefillProblem&>(p) = prefill_problem(
      params, Form::kPaged, phase == SegmentPhase::kSize ? Use::kSize : Use::kLaunch);
  check_sizes(p);
  p.use_cp = GDN_CP_AUTO;
  p.phase = phase;
  p.open = c.initial_state != nullptr;
  p.mapped = c.offset != nullptr;
  GDN_REQUIRE(p.mapped || c.transition == nullptr,
              "offset: NULL given with a transition, both or neither expected");
  GDN_REQUIRE(p.open || c.transition == nullptr,
              "transition: given without initial_state, NULL expected, offset is then the state "
              "after the segment");
  GDN_REQUIRE(!p.open || !p.mapped || c.transition != nullptr,
              "transition: NULL given with initial_state and offset, [H, K, K] expected");
  check_map_pointer("initial_state", c.initial_state);
  check_map_pointer("transition", c.transition);
  check_map_pointer("offset", c.offset);
  p.initial_state = c.initial_state;
  p.transition = c.transition;
  p.offset = c.offset;
  return p;
}

CombineProblem combine_problem(const gdn_segment_combine_params_t* params) {
  const auto c = read_struct("gdn_segment_combine_params_t", params);
  CombineProblem p;
  p.device = check_device(c.device_type, c.device_id, c.stream);
  p.threads = check_threads(c.parallel_for, c.parallel_for_context, c.num_threads);
  check_count("num_maps", c.num_maps);
  GDN_REQUIRE(c.num_heads >= 1, "num_heads: %lld given, at least 1 expected",
              static_cast<long long>(c.num_heads));
  const Heads heads = check_heads({.q = c.num_heads,
                                   .k = c.num_heads,
                                   .v = c.num_heads,
                                   .dim_k = c.head_dim_k,
                                   .dim_v = c.head_dim_v});
  p.num_maps = c.num_maps;
  p.heads = heads.state;
  p.dim_k = heads.dim_k;
  p.dim_v = heads.dim_v;
  const auto stride = [](const char* name, int64_t given, int64_t dense) {
    GDN_REQUIRE(given == 0 || given >= dense,
                "%s: %lld given, 0 (dense) or at least %lld elements expected", name,
                static_cast<long long>(given), static_cast<long long>(dense));
    return given == 0 ? dense : given;
  };
  const int64_t square = static_cast<int64_t>(p.heads) * p.dim_k * p.dim_k;
  p.transition_stride = stride("transition_stride", c.transition_stride, square);
  p.offset_stride = stride("offset_stride", c.offset_stride, heads.state_elements());
  const bool reads_first = c.initial_state != nullptr;
  GDN_REQUIRE(c.transitions != nullptr || c.num_maps <= (reads_first ? 0 : 1),
              "transitions: NULL given, [num_maps, H, K, K] expected");
  GDN_REQUIRE(c.offsets != nullptr || c.num_maps == 0,
              "offsets: NULL given, [num_maps, H, V, K] expected");
  GDN_REQUIRE(c.state != nullptr, "state: NULL given, [H, V, K] expected");
  p.transitions = c.transitions;
  p.offsets = c.offsets;
  p.initial_state = c.initial_state;
  p.state = c.state;
  return p;
}

}  // namespace gdn

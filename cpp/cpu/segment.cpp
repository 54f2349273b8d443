// A part of a prompt on the CPU, by two ordinary prefills for the map: N is where the zero state
// ends, and M is where the identity ends if every v is zero.
#include "core/segment.h"

#include <algorithm>
#include <cstring>

#include "core/slots.h"
#include "core/workspace.h"
#include "cpu/operand.h"
#include "cpu/units.h"

namespace gdn {
namespace {

using namespace cpu;

// Outputs that nobody reads, and a v of zeros.
struct Layout {
  WorkspacePlan workspace;
  WorkspacePlan::Region sink, zeros;

  explicit Layout(const SegmentProblem& p) {
    const Heads& h = p.heads;
    const int64_t most = std::max(h.dim_k, h.dim_v), bytes = element_bytes(p.io);
    sink = workspace.add(static_cast<size_t>(h.state * most * bytes));
    zeros = workspace.add(static_cast<size_t>(h.dim_k * bytes));
  }
};

Pool one_state(const void* state, DType dtype, int64_t elements) {
  return {.data = const_cast<void*>(state), .dtype = dtype, .num_rows = 1, .row_stride = elements};
}

// The slot form of one sequence, by numbers instead of tables.
struct Slots {
  int64_t prefix, read_row, write_row, checkpoint_start;

  static IndexTable table(const int64_t& value) {
    return {.data = &value, .size = 1, .is_int64 = true};
  }
  PrefillProblem apply(const PrefillProblem& p) const {
    PrefillProblem call = p;
    call.paged = false;
    call.slots_given = false;
    call.prefix_lens = table(prefix);
    call.state_indices = table(read_row);
    call.output_state_indices = table(write_row);
    call.checkpoint_starts = table(checkpoint_start);
    return call;
  }
};

// The map of no token.
void write_identity(const SegmentProblem& p) {
  const int64_t heads = p.heads.state, k = p.heads.dim_k;
  std::memset(p.offset, 0, static_cast<size_t>(p.heads.state_elements()) * sizeof(float));
  if (p.transition == nullptr) return;
  std::memset(p.transition, 0, static_cast<size_t>(heads * k * k) * sizeof(float));
  for (int64_t i = 0; i < heads * k; ++i) p.transition[i * k + i % k] = 1.0f;
}

void begin(const SegmentProblem& p, const Layout& layout) {
  if (!p.mapped) return;
  write_identity(p);
  const Sequence s = resolve_sequence(p, 0);
  if (!s.live || s.length == 0) return;
  const Heads& h = p.heads;
  const bool reads_page = !p.open && s.read_row >= 0;
  const Slots slots = {
      .prefix = s.prefix, .read_row = reads_page ? 0 : -1, .write_row = 0, .checkpoint_start = 0};
  PrefillProblem call = slots.apply(p);
  call.checkpoints = {};
  call.output = {.data = WorkspacePlan::carve<char>(p.workspace, layout.sink),
                 .dtype = p.io,
                 .row_stride = 0,
                 .head_stride = std::max(h.dim_k, h.dim_v)};
  call.initial = {};
  if (reads_page) {
    call.initial = one_state(state_address(p.initial, h, s.read_row, 0, 0), p.initial.dtype,
                             h.state_elements());
  }
  call.output_state = one_state(p.offset, DType::kFloat32, h.state_elements());
  kPrefillCpu.launch(call);
  if (!p.open) return;

  auto* zeros = WorkspacePlan::carve<char>(p.workspace, layout.zeros);
  std::memset(zeros, 0, layout.zeros.bytes);
  const Slots in_place = {.prefix = s.prefix, .read_row = 0, .write_row = 0, .checkpoint_start = 0};
  PrefillProblem identity = in_place.apply(call);
  identity.heads.dim_v = h.dim_k;
  identity.v = {.data = zeros, .dtype = p.io, .row_stride = 0, .head_stride = 0};
  identity.initial = identity.output_state =
      one_state(p.transition, DType::kFloat32, identity.heads.state_elements());
  kPrefillCpu.launch(identity);
}

void finish(const SegmentProblem& p) {
  const Sequence s = resolve_sequence(p, 0);
  if (!p.open || !s.live) return kPrefillCpu.launch(p);
  const Slots slots = {.prefix = s.prefix,
                       .read_row = 0,
                       .write_row = s.write_row,
                       .checkpoint_start = s.checkpoint_start};
  PrefillProblem call = slots.apply(p);
  call.initial = one_state(p.initial_state, DType::kFloat32, p.heads.state_elements());
  kPrefillCpu.launch(call);
}

// One row of the state: next = state M + N. An element of M that is 0 drops what the state holds
// there even if that is not finite: behind a reset M is zero.
void combine_row(const CombineProblem& p, const float* m, const float* n, const float* state,
                 float* next) {
  std::copy(n, n + p.dim_k, next);
  if (state == nullptr) return;
  for (int64_t j = 0; j < p.dim_k; ++j, m += p.dim_k) {
    const float s = state[j];
    if (s == 0.0f) continue;
    for (int64_t c = 0; c < p.dim_k; ++c) next[c] += m[c] == 0.0f ? 0.0f : s * m[c];
  }
}

}  // namespace

void combine_segments_cpu(const CombineProblem& p) {
  const int64_t k = p.dim_k, v = p.dim_v;
  Threads threads = p.threads;
  const int32_t count = threads_for_pass(p.num_maps * p.heads * v * k, &threads);
  const size_t scratch_bytes = 2 * static_cast<size_t>(k) * sizeof(float);
  for_units(threads, count, p.heads * v, scratch_bytes, [&](int64_t i, float* scratch) {
    const int64_t head = i / v;
    const float* state = p.initial_state == nullptr ? nullptr : p.initial_state + i * k;
    for (int64_t map = 0; map < p.num_maps; ++map) {
      float* const next = scratch + map % 2 * k;
      const float* m = p.transitions + map * p.transition_stride + head * k * k;
      combine_row(p, m, p.offsets + map * p.offset_stride + i * k, state, next);
      state = next;
    }
    float* const target = p.state + i * k;
    if (state == nullptr) {
      std::fill(target, target + k, 0.0f);
    } else if (state != target) {
      std::copy(state, state + k, target);
    }
  });
}

const SegmentRow kSegmentCpu = {
    .name = "cpu",
    .description = [] { return kPrefillCpu.description(); },
    .refuse = [](const SegmentProblem& p) { return refuse_operands(p.device, p.heads); },
    .workspace = [](const SegmentProblem& p) { return Layout(p).workspace.total(); },
    .launch =
        [](const SegmentProblem& p) {
          const Layout layout(p);
          layout.workspace.check("workspace", p.workspace, p.workspace_bytes);
          p.phase == SegmentPhase::kBegin ? begin(p, layout) : finish(p);
        },
};

}  // namespace gdn

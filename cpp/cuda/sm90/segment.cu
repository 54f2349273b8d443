// The row cuda_sm90 of a part of a prompt: a prefill in two halves. Begin runs prepare and the
// summary over all chunks and carries the maps of the pieces to that of the part (carry.cuh);
// finish carries the state that came meanwhile to every piece and runs the scan.
//
// Between the two the workspace holds That and the gates of all chunks: there are no slabs.
#include "core/segment.h"
#include "core/text.h"
#include "cuda/common/device.h"
#include "cuda/sm80/prefill.cuh"
#include "cuda/sm90/carry.cuh"
#include "cuda/sm90/prefill.cuh"

namespace gdn {
namespace {

using sm90::CarryParams;
using sm90::GateBlock;
using sm90::HopperParams;

// Pieces that the part is cut into: the shortest time by the figures of segment_choice.h.
int32_t choose_pieces(const SegmentProblem& p) {
  const int32_t heads = p.heads.state, blocks = device_info(p.device.id).num_sms;
  const auto chunks = static_cast<int32_t>(chunk_bound(p));
  const sm90::SegmentParams kind = {.open = p.open, .mapped = p.mapped};
  int32_t best = 1;
  float best_time = sm90::kNoWay;
  for (int32_t pieces = 1; pieces <= std::min(sm90::kMaxPieces, chunks); ++pieces) {
    if (pieces > 2 && pieces * heads > 3 * blocks) break;  // the states of so many take memory
    const auto length = static_cast<float>(sm90::divide_up(chunks, pieces));
    const auto scans = static_cast<float>(pieces * heads);
    const auto maps = static_cast<float>(sm90::summary_items(kind, pieces) * heads);
    const float waves = sm90::even_share(scans, blocks);
    const bool halves = sm90::scan_in_halves(pieces * heads, blocks);
    const float each = halves ? sm90::kHalfScanCost : sm90::kScanCost;
    const float scan = each * waves * length + sm90::kItemCost * (waves - 1.0f);
    const float summary = sm90::summary_in_pieces(maps, length, blocks)
                              ? sm90::summary_in_line(maps, length, blocks)
                              : sm90::summary_in_waves(maps, length, blocks);
    const float time = scan + summary + 2 * sm90::kCombineCost * static_cast<float>(pieces);
    if (time >= best_time) continue;
    best_time = time;
    best = pieces;
  }
  return best;
}

struct Layout {
  WorkspacePlan workspace;
  WorkspacePlan::Region plan, state, states, transitions, resets, inverses, gates;
  WorkspacePlan::Region piece_states, pieces_written;  // where summaries are shared out evenly
  int32_t pieces = 0;

  explicit Layout(const SegmentProblem& p) : pieces(choose_pieces(p)) {
    const size_t heads = p.heads.state, records = static_cast<size_t>(chunk_bound(p)) * heads;
    plan = workspace.add(plan_bytes(p));
    state = workspace.add(sizeof(sm90::SlabState));
    // One more: N of the last piece.
    states = workspace.add((pieces + 1) * heads * sm90::kDim * sm90::kDim * sizeof(float));
    transitions = workspace.add(pieces * heads * sm90::kTransitionVectors * sizeof(uint4));
    resets = workspace.add(pieces * heads * sizeof(int32_t));
    const size_t blocks = device_info(p.device.id).num_sms;
    piece_states = workspace.add(blocks * sm90::kDim * sm90::kDim * sizeof(float));
    pieces_written = workspace.add(blocks * sm90::ScanTraits::kStateWarps * sizeof(int32_t));
    inverses = workspace.add(records * sm90::kInverseBytes);
    gates = workspace.add(records * sizeof(GateBlock));
  }
};

HopperParams segment_params(const SegmentProblem& p, const Layout& layout) {
  HopperParams params = sm90::call_of(p, WorkspacePlan::carve<char>(p.workspace, layout.plan));
  params.call.slab_chunks = static_cast<int32_t>(chunk_bound(p));
  params.inverses = WorkspacePlan::carve<uint8_t>(p.workspace, layout.inverses);
  params.gates = WorkspacePlan::carve<GateBlock>(p.workspace, layout.gates);
  params.state = WorkspacePlan::carve<sm90::SlabState>(p.workspace, layout.state);
  params.segments = {.states = WorkspacePlan::carve<float>(p.workspace, layout.states),
                     .transitions = WorkspacePlan::carve<uint4>(p.workspace, layout.transitions),
                     .resets = WorkspacePlan::carve<int32_t>(p.workspace, layout.resets),
                     .capacity = layout.pieces,
                     .num_blocks = device_info(p.device.id).num_sms,
                     .pieces = layout.pieces,
                     .open = p.open,
                     .mapped = p.mapped};
  params.pieces = {.states = WorkspacePlan::carve<float>(p.workspace, layout.piece_states),
                   .written = WorkspacePlan::carve<int32_t>(p.workspace, layout.pieces_written),
                   .count = params.segments.num_blocks};
  params.num_slabs = 1;
  return params;
}

template <int kTiles>
void launch_carry(const CarryParams& carry, const SegmentProblem& p) {
  launch(sm90::carry_states<kTiles>,
         {.blocks = carry.segments.num_blocks,
          .threads = sm90::CombineTraits<kTiles>::kThreads,
          .stream = p.device.stream,
          .early_start = true},
         carry, "carry_states");
}

void launch_carry(const HopperParams& params, const SegmentProblem& p, const float* initial) {
  const CarryParams carry = {.segments = params.segments,
                             .state = params.state,
                             .heads = p.heads.state,
                             .initial = initial,
                             .transition = p.transition,
                             .offset = p.offset};
  p.heads.state <= 16 ? launch_carry<1>(carry, p) : launch_carry<2>(carry, p);
}

template <class T>
void launch_begin(const SegmentProblem& p, const Layout& layout, const HopperParams& params) {
  plan_of(p, WorkspacePlan::carve<char>(p.workspace, layout.plan));
  sm90::launch_prepare<T>(params, p.device);
  const bool first_alone = layout.pieces == 1 && !p.mapped;
  if (first_alone) return;  // nothing is open, or nobody asks
  sm90::launch_summaries<T>(params, p.device);
  if (p.mapped || !p.open) launch_carry(params, p, nullptr);
}

template <class T>
void launch_finish(const SegmentProblem& p, const HopperParams& params) {
  if (p.open) launch_carry(params, p, p.initial_state);
  sm90::launch_scan<T>(params, p.device);
}

void launch_segment(const SegmentProblem& given) {
  SegmentProblem p = given;
  p.batch_invariant = true;  // chunks, however few the tokens are (common/short_sequence.h)
  const LaunchScope scope(p.device);
  const Layout layout(p);
  layout.workspace.check("workspace", p.workspace, p.workspace_bytes);
  const HopperParams params = segment_params(p, layout);
  const bool begins = p.phase == SegmentPhase::kBegin;
  if (p.io == DType::kBFloat16) {
    begins ? launch_begin<bf16>(p, layout, params) : launch_finish<bf16>(p, params);
  } else {
    begins ? launch_begin<fp16>(p, layout, params) : launch_finish<fp16>(p, params);
  }
}

}  // namespace

void load_segment_sm90_kernels() {
  load_kernel(sm90::carry_states<1>, "carry_states");
  load_kernel(sm90::carry_states<2>, "carry_states");
}

const SegmentRow kSegmentCudaSm90 = {
    .name = "cuda_sm90",
    .description = [] { return kPrefillCudaSm90.description(); },
    .refuse = [](const SegmentProblem& p) { return sm90::refuse_call(p); },
    .workspace = [](const SegmentProblem& p) { return Layout(p).workspace.total(); },
    .launch = launch_segment,
    .explain =
        [](const SegmentProblem& p, Text* text) {
          text->add("  regime: a segment in two halves, %d pieces at most\n", choose_pieces(p));
        },
};

}  // namespace gdn

// The row cuda_sm90 of prefill: what it refuses, its workspace, and the call.
#include "core/kernel.h"
#include "core/slots.h"
#include "core/text.h"
#include "cuda/short/short.h"
#include "cuda/sm80/prefill.cuh"
#include "cuda/sm90/prefill.cuh"
#include "cuda/sm90/tensor_map.h"

namespace gdn {
namespace {

// Shorter sequences do not pay for the two kernels of segments.
constexpr int64_t kLeastCutTokens = 2048;

using sm90::GateBlock;
using sm90::HopperParams;

// Segments that sequences may be cut into, from host integers; 0: the kernels of segments are not
// launched. More than two waves of them never pay (README.md).
int32_t segment_bound(const PrefillProblem& p) {
  const int32_t heads = p.heads.state, blocks = device_info(p.device.id).num_sms;
  const int64_t longest = p.max_seqlen > 0 ? std::min(p.max_seqlen, p.num_tokens) : p.num_tokens;
  const int64_t chunks = most_chunks(chunk_grid(p.checkpoint_every), longest, 1);
  if (p.use_cp == GDN_CP_OFF || p.batch_invariant || chunks < 2) return 0;
  if (heads > 2 * blocks) return 0;  // they fill the GPU, and two segments of them much memory
  const bool pays = longest >= kLeastCutTokens &&
                    sm90::may_pay(static_cast<int32_t>(chunks), chunk_bound(p), heads, blocks);
  return pays || p.use_cp == GDN_CP_ON ? std::max(2 * blocks / heads, 2) : 0;
}

sm90::SegmentParams segment_limits(const PrefillProblem& p) {
  return {.capacity = segment_bound(p),
          .num_blocks = device_info(p.device.id).num_sms,
          .min_chunks = 1,
          .max_chunks = INT32_MAX,
          .demanded = p.use_cp == GDN_CP_ON};
}

// The size query and the launch build this from the same integers.
struct HopperLayout {
  WorkspacePlan workspace;
  WorkspacePlan::Region plan, state, states, transitions, resets, steps, handover, inverses, gates;
  WorkspacePlan::Region piece_states, pieces_written;
  int32_t pieces = 0;    // that items are shared out in
  int32_t segments = 0;  // of sequences that are cut
  int32_t slab_chunks = 0;
  int32_t num_slabs = 0;

  explicit HopperLayout(const PrefillProblem& p) {
    const int64_t bound = chunk_bound(p), heads = p.heads.state;
    const int64_t each = heads * (sm90::kInverseBytes + static_cast<int64_t>(sizeof(GateBlock)));
    const size_t handover_bytes = 2 * p.heads.state_elements() * sizeof(float);
    plan = workspace.add(plan_bytes(p));
    state = workspace.add(sizeof(sm90::SlabState));
    segments = segment_bound(p);
    const size_t maps = static_cast<size_t>(segments * heads);
    states = workspace.add(maps * sm90::kDim * sm90::kDim * sizeof(float));
    transitions = workspace.add(maps * sm90::kTransitionVectors * sizeof(uint4));
    resets = workspace.add(maps * sizeof(int32_t));
    steps = workspace.add(maps * sm90::ScanTraits::kStateWarps * sizeof(int32_t));
    // Items of one wave stay whole, and many sequences fill the last wave by themselves.
    const int32_t blocks = device_info(p.device.id).num_sms;
    const int64_t sequences = entry_bound(p);
    if (sequences * heads > blocks && sequences <= sm90::kMaxCutSequences) pieces = blocks;
    if (segments > 0) pieces = blocks;
    piece_states = workspace.add(sizeof(float) * pieces * sm90::kDim * sm90::kDim);
    pieces_written = workspace.add(sizeof(int32_t) * pieces * sm90::ScanTraits::kStateWarps);
    int64_t room = kPrefillWorkspaceLimit - static_cast<int64_t>(workspace.total());
    if (bound * each > room) {
      handover = workspace.add(handover_bytes);
      room -= static_cast<int64_t>(handover_bytes);
    }
    const int64_t capacity = std::max<int64_t>(room / each, 1);
    num_slabs = static_cast<int32_t>((bound + capacity - 1) / capacity);
    slab_chunks = static_cast<int32_t>(num_slabs > 0 ? (bound + num_slabs - 1) / num_slabs : 0);
    inverses = workspace.add(static_cast<size_t>(slab_chunks * heads) * sm90::kInverseBytes);
    gates = workspace.add(static_cast<size_t>(slab_chunks * heads) * sizeof(GateBlock));
  }
};

// The scan moves pairs of state elements.
bool pairs_aligned(const Pool& pool) {
  const uintptr_t bytes = pool.dtype == DType::kFloat32 ? 8 : 4;
  return !pool || (reinterpret_cast<uintptr_t>(pool.data) % bytes == 0 && pool.row_stride % 2 == 0);
}

const char* refuse(const PrefillProblem& p) {
  const Heads& h = p.heads;
  if (p.device.type != GDN_CUDA_DEVICE) return "it runs on CUDA devices";
  if (device_info(p.device.id).compute_capability != 90) return "the GPU is not an sm_90";
  if (h.dim_k != sm90::kDim || h.dim_v != sm90::kDim) return "head_dim is not 128";
  if (p.io == DType::kFloat32) return "q, k, v are fp32; served: bf16 and fp16";
  if (p.use_cp == GDN_CP_ON && p.batch_invariant) {
    return "use_cp = GDN_CP_ON cuts sequences by what else is in the batch, which "
           "GDN_BATCH_INVARIANT forbids";
  }
  if (entry_bound(p) > kMaxSequences) return "more than 4194304 sequences in one call";
  if (HopperLayout(p).workspace.total() > 256'000'000) {
    return "one chunk of this many heads needs more than 256 MB of workspace";
  }
  if (!sm90::fits_tensor_map(p.q, h.q)) return "q: not 16-byte rows that the copy engine takes";
  if (!sm90::fits_tensor_map(p.k, h.k)) return "k: not 16-byte rows that the copy engine takes";
  if (!sm90::fits_tensor_map(p.v, h.v)) return "v: not 16-byte rows that the copy engine takes";
  if (!sm90::fits_tensor_map(p.output, h.state)) {
    return "output: not 16-byte rows that the copy engine takes";
  }
  if (!pairs_aligned(p.initial) || !pairs_aligned(p.output_state) ||
      !pairs_aligned(p.checkpoints)) {
    return "a state pool is not aligned to pairs of elements";
  }
  return nullptr;
}

// New chunks of a sequence whose prefix the host does not know: some less or more are possible.
int32_t host_chunks(const PrefillProblem& p, int64_t b) {
  int64_t begin = 0, length = 0;
  token_range(p.cu_seqlens_host, p.num_tokens, b, &begin, &length);
  const ChunkGrid grid = chunk_grid(p.checkpoint_every);
  return static_cast<int32_t>(chunks_of_rows(grid, grid.page_chunks, length));
}

// The way the device takes at these lengths; 0: no sequence is cut.
int32_t expected_segment_chunks(const PrefillProblem& p) {
  const sm90::SegmentParams limits = segment_limits(p);
  int32_t longest = 0, present = 0;
  int64_t all = 0;
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    const int32_t chunks = host_chunks(p, b);
    longest = std::max(longest, chunks);
    present += chunks > 0;
    all += chunks;
  }
  const bool wanted =
      limits.demanded || sm90::may_pay(longest, all, p.heads.state, limits.num_blocks);
  if (longest < 2 || present > sm90::kMaxCutSequences || !wanted) return 0;
  int32_t best_chunks = 0;
  float best = sm90::kNoWay;
  for (int32_t pieces = 1; pieces <= sm90::kMaxPieces; ++pieces) {
    const int32_t length = sm90::candidate_chunks(limits, longest, pieces);
    sm90::SegmentTally tally = {};
    for (int64_t b = 0; b < p.num_seqs; ++b) tally.add(host_chunks(p, b), length);
    const float cost = sm90::segment_cost(limits, tally, p.heads.state, longest, length);
    if (cost >= best) continue;
    best = cost;
    best_chunks = tally.cut > 0 ? length : 0;
  }
  return best_chunks;
}

// Whether two blocks share a segment or sequence of a head; segment_chunks of 0: none is cut.
void explain_halves(const PrefillProblem& p, int32_t segment_chunks, Text* text) {
  if (!p.cu_seqlens_host) return;
  int64_t items = 0;
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    const int32_t chunks = host_chunks(p, b);
    items += segment_chunks > 0 ? sm90::divide_up(chunks, segment_chunks) : chunks > 0;
  }
  items *= p.heads.state;
  const int32_t blocks = device_info(p.device.id).num_sms;
  if (items > 0 && items <= blocks && sm90::scan_in_halves(static_cast<int32_t>(items), blocks)) {
    text->add("  scan: %lld of them and heads, two blocks for each, 64 rows of V a block\n",
              static_cast<long long>(items));
  }
}

void explain_regime(const PrefillProblem& p, Text* text) {
  constexpr int64_t kShown = 16;
  explain_short(p, text);
  if (short_regime(p) == ShortRegime::kAll) return;
  if (segment_bound(p) == 0) {
    text->add("  regime: every sequence in one pass; no context parallelism (%s)\n",
              p.use_cp == GDN_CP_OFF ? "use_cp forbids it"
              : p.batch_invariant    ? "batch-invariant"
                                     : "the batch fills the GPU, or is short");
    return explain_halves(p, 0, text);
  }
  if (!p.cu_seqlens_host) {
    return text->add(
        "  regime: the device cuts sequences by their true lengths, %d segments at "
        "most; with cu_seqlens_cpu this says which\n",
        segment_bound(p));
  }
  const int32_t chunks = expected_segment_chunks(p);
  if (chunks == 0) {
    text->add("  regime: every sequence in one pass at these lengths\n");
    return explain_halves(p, 0, text);
  }
  const ChunkGrid grid = chunk_grid(p.checkpoint_every);
  text->add("  regime: context parallel, segments of %d tokens:",
            static_cast<int>(rows_before(grid, grid.page_chunks, chunks)));
  for (int64_t b = 0; b < std::min(p.num_seqs, kShown); ++b) {
    text->add("%s sequence %lld in %d", b == 0 ? "" : ",", static_cast<long long>(b),
              sm90::divide_up(host_chunks(p, b), chunks));
  }
  text->add(p.num_seqs > kShown ? ", ...\n" : "\n");
  explain_halves(p, chunks, text);
}

PrefillParams kernel_params(const PrefillProblem& p) {
  PrefillParams params = call_params(p);
  params.group = p.heads.state / p.heads.k;
  params.units = p.heads.k;
  return params;
}

HopperParams hopper_params(const PrefillProblem& p, const HopperLayout& layout, char* plan) {
  HopperParams params = sm90::call_of(p, plan);
  params.call.slab_chunks = layout.slab_chunks;
  params.inverses = WorkspacePlan::carve<uint8_t>(p.workspace, layout.inverses);
  params.gates = WorkspacePlan::carve<GateBlock>(p.workspace, layout.gates);
  params.state = WorkspacePlan::carve<sm90::SlabState>(p.workspace, layout.state);
  params.segments = segment_limits(p);
  params.segments.states = WorkspacePlan::carve<float>(p.workspace, layout.states);
  params.segments.transitions = WorkspacePlan::carve<uint4>(p.workspace, layout.transitions);
  params.segments.resets = WorkspacePlan::carve<int32_t>(p.workspace, layout.resets);
  params.segments.steps = WorkspacePlan::carve<int32_t>(p.workspace, layout.steps);
  params.pieces = {.states = WorkspacePlan::carve<float>(p.workspace, layout.piece_states),
                   .written = WorkspacePlan::carve<int32_t>(p.workspace, layout.pieces_written),
                   .count = layout.pieces};
  params.num_slabs = layout.num_slabs;
  return params;
}

template <class T>
void launch_slabs(const PrefillProblem& p, const HopperLayout& layout, HopperParams& params) {
  float* handover = WorkspacePlan::carve<float>(p.workspace, layout.handover);
  const int64_t state_elements = p.heads.state_elements();
  for (params.slab = 0; params.slab < layout.num_slabs; ++params.slab) {
    // The two buffers take turns: one slab may end one sequence and cut another.
    params.call.handover_in = handover + (params.slab & 1) * state_elements;
    params.call.handover_out = handover + (~params.slab & 1) * state_elements;
    sm90::launch_prepare<T>(params, p.device);
    if (layout.segments > 0) sm90::launch_summaries<T>(params, p.device);
    sm90::launch_scan<T>(params, p.device);
  }
}

void launch_prefill_sm90(const PrefillProblem& p) {
  const LaunchScope scope(p.device);
  const HopperLayout layout(p);
  layout.workspace.check("workspace", p.workspace, p.workspace_bytes);
  auto* plan = static_cast<char*>(plan_of(p, WorkspacePlan::carve<char>(p.workspace, layout.plan)));
  HopperParams params = hopper_params(p, layout, plan);
  if (p.io == DType::kBFloat16) {
    launch_slabs<bf16>(p, layout, params);
  } else {
    launch_slabs<fp16>(p, layout, params);
  }
  launch_short_of_plan(p, plan);
}

}  // namespace

const char* sm90::refuse_call(const PrefillProblem& p) { return refuse(p); }

HopperParams sm90::call_of(const PrefillProblem& p, char* plan) {
  HopperParams params = {};
  params.q_map = make_tensor_map(p.q, p.heads.q, p.num_tokens, "q");
  params.k_map = make_tensor_map(p.k, p.heads.k, p.num_tokens, "k");
  params.v_map = make_tensor_map(p.v, p.heads.v, p.num_tokens, "v");
  params.output_map = make_tensor_map(p.output, p.heads.state, p.num_tokens, "output");
  params.call = kernel_params(p);
  params.call.plan = reinterpret_cast<const PlanHeader*>(plan);
  params.call.entries = reinterpret_cast<const SequenceEntry*>(plan + kWorkspaceAlignment);
  params.call.entry_bound = entry_bound(p);
  return params;
}

void load_prefill_sm90_kernels() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "current CUDA device");
  int major = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "reading the CUDA device");
  if (major != 9) return;
  sm90::load_kernels<bf16>();
  sm90::load_kernels<fp16>();
  load_segment_sm90_kernels();
}

const PrefillRow kPrefillCudaSm90 = {
    .name = "cuda_sm90",
    .description = [] { return "wgmma and the bulk copy engine, sm_90; head size 128"; },
    .refuse = refuse,
    // A size query may come without addresses, and those may leave the call to the portable row:
    // the size does for both.
    .workspace =
        [](const PrefillProblem& p) {
          const size_t chunks = HopperLayout(p).workspace.total();
          return std::max(prefill_workspace(p, chunks), kPrefillCudaPortable.workspace(p));
        },
    .launch =
        [](const PrefillProblem& p) {
          if (p.num_seqs == 0 || p.num_tokens == 0) return;
          if (short_regime(p) == ShortRegime::kAll) return launch_short(p);
          launch_prefill_sm90(p);
        },
    .explain = explain_regime,
};

}  // namespace gdn

// The row cuda_portable of prefill: what it refuses, its workspace, and the call.
#include <cmath>

#include "core/kernel.h"
#include "core/text.h"
#include "cuda/short/short.h"
#include "cuda/sm80/plan.cuh"
#include "cuda/sm80/prefill.cuh"

namespace gdn {
namespace {

bool aligned(const Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.row_stride % 8 == 0 &&
         x.head_stride % 8 == 0;
}

// Pairs of elements in every row.
bool aligned(const Pool& pool) {
  const uintptr_t bytes = pool.dtype == DType::kFloat32 ? 8 : 4;
  return !pool || (reinterpret_cast<uintptr_t>(pool.data) % bytes == 0 && pool.row_stride % 2 == 0);
}

PrefillParams prefill_params(const PrefillProblem& p) {
  PrefillParams params = call_params(p);
  params.group = static_cast<int32_t>(unit_heads(p.heads));
  params.units = p.heads.state / params.group;
  params.heads_per_q = small_divisor(p.heads.state / p.heads.q);
  params.heads_per_k = small_divisor(p.heads.state / p.heads.k);
  params.log2_scale = std::log2(std::fabs(p.scale));
  params.vector_qk = aligned(p.q) && aligned(p.k);
  params.vector_v = aligned(p.v);
  params.vector_output = reinterpret_cast<uintptr_t>(p.output.data) % 4 == 0 &&
                         p.output.row_stride % 2 == 0 && p.output.head_stride % 2 == 0;
  params.vector_state = aligned(p.initial) && aligned(p.output_state) && aligned(p.checkpoints);
  params.staging = least_staging(p);
  params.staging.qk |= !params.vector_qk;
  params.staging.v |= !params.vector_v;
  return params;
}

void launch_plan(const PrefillProblem& p, void* plan) {
  const int64_t threads = std::clamp<int64_t>((p.num_seqs + 31) / 32 * 32, 32, kPlanThreads);
  const PlanParams params = {
      .problem = p,
      .header = static_cast<PlanHeader*>(plan),
      .entries = reinterpret_cast<SequenceEntry*>(static_cast<char*>(plan) + kWorkspaceAlignment),
      .entry_bound = entry_bound(p),
      .chunk_bound = chunk_bound(p),
      .short_tokens = short_regime(p) == ShortRegime::kNone ? 0 : kShortTokens,
      .grid = chunk_grid(p.checkpoint_every)};
  launch(prefill_plan,
         {.blocks = 1, .threads = static_cast<int32_t>(threads), .stream = p.device.stream}, params,
         "prefill_plan");
}

void check_plan(const PrefillProblem& p) {
  WorkspacePlan plan;
  plan.add(plan_bytes(p));
  plan.check("plan", p.plan, p.plan_bytes);
}

// Tiles of one slab lie behind each other in one region.
void place_tiles(PrefillParams& params, char* tiles) {
  const int64_t chunks = params.slab_chunks, heads = params.heads.state;
  const int64_t tile_elements = kChunk * params.heads.dim_k;
  params.records = reinterpret_cast<ChunkRecord*>(tiles);
  auto* staged = reinterpret_cast<bf16*>(params.records + chunks * heads);
  if (params.staging.qk) {
    params.staged_q = staged;
    params.staged_k = params.staged_q + chunks * params.units * tile_elements;
    staged = params.staged_k + chunks * params.units * tile_elements;
  }
  if (params.staging.v) params.staged_v = staged;
}

const char* refuse(const PrefillProblem& p) {
  const Heads& h = p.heads;
  if (p.device.type != GDN_CUDA_DEVICE) return "it runs on CUDA devices";
  if (p.io == DType::kFloat32) return "q, k, v are fp32; served: bf16 and fp16";
  if (h.dim_k != h.dim_v) return "head_dim_k and head_dim_v differ; served: 64 and 128, equal";
  if (h.dim_k != 64 && h.dim_k != 128) return "head_dim is not 64 or 128";
  if (p.use_cp == GDN_CP_ON) return "use_cp = GDN_CP_ON, and this row has no context parallelism";
  if (entry_bound(p) > kMaxSequences) return "more than 4194304 sequences in one call";
  if (PrefillLayout(p).workspace.total() > 256'000'000) {
    return "one chunk of this many heads needs more than 256 MB of workspace";
  }
  if (device_info(p.device.id).compute_capability < 80) return "the GPU is older than sm_80";
  return nullptr;
}

}  // namespace

PrefillParams call_params(const PrefillProblem& p) {
  PrefillParams params;
  params.heads = p.heads;
  params.io_fp16 = p.io == DType::kFloat16;
  params.qk_l2norm = p.qk_l2norm;
  params.scale = p.scale;
  params.q = p.q;
  params.k = p.k;
  params.v = p.v;
  params.output = p.output;
  params.gates = p.gates;
  params.initial = p.initial;
  params.output_state = p.output_state;
  params.checkpoints = p.checkpoints;
  params.checkpoint_indices = p.checkpoint_indices;
  params.grid = chunk_grid(p.checkpoint_every);
  if (p.checkpoint_every == 0) params.checkpoints = {};
  return params;
}

void* plan_of(const PrefillProblem& p, void* own) {
  if (p.plan != nullptr) {
    check_plan(p);
    return p.plan;
  }
  launch_plan(p, own);
  return own;
}

void make_plan(const PrefillProblem& p) {
  if (p.num_seqs == 0 || p.num_tokens == 0) return;
  const LaunchScope scope(p.device);
  check_plan(p);
  launch_plan(p, p.plan);
}

const PlanKernels kPlanCuda = {.size = plan_bytes, .make = make_plan};

size_t prefill_workspace(const PrefillProblem& p, size_t chunks) {
  return short_regime(p) == ShortRegime::kAll ? 0 : chunks;
}

// A plan of the caller's may list short sequences that this call itself would run in chunks.
void launch_short_of_plan(const PrefillProblem& p, const void* plan) {
  if (short_regime(p) != ShortRegime::kMixed && (p.plan == nullptr || p.num_seqs == 1)) return;
  const auto* entries =
      reinterpret_cast<const ShortEntry*>(static_cast<const char*>(plan) + kWorkspaceAlignment);
  launch_listed_short(p, static_cast<const PlanHeader*>(plan), entries + entry_bound(p) - 1);
}

// NOTE: 8192x4 with 8 heads: 335 us narrow, 413 wide; 4096x8: 244 narrow, 233 wide (H200).
ScanShape prefill_shape(const PrefillProblem& p) {
  const int64_t chains = std::min(entry_bound(p), chunk_bound(p)) * p.heads.state;
  const int64_t narrow_blocks = chains * (p.heads.dim_v / 32);
  return narrow_blocks <= device_info(p.device.id).num_sms ? ScanShape::kNarrow : ScanShape::kWide;
}

void launch_prefill(const PrefillProblem& p, ScanShape shape) {
  const LaunchScope scope(p.device);
  const PrefillLayout layout(p);
  layout.workspace.check("workspace", p.workspace, p.workspace_bytes);
  void* plan = plan_of(p, WorkspacePlan::carve<char>(p.workspace, layout.plan));
  PrefillParams params = prefill_params(p);
  params.plan = static_cast<const PlanHeader*>(plan);
  params.entries =
      reinterpret_cast<const SequenceEntry*>(static_cast<char*>(plan) + kWorkspaceAlignment);
  params.entry_bound = entry_bound(p);
  const int64_t bound = chunk_bound(p);
  const int64_t capacity = std::min(bound, layout.slab_chunks(p, params.staging));
  const int64_t slabs = (bound + capacity - 1) / capacity;
  params.slab_chunks = static_cast<int32_t>((bound + slabs - 1) / slabs);
  place_tiles(params, WorkspacePlan::carve<char>(p.workspace, layout.chunks));
  float* handover = WorkspacePlan::carve<float>(p.workspace, layout.handover);
  const int64_t state_elements = p.heads.state_elements();
  for (int64_t slab = 0; slab < slabs; ++slab) {
    params.slab_begin = static_cast<int32_t>(slab * params.slab_chunks);
    // The two buffers take turns: one slab may end one sequence and cut another.
    params.handover_in = handover + (slab & 1) * state_elements;
    params.handover_out = handover + (~slab & 1) * state_elements;
    if (p.heads.dim_k == 64) {
      launch_slab<64>(params, p, shape);
    } else {
      launch_slab<128>(params, p, shape);
    }
  }
  launch_short_of_plan(p, plan);
}

void load_prefill_portable_kernels() {
  load_kernel(prefill_plan, "prefill_plan");
  load_prefill_kernels<64>();
  load_prefill_kernels<128>();
}

const PrefillRow kPrefillCudaPortable = {
    .name = "cuda_portable",
    .description = [] { return "mma.sync, any GPU from sm_80; head sizes 64 and 128"; },
    .refuse = refuse,
    .workspace =
        [](const PrefillProblem& p) {
          return prefill_workspace(p, PrefillLayout(p).workspace.total());
        },
    .launch =
        [](const PrefillProblem& p) {
          if (p.num_seqs == 0 || p.num_tokens == 0) return;
          if (short_regime(p) == ShortRegime::kAll) return launch_short(p);
          launch_prefill(p, prefill_shape(p));
        },
    .explain = explain_short,
};

}  // namespace gdn

// The row cuda_sm90 of prefill: what it refuses, its workspace, and the call.
#include "core/kernel.h"
#include "cuda/sm80/prefill.cuh"
#include "cuda/sm90/prefill.cuh"
#include "cuda/sm90/tensor_map.h"

namespace gdn {
namespace {

using sm90::GateBlock;
using sm90::HopperParams;

// The size query and the launch build this from the same integers.
struct HopperLayout {
  WorkspacePlan workspace;
  WorkspacePlan::Region plan, ticket, handover, inverses, gates;
  int32_t slab_chunks = 0;
  int32_t num_slabs = 0;

  explicit HopperLayout(const PrefillProblem& p) {
    const int64_t bound = chunk_bound(p), heads = p.heads.state;
    const int64_t each = heads * (sm90::kInverseBytes + static_cast<int64_t>(sizeof(GateBlock)));
    const size_t handover_bytes = 2 * p.heads.state_elements() * sizeof(float);
    plan = workspace.add(plan_bytes(p));
    ticket = workspace.add(sizeof(int32_t));
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
  if (p.use_cp == GDN_CP_ON) return "use_cp = GDN_CP_ON, and this row has no context parallelism";
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

PrefillParams kernel_params(const PrefillProblem& p) {
  PrefillParams params = call_params(p);
  params.group = p.heads.state / p.heads.k;
  params.units = p.heads.k;
  // Twice this many chunks still count in 32 bits.
  params.checkpoint_chunks = static_cast<int32_t>(
      std::min<int64_t>(std::max<int64_t>(p.checkpoint_every / kChunk, 1), 1 << 30));
  if (p.checkpoint_every == 0) params.checkpoints = {};
  return params;
}

HopperParams hopper_params(const PrefillProblem& p, const HopperLayout& layout, char* plan) {
  HopperParams params = {};
  params.q_map = sm90::make_tensor_map(p.q, p.heads.q, p.num_tokens, "q");
  params.k_map = sm90::make_tensor_map(p.k, p.heads.k, p.num_tokens, "k");
  params.v_map = sm90::make_tensor_map(p.v, p.heads.v, p.num_tokens, "v");
  params.output_map = sm90::make_tensor_map(p.output, p.heads.state, p.num_tokens, "output");
  params.call = kernel_params(p);
  params.call.plan = reinterpret_cast<const PlanHeader*>(plan);
  params.call.entries = reinterpret_cast<const SequenceEntry*>(plan + kWorkspaceAlignment);
  params.call.slab_chunks = layout.slab_chunks;
  params.inverses = WorkspacePlan::carve<uint8_t>(p.workspace, layout.inverses);
  params.gates = WorkspacePlan::carve<GateBlock>(p.workspace, layout.gates);
  params.next_item = WorkspacePlan::carve<int32_t>(p.workspace, layout.ticket);
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
    sm90::launch_scan<T>(params, p.device);
  }
}

void launch_prefill_sm90(const PrefillProblem& p) {
  const LaunchScope scope(p.device);
  const HopperLayout layout(p);
  layout.workspace.check("workspace", p.workspace, p.workspace_bytes);
  HopperParams params = hopper_params(
      p, layout,
      static_cast<char*>(plan_of(p, WorkspacePlan::carve<char>(p.workspace, layout.plan))));
  if (p.io == DType::kBFloat16) {
    launch_slabs<bf16>(p, layout, params);
  } else {
    launch_slabs<fp16>(p, layout, params);
  }
}

}  // namespace

void load_prefill_sm90_kernels() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "current CUDA device");
  int major = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "reading the CUDA device");
  if (major != 9) return;
  sm90::load_kernels<bf16>();
  sm90::load_kernels<fp16>();
}

const PrefillRow kPrefillCudaSm90 = {
    .name = "cuda_sm90",
    .description = [] { return "wgmma and the bulk copy engine, sm_90; head size 128"; },
    .refuse = refuse,
    // A size query may come without addresses, and those may leave the call to the portable row:
    // the size does for both.
    .workspace =
        [](const PrefillProblem& p) {
          return std::max(HopperLayout(p).workspace.total(), kPrefillCudaPortable.workspace(p));
        },
    .launch =
        [](const PrefillProblem& p) {
          if (p.num_seqs > 0 && p.num_tokens > 0) launch_prefill_sm90(p);
        },
};

}  // namespace gdn

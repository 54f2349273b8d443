// The decode row "cuda": what it serves and how a launch is cut.
#include "core/kernel.h"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/decode/cut.h"

namespace gdn {
namespace {

bool is_aligned(const Pool& pool) {
  const int64_t row_bytes = pool.row_stride * (pool.dtype == DType::kFloat32 ? 4 : 2);
  return reinterpret_cast<uintptr_t>(pool.data) % 16 == 0 && row_bytes % 16 == 0;
}

const char* refuse(const DecodeProblem& p) {
  const Heads& heads = p.heads;
  if (p.device.type != GDN_CUDA_DEVICE) return "it runs on CUDA devices";
  if (p.io == DType::kFloat32) return "io_dtype is fp32, bf16 or fp16 needed";
  if (heads.dim_k != heads.dim_v || (heads.dim_k != 64 && heads.dim_k != 128)) {
    return "head_dim_k and head_dim_v must be equal, 64 or 128";
  }
  if (p.initial.dtype != p.output_state.dtype) {
    return "initial_state and output_state must have one dtype";
  }
  if (!is_aligned(p.initial) || !is_aligned(p.output_state)) {
    return "a state pool needs a 16-byte aligned base and row stride";
  }
  if (heads.state > 0xffff) return "more than 65535 heads";
  if (p.batch * heads.state > kMaxBlocks / 4) return "batch_size times heads is 2^29 or more";
  if (device_info(p.device.id).compute_capability < 80) return kNoCodeForDevice;
  return nullptr;
}

template <class State, int kDim>
struct Kernels : DecodeCuts<State, kDim> {
  using Cuts = DecodeCuts<State, kDim>;
  using typename Cuts::Bulk;
  using typename Cuts::Stream;
  using typename Cuts::Tiny;

  static DecodeParams make_params(const DecodeProblem& p, const Cut& cut,
                                  const DeviceInfo& device) {
    const Heads& heads = p.heads;
    DecodeParams params{.problem = p, .groups = cut.groups, .evict_first = cut.evict_first};
    while (cut.groups << params.parts_log2 < Cuts::kMaxGroups) ++params.parts_log2;
    if (cut.split_tail && cut.groups > Bulk::kTile) {
      params.tail_log2 = 1;
      params.tail_block = (p.batch * heads.state - device.num_sms) << params.parts_log2;
    }
    params.heads_per_q = small_divisor(heads.state / heads.q);
    params.heads_per_k = small_divisor(heads.state / heads.k);
    params.heads_per_v = small_divisor(heads.state / heads.v);
    const bool slots_known = !p.paged || p.slots_given;
    if (device.has_dependent_launch() && slots_known) {
      params.expects_row = true;
      params.prefetch_groups = cut.prefetch_groups;
      params.prefetch_blocks =
          cut.prefetch_waves > 0 ? int64_t{cut.prefetch_waves} * cut.blocks_per_sm * device.num_sms
                                 : kMaxBlocks;
    }
    return params;
  }

  static void launch_for(const DecodeProblem& p) {
    const DeviceInfo& device = device_info(p.device.id);
    const int64_t states = p.batch * p.heads.state;
    const Cut cut = Cuts::choose(states, device);
    const DecodeParams params = make_params(p, cut, device);
    int64_t blocks = states << params.parts_log2;
    if (params.tail_log2 > 0) {
      blocks = params.tail_block + ((blocks - params.tail_block) << params.tail_log2);
    }
    launch(kernel_of(cut.kernel),
           {.blocks = blocks,
            .threads = Stream::kThreads,
            .shared_bytes = cut.kernel == Kernel::kBulk ? Cuts::shared_bytes(cut, device) : 0,
            .stream = p.device.stream,
            .early_start = device.has_dependent_launch()},
           params, "decode");
  }

  static void (*kernel_of(Kernel kernel))(DecodeParams) {
    switch (kernel) {
      case Kernel::kTiny: return decode_kernel<Tiny>;
      case Kernel::kStream: return decode_kernel<Stream>;
      default: return decode_bulk_kernel<Bulk>;
    }
  }

  static void load(const DeviceInfo& device) {
    load_kernel(kernel_of(Kernel::kTiny), "decode");
    load_kernel(kernel_of(Kernel::kStream), "decode");
    load_kernel(kernel_of(Kernel::kBulk), "decode",
                Cuts::shared_bytes({.groups = Cuts::kMaxGroups, .blocks_per_sm = 1}, device));
  }
};

// The instantiations: state dtype x head size. q, k, v and gates branch on their dtypes.
template <class Function>
void for_kernels(DType state, int dim, Function function) {
  const bool wide = dim == 128;
  switch (state) {
    case DType::kBFloat16:
      return wide ? function(Kernels<bf16, 128>()) : function(Kernels<bf16, 64>());
    case DType::kFloat16:
      return wide ? function(Kernels<fp16, 128>()) : function(Kernels<fp16, 64>());
    default: return wide ? function(Kernels<float, 128>()) : function(Kernels<float, 64>());
  }
}

void launch_row(const DecodeProblem& p) {
  if (p.batch == 0) return;
  const LaunchScope scope(p.device);
  for_kernels(p.initial.dtype, p.heads.dim_k, [&p](auto kernels) { kernels.launch_for(p); });
}

}  // namespace

void load_decode_kernels() {
  int device_id = 0;
  check_cuda(cudaGetDevice(&device_id), "current CUDA device");
  const DeviceInfo& device = device_info(device_id);
  for (const DType state : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int dim : {64, 128}) {
      for_kernels(state, dim, [&](auto kernels) { kernels.load(device); });
    }
  }
}

const DecodeRowKernel kDecodeCuda = {
    .name = "cuda",
    .description = [] { return "one pass over each state row, any GPU from sm_80"; },
    .refuse = refuse,
    .workspace = [](const DecodeProblem&) -> size_t { return 0; },
    .launch = launch_row,
};

}  // namespace gdn

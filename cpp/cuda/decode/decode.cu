// The decode row "cuda": what it serves and how a launch is cut.
#include "cuda/decode/decode.cuh"

#include "core/kernel.h"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"

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
  if (p.batch * heads.state > kMaxBlocks) return "batch_size times heads is 2^31 or more";
  if (device_info(p.device.id).compute_capability < 80) return kNoCodeForDevice;
  return nullptr;
}

// Few states are cut fine, so that every SM has work; many are not, so that the operands are made
// once per state.
template <class Traits>
int choose_groups(int64_t states, int32_t num_sms) {
  const int64_t wanted_blocks = int64_t{num_sms} * Traits::kBlocksPerSm * 4;
  int groups = Traits::kMaxGroups;
  while (groups > Traits::kTile && states * (Traits::kMaxGroups / groups) < wanted_blocks) {
    groups /= 2;
  }
  return groups;
}

template <class Traits>
void launch_decode(const DecodeProblem& p) {
  const DeviceInfo& device = device_info(p.device.id);
  const Heads& heads = p.heads;
  DecodeParams params{.problem = p};
  const int64_t states = p.batch * heads.state;
  params.groups = choose_groups<Traits>(states, device.num_sms);
  while (params.groups << params.parts_log2 < Traits::kMaxGroups) ++params.parts_log2;
  params.heads_per_q = small_divisor(heads.state / heads.q);
  params.heads_per_k = small_divisor(heads.state / heads.k);
  params.heads_per_v = small_divisor(heads.state / heads.v);
  launch(decode_kernel<Traits>,
         {.blocks = states << params.parts_log2,
          .threads = Traits::kThreads,
          .stream = p.device.stream,
          .early_start = device.has_dependent_launch()},
         params, "decode");
}

// The instantiations: state dtype x head size. q, k, v and gates branch on their dtypes.
template <class Function>
void for_traits(DType state, int dim, Function function) {
  const bool wide = dim == 128;
  switch (state) {
    case DType::kBFloat16:
      return wide ? function(DecodeTraits<bf16, 128>()) : function(DecodeTraits<bf16, 64>());
    case DType::kFloat16:
      return wide ? function(DecodeTraits<fp16, 128>()) : function(DecodeTraits<fp16, 64>());
    default:
      return wide ? function(DecodeTraits<float, 128>()) : function(DecodeTraits<float, 64>());
  }
}

void launch_row(const DecodeProblem& p) {
  if (p.batch == 0) return;
  const LaunchScope scope(p.device);
  for_traits(p.initial.dtype, p.heads.dim_k,
             [&p](auto traits) { launch_decode<decltype(traits)>(p); });
}

}  // namespace

void load_decode_kernels() {
  for (const DType state : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int dim : {64, 128}) {
      for_traits(state, dim, [](auto traits) {
        load_kernel(decode_kernel<decltype(traits)>, "decode");
      });
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

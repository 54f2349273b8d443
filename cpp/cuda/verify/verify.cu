// The verify row "cuda": what it serves, and its instantiations.
#include "core/kernel.h"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/verify/verify.cuh"

namespace gdn {
namespace {

bool is_aligned(const Pool& pool) {
  const int64_t row_bytes = pool.row_stride * (pool.dtype == DType::kFloat32 ? 4 : 2);
  return reinterpret_cast<uintptr_t>(pool.data) % 16 == 0 && row_bytes % 16 == 0;
}

bool lies_on_8_bytes(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data) % 8 == 0 && t.row_stride % 4 == 0 &&
         t.head_stride % 4 == 0;
}

const char* refuse(const VerifyProblem& p) {
  const Heads& heads = p.heads;
  if (p.device.type != GDN_CUDA_DEVICE) return "it runs on CUDA devices";
  if (p.io == DType::kFloat32) return "io_dtype is fp32, bf16 or fp16 needed";
  if (heads.dim_k != heads.dim_v || (heads.dim_k != 64 && heads.dim_k != 128)) {
    return "head_dim_k and head_dim_v must be equal, 64 or 128";
  }
  if (!is_aligned(p.pool)) return "a state pool needs a 16-byte aligned base and row stride";
  if (heads.state > 0xffff) return "more than 65535 heads";
  if (p.num_seqs * heads.state > kMaxBlocks) return "num_seqs times heads is 2^31 or more";
  if (device_info(p.device.id).compute_capability < 80) return kNoCodeForDevice;
  return nullptr;
}

// The instantiations: state dtype x io dtype x head size.
template <class Io, class Function>
void for_states(DType state, bool wide, Function function) {
  switch (state) {
    case DType::kBFloat16:
      return wide ? function(VerifyTraits<bf16, Io, 128>())
                  : function(VerifyTraits<bf16, Io, 64>());
    case DType::kFloat16:
      return wide ? function(VerifyTraits<fp16, Io, 128>())
                  : function(VerifyTraits<fp16, Io, 64>());
    default:
      return wide ? function(VerifyTraits<float, Io, 128>())
                  : function(VerifyTraits<float, Io, 64>());
  }
}

template <class Function>
void for_kernels(DType io, DType state, int dim, Function function) {
  if (io == DType::kBFloat16) return for_states<bf16>(state, dim == 128, function);
  return for_states<fp16>(state, dim == 128, function);
}

void launch_row(const VerifyProblem& p) {
  const LaunchScope scope(p.device);
  VerifyParams params{.problem = p, .layout = draft_layout(p.heads, p.io, p.max_draft)};
  const Heads& heads = p.heads;
  params.heads_per_q = small_divisor(heads.state / heads.q);
  params.heads_per_k = small_divisor(heads.state / heads.k);
  params.heads_per_v = small_divisor(heads.state / heads.v);
  params.vectors = lies_on_8_bytes(p.q) && lies_on_8_bytes(p.k) && lies_on_8_bytes(p.v) &&
                   lies_on_8_bytes(p.output);
  for_kernels(p.io, p.pool.dtype, p.heads.dim_k, [&](auto traits) {
    using Traits = decltype(traits);
    launch(verify_kernel<Traits>,
           {.blocks = p.num_seqs * p.heads.state,
            .threads = Traits::kThreads,
            .stream = p.device.stream,
            .early_start = device_info(p.device.id).has_dependent_launch()},
           params, "verify");
  });
}

}  // namespace

void load_verify_kernels() {
  for (const DType io : {DType::kBFloat16, DType::kFloat16}) {
    for (const DType state : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const int dim : {64, 128}) {
        for_kernels(io, state, dim,
                    [](auto traits) { load_kernel(verify_kernel<decltype(traits)>, "verify"); });
      }
    }
  }
}

const VerifyRow kVerifyCuda = {
    .name = "cuda",
    .description = [] { return "one pass over each state for all tokens, any GPU from sm_80"; },
    .refuse = refuse,
    .workspace = [](const VerifyProblem&) -> size_t { return 0; },
    .launch = launch_row,
};

}  // namespace gdn

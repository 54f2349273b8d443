// The decode row "cuda": what it serves and how a launch is cut.
#include <algorithm>

#include "core/kernel.h"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/decode/decode.cuh"
#include "cuda/decode/decode_bulk.cuh"

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

// How a launch is cut.
struct Cut {
  bool bulk = false;
  int32_t groups = 0;           // per warp
  int32_t blocks_per_sm = 0;    // bulk: how many at a time; 0: as many as fit
  int32_t prefetch_groups = 0;  // per warp
  bool evict_first = true;
  bool split_tail = false;
};

// NOTE: measured on H200 (132 SMs), where the device memory of all states counts per SM.
constexpr int64_t KiB = 1024;

template <class State, int kDim>
struct Kernels {
  using Stream = StreamTraits<State, kDim>;
  using Bulk = BulkTraits<State, kDim>;
  static constexpr int64_t kStateBytes = sizeof(State) * Bulk::kHead;
  static constexpr bool kWide = sizeof(State) == 4;

  // Enough blocks for every SM; beyond that, as few as possible share the work of a state.
  static Cut cut_for_registers(int64_t states, const DeviceInfo& device) {
    const int64_t wanted_blocks = int64_t{device.num_sms} * (kWide ? 16 : 2);
    Cut cut{.groups = Stream::kMaxGroups};
    while (cut.groups > 1 && states * (Stream::kMaxGroups / cut.groups) < wanted_blocks) {
      cut.groups /= 2;
    }
    if (!kWide && states * Stream::kMaxGroups > device.num_sms && cut.groups < Stream::kTile) {
      cut.groups = Stream::kTile;
    }
    cut.prefetch_groups = cut.groups;
    return cut;
  }

  static Cut choose(int64_t states, const DeviceInfo& device) {
    const int64_t bytes_per_sm = states * kStateBytes / device.num_sms;
    const bool few = bytes_per_sm < 62 * KiB;
    if (few || device.compute_capability < kBulkCapability) {
      return cut_for_registers(states, device);
    }
    if (kWide && bytes_per_sm >= 500 * KiB && bytes_per_sm < 1000 * KiB) {
      return {.groups = 2};
    }
    // Blocks of 32 KB, four at a time: 17 MB in work on the whole GPU.
    Cut cut{.bulk = true, .groups = Bulk::kMaxGroups, .prefetch_groups = 2};
    while (cut.groups > Bulk::kTile && kStateBytes * cut.groups / Bulk::kMaxGroups > 32 * KiB) {
      cut.groups /= 2;
    }
    int64_t block_bytes = kStateBytes * cut.groups / Bulk::kMaxGroups;
    int64_t window = 128 * KiB;
    cut.evict_first = bytes_per_sm < 750 * KiB;
    if (kWide && bytes_per_sm >= 125 * KiB && bytes_per_sm < 500 * KiB) {
      cut.groups = Bulk::kMaxGroups;
      block_bytes = kStateBytes;
    } else if (kWide && bytes_per_sm >= 1500 * KiB) {
      cut.prefetch_groups = cut.groups;
      window = 96 * KiB;
    } else {
      cut.split_tail = bytes_per_sm >= 500 * KiB;
    }
    cut.blocks_per_sm = static_cast<int32_t>(window / block_bytes);
    return cut;
  }

  // Shared memory of a bulk block, padded so that no more than the wanted blocks share an SM.
  static size_t shared_bytes(const Cut& cut, const DeviceInfo& device) {
    const int64_t reserve = 2 * KiB + sizeof(DecodeShared<Bulk>);
    const int64_t needed = kStateBytes * cut.groups / Bulk::kMaxGroups;
    const int64_t padded = device.shared_bytes_per_sm / cut.blocks_per_sm - reserve;
    const int64_t largest = device.max_shared_bytes - reserve;
    return static_cast<size_t>(std::max(needed, std::min(padded, largest)));
  }

  static DecodeParams make_params(const DecodeProblem& p, const Cut& cut,
                                  const DeviceInfo& device) {
    const Heads& heads = p.heads;
    DecodeParams params{.problem = p, .groups = cut.groups, .evict_first = cut.evict_first};
    while (cut.groups << params.parts_log2 < Stream::kMaxGroups) ++params.parts_log2;
    if (cut.split_tail && cut.groups > Bulk::kTile) {
      params.tail_log2 = 1;
      params.tail_block = (p.batch * heads.state - device.num_sms) << params.parts_log2;
    }
    params.heads_per_q = small_divisor(heads.state / heads.q);
    params.heads_per_k = small_divisor(heads.state / heads.k);
    params.heads_per_v = small_divisor(heads.state / heads.v);
    const bool slots_known = !p.paged || p.slots_given;
    if (device.has_dependent_launch() && slots_known) {
      params.prefetch_groups = cut.prefetch_groups;
    }
    return params;
  }

  static void launch_for(const DecodeProblem& p) {
    const DeviceInfo& device = device_info(p.device.id);
    const int64_t states = p.batch * p.heads.state;
    const Cut cut = choose(states, device);
    const DecodeParams params = make_params(p, cut, device);
    int64_t blocks = states << params.parts_log2;
    if (params.tail_log2 > 0) {
      blocks = params.tail_block + ((blocks - params.tail_block) << params.tail_log2);
    }
    launch(cut.bulk ? decode_bulk_kernel<Bulk> : decode_kernel<Stream>,
           {.blocks = blocks,
            .threads = Stream::kThreads,
            .shared_bytes = cut.bulk ? shared_bytes(cut, device) : 0,
            .stream = p.device.stream,
            .early_start = device.has_dependent_launch()},
           params, "decode");
  }

  static void load(const DeviceInfo& device) {
    load_kernel(decode_kernel<Stream>, "decode");
    load_kernel(decode_bulk_kernel<Bulk>, "decode",
                shared_bytes({.groups = Bulk::kMaxGroups, .blocks_per_sm = 1}, device));
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

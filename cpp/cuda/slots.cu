// Page table to slots: one thread per sequence applies core/slots.h.
#include "core/slots.h"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/page_table.h"

namespace gdn {
namespace {

constexpr int kThreads = 128;

// Sequence of this thread, or -1 past the last one.
__device__ int64_t sequence_index(int64_t num_seqs) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  return b < num_seqs ? b : -1;
}

__global__ void __launch_bounds__(kThreads)
    prefill_slots_kernel(const __grid_constant__ PageTableProblem p) {
  const int64_t b = sequence_index(p.num_seqs);
  if (b < 0) return;
  int64_t begin, length;
  PrefillSlots slots;
  if (token_range(p.cu_seqlens, p.num_tokens, b, &begin, &length)) {
    slots = prefill_slots(p.table, p.num_pages, b, length);
  }
  p.state_indices[b] = static_cast<int32_t>(slots.read_row);
  p.output_state_indices[b] = static_cast<int32_t>(slots.write_row);
  p.checkpoint_starts[b] = static_cast<int32_t>(slots.checkpoint_start);
  p.prefix_lens[b] = static_cast<int32_t>(slots.prefix);
}

__global__ void __launch_bounds__(kThreads)
    decode_slots_kernel(const __grid_constant__ PageTableProblem p) {
  const int64_t b = sequence_index(p.num_seqs);
  if (b < 0) return;
  const DecodeRow row = decode_slots(p.table, p.num_pages, b);
  p.state_indices[b] = static_cast<int32_t>(row.read_row);
  p.output_state_indices[b] = static_cast<int32_t>(row.write_row);
}

LaunchConfig per_sequence(const PageTableProblem& p) {
  return {.blocks = (p.num_seqs + kThreads - 1) / kThreads,
          .threads = kThreads,
          .stream = p.device.stream};
}

}  // namespace

void prefill_slots_cuda(const PageTableProblem& p) {
  const LaunchScope scope(p.device);
  launch(prefill_slots_kernel, per_sequence(p), p, "prefill_slots");
}

void decode_slots_cuda(const PageTableProblem& p) {
  const LaunchScope scope(p.device);
  launch(decode_slots_kernel, per_sequence(p), p, "decode_slots");
}

void load_slots_kernels() {
  load_kernel(prefill_slots_kernel, "prefill_slots");
  load_kernel(decode_slots_kernel, "decode_slots");
}

}  // namespace gdn

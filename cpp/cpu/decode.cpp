// Decode on the CPU: one token per row of the batch, state rows streamed once.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/kernel.h"
#include "core/slots.h"
#include "core/status.h"
#include "cpu/kernels.h"
#include "cpu/operand.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace gdn {
namespace {

using namespace cpu;

constexpr int64_t kSerialElements = 1 << 17;  // B H K V below which threads cost more
constexpr int64_t kRangesPerThread = 8;

struct Split {
  int32_t rows = 0;   // V rows of a unit
  int32_t parts = 0;  // units of a head
};

// Whole heads, unless there are too few of them for the threads.
Split split_heads(const DecodeProblem& p, int32_t threads) {
  const int64_t blocks = p.heads.dim_v / 8;
  const int64_t heads = std::max<int64_t>(p.batch * p.heads.state, 1);
  const int64_t wanted = threads == 1 ? 1 : (2 * threads + heads - 1) / heads;
  const int64_t per_unit = std::max<int64_t>(blocks / std::min(wanted, blocks), 1);
  return {.rows = static_cast<int32_t>(per_unit * 8),
          .parts = static_cast<int32_t>((blocks + per_unit - 1) / per_unit)};
}

StateRows state_rows(const DecodeProblem& p, const Pool& pool, int64_t row, int64_t head,
                     int64_t offset) {
  return {.data = state_address(pool, p.heads, row, head, offset),
          .dtype = pool.dtype,
          .dim_k = p.heads.dim_k,
          .dim_v = 0};
}

void run_unit(const DecodeProblem& p, const Kernels& table, const Split& split, int64_t unit,
              float* scratch) {
  const int64_t offset = unit % split.parts * split.rows;
  const int32_t head = static_cast<int32_t>(unit / split.parts % p.heads.state);
  const int64_t b = unit / split.parts / p.heads.state;
  const int32_t dim_v = static_cast<int32_t>(std::min<int64_t>(split.rows, p.heads.dim_v - offset));
  const DecodeRow row = resolve_decode(p, b);
  void* output = writable(p.output, b, head, offset);
  if (!row.live) {
    std::memset(output, 0, dim_v * element_bytes(p.io));
    return;
  }
  DecodeStep step{.q = address(p.q, b, p.heads.q_of(head)),
                  .k = address(p.k, b, p.heads.k_of(head)),
                  .v = address(p.v, b, p.heads.v_of(head), offset),
                  .output = output,
                  .io = p.io,
                  .scale = p.scale,
                  .alpha = read_alpha(p.gates, b, head),
                  .beta = read_beta(p.gates, b, head),
                  .l2norm = p.qk_l2norm,
                  .read = state_rows(p, p.initial, row.read_row, head, offset),
                  .write = state_rows(p, p.output_state, row.write_row, head, offset),
                  .scratch = scratch};
  step.read.dim_v = step.write.dim_v = dim_v;
  table.decode(step);
}

void launch(const DecodeProblem& p) {
  Threads threads = p.threads;
  const int64_t elements = p.batch * p.heads.state_elements();
  if (elements <= kSerialElements) threads.count = 1;
  const int32_t count = thread_count(threads);
  const Split split = split_heads(p, count);
  const int64_t units = p.batch * p.heads.state * split.parts;
  const int64_t ranges =
      count == 1 ? std::min<int64_t>(units, 1) : std::min(units, kRangesPerThread * count);
  const Kernels& table = kernels();
  const size_t bytes = 2 * sizeof(float) * p.heads.dim_k;
  std::atomic<bool> out_of_memory{false};
  parallel_for(threads, ranges, [&](int64_t r) {
    float* scratch = static_cast<float*>(thread_scratch().reserve(bytes));
    if (scratch == nullptr) {
      out_of_memory = true;
      return;
    }
    for (int64_t i = units * r / ranges; i < units * (r + 1) / ranges; ++i) {
      run_unit(p, table, split, i, scratch);
    }
  });
  if (out_of_memory) throw Error(GDN_INTERNAL, "out of host memory: %zu bytes of scratch", bytes);
}

const char* refuse(const DecodeProblem& p) {
  if (p.device.type != GDN_CPU) return "the operands are not in host memory";
  if (p.heads.dim_k % 8 != 0 || p.heads.dim_v % 8 != 0) {
    return "head_dim_k and head_dim_v must be multiples of 8";
  }
  return nullptr;
}

const char* description() { return kernels().isa; }

size_t workspace(const DecodeProblem&) { return 0; }

}  // namespace

const DecodeRowKernel kDecodeCpu = {.name = "cpu",
                                    .description = description,
                                    .refuse = refuse,
                                    .workspace = workspace,
                                    .launch = launch};

}  // namespace gdn

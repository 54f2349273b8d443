// Decode on the CPU: one token per row of the batch, state rows streamed once.
#include <algorithm>
#include <cstring>

#include "core/kernel.h"
#include "core/slots.h"
#include "core/status.h"
#include "cpu/kernels.h"
#include "cpu/operand.h"
#include "cpu/units.h"

namespace gdn {
namespace {

using namespace cpu;

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
  const int32_t count = threads_for_pass(p.batch * p.heads.state_elements(), &threads);
  const Split split = split_heads(p, count);
  const int64_t units = p.batch * p.heads.state * split.parts;
  const Kernels& table = kernels();
  const size_t bytes = 2 * sizeof(float) * p.heads.dim_k;
  for_units(threads, count, units, bytes,
            [&](int64_t i, float* scratch) { run_unit(p, table, split, i, scratch); });
}

const char* refuse(const DecodeProblem& p) { return refuse_operands(p.device, p.heads); }

const char* description() { return kernels().isa; }

size_t workspace(const DecodeProblem&) { return 0; }

}  // namespace

const DecodeRowKernel kDecodeCpu = {.name = "cpu",
                                    .description = description,
                                    .refuse = refuse,
                                    .workspace = workspace,
                                    .launch = launch};

}  // namespace gdn

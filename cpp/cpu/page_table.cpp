// Slots, page-table check and page health on the host.
#include "core/page_table.h"

#include <cstring>

#include "core/kernel.h"
#include "cpu/parallel.h"

namespace gdn {
namespace {

void prefill_slots_cpu(const PageTableProblem& p) {
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    int64_t begin = 0, length = 0;
    PrefillSlots slots;
    if (token_range(p.cu_seqlens, p.num_tokens, b, &begin, &length)) {
      slots = prefill_slots(p.table, p.num_pages, b, length);
    }
    p.state_indices[b] = static_cast<int32_t>(slots.read_row);
    p.output_state_indices[b] = static_cast<int32_t>(slots.write_row);
    p.checkpoint_starts[b] = static_cast<int32_t>(slots.checkpoint_start);
    p.prefix_lens[b] = static_cast<int32_t>(slots.prefix);
  }
}

void decode_slots_cpu(const PageTableProblem& p) {
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    const DecodeRow row = decode_slots(p.table, p.num_pages, b);
    p.state_indices[b] = static_cast<int32_t>(row.read_row);
    p.output_state_indices[b] = static_cast<int32_t>(row.write_row);
  }
}

void validate_cpu(const PageTableProblem& p) { *p.report = check_page_table(p); }

size_t validate_workspace_cpu(const PageTableProblem&) { return 0; }

// Magnitudes of IEEE numbers order as their bits do: inf is the largest, NaNs lie above.
template <class Bits>
struct Health {
  int64_t nan_count = 0;
  int64_t inf_count = 0;
  Bits largest = 0;  // of the finite values, without the sign
};

template <class Bits>
Health<Bits> health(const Bits* values, int64_t count, Bits infinity) {
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  Health<Bits> h;
  for (int64_t i = 0; i < count; ++i) {
    const Bits magnitude = values[i] & kMagnitude;
    h.nan_count += magnitude > infinity;
    h.inf_count += magnitude == infinity;
    h.largest = magnitude < infinity && magnitude > h.largest ? magnitude : h.largest;
  }
  return h;
}

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float from_bf16_bits(uint16_t bits) { return from_bits(uint32_t{bits} << 16); }

// A finite fp16 magnitude: its exponent bias is 112 less than that of fp32.
float from_fp16_bits(uint16_t bits) { return from_bits(uint32_t{bits} << 13) * 0x1p112f; }

template <class Bits, class Convert>
void write_health(const PageStatsProblem& p, int64_t i, const Health<Bits>& h, Convert convert) {
  p.nan_count[i] = h.nan_count;
  p.inf_count[i] = h.inf_count;
  p.abs_max[i] = convert(h.largest);
}

void page_health(const PageStatsProblem& p, int64_t i) {
  const int64_t row = p.page_indices ? p.page_indices[i] : i;
  if (row < 0 || row >= p.pool.num_rows) {
    p.nan_count[i] = p.inf_count[i] = -1;
    p.abs_max[i] = -1.0f;
    return;
  }
  const int64_t offset = row * p.pool.row_stride;
  const auto* narrow = static_cast<const uint16_t*>(p.pool.data) + offset;
  const auto* wide = static_cast<const uint32_t*>(p.pool.data) + offset;
  switch (p.pool.dtype) {
    case DType::kFloat16:
      return write_health(p, i, health<uint16_t>(narrow, p.row_elements, 0x7c00), from_fp16_bits);
    case DType::kBFloat16:
      return write_health(p, i, health<uint16_t>(narrow, p.row_elements, 0x7f80), from_bf16_bits);
    default:
      return write_health(p, i, health<uint32_t>(wide, p.row_elements, 0x7f800000), from_bits);
  }
}

void page_stats_cpu(const PageStatsProblem& p) {
  cpu::parallel_for(p.threads, p.num_pages, [&p](int64_t i) { page_health(p, i); });
}

}  // namespace

const PageTableKernels kPageTableCpu = {.prefill_slots = prefill_slots_cpu,
                                        .decode_slots = decode_slots_cpu,
                                        .validate = validate_cpu,
                                        .validate_workspace = validate_workspace_cpu,
                                        .page_stats = page_stats_cpu};

}  // namespace gdn

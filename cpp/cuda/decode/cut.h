// How decode launches are cut: which kernel, how many rows per block, how many blocks at a time.
#pragma once

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/decode/decode.cuh"
#include "cuda/decode/decode_bulk.cuh"

namespace gdn {

// decode_kernel with the smallest tile, decode_kernel, decode_bulk_kernel.
enum class Kernel { kTiny, kStream, kBulk };

// How a launch is cut.
struct Cut {
  Kernel kernel = Kernel::kStream;
  int32_t groups = 0;           // per warp
  int32_t blocks_per_sm = 0;    // bulk: how many at a time
  int32_t prefetch_groups = 0;  // per warp
  int32_t prefetch_waves = 0;   // bulk: by the blocks of the first waves alone; 0: by all
  bool evict_first = true;
  bool split_tail = false;
};

constexpr int64_t KiB = 1024;

// NOTE: the figures were measured on H200 (132 SMs), where the states' bytes per SM decide.
template <class State, int kDim>
struct DecodeCuts {
  static constexpr bool kWide = sizeof(State) == 4;
  using Stream = StreamTraits<State, kDim, kWide ? 1 : 2>;
  using Tiny = StreamTraits<State, kDim, 1>;
  using Bulk = BulkTraits<State, kDim>;
  static constexpr int kMaxGroups = Bulk::kMaxGroups;
  static constexpr int64_t kStateBytes = sizeof(State) * Bulk::kHead;

  // Enough blocks for every SM; beyond that, as few as possible share the work of a state.
  static Cut cut_for_registers(int64_t states, int32_t num_sms) {
    if (states * kMaxGroups <= num_sms) {
      return {.kernel = Kernel::kTiny, .groups = 1, .prefetch_groups = 1};
    }
    const int64_t wanted_blocks = int64_t{num_sms} * (kWide ? 16 : 2);
    Cut cut{.groups = kMaxGroups};
    while (cut.groups > Stream::kTile && states * (kMaxGroups / cut.groups) < wanted_blocks) {
      cut.groups /= 2;
    }
    cut.prefetch_groups = cut.groups;
    return cut;
  }

  static Cut choose(int64_t states, const DeviceInfo& device) {
    const int64_t bytes_per_sm = states * kStateBytes / device.num_sms;
    if (bytes_per_sm < 62 * KiB || device.compute_capability < kBulkCapability) {
      return cut_for_registers(states, device.num_sms);
    }
    // Blocks of at most 32 KB, four at a time: 17 MB in work on the whole GPU.
    Cut cut{.kernel = Kernel::kBulk, .groups = kMaxGroups, .prefetch_groups = Bulk::kTile};
    int64_t window = 128 * KiB, block = 32 * KiB;
    cut.evict_first = bytes_per_sm < 600 * KiB;
    cut.prefetch_waves = bytes_per_sm < 600 * KiB ? 1 : 0;
    cut.split_tail = bytes_per_sm >= 480 * KiB;
    if (kWide && bytes_per_sm >= 400 * KiB && bytes_per_sm < 600 * KiB) {
      window = 96 * KiB;
    } else if (kWide && bytes_per_sm >= 120 * KiB && bytes_per_sm < 400 * KiB) {
      block = 64 * KiB;
    } else if (kWide && bytes_per_sm >= 3000 * KiB) {
      window = 96 * KiB;
      cut.prefetch_groups = kMaxGroups;
      cut.split_tail = false;
    }
    while (cut.groups > Bulk::kTile && block_bytes(cut) > block) cut.groups /= 2;
    cut.prefetch_groups = std::min(cut.prefetch_groups, cut.groups);
    cut.blocks_per_sm = static_cast<int32_t>(window / block_bytes(cut));
    return cut;
  }

  static int64_t block_bytes(const Cut& cut) { return kStateBytes * cut.groups / kMaxGroups; }

  // Shared memory of a bulk block, padded so that no more than the wanted blocks share an SM.
  static size_t shared_bytes(const Cut& cut, const DeviceInfo& device) {
    const int64_t reserve = 2 * KiB + sizeof(DecodeShared<Bulk>);
    const int64_t padded = device.shared_bytes_per_sm / cut.blocks_per_sm - reserve;
    const int64_t largest = device.max_shared_bytes - reserve;
    return static_cast<size_t>(std::max(block_bytes(cut), std::min(padded, largest)));
  }
};

}  // namespace gdn

// Into how many segments sequences are cut: the time of every way, by a model with measured
// figures. The device chooses by it from true lengths; the host explains by it what it knows of
// them.
#pragma once

#include <cstdint>

#include "cuda/sm90/traits.h"

namespace gdn::sm90 {

// More sequences than this in one slab fill the GPU, or share it too evenly to be cut.
inline constexpr int32_t kMaxCutSequences = 64;
inline constexpr int32_t kMaxPieces = 32;  // of the longest sequence

// H200, us (README.md): a chunk of a block of the scan and of the summary; a segment of the
// combination; what the two kernels of segments cost before their first chunk.
inline constexpr float kScanCost = 2.1f;
inline constexpr float kSummaryCost = 1.2f;
inline constexpr float kCombineCost = 0.8f;
inline constexpr float kFixedCost = 10.0f;
inline constexpr float kNoWay = 1e30f;

// Items of the summary for a sequence of that many segments: the first one takes all rows of N from
// the true state and needs no M, the last one needs neither.
GDN_HOST_DEVICE inline int32_t summary_items(int32_t pieces) {
  return pieces > 1 ? 2 * pieces - 3 : 0;
}

GDN_HOST_DEVICE inline int32_t divide_up(int64_t a, int32_t b) {
  return static_cast<int32_t>((a + b - 1) / b);
}

// What one way makes of all sequences.
struct SegmentTally {
  int32_t chunks;
  int32_t pieces;     // segments and whole sequences
  int32_t cut;        // segments of the sequences that are cut
  int32_t summaries;  // items of the summary per head
  int32_t steps;      // of the longest combination

  GDN_HOST_DEVICE void add(int32_t sequence_chunks, int32_t length) {
    const int32_t parts = divide_up(sequence_chunks, length);
    chunks += sequence_chunks;
    pieces += parts;
    cut += parts > 1 ? parts : 0;
    summaries += summary_items(parts);
    steps = parts - 1 > steps ? parts - 1 : steps;
  }
};

// Chunks per segment if the longest sequence is cut into that many pieces.
GDN_HOST_DEVICE inline int32_t candidate_chunks(const SegmentParams& limits, int32_t longest,
                                                int32_t pieces) {
  const int32_t length = divide_up(longest, pieces);
  const int32_t least = length > limits.min_chunks ? length : limits.min_chunks;
  return least < limits.max_chunks ? least : limits.max_chunks;
}

GDN_HOST_DEVICE inline float segment_cost(const SegmentParams& limits, const SegmentTally& tally,
                                          int32_t heads, int32_t longest, int32_t length) {
  const int32_t blocks = limits.num_blocks;
  const auto waves = [&](int32_t items) {
    return divide_up(static_cast<int64_t>(items) * heads, blocks);
  };
  if (tally.cut == 0) {
    const int32_t evenly = waves(tally.chunks);
    return limits.demanded ? kNoWay : kScanCost * (longest > evenly ? longest : evenly);
  }
  if (tally.cut > limits.capacity) return 2 * kNoWay;
  return kFixedCost + kCombineCost * tally.steps +
         length * (kScanCost * waves(tally.pieces) + kSummaryCost * waves(tally.summaries));
}

}  // namespace gdn::sm90

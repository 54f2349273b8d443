// Into how many segments sequences are cut: the time of every way, by a model with measured
// figures. The device chooses by it from true lengths; the host explains by it what it knows of
// them.
#pragma once

#include <cstdint>

#include "cuda/sm90/traits.h"

namespace gdn::sm90 {

inline constexpr int32_t kMaxPieces = 32;  // of the longest sequence

// H200, us, fitted to whole calls (README.md): a chunk of a scan that leaves blocks idle, and so
// runs at a higher clock; a chunk of a block of the scan and of the summary; each further item of a
// block; a step of the combination; what segments cost before the first of these.
inline constexpr float kWholeCost = 2.05f;
inline constexpr float kScanCost = 2.35f;
inline constexpr float kSummaryCost = 1.2f;
inline constexpr float kItemCost = 3.5f;
inline constexpr float kCombineCost = 1.35f;
inline constexpr float kFixedCost = 17.0f;
inline constexpr float kNoWay = 1e30f;

// Items of the summary for a sequence of that many segments: the first one takes all rows of N from
// the true state and needs no M, the last one needs neither.
GDN_HOST_DEVICE inline int32_t summary_items(int32_t pieces) {
  return pieces > 1 ? 2 * pieces - 3 : 0;
}

// The same of a part of a prompt, of which either may not hold.
GDN_HOST_DEVICE inline int32_t summary_items(const SegmentParams& segments, int32_t pieces) {
  const int32_t items = 2 * pieces - 3 + segments.open + 2 * segments.mapped;
  return items > 0 ? items : 0;
}

GDN_HOST_DEVICE inline int32_t divide_up(int64_t a, int32_t b) {
  return static_cast<int32_t>((a + b - 1) / b);
}

// Whether any way can beat uncut sequences: with all blocks busy all the time, and the launches.
// The device asks for the true lengths, the host for what it knows to bound them.
GDN_HOST_DEVICE inline bool may_pay(int32_t longest, int64_t chunks, int32_t heads,
                                    int32_t blocks) {
  const float evenly = static_cast<float>(chunks) * heads / blocks;
  const float whole = kWholeCost * (static_cast<float>(longest) > evenly ? longest : evenly);
  return whole > kFixedCost + (kScanCost + kSummaryCost) * evenly;
}

// What one way makes of all sequences.
struct SegmentTally {
  int32_t chunks;
  int32_t pieces;     // segments and whole sequences
  int32_t cut;        // segments of the sequences that are cut
  int32_t summaries;  // items of the summary per head
  int32_t steps;      // of the longest combination

  GDN_HOST_DEVICE void add(int32_t sequence_chunks, int32_t length) {
    const int32_t parts = (sequence_chunks + length - 1) / length;
    chunks += sequence_chunks;
    pieces += parts;
    cut += parts > 1 ? parts : 0;
    summaries += summary_items(parts);
    steps = parts - 2 > steps ? parts - 2 : steps;
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
  const auto evenly = [&](int64_t x) { return divide_up(x * heads, limits.num_blocks); };
  if (tally.cut == 0) {
    const int32_t spread = evenly(tally.chunks);
    return limits.demanded ? kNoWay : kWholeCost * (longest > spread ? longest : spread);
  }
  if (tally.cut > limits.capacity) return 2 * kNoWay;
  // The busiest block has full waves of items, or an even share and the last item.
  const auto busiest = [&](int32_t items, int64_t chunks, float each) {
    const int32_t waves = evenly(items), more = waves > 1 ? waves - 1 : 0;
    const float full = each * (waves * length) + kItemCost * more;
    const float spread = each * (evenly(chunks) + length) + kItemCost;
    return full < spread ? full : spread;
  };
  const int64_t summary_chunks = static_cast<int64_t>(tally.summaries) * length;
  return kFixedCost + kCombineCost * tally.steps + busiest(tally.pieces, tally.chunks, kScanCost) +
         busiest(tally.summaries, summary_chunks, kSummaryCost);
}

}  // namespace gdn::sm90

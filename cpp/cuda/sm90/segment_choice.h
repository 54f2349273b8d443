// Into how many segments sequences are cut: the time of every way, by a model with measured
// figures. The device chooses by it from true lengths; the host explains by it what it knows of
// them.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/sm90/traits.h"

namespace gdn::sm90 {

inline constexpr int32_t kMaxPieces = 32;  // of the longest sequence

// H200, us, fitted to whole calls (README.md): a chunk of a scan that leaves blocks idle, and so
// runs at a higher clock; a chunk of a block of the scan and of the summary; the same of items of
// 64 rows of V; each further item of a block; a step of the combination; what segments cost before
// the first of these.
inline constexpr float kWholeCost = 1.97f;
inline constexpr float kScanCost = 2.12f;
inline constexpr float kHalfWholeCost = 1.6f;
inline constexpr float kHalfScanCost = 1.7f;
inline constexpr float kSummaryCost = 1.25f;
inline constexpr float kItemCost = 3.0f;
inline constexpr float kCombineCost = 1.6f;
inline constexpr float kFixedCost = 13.0f;
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

// Whether two blocks take an item of the scan, half of the rows of V each: a chunk is shorter with
// one state warpgroup.
GDN_HOST_DEVICE inline bool scan_in_halves(int32_t items, int32_t blocks) {
  return 2 * items <= blocks;
}

// What the busiest of all blocks has, if they share evenly. In fp32, as all that follows: a
// division of integers takes the device ten times as long.
GDN_HOST_DEVICE inline float even_share(float x, int32_t blocks) {
  return ceilf(x / static_cast<float>(blocks));
}

// The busiest block of the summary, us: full waves of items, or a piece of the line of all of them
// (summary_item.cuh) with what a hand-over costs. All items are of one length.
GDN_HOST_DEVICE inline float summary_in_waves(float items, float length, int32_t blocks) {
  const float waves = even_share(items, blocks);
  return items == 0.0f ? 0.0f : kSummaryCost * waves * length + kItemCost * (waves - 1.0f);
}
GDN_HOST_DEVICE inline float summary_in_line(float items, float length, int32_t blocks) {
  return kSummaryCost * even_share(items * (length + 1.0f), blocks) + 2.0f * kItemCost;
}
GDN_HOST_DEVICE inline bool summary_in_pieces(float items, float length, int32_t blocks) {
  return blocks > 0 && items > static_cast<float>(blocks) &&
         summary_in_line(items, length, blocks) < summary_in_waves(items, length, blocks);
}

GDN_HOST_DEVICE inline float segment_cost(const SegmentParams& limits, const SegmentTally& tally,
                                          int32_t heads, int32_t longest, int32_t length) {
  const int32_t blocks = limits.num_blocks;
  const auto h = static_cast<float>(heads), each_length = static_cast<float>(length);
  const float items = static_cast<float>(tally.pieces) * h;
  const float spread = even_share(static_cast<float>(tally.chunks) * h, blocks);
  const bool halves = scan_in_halves(tally.pieces * heads, blocks);
  if (tally.cut == 0) {
    const float each = halves ? kHalfWholeCost : kWholeCost;
    return limits.demanded ? kNoWay : each * fmaxf(static_cast<float>(longest), spread);
  }
  if (tally.cut > limits.capacity) return 2 * kNoWay;
  // The busiest block of the scan has full waves of items, or an even share and the last item.
  const float waves = even_share(items, blocks), each = halves ? kHalfScanCost : kScanCost;
  const float full = each * waves * each_length + kItemCost * (waves - 1.0f);
  const float scan = fminf(full, each * (spread + each_length) + kItemCost);
  const float summaries = static_cast<float>(tally.summaries) * h;
  const float summary = summary_in_pieces(summaries, each_length, blocks)
                            ? summary_in_line(summaries, each_length, blocks)
                            : summary_in_waves(summaries, each_length, blocks);
  return kFixedCost + kCombineCost * static_cast<float>(tally.steps) + scan + summary;
}

}  // namespace gdn::sm90

// What the roles of the summary share: its stages, its memory, and its items.
#pragma once

#include "cuda/sm90/scan_item.cuh"
#include "cuda/sm90/segments.cuh"

namespace gdn::sm90 {

// An item is 128 rows of [N; M] of one segment and head: of the first segment all of N, of the
// others one half of N (warpgroup 0) and of M (warpgroup 1).
struct alignas(16) SummaryItem {
  ScanItem part;  // state_in: the first segment's, else null; state_out: [128, 128] fp32, N's place
  int32_t half;   // rows 64 half .. of N and of M; -1: all of N
  int32_t copied;     // not 0: state_copy is written
  float* state_copy;  // [128, 128]: the state before the sequence, which the scan may overwrite
  uint4* transition;  // [8, 16, 32]
  int32_t* reset;
};
static_assert(sizeof(SummaryItem) == 128 && offsetof(SummaryItem, part) == 0);

struct SummaryTraits {
  static constexpr int kStateGroups = 2;
  static constexpr int kAuxGroup = kStateGroups;
  static constexpr int kThreads = 128 * (kStateGroups + 2);
  static constexpr int kStateRegisters = 176;
  static constexpr int kAuxRegisters = 120;
  static constexpr int kLoaderRegisters = 40;

  static constexpr int kStages = 4;  // of K, V, That and gates together
  static constexpr int kXStages = 2;
  static constexpr int kItemStages = 4;

  // Bytes from the start of shared memory, which is aligned to 1024.
  static constexpr int kKeys = 0;
  static constexpr int kValues = kKeys + kStages * kTile;
  static constexpr int kInverses = kValues + kStages * kTile;
  static constexpr int kX = kInverses + kStages * kPanel;
  static constexpr int kGates = kX + kXStages * kTile;
  static constexpr int kItems = kGates + kStages * static_cast<int>(sizeof(GateBlock));
  static constexpr int kBarriers = kItems + kItemStages * static_cast<int>(sizeof(SummaryItem));
  static constexpr int kFull = kBarriers;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kXFull = kEmpty + 8 * kStages;
  static constexpr int kXEmpty = kXFull + 8 * kXStages;
  static constexpr int kItemFull = kXEmpty + 8 * kXStages;
  static constexpr int kItemEmpty = kItemFull + 8 * kItemStages;
  static constexpr int kSharedBytes = kItemEmpty + 8 * kItemStages;

  static constexpr int kLoaderSync = 1;  // named barrier
};
static_assert(SummaryTraits::kSharedBytes <= 232448);

// Chunks of a segment.
struct ChunkSpan {
  int32_t begin;
  int32_t end;
};

// Where items would leave blocks idle at the end, they are shared out on a line, all of one length
// and 1 for the change of items, cut into a piece a block. The piece that begins within an item
// takes its first chunks, and the piece that ends there its last ones: a block starts with what
// another waits for, as in the scan (pieces.cuh).
struct SummaryLine {
  int32_t items;
  int32_t length;  // chunks of an item
  int32_t pieces;

  // Where piece `piece` begins. A slab's line has less than 2^31 chunks.
  __device__ __forceinline__ int32_t cut(int32_t piece) const {
    const int32_t all = items * (length + 1), each = all / pieces;
    return each * piece + min(piece, all - each * pieces);
  }
};

// One block's piece of the line, item after item.
struct SummaryPiece {
  int32_t number = -1;
  int32_t item = 0;               // the next one
  int32_t last = -1;              // the one in which the piece ends
  int32_t skipped = 0, tail = 0;  // chunks at the first one's end, at the last one's end

  __device__ __forceinline__ void begin(const SummaryLine& line, int32_t piece) {
    const int32_t from = line.cut(piece), to = line.cut(piece + 1), step = line.length + 1;
    number = piece;
    item = from / step;
    last = to / step;
    skipped = min(from - item * step, line.length);
    tail = min(to - last * step, line.length);
  }
  __device__ __forceinline__ bool finished() const { return item > last; }
  // Of the next item; none if begin == end.
  __device__ __forceinline__ ChunkSpan next(const SummaryLine& line) {
    ChunkSpan span = {0, line.length};
    if (item == last) span.begin = line.length - tail;
    span.end -= skipped;
    skipped = 0;
    ++item;
    return span;
  }
};

// Item `number` of the summary for one head, by one thread.
__device__ __forceinline__ void make_summary_item(const HopperParams& p, Found found,
                                                  const SlabSequences& all, int32_t segment_chunks,
                                                  int32_t head, ChunkSpan span, SummaryItem& item) {
  // Of a part of a prompt that begins with an open state, the first segment is like the others.
  const int32_t number = found.rest + !p.segments.open;
  const int32_t index = number / 2;
  const bool from_state = index == 0 && !p.segments.open;
  const StateSource before = state_before(p, found.part, all.slab, head);
  take_segment(found.part, index, segment_chunks);
  found.part.end = min(found.part.end, found.part.begin + span.end);
  found.part.begin += span.begin;
  make_item(p, found.part, all.slab, head, item.part);
  const int32_t place = found.part.place;
  item.half = from_state ? -1 : number & 1;
  item.part.state_in = from_state && span.begin == 0 ? before.data : nullptr;
  item.part.dtype_in = static_cast<int32_t>(before.dtype);
  item.part.state_out = segment_state(p, place + 1, head);
  item.copied = item.part.state_in != nullptr;
  item.state_copy = segment_state(p, place, head);
  const int64_t record = static_cast<int64_t>(place) * p.call.heads.state + head;
  item.transition = p.segments.transitions + record * kTransitionVectors;
  item.reset = p.segments.resets + record;
}

}  // namespace gdn::sm90

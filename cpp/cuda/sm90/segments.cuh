// Segments: long sequences of a slab cut into runs of whole chunks, so that few heads fill the GPU.
//
// Over a segment the state moves by an affine map, S_end = S_start M + N, with M [K, K] and N
// [V, K] per state head. summary.cuh forms M and N of all segments at once, combine.cuh composes
// them into the state at every segment's start, and the scan then runs all segments at once. Here:
// who is cut, where, and which part of which sequence an item is.
//
// All of it comes from the true lengths on the device, so a captured call stays right when its
// lengths change. The host only decides whether the kernels are launched (capacity > 0).
#pragma once

#include <climits>

#include "cuda/sm90/segment_choice.h"
#include "cuda/sm90/traits.h"

namespace gdn::sm90 {

// Consecutive chunks of one sequence within one slab: all of them, or one segment.
struct Part {
  SequenceEntry sequence;
  int32_t begin;  // chunk numbers over all sequences
  int32_t end;
  int32_t index;  // of the segment in its sequence
  int32_t count;  // segments of the sequence; 1: not cut
  int32_t place;  // of the segment in `states`, `transitions`, `resets`; unused if not cut
};

__device__ __forceinline__ SlabSequences slab_sequences(const HopperParams& p, int lane) {
  const PlanHeader plan = *p.call.plan;
  const SlabRange slab = slab_range(plan.num_chunks, p.slab, p.num_slabs);
  if (slab.begin >= slab.end) return {.slab = slab, .first = 0, .count = 0};
  const int32_t first = find_sequence(p.call.entries, plan.num_entries, slab.begin, lane);
  const int32_t last = find_sequence(p.call.entries, plan.num_entries, slab.end - 1, lane);
  return {.slab = slab, .first = first, .count = last - first + 1};
}

// The plan's sequences on their way to L1, before a kernel waits for the one in front of it: that
// has waited for the plan.
__device__ __forceinline__ void request_sequences(const HopperParams& p, int lane) {
  [[maybe_unused]] int32_t unused;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(unused) : "l"(p.call.plan));
  const SequenceEntry* entry = p.call.entries + lane;
  if (lane < p.call.entry_bound) {
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(unused) : "l"(entry));
  }
}

// Chunks of a sequence in the slab; none of a dead one.
__device__ __forceinline__ int32_t live_chunks(const ChunkGrid& grid, const SequenceEntry& s,
                                               SlabRange slab) {
  if (!s.live()) return 0;
  return min(s.chunk_begin + s.chunk_count(grid), slab.end) - max(s.chunk_begin, slab.begin);
}

__device__ __forceinline__ int32_t lane_chunks(const HopperParams& p, const SlabSequences& all,
                                               int32_t place) {
  if (place >= all.count) return 0;
  return live_chunks(p.call.grid, p.call.entries[all.first + place], all.slab);
}

__device__ __forceinline__ int32_t warp_inclusive_count(int32_t x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t lower = __shfl_up_sync(kFullWarp, x, step);
    if (lane >= step) x += lower;
  }
  return x;
}

// ---- the choice ---------------------------------------------------------------------------------

// Every lane weighs one way: the longest sequence in 1 .. 32 pieces, and the others in pieces of
// the same length. The shortest time wins.
__device__ __forceinline__ SlabState choose_segments(const HopperParams& p,
                                                     const SlabSequences& all, int lane) {
  int32_t longest = max(lane_chunks(p, all, lane), lane_chunks(p, all, lane + 32));
  longest = __reduce_max_sync(kFullWarp, longest);
  const int32_t chunks = all.slab.end - all.slab.begin, heads = p.call.heads.state;
  const bool wanted = p.segments.demanded || may_pay(longest, chunks, heads, p.segments.num_blocks);
  if (longest < 2 || !wanted) return {};
  const int32_t length = candidate_chunks(p.segments, longest, lane + 1);
  SegmentTally tally = {};
  for (int32_t base = 0; base < all.count; base += 32) {
    const int32_t own = lane_chunks(p, all, base + lane);
    for (int32_t i = 0; i < min(32, all.count - base); ++i) {
      tally.add(__shfl_sync(kFullWarp, own, i), length);
    }
  }
  const float cost = segment_cost(p.segments, tally, heads, longest, length);
  // The shortest time of all lanes, and the first lane that has it.
  float best = cost;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    best = fminf(best, __shfl_xor_sync(kFullWarp, best, step));
  }
  const int winner = __ffs(static_cast<int>(__ballot_sync(kFullWarp, cost == best))) - 1;
  if (__shfl_sync(kFullWarp, tally.cut, winner) == 0 || best >= kNoWay) return {};
  return {.segment_chunks = __shfl_sync(kFullWarp, length, winner),
          .num_parts = __shfl_sync(kFullWarp, tally.pieces, winner),
          .num_summaries = __shfl_sync(kFullWarp, tally.summaries, winner)};
}

// The one sequence of a part of a prompt, in the pieces that the host chose.
__device__ __forceinline__ SlabState take_pieces(const HopperParams& p, const SlabSequences& all) {
  const int32_t chunks = lane_chunks(p, all, 0);
  const int32_t length = max(divide_up(chunks, p.segments.pieces), 1);
  const int32_t parts = divide_up(chunks, length);
  return {.segment_chunks = length,
          .num_parts = parts,
          .num_summaries = parts > 0 ? summary_items(p.segments, parts) : 0};
}

// ---- from numbers to parts ----------------------------------------------------------------------

// Part `number` of a slab, by a whole warp. kSummary: counted in items of the summary, of which
// `rest` is the number within the sequence; the segment is then 0 .. and not set.
struct Found {
  Part part;
  int32_t rest;
};

template <bool kSummary>
__device__ __forceinline__ Found find_cut_part(const HopperParams& p, const SlabSequences& all,
                                               int32_t segment_chunks, int32_t number, int lane) {
  int32_t places = 0;
  for (int32_t base = 0; base < all.count; base += 32) {
    const int32_t chunks = lane_chunks(p, all, base + lane);
    const int32_t pieces = (chunks + segment_chunks - 1) / segment_chunks;
    const int32_t weight = !kSummary               ? pieces
                           : p.segments.pieces > 0 ? summary_items(p.segments, pieces)
                                                   : summary_items(pieces);
    const int32_t cut = pieces > 1 ? pieces : 0;
    const int32_t weights = warp_inclusive_count(weight, lane);
    const int32_t cuts = warp_inclusive_count(cut, lane);
    const unsigned past = __ballot_sync(kFullWarp, weights > number);
    if (past == 0) {
      number -= __shfl_sync(kFullWarp, weights, 31);
      places += __shfl_sync(kFullWarp, cuts, 31);
      continue;
    }
    const int owner = __ffs(static_cast<int>(past)) - 1;
    Found found = {};
    found.rest = number - __shfl_sync(kFullWarp, weights - weight, owner);
    found.part.sequence = p.call.entries[all.first + base + owner];
    found.part.count = __shfl_sync(kFullWarp, pieces, owner);
    found.part.place = places + __shfl_sync(kFullWarp, cuts - cut, owner);
    found.part.begin = max(found.part.sequence.chunk_begin, all.slab.begin);
    found.part.end = found.part.begin + __shfl_sync(kFullWarp, chunks, owner);
    return found;
  }
  return {};
}

__device__ __forceinline__ void take_segment(Part& part, int32_t index, int32_t segment_chunks) {
  part.index = index;
  part.begin += index * segment_chunks;
  part.end = min(part.end, part.begin + segment_chunks);
  part.place += index;
}

// Part `number` of the scan: a segment where the slab is cut, a whole sequence where not.
__device__ __forceinline__ Part find_part(const HopperParams& p, const SlabSequences& all,
                                          int32_t segment_chunks, int32_t number, int lane) {
  if (segment_chunks == 0) {
    Part part = {};
    part.sequence = p.call.entries[all.first + number];
    part.begin = max(part.sequence.chunk_begin, all.slab.begin);
    const int32_t chunks = part.sequence.chunk_count(p.call.grid);
    part.end = min(part.sequence.chunk_begin + chunks, all.slab.end);
    part.count = 1;
    return part;
  }
  Found found = find_cut_part<false>(p, all, segment_chunks, number, lane);
  take_segment(found.part, found.rest, segment_chunks);
  return found.part;
}

// ---- items --------------------------------------------------------------------------------------

// The [128, 128] state of one head in a pool; null for row -1.
__device__ __forceinline__ char* pool_state(const Pool& pool, int32_t row, int32_t head) {
  if (!pool || row < 0) return nullptr;
  const int bytes = pool.dtype == DType::kFloat32 ? 4 : 2;
  return static_cast<char*>(pool.data) +
         (row * pool.row_stride + static_cast<int64_t>(head) * (kDim * kDim)) * bytes;
}

__device__ __forceinline__ float* segment_state(const HopperParams& p, int32_t place,
                                                int32_t head) {
  return p.segments.states +
         (static_cast<int64_t>(place) * p.call.heads.state + head) * (kDim * kDim);
}

// The state before the first chunk of a sequence in the slab.
struct StateSource {
  const void* data;
  DType dtype;
};
__device__ __forceinline__ StateSource state_before(const HopperParams& p, const Part& part,
                                                    SlabRange slab, int32_t head) {
  if (part.sequence.chunk_begin < slab.begin) {
    return {p.call.handover_in + static_cast<int64_t>(head) * (kDim * kDim), DType::kFloat32};
  }
  return {pool_state(p.call.initial, part.sequence.read_row, head), p.call.initial.dtype};
}

// The part for one state head, as the scan runs it.
__device__ __forceinline__ void make_item(const HopperParams& params, const Part& part,
                                          SlabRange slab, int32_t head, ScanItem& item) {
  const PrefillParams& p = params.call;
  const SequenceEntry& sequence = part.sequence;
  const int32_t done = part.begin - sequence.chunk_begin;
  const ChunkRows first = chunk_rows(p.grid, sequence, done);
  item.chunks = part.end - part.begin;
  item.origin = static_cast<int32_t>(first.origin);
  item.first_row = first.first;
  item.last_row = chunk_rows(p.grid, sequence, done + item.chunks - 1).last;
  item.record = (part.begin - slab.begin) * p.heads.state + head;
  item.head = head;
  item.q_head = p.heads.q_of(head);
  item.k_head = p.heads.k_of(head);
  item.v_head = p.heads.v_of(head);
  item.awaited = item.announced = item.half = -1;

  const int32_t passed = p.grid.page_ends(sequence.first_checkpoint, done);
  item.page_end =
      static_cast<int32_t>(sequence.first_checkpoint + int64_t{passed} * p.grid.page_chunks - done);
  item.checkpoint = sequence.checkpoint_start + passed;

  // Of a cut sequence no pool row is read here: another segment may be writing it.
  StateSource before = state_before(params, part, slab, head);
  const bool cut = part.count > 1 && (part.index > 0 || before.data != nullptr);
  if (cut || params.segments.open) {
    before = {segment_state(params, part.place, head), DType::kFloat32};
  }
  item.state_in = before.data;
  item.dtype_in = static_cast<int32_t>(before.dtype);
  const bool handed_over = sequence.chunk_begin + sequence.chunk_count(p.grid) > slab.end;
  item.state_out =
      handed_over
          ? reinterpret_cast<char*>(p.handover_out + static_cast<int64_t>(head) * (kDim * kDim))
          : pool_state(p.output_state, sequence.write_row, head);
  item.dtype_out = static_cast<int32_t>(handed_over ? DType::kFloat32 : p.output_state.dtype);
  if (part.index + 1 < part.count) item.state_out = nullptr;
  item.chain = ((part.place - part.index) * p.heads.state + head) * ScanTraits::kStateWarps;
  item.steps = params.segments.steps && part.index > 1 ? part.index - 1 : 0;
}

}  // namespace gdn::sm90

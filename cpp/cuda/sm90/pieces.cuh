// Pieces: where the last wave of items would leave multiprocessors idle, the scan first shares two
// waves' worth of items out evenly and then runs the others whole.
//
// The items to share lie on a line that is cut into a piece a block: a chunk is 2 long, an item 1
// more; a slab's line is short enough for 32 bits, times the pieces too. Of an item that a cut
// divides, the piece that begins there takes the first chunks and the piece that ends there the
// last ones. So a block starts with what another waits for and ends with what itself waits for: by
// then it has long been written. The state is handed over in fp32, so cuts change no bit of a
// result.
//
// A piece waits for the next one, which an earlier ticket has drawn: its block runs already.
#pragma once

#include "cuda/sm90/segments.cuh"

namespace gdn::sm90 {

// Items whose sharing pays: those past the last full wave, and one full wave, so that no item is
// longer than a piece. By one warp of prepare.
__device__ __forceinline__ int32_t choose_cut_items(const HopperParams& p, const SlabSequences& all,
                                                    int lane) {
  constexpr int32_t kMostWaves = 8;
  const int32_t blocks = p.pieces.count;
  if (blocks == 0 || all.count > kMaxCutSequences) return 0;
  const int32_t items = all.count * p.call.heads.state, rest = items % blocks;
  // A last wave that is nearly full is left as it is.
  if (items < blocks || items >= kMostWaves * blocks || rest > blocks * 7 / 8) return 0;
  const int32_t shared = rest + blocks;
  if (rest == 0 || shared > 32 * p.call.heads.state) return 0;  // PieceLine::place
  const int32_t own[2] = {lane_chunks(p, all, lane), lane_chunks(p, all, lane + 32)};
  const int32_t longest = __reduce_max_sync(kFullWarp, max(own[0], own[1]));
  const int32_t sum = __reduce_add_sync(kFullWarp, own[0] + own[1]);
  // Uneven lengths fill the last wave by themselves, and an item longer than a piece cannot gain.
  constexpr int32_t kLeastChunks = 16;
  const bool even = static_cast<int64_t>(longest) * all.count <= int64_t{sum} * 3 / 2;
  return even && longest >= kLeastChunks ? shared : 0;
}

// By one warp, into shared memory: what begin_slab writes, without the segments of each sequence;
// where whole sequences are known to be the items, from the plan.
__device__ __forceinline__ void copy_slab(const HopperParams& p, SlabState& shared, bool planned,
                                          int lane) {
  if (planned) {
    const PlanHeader plan = *p.call.plan;
    const SlabSequences all = {{0, plan.num_chunks}, 0, plan.num_entries};
    if (lane == 0) {
      shared.segment_chunks = shared.cut_items = 0;
      shared.num_parts = all.count;
      shared.sequences = all;
      shared.halves = scan_in_halves(all.count * p.call.heads.state, p.segments.num_blocks);
    }
  } else if (lane < static_cast<int>(offsetof(SlabState, segments) / 4)) {
    reinterpret_cast<int32_t*>(&shared)[lane] = reinterpret_cast<const int32_t*>(p.state)[lane];
  }
  __syncwarp();
}

// By one warp of prepare: what the other kernels of the slab read.
__device__ __forceinline__ void begin_slab(const HopperParams& p, int lane) {
  const SlabSequences all = slab_sequences(p, lane);
  SlabState state = {};
  if (p.segments.pieces > 0) {
    state = take_pieces(p, all);
  } else if (p.segments.capacity > 0 && all.count <= kMaxCutSequences) {
    state = choose_segments(p, all, lane);
  }
  const int32_t length = state.segment_chunks;
  if (length == 0) {
    state.num_parts = all.count;
    state.cut_items = choose_cut_items(p, all, lane);
  }
  SlabState& shared = *p.state;
  int32_t combined = 0;  // sequences with steps of the combination
  for (int32_t i = lane; i < kMaxCutSequences; i += 32) {
    const int32_t pieces = length > 0 ? (lane_chunks(p, all, i) + length - 1) / length : 0;
    shared.segments[i] = static_cast<uint16_t>(pieces);
    combined += __popc(__ballot_sync(kFullWarp, pieces > 2));
  }
  if (lane == 0) {
    shared.next_item = 0;
    shared.next_summary = 0;
    shared.segment_chunks = length;
    shared.num_parts = state.num_parts;
    shared.sequences = all;
    shared.num_summaries = state.num_summaries;
    shared.cut_items = state.cut_items;
    shared.halves = scan_in_halves(state.num_parts * p.call.heads.state, p.segments.num_blocks);
    const int32_t summaries = state.num_summaries * p.call.heads.state;
    // The last segment of a part of a prompt is summed up too, and a piece knows one length alone.
    const bool even = !p.segments.mapped || lane_chunks(p, all, 0) == state.num_parts * length;
    shared.summary_pieces =
        even && summary_in_pieces(summaries, length, p.pieces.count) ? p.pieces.count : 0;
    shared.next_combination = 0;
    shared.num_combinations = combined * p.call.heads.state * ScanTraits::kStateWarps;
  }
  for (int i = lane; i < p.pieces.count * ScanTraits::kStateWarps; i += 32) {
    p.pieces.written[i] = 0;
  }
}

// One block's piece, and how far it is; the same in all lanes of a warp.
struct Piece {
  int32_t number = 0;
  int32_t item = 0;  // the next one
  int32_t begin = 0, end = 0;
  int32_t at = 0;  // where the next item begins
};

struct PieceLine {
  const HopperParams& p;
  const SlabSequences& all;
  int32_t items;  // on the line

  // What the items before those of sequence `lane + base` take, and the length of one of its own.
  struct Place {
    int32_t begin;
    int32_t cost;
  };
  // Of every sequence at once, a lane each of the first 32; the line holds no more.
  __device__ __forceinline__ Place place(int lane) const {
    const int32_t heads = p.call.heads.state;
    const int32_t cost = 2 * lane_chunks(p, all, lane) + 1;
    const int32_t own = max(min(items - lane * heads, heads), 0);
    int32_t end = cost * own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t lower = __shfl_up_sync(kFullWarp, end, step);
      if (lane >= step) end += lower;
    }
    return {end - cost * own, cost};
  }

  __device__ __forceinline__ Piece begin(int32_t number, int lane) const {
    const Place own = place(lane);
    const int32_t heads = p.call.heads.state, last = (items - 1) / heads;
    const int32_t length = __shfl_sync(kFullWarp, own.begin, last) +
                           __shfl_sync(kFullWarp, own.cost, last) * (items - last * heads);
    Piece piece = {.number = number};
    piece.begin = length * number / p.pieces.count;
    piece.end = length * (number + 1) / p.pieces.count;
    const unsigned before = __ballot_sync(kFullWarp, lane <= last && own.begin <= piece.begin);
    const int owner = 31 - __clz(static_cast<int>(before));
    const int32_t start = __shfl_sync(kFullWarp, own.begin, owner);
    const int32_t cost = __shfl_sync(kFullWarp, own.cost, owner);
    const int32_t head = (piece.begin - start) / cost;
    piece.item = owner * heads + head;
    piece.at = start + head * cost;
    return piece;
  }

  // The next item's chunks that belong to the piece; false: none of them.
  __device__ __forceinline__ bool next(Piece& piece, Part& part, int32_t* head) const {
    const int32_t heads = p.call.heads.state;
    part = find_part(p, all, 0, piece.item / heads, 0);
    *head = piece.item++ % heads;
    const int32_t chunks = part.sequence.live() ? part.end - part.begin : 0;
    const int32_t end = piece.at + 2 * chunks + 1;
    const int32_t begin = part.begin;
    if (end > piece.end) part.begin = begin + (end - piece.end) / 2;
    if (piece.at < piece.begin) {
      part.end = begin + (end - piece.begin) / 2;
    }
    piece.at = end;
    return chunks > 0 && part.begin < part.end;
  }
};

// After make_item: the ends of a cut item are other blocks' states.
__device__ __forceinline__ void cut_item(const HopperParams& p, SlabRange slab, const Part& part,
                                         int32_t piece, ScanItem& item) {
  const auto state = [&](int32_t of) {
    return p.pieces.states + static_cast<int64_t>(of) * (kDim * kDim);
  };
  const SequenceEntry& sequence = part.sequence;
  if (part.begin > max(sequence.chunk_begin, slab.begin)) {
    item.awaited = piece + 1;
    item.state_in = state(piece + 1);
    item.dtype_in = static_cast<int32_t>(DType::kFloat32);
  }
  if (part.end < min(sequence.chunk_begin + sequence.chunk_count(p.call.grid), slab.end)) {
    item.announced = piece;
    item.state_out = state(piece);
    item.dtype_out = static_cast<int32_t>(DType::kFloat32);
  }
}

}  // namespace gdn::sm90

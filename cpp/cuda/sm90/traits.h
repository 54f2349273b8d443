// Tiles, stages, roles, registers and the shared-memory map of the Hopper prefill kernels.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/sm80/params.h"

namespace gdn::sm90 {

inline constexpr int kDim = 128;                // head size
inline constexpr int kPanel = kChunk * 64 * 2;  // bytes of 64 rows x 64 columns
inline constexpr int kTile = 2 * kPanel;        // of 64 rows x 128 columns

// The lower triangle of That: four panels of 16 columns, panel j from row 16 j on.
inline constexpr int kInverseBytes = 5120;

// Where panel j begins in the packed triangle. Unpacked, row t of panel j is at 2048 j + 32 t.
GDN_HOST_DEVICE constexpr int inverse_panel(int j) { return 512 * (4 * j - j * (j - 1) / 2); }
GDN_HOST_DEVICE constexpr int inverse_panel_bytes(int j) { return 512 * (4 - j); }
static_assert(inverse_panel(4) == kInverseBytes);

// Gates of one chunk and head, fp32. c_t = log2 of the product of alpha up to t, G_t = 2^c_t.
struct alignas(128) GateBlock {
  float log2[kChunk];        // c_t
  float from_start[kChunk];  // G_t, in fragment order (gate_place)
};
static_assert(sizeof(GateBlock) == 512);

// Bytes to c_C and G_C, of the last token.
inline constexpr int kGateSum = (kChunk - 1) * 4;
inline constexpr int kGateTotal = (kChunk + gate_place(kChunk - 1)) * 4;

// What the loader hands to the other roles for one (sequence, state head) of a slab.
struct alignas(16) ScanItem {
  int32_t chunks;     // 0: no more items
  int32_t origin;     // token of the first chunk's row 0; it may lie before the sequence
  int32_t first_row;  // of the first chunk
  int32_t last_row;   // of the last chunk, past the end
  int32_t record;     // first chunk x heads + head: index into inverses and gate blocks
  int32_t head;       // state and output head
  int32_t q_head;
  int32_t k_head;
  int32_t v_head;
  int32_t page_end;      // chunks up to the first page end; far off without pages
  int32_t checkpoint;    // entry of that page end
  int32_t awaited;       // piece whose block leaves the state to begin with; -1: none
  int32_t announced;     // own piece, where another block continues; -1: none
  int32_t chain;         // of a cut sequence and head: index into SegmentParams::steps, and of the
  int32_t steps;         // combination's steps those that this segment waits for
  int32_t half;          // 0, 1: 64 rows of V alone, by the first state warpgroup; -1: all rows
  const void* state_in;  // [128, 128] of this head; null: zero
  void* state_out;       // null: not stored
  int32_t dtype_in;      // DType
  int32_t dtype_out;
};
static_assert(sizeof(ScanItem) == 96);

// Chunks of one slab, numbered over all sequences.
struct SlabRange {
  int32_t begin;
  int32_t end;
};

// More sequences than this in one slab fill the GPU, or share it too evenly to be cut.
inline constexpr int32_t kMaxCutSequences = 64;

// The sequences of one slab.
struct SlabSequences {
  SlabRange slab;
  int32_t first;
  int32_t count;
};

// What the kernels of a slab share; prepare writes it.
struct alignas(16) SlabState {
  int32_t next_item;       // ticket of the scan
  int32_t next_summary;    // ticket of the summary
  int32_t segment_chunks;  // chunks per segment; 0: no sequence is cut
  int32_t num_parts;       // segments and whole sequences
  SlabSequences sequences;
  int32_t num_summaries;     // items of the summary per head
  int32_t cut_items;         // items of the scan that are cut into a piece a block (pieces.cuh)
  int32_t next_combination;  // ticket of the combination
  int32_t num_combinations;
  int32_t summary_pieces;  // not 0: the summary shares its items out in so many pieces
  int32_t halves;          // not 0: an item of the scan is 64 rows of V
  int32_t unused[2];
  uint16_t segments[kMaxCutSequences];  // of each sequence, where some are cut
};
static_assert(sizeof(SlabState) == 64 + 2 * kMaxCutSequences);

inline constexpr int kTransitionVectors = 8 * 16 * 32;  // of 16 bytes: one M

// The maps of segments and heads: S_end = S_start M + N.
struct SegmentParams {
  float* states;       // [capacity, H, 128, 128]: N of the segment before, then the state before
  uint4* transitions;  // [capacity, H, 8, 16, 32]: M, as B fragments in two parts (combine.cuh)
  int32_t* resets;     // [capacity, H]: not 0: M is zero, whatever the state is
  int32_t* steps;  // [capacity, H, 8]: steps done of 16 rows, at a sequence's first segment; null:
                   // the scan does not combine
  int32_t capacity;    // segments of the sequences that are cut; 0: none is
  int32_t num_blocks;  // multiprocessors
  int32_t min_chunks;  // of a segment
  int32_t max_chunks;
  bool demanded;  // cut where that is possible, not where it pays
  // A part of a prompt (segment.cu): its one sequence is cut into so many, 0: it is a whole call.
  int32_t pieces;
  bool open;    // the state before it comes later, so the first one has a map too
  bool mapped;  // its own map is asked for, so the last one has one too
};

// Where the scan or the summary shares items out in pieces.
struct PieceParams {
  float* states;     // [count, 128, 128]: the state where the first item of a piece is cut
  int32_t* written;  // [count, state warps]: not 0: the warp's part of it is there
  int32_t count;     // blocks; 0: no item is cut
};

// By value to all kernels.
struct HopperParams {
  CUtensorMap q_map, k_map, v_map, output_map;
  PrefillParams call;
  SegmentParams segments;
  PieceParams pieces;
  uint8_t* inverses;  // [slab_chunks, H, kInverseBytes]: That of a chunk, swizzled
  GateBlock* gates;   // [slab_chunks, H]
  SlabState* state;
  int32_t slab;
  int32_t num_slabs;
};

// Slabs share the chunks that there are evenly: the host knows only their bound.
GDN_HOST_DEVICE inline SlabRange slab_range(int32_t chunks, int32_t slab, int32_t num_slabs) {
  const int32_t each = (chunks + num_slabs - 1) / num_slabs;
  const int64_t begin = static_cast<int64_t>(slab) * each, end = begin + each;
  return {.begin = static_cast<int32_t>(begin < chunks ? begin : chunks),
          .end = static_cast<int32_t>(end < chunks ? end : chunks)};
}

// Scan: two state warpgroups of 64 rows of V each, one auxiliary warpgroup, one loader warpgroup.
struct ScanTraits {
  static constexpr int kStateGroups = 2;
  static constexpr int kStateWarps = 4 * kStateGroups;
  static constexpr int kAuxGroup = kStateGroups;
  static constexpr int kLoaderGroup = kStateGroups + 1;
  static constexpr int kThreads = 128 * (kStateGroups + 2);
  // NOTE: below 176 registers the state role spills (nvcc 13.0). The sum is 512, all of an SM.
  static constexpr int kStateRegisters = 176;
  static constexpr int kAuxRegisters = 112;
  static constexpr int kLoaderRegisters = 48;
  static constexpr int kLoaderWarps = 2;  // of its warpgroup; then a value warp a state group

  static constexpr int kKeyStages = 4;
  static constexpr int kQueryStages = 3;
  static constexpr int kInverseStages = 3;
  static constexpr int kPairStages = 2;  // V with O, X, R
  // A block is last read one chunk after its K; then K's ring holds back the refill.
  static constexpr int kGateStages = 6;
  static constexpr int kItemStages = 4;

  // Bytes from the start of shared memory, which is aligned to 1024.
  static constexpr int kKeys = 0;
  static constexpr int kQueries = kKeys + kKeyStages * kTile;
  static constexpr int kValues = kQueries + kQueryStages * kTile;  // O leaves through V's place
  static constexpr int kX = kValues + kPairStages * kStateGroups * kPanel;
  static constexpr int kR = kX + kPairStages * kTile;
  static constexpr int kInverses = kR + kPairStages * kPanel;
  static constexpr int kGates = kInverses + kInverseStages * kPanel;
  static constexpr int kItems = kGates + kGateStages * static_cast<int>(sizeof(GateBlock));
  static constexpr int kBarriers = kItems + kItemStages * static_cast<int>(sizeof(ScanItem));

  // mbarriers, 8 bytes each; "full" ends with the data in place, "empty" with the last reader.
  static constexpr int kKeyFull = kBarriers;
  static constexpr int kKeyEmpty = kKeyFull + 8 * kKeyStages;
  static constexpr int kQueryFull = kKeyEmpty + 8 * kKeyStages;
  static constexpr int kQueryEmpty = kQueryFull + 8 * kQueryStages;
  static constexpr int kInverseFull = kQueryEmpty + 8 * kQueryStages;
  static constexpr int kInverseEmpty = kInverseFull + 8 * kInverseStages;
  static constexpr int kValueFull = kInverseEmpty + 8 * kInverseStages;  // [group][stage]
  static constexpr int kOutputFull = kValueFull + 8 * kPairStages * kStateGroups;
  static constexpr int kXFull = kOutputFull + 8 * kPairStages * kStateGroups;
  static constexpr int kXEmpty = kXFull + 8 * kPairStages;
  static constexpr int kRFull = kXEmpty + 8 * kPairStages;
  static constexpr int kREmpty = kRFull + 8 * kPairStages;
  static constexpr int kItemFull = kREmpty + 8 * kPairStages;
  static constexpr int kItemEmpty = kItemFull + 8 * kItemStages;
  static constexpr int kSlab = kItemEmpty + 8 * kItemStages;  // SlabState
  static constexpr int kSharedBytes = kSlab + static_cast<int>(sizeof(SlabState));

  // Named barrier; 0 is __syncthreads.
  static constexpr int kLoaderSync = 1;
  static constexpr int kCombineSync = 2;
  static constexpr int kValuesFree = 3;
};
static_assert(ScanTraits::kSharedBytes <= 232448);
static_assert(2 * ScanTraits::kStateRegisters + ScanTraits::kAuxRegisters +
                  ScanTraits::kLoaderRegisters ==
              512);

}  // namespace gdn::sm90

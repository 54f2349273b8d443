// Where a scan block stands, and the copies of a chunk's operands into shared memory.
#pragma once

#include "cuda/common/copy.cuh"
#include "cuda/sm80/traits.h"

namespace gdn {

// The same for all threads of a block: one warp works it out.
struct ScanBlock {
  // Where chunk 0 of the sequence stands.
  const bf16* keys;
  const bf16* queries;
  const bf16* values;          // from the block's first column on
  const ChunkRecord* records;  // of the block's head
  uint16_t* output;            // from the block's first column on
  int32_t entry;               // of the plan; negative: nothing to do
  int32_t head;
  int32_t column;  // first column of V
  int32_t begin;   // chunks of this slab, counted within the sequence
  int32_t end;
  int32_t skipped;   // rows of chunk 0 before the first token
  uint32_t rows;     // all rows of the sequence, with the skipped ones
  int32_t page_end;  // chunks up to the first page end
  bool live;
};

// Where a block stands in its sequence: a chunk and its rows. kUnaligned: a page may end in a
// shorter chunk. NOTE: two kernels, as the arithmetic of the second costs 1024x8 8/32 2.5 % (H200).
template <bool kUnaligned>
struct ScanChunk;

template <>
struct ScanChunk<false> {
  int32_t number;

  __device__ __forceinline__ ScanChunk(const ChunkGrid&, const ScanBlock& block)
      : number(block.begin) {}
  // Rows of the sequence before row 0.
  __device__ __forceinline__ int64_t begin() const { return number * kChunk; }
  // Rows that hold tokens.
  __device__ __forceinline__ int first(const ScanBlock& block) const {
    return number == 0 ? block.skipped : 0;
  }
  __device__ __forceinline__ int last(const ScanBlock& block) const {
    const uint32_t left = block.rows - static_cast<uint32_t>(number) * 64u;
    return left < 64u ? static_cast<int>(left) : 64;
  }
  __device__ __forceinline__ void advance(const ChunkGrid&) { ++number; }
};

template <>
struct ScanChunk<true> {
  int32_t number;
  uint32_t rows_before;
  int32_t page_end;  // chunks up to the next page end
  int most;          // rows with those past the end of the sequence

  __device__ __forceinline__ ScanChunk(const ChunkGrid& grid, const ScanBlock& block)
      : number(block.begin),
        rows_before(static_cast<uint32_t>(gdn::rows_before(grid, block.page_end, block.begin))),
        page_end(block.page_end + grid.page_ends(block.page_end, block.begin) * grid.page_chunks) {
    set_most(grid);
  }
  __device__ __forceinline__ int64_t begin() const { return rows_before; }
  __device__ __forceinline__ int first(const ScanBlock& block) const {
    return number == 0 ? block.skipped : 0;
  }
  __device__ __forceinline__ int last(const ScanBlock& block) const {
    return static_cast<int>(min(block.rows - rows_before, static_cast<uint32_t>(most)));
  }
  __device__ __forceinline__ void advance(const ChunkGrid& grid) {
    rows_before += most;
    if (++number == page_end) page_end += grid.page_chunks;
    set_most(grid);
  }

 private:
  __device__ __forceinline__ void set_most(const ChunkGrid& grid) {
    most = static_cast<int>(kChunk) - (number + 1 == page_end ? grid.gap : 0);
  }
};

// Fills `block` with the work of this block, by one warp.
template <class Traits>
__device__ __forceinline__ void find_block(const PrefillParams& p, ScanBlock& block) {
  const int lane = this_lane();
  const PlanHeader plan = *p.plan;
  const int32_t slab_end = min(p.slab_begin + p.slab_chunks, plan.num_chunks);
  if (lane == 0) block.entry = -1;
  if (p.slab_begin >= slab_end) return;
  const int64_t item = blockIdx.x / Traits::kSplits;
  const int64_t entry =
      item / p.heads.state + find_sequence(p.entries, plan.num_entries, p.slab_begin, lane);
  if (entry >= plan.num_entries) return;
  const SequenceEntry sequence = p.entries[entry];
  if (sequence.chunk_begin >= slab_end) return;
  if (lane != 0) return;

  const int32_t head = static_cast<int32_t>(item % p.heads.state);
  const int32_t column = static_cast<int32_t>(blockIdx.x % Traits::kSplits) * Traits::kColumns;
  const int64_t slot = sequence.chunk_begin - p.slab_begin;  // of chunk 0; may lie before the slab
  const int64_t origin = sequence.begin - sequence.skipped();
  const auto rows_of = [&](const Tensor& x, int32_t x_head) {
    return static_cast<const bf16*>(x.data) + origin * x.row_stride + x_head * x.head_stride;
  };
  constexpr int64_t kTile = kChunk * Traits::D;
  const int64_t unit = slot * p.units + head / p.group, place = slot * p.heads.state + head;
  block.entry = static_cast<int32_t>(entry);
  block.head = head;
  block.column = column;
  block.begin = max(p.slab_begin - sequence.chunk_begin, 0);
  block.end = min(slab_end - sequence.chunk_begin, sequence.chunk_count(p.grid));
  block.skipped = sequence.skipped();
  block.rows = static_cast<uint32_t>(block.skipped) + static_cast<uint32_t>(sequence.length);
  block.page_end = sequence.first_checkpoint;
  block.live = sequence.live();
  block.keys = p.staging.qk ? p.staged_k + unit * kTile : rows_of(p.k, p.heads.k_of(head));
  block.queries = p.staging.qk ? p.staged_q + unit * kTile : rows_of(p.q, p.heads.q_of(head));
  block.values =
      (p.staging.v ? p.staged_v + place * kTile : rows_of(p.v, p.heads.v_of(head))) + column;
  block.records = p.records + place;
  block.output = static_cast<uint16_t*>(const_cast<void*>(p.output.data)) +
                 origin * p.output.row_stride + head * p.output.head_stride + column;
}

template <class Traits>
class ScanCopies {
 public:
  static constexpr int D = Traits::D;
  using KeyTile = typename Traits::KeyTile;
  using ValueTile = typename Traits::ValueTile;
  using Chunk = ScanChunk<Traits::kUnaligned>;

  __device__ __forceinline__ ScanCopies(const PrefillParams& p, const ScanBlock& block,
                                        uint32_t shared)
      : p_(p), block_(block), shared_(shared) {}

  __device__ __forceinline__ uint32_t stage(int32_t chunk) const {
    return shared_ + (chunk & 1) * Traits::kStageBytes;
  }
  __device__ __forceinline__ uint32_t queries(int32_t chunk) const {
    return rest(chunk) + Traits::kQueries;
  }
  __device__ __forceinline__ uint32_t products(int32_t chunk) const {
    return rest(chunk) + Traits::kProducts;
  }
  __device__ __forceinline__ uint32_t values(int32_t chunk) const {
    return rest(chunk) + Traits::kValues;
  }

  // K, T and gates.
  __device__ __forceinline__ void copy_keyed(const Chunk& chunk) const {
    const int copier = static_cast<int>(threadIdx.x) - Traits::kFirstCopier;
    if (chunk.number >= block_.end || copier < 0) return;
    const uint32_t to = stage(chunk.number);
    copy_keys(to + Traits::kKeys, block_.keys, p_.k, chunk, copier);
    copy_bytes<kTriangleBytes + sizeof(GateRecord)>(to + Traits::kTriangle, record(chunk.number).t,
                                                    copier);
    copy_commit();
  }

  // V, Q and P.
  __device__ __forceinline__ void copy_rest(const Chunk& chunk) const {
    const int copier = static_cast<int>(threadIdx.x) - Traits::kFirstCopier;
    if (chunk.number >= block_.end || copier < 0) return;
    copy_values(chunk, copier);
    copy_keys(queries(chunk.number), block_.queries, p_.q, chunk, copier);
    copy_bytes<kTriangleBytes>(products(chunk.number), record(chunk.number).p, copier);
    copy_commit();
  }

 private:
  static constexpr int kKeyPieces = D / 8;
  static constexpr int kKeyStep = Traits::kCopiers / kKeyPieces;
  static constexpr int kValuePieces = 2 * Traits::kWarps;
  static constexpr int kValueStep = Traits::kCopiers / kValuePieces;

  __device__ __forceinline__ uint32_t rest(int32_t chunk) const {
    return shared_ + (Traits::kAhead ? (chunk & 1) * Traits::kRestBytes : 0);
  }

  // `copier` is a thread's place among those that copy; a negative one does not.

  // Rows of a chunk for one thread: one piece of every kStep-th row.
  struct Rows {
    const bf16* from;
    int64_t stride;
    uint32_t place;  // of the first piece, from the tile's start
    int row;
    int first, last;  // rows that hold tokens
  };

  template <class Tile, int kStep>
  static __device__ __forceinline__ void copy_rows(uint32_t tile, const Rows& rows) {
    static_assert((kStep & (kStep - 1)) == 0 && 64 % kStep == 0);
    const auto place_of = [&](int turn) {
      return tile + (rows.place ^ Tile::flip(turn * kStep)) + turn * kStep * Tile::kRowBytes;
    };
    if (rows.first == 0 && rows.last == 64) {
#pragma unroll
      for (int turn = 0; turn < 64 / kStep; ++turn) {
        copy_async(place_of(turn), rows.from + turn * kStep * rows.stride);
      }
      return;
    }
    // Where such chunks are many, the turns before the first row without a token need no test.
    int turn = 0;
    if (Traits::kUnaligned && rows.first == 0) {
#pragma unroll 4
      for (; turn < rows.last / kStep; ++turn) {
        copy_async(place_of(turn), rows.from + turn * kStep * rows.stride);
      }
    }
#pragma unroll 1
    for (; turn < 64 / kStep; ++turn) {
      const int at = rows.row + turn * kStep;
      copy_async_or_zero(place_of(turn), rows.from + turn * kStep * rows.stride,
                         at >= rows.first && at < rows.last);
    }
  }

  __device__ __forceinline__ int64_t key_stride(const Tensor& x) const {
    return p_.staging.qk ? D : x.row_stride;
  }

  __device__ __forceinline__ void copy_keys(uint32_t to, const bf16* from, const Tensor& x,
                                            const Chunk& chunk, int copier) const {
    const int64_t stride = key_stride(x);
    const int64_t begin =
        p_.staging.qk ? chunk.number * (p_.units * kChunk * D) : chunk.begin() * stride;
    const int row = copier / kKeyPieces, piece = copier % kKeyPieces;
    copy_rows<KeyTile, kKeyStep>(to, {.from = from + begin + row * stride + 8 * piece,
                                      .stride = stride,
                                      .place = KeyTile::offset(row, piece),
                                      .row = row,
                                      .first = p_.staging.qk ? 0 : chunk.first(block_),
                                      .last = p_.staging.qk ? 64 : chunk.last(block_)});
  }

  __device__ __forceinline__ void copy_values(const Chunk& chunk, int copier) const {
    const int64_t stride = p_.staging.v ? D : p_.v.row_stride;
    const int64_t begin =
        p_.staging.v ? chunk.number * (p_.heads.state * kChunk * D) : chunk.begin() * stride;
    const int row = copier / kValuePieces, piece = copier % kValuePieces;
    copy_rows<ValueTile, kValueStep>(values(chunk.number),
                                     {.from = block_.values + begin + row * stride + 8 * piece,
                                      .stride = stride,
                                      .place = ValueTile::offset(row, piece),
                                      .row = row,
                                      .first = p_.staging.v ? 0 : chunk.first(block_),
                                      .last = p_.staging.v ? 64 : chunk.last(block_)});
  }

  __device__ __forceinline__ const ChunkRecord& record(int32_t chunk) const {
    return block_.records[static_cast<int64_t>(chunk) * p_.heads.state];
  }

  template <int kBytes>
  static __device__ __forceinline__ void copy_bytes(uint32_t to, const uint8_t* from, int copier) {
    constexpr int kPieces = kBytes / 16;
    to += 16 * copier;
    from += 16 * copier;
#pragma unroll
    for (int i = 0; i < kPieces; i += Traits::kCopiers) {
      if (i + Traits::kCopiers <= kPieces || i + copier < kPieces) {
        copy_async(to + 16 * i, from + 16 * i);
      }
    }
  }

  const PrefillParams& p_;
  const ScanBlock& block_;
  uint32_t shared_;
};

}  // namespace gdn

// Advances the tiles of one head through a segment, four tokens at a time. Per mini-chunk and
// register of V rows: eight dot products over K with the old tile, a 4 x 4 triangular solve, a
// rank-4 update. 12 or 13 operations per four tokens and tile element against 16 token by token.
#pragma once

#include "cpu/pass.h"
#include "cpu/state.h"

namespace gdn::cpu {
namespace {

// W registers of V rows of a tile, between two passes.
struct Strip {
  float* tile;                 // [K][kTileV], at the strip's first V row
  int offset;                  // of that row from the tiles' first V row
  int left;                    // V rows from there on
  Vec z[2 * kMini][kWidth];    // tile k_i, tile q_i
  Vec weights[kMini][kWidth];  // store_j u_j
};

// The triangular solve of a mini-chunk whose tokens all exist and never reset.
template <int W>
GDN_INLINE void solve_plain(const MiniChunk& m, const Values& values, int64_t token, Strip* strip) {
#pragma GCC unroll 2
  for (int w = 0; w < W; ++w) {
    const int left = strip->left - w * kLanes;
    const int64_t row = strip->offset + w * kLanes;
    Vec u[kMini];
#pragma GCC unroll 4
    for (int i = 0; i < kMini; ++i) {
      const Vec v = read_lanes(values.v, (token + i) * values.v_stride + row, values.io, left);
      u[i] = v * m.beta[i] - strip->z[i][w] * m.read_k[i];
#pragma GCC unroll 4
      for (int j = 0; j < i; ++j) u[i] -= u[j] * m.solve[i][j];
    }
#pragma GCC unroll 4
    for (int i = 0; i < kMini; ++i) {
      Vec o = strip->z[kMini + i][w] * m.read_q[i];
#pragma GCC unroll 4
      for (int j = 0; j <= i; ++j) o += u[j] * m.mix[i][j];
      write_lanes(values.output, (token + i) * values.output_stride + row, values.io, left, o);
      strip->weights[i][w] = u[i] * m.store[i];
    }
  }
}

// The same with absent tokens and resets. What a reset has cut off is left out, not multiplied by
// zero: it may be NaN.
template <int W>
void solve_any(const MiniChunk& m, const Values& values, int64_t token, Strip* strip) {
  for (int w = 0; w < W; ++w) {
    const int left = strip->left - w * kLanes;
    const int64_t row = strip->offset + w * kLanes;
    Vec u[kMini] = {};
    for (int i = m.first; i < m.last; ++i) {
      const int64_t at = (token + i) * values.v_stride + row;
      u[i] = read_lanes(values.v, at, values.io, left) * m.beta[i];
      Vec o{};
      if (m.reset[i] < 0) {
        u[i] -= strip->z[i][w] * m.read_k[i];
        o = strip->z[kMini + i][w] * m.read_q[i];
      }
      const int from = m.reset[i] > m.first ? m.reset[i] : m.first;
      for (int j = from; j < i; ++j) u[i] -= u[j] * m.solve[i][j];
      for (int j = from; j <= i; ++j) o += u[j] * m.mix[i][j];
      write_lanes(values.output, (token + i) * values.output_stride + row, values.io, left, o);
    }
    for (int j = 0; j < kMini; ++j) {
      const bool stored = j >= m.first && j < m.last && j >= m.reset[kMini - 1];
      strip->weights[j][w] = stored ? u[j] * m.store[j] : Vec{};
    }
  }
}

// Update by mini-chunk n - 1, dot products of mini-chunk n; either may lie outside the segment.
template <int W>
GDN_INLINE void run_pass(const Segment& segment, int n, Requests* requests, Strip* strip) {
  const int64_t mini_floats = static_cast<int64_t>(segment.dim_k) * 2 * kMini;
  PassInput<W> in{.tile = strip->tile,
                  .dim_k = segment.dim_k,
                  .old_kq = segment.kq,
                  .weights = strip->weights,
                  .keep = 1.0f,
                  .new_kq = segment.kq};
  if (n == 0) {
    const MiniChunk& first = segment.minis[0];
    if (first.reset[first.first] >= 0) return;  // the tile does not count and may not exist
    return pass<W, Update::kNone, true>(in, requests, strip->z);
  }
  const MiniChunk& m = segment.minis[n - 1];
  in.old_kq += (n - 1) * mini_floats;
  in.keep = m.keep;
  const bool replace = m.reset[kMini - 1] >= 0;
  if (n == segment.num_minis) {  // the last update always brings the factor back to 1
    return replace ? pass<W, Update::kReplace, false>(in, requests, strip->z)
                   : pass<W, Update::kScaleAdd, false>(in, requests, strip->z);
  }
  in.new_kq += n * mini_floats;
  if (replace) return pass<W, Update::kReplace, true>(in, requests, strip->z);
  return m.rescale ? pass<W, Update::kScaleAdd, true>(in, requests, strip->z)
                   : pass<W, Update::kAdd, true>(in, requests, strip->z);
}

template <int W>
GDN_INLINE void step_strip(const Segment& segment, int n, const Values& values, Requests* requests,
                           Strip* strip) {
  run_pass<W>(segment, n, requests, strip);
  if (n == segment.num_minis) return;
  const MiniChunk& m = segment.minis[n];
  const int64_t token = n * kMini - segment.phase;
  if (m.plain) {
    solve_plain<W>(m, values, token, strip);
  } else {
    solve_any<W>(m, values, token, strip);
  }
}

// How far ahead token rows are requested. NOTE: 1, 2 and 8 mini-chunks measure alike.
constexpr int kAhead = 2;

constexpr uintptr_t kLine = 64;

GDN_INLINE uintptr_t line_of(uintptr_t address) { return address & ~(kLine - 1); }

// All lines of one strip of a token row.
GDN_INLINE void add_row(const void* base, int64_t element, int64_t bytes, Requests* requests) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(base) + element * bytes;
  const uintptr_t end = begin + kStripV * bytes;
  for (uintptr_t line = line_of(begin); line < end; line += kLine) requests->add(line);
}

// v and output of one strip for the mini-chunk from `token` on.
GDN_INLINE void add_values(const Values& values, int64_t token, int64_t row, Requests* requests) {
  const int64_t bytes = values.io == DType::kFloat32 ? 4 : 2;
  const int64_t end = token + kMini < values.tokens_left ? token + kMini : values.tokens_left;
  for (int64_t t = token; t < end; ++t) {
    add_row(values.v, t * values.v_stride + row, bytes, requests);
    add_row(values.output, t * values.output_stride + row, bytes, requests);
  }
}

// Hands out the lines of what is upcoming in equal shares.
class UpcomingLines {
 public:
  UpcomingLines(const Upcoming& upcoming, int steps)
      : stream_(upcoming.streams), end_(upcoming.streams + upcoming.count) {
    int64_t lines = 0;
    for (const Upcoming::Stream* s = stream_; s < end_; ++s) {
      lines += s->rows * static_cast<int64_t>(s->bytes / kLine + 1);
    }
    const int64_t share = (lines + steps - 1) / steps;
    share_ = static_cast<int>(share < kMaxShare ? share : kMaxShare);
    start_row();
  }

  void take(Requests* requests) {
    for (int n = 0; n < share_ && stream_ < end_; ++n) {
      requests->add(line_);
      line_ += kLine;
      if (line_ < row_end_) continue;
      if (++row_ == stream_->rows) {
        row_ = 0;
        ++stream_;
      }
      start_row();
    }
  }

 private:
  // The lines of a strip's rows of v and output leave this much room.
  static constexpr int kMaxShare = Requests::kMax - 2 * kMini * (kStripV * 4 / kLine + 1);

  void start_row() {
    if (stream_ == end_) return;
    const uintptr_t row = reinterpret_cast<uintptr_t>(stream_->base) + row_ * stream_->stride;
    line_ = line_of(row);
    row_end_ = row + stream_->bytes;
  }

  const Upcoming::Stream* stream_;
  const Upcoming::Stream* end_;
  int64_t row_ = 0;
  uintptr_t line_ = 0, row_end_ = 0;
  int share_ = 0;
};

// Stores the rows of a finished strip at once, while it is in L1; strips of four rows in pairs.
GDN_INLINE void store_strip(const StateStore& store, const Strip& strip) {
  const int end = strip.offset + kStripV < store.to.dim_v ? strip.offset + kStripV : store.to.dim_v;
  const int begin = strip.offset / 8 * 8;
  if (end % 8 == 0) store_rows(strip.tile - (strip.offset - begin), store, begin, end);
}

// The strips of a tile go through the segment side by side: they share its q and k in L1, and the
// dot products of one run in the shadow of another's solve. NOTE: two tiles side by side measure
// the same.
void advance(const Segment& segment, const Values& values, const Upcoming& upcoming,
             const StateStore& store, float* tiles) {
  constexpr int kStrips = kTileV / kStripV;
  const int64_t tile_floats = static_cast<int64_t>(segment.dim_k) * kTileV;
  const MiniChunk& first = segment.minis[0];
  const bool from_zero = first.reset[first.first] >= 0;
  const int strips_in_all = (values.dim_v + kStripV - 1) / kStripV;
  UpcomingLines lines(upcoming, strips_in_all * (segment.num_minis + (from_zero ? 0 : 1)));
  for (int row = 0; row < values.dim_v; row += kTileV, tiles += tile_floats) {
    Strip strips[kStrips];
    int count = 0;
    for (int v = 0; v < kTileV && row + v < values.dim_v; v += kStripV) {
      strips[count].tile = tiles + v;
      strips[count].offset = row + v;
      strips[count++].left = values.dim_v - row - v;
    }
    for (int n = 0; n <= segment.num_minis; ++n) {
      for (Strip* strip = strips; strip < strips + count; ++strip) {
        Requests requests;
        if (n > 0 || !from_zero) lines.take(&requests);
        add_values(values, (n + kAhead) * kMini - segment.phase, strip->offset, &requests);
        if (kWidth == 1 || strip->left > kLanes) {
          step_strip<kWidth>(segment, n, values, &requests, strip);
        } else {
          step_strip<1>(segment, n, values, &requests, strip);
        }
        if (n == segment.num_minis && store.to.data != nullptr) store_strip(store, *strip);
      }
    }
  }
}

}  // namespace
}  // namespace gdn::cpu

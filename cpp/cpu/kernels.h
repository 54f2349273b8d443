// The numeric kernels of the CPU backend as a table of functions, one table per instruction set.
// Everything with arithmetic in its inner loop lives behind this table; page rules, gates and
// threads live in front of it and are compiled for the baseline alone.
//
// A state head S [V, K] is kept transposed while it is worked on: tiles of kTileV rows of S,
// stored as [K][kTileV], so that one vector register holds one k of neighbouring V rows and dot
// products over K need no horizontal sum. Tokens advance in mini-chunks of kMini that lie on
// absolute multiples of kMini, which makes the bytes of a sequence independent of how its tokens
// are batched, split at page ends or spread over threads.
#pragma once

#include <cstdint>

#include "core/verify.h"

namespace gdn::cpu {

inline constexpr int kTileV = 32;  // V rows of one tile
inline constexpr int kMini = 4;    // tokens of one mini-chunk
inline constexpr int kSegmentMinis = static_cast<int>(kChunk) / kMini;

// The scalars of one mini-chunk. With alpha_i, beta_i of its tokens, A_i = alpha_0 .. alpha_i,
// D_ij = alpha_(j+1) .. alpha_i and the tile holding S / c for a running factor c:
//
//   u_i   = beta_i v_i - read_k_i (tile k_i) - sum_(j<i) solve_ij u_j
//   o_i   = read_q_i (tile q_i) + sum_(j<=i) mix_ij u_j
//   tile := keep tile + sum_j store_j u_j k_j^T
//
// c spares the multiplication by A_3 in most mini-chunks: it starts at 1, and the chunk that would
// take it out of [1/256, 256] (or ends the segment) sets `rescale` and brings it back to 1.
struct MiniChunk {
  float beta[kMini];
  float read_k[kMini];        // beta_i c A_i
  float read_q[kMini];        // c A_i
  float solve[kMini][kMini];  // beta_i D_ij k_i.k_j, j < i
  float mix[kMini][kMini];    // D_ij q_i.k_j, j <= i
  float store[kMini];         // D_3j over the new c
  float keep;                 // factor of the tile, used if `rescale`
  int8_t first, last;         // tokens [first, last) exist
  int8_t reset[kMini];        // latest token <= i before which nothing counts, or -1
  bool rescale;
  bool plain;  // all tokens exist and none resets
};

// Up to kChunk tokens of one (sequence, head), not crossing an absolute multiple of kChunk.
struct SegmentInput {
  const void* q;  // [tokens, K] of the operand heads
  const void* k;
  int64_t q_stride, k_stride;  // elements
  DType io;
  int32_t dim_k;
  int32_t tokens;
  int32_t phase;       // absolute position of the first token modulo kMini
  bool from_zero;      // nothing before the first token: the tiles are not looked at
  bool l2norm;         // q, k := x rsqrt(sum x^2 + 1e-6), rounded to io
  float scale;         // folded into q
  const float* alpha;  // [tokens]
  const float* beta;   // [tokens]
};

// What `prepare` makes of it, shared by all tiles of the head.
struct Segment {
  float* kq;         // [minis][K / 8][2 kMini][8]: rows k_0 .. k_3, q_0 .. q_3, absent tokens 0
  MiniChunk* minis;  // [minis]
  int32_t num_minis;
  int32_t dim_k;
  int32_t phase;
};

// v and output of the segment's first token at the first V row of the tiles.
struct Values {
  const void* v;
  void* output;
  int64_t v_stride, output_stride;  // elements per token
  int64_t tokens_left;              // of the sequence, from the segment's first on
  DType io;
  int32_t dim_v;  // V rows of all tiles together, a multiple of 8
};

// V rows of one state head in memory: [dim_v, dim_k], dense.
struct StateRows {
  void* data;
  DType dtype;
  int32_t dim_k, dim_v;
};

// Where the tiles go once a segment is done.
struct StateStore {
  StateRows to;    // null data: nowhere
  bool streaming;  // past the caches: fp32, K a multiple of 16, 64-byte aligned rows
};

// Memory that the task will touch after this segment: token rows of the next one, a page about to
// be stored. Token rows of one head lie far apart, so no hardware prefetcher sees them coming;
// `advance` requests them line by line in the shadow of its arithmetic.
struct Upcoming {
  struct Stream {
    const void* base;
    int64_t stride;  // bytes from row to row
    int32_t rows;
    int32_t bytes;  // of a row
  };
  Stream streams[6];
  int32_t count;
};

// One token on V rows of one state head.
struct DecodeStep {
  const void* q;  // [K]
  const void* k;  // [K]
  const void* v;  // [V rows]
  void* output;   // [V rows]
  DType io;
  float scale, alpha, beta;
  bool l2norm;      // without rounding
  StateRows read;   // null data: zero state
  StateRows write;  // null data: no store
  float* scratch;   // [2 K]
};

// Accepted draft tokens folded into a state: S := keep S + sum_t weight_t u_t k_t^T over the tokens
// [first, last). `replace` discards what was there.
struct Fold {
  float keep;
  float weight[kMaxDraft];
  int8_t first, last;
  bool replace;
  StateRows write;  // null data: no store
};

// A verify step on one state head: folds, then the new tokens. With G_t = alpha_0 .. alpha_t and
// D_ts = alpha_(s+1) .. alpha_t,
//
//   u_t = beta_t (v_t - G_t S k_t - sum_(s<t) D_ts (k_t.k_s) u_s)
//   o_t = G_t S q_t + sum_(s<=t) D_ts (q_t.k_s) u_s
struct VerifyStep {
  const void* q;  // the first token's [K]
  const void* k;
  const void* v;                                        // [V]
  void* output;                                         // [V]
  int64_t q_stride, k_stride, v_stride, output_stride;  // elements per token
  DType io;
  float scale;
  bool l2norm;
  int32_t tokens;  // new ones
  float alpha[kMaxDraft], beta[kMaxDraft];
  StateRows read;  // null data: zero state
  Fold folds[2];
  int32_t num_folds;
  void* draft_k;         // [K, draft_tokens], io dtype; read by the folds, then rewritten
  float* draft_u;        // [V, draft_tokens]
  int32_t draft_tokens;  // 0: no record to write
  float* scratch;        // [3 kMaxDraft K]
};

struct Kernels {
  const char* isa;
  void (*load_tiles)(const StateRows&, float* tiles);
  void (*store_tiles)(const float* tiles, const StateStore&);
  void (*finish_streaming)();  // before another thread may read what was streamed
  void (*prepare)(const SegmentInput&, Segment*);
  void (*advance)(const Segment&, const Values&, const Upcoming&, const StateStore&, float* tiles);
  void (*decode)(const DecodeStep&);
  void (*verify)(const VerifyStep&);
};

// The table of the best instruction set of this machine; chosen once.
const Kernels& kernels();

// The tables that this machine can run, best first; null past the end.
const Kernels* supported_kernels(int index);

}  // namespace gdn::cpu

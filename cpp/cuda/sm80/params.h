// What the prefill kernels are handed, what they leave for each other in the workspace, and the
// one layout of that workspace.
//
// A call runs as: plan (list the sequences, number their chunks), then per slab of chunks prepare
// (parallel over chunks and heads) and scan (serial over the chunks of a sequence). A slab is as
// many chunks as the workspace holds; a sequence cut by a slab's end hands its fp32 state over.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/common/divide.h"
#include "cuda/common/sequence.cuh"
#include "cuda/common/types.cuh"

namespace gdn {

// A lower triangle of a [64, 64] matrix in bf16, as the ten 16x16 blocks (i, j), j <= i, at
// i (i + 1) / 2 + j. A block is 32 lanes x 16 bytes: each lane's B fragments of two n-tiles.
inline constexpr int kTriangleBlockBytes = 512;
inline constexpr int kTriangleBytes = 10 * kTriangleBlockBytes;

// Gate factors of the 64 tokens of one chunk and head, fp32, in fragment order (gate_place).
struct GateRecord {
  float from_start[kChunk];  // G_t: decay from the chunk's start to token t
  float to_end[kChunk];      // G_C / G_t, never formed as a quotient
  uint32_t resets[2];        // bit t: alpha_t = 0
  uint32_t unused[30];       // keeps records on 128-byte lines
};

// Place of token t: the four tokens a lane needs of a 16-token block are neighbours.
GDN_HOST_DEVICE constexpr int gate_place(int t) {
  return (t & ~15) | ((t & 6) << 1) | ((t & 8) >> 2) | (t & 1);
}

// What prepare leaves for one chunk and state head.
//   T[t][s] = D[t][s] That[t][s],  P[t][s] = scale D[t][s] q_t . k_s,  D[t][s] = G_t / G_s, s <= t
struct ChunkRecord {
  uint8_t t[kTriangleBytes];
  GateRecord gates;
  uint8_t p[kTriangleBytes];
};
static_assert(sizeof(GateRecord) == 640 && sizeof(ChunkRecord) == 10880);

// Operands that the scan cannot copy as they are (l2norm, fp16, rows off 16 bytes): prepare stages
// them as dense bf16 [64, D] tiles with zeros in foreign rows.
struct Staging {
  bool qk = false;
  bool v = false;
};

// By value to every prefill kernel.
struct PrefillParams {
  Heads heads;
  int32_t group = 1;  // unit_heads()
  int32_t units = 1;  // H / group
  SmallDivisor heads_per_q, heads_per_k;
  bool io_fp16 = false;
  bool qk_l2norm = false;
  bool vector_qk = false;  // rows of q and k allow 16-byte loads
  bool vector_v = false;
  bool vector_output = false;  // rows of the output allow pairs of elements
  bool vector_state = false;   // rows of all pools allow pairs of elements
  Staging staging;
  float scale = 1.0f;
  float log2_scale = 0.0f;  // of its magnitude
  Tensor q, k, v, output;   // [tokens, heads, D]
  Gates gates;
  Pool initial, output_state, checkpoints;
  IndexTable checkpoint_indices;
  ChunkGrid grid;

  const PlanHeader* plan = nullptr;
  const SequenceEntry* entries = nullptr;  // [plan->num_entries]
  int64_t entry_bound = 0;
  int32_t slab_begin = 0;  // first chunk of this slab
  int32_t slab_chunks = 0;
  ChunkRecord* records = nullptr;      // [slab_chunks, H]
  bf16* staged_q = nullptr;            // [slab_chunks, units, 64, D]
  bf16* staged_k = nullptr;            // [slab_chunks, units, 64, D]
  bf16* staged_v = nullptr;            // [slab_chunks, H, 64, D]
  const float* handover_in = nullptr;  // [H, D, D], of the sequence that the last slab cut
  float* handover_out = nullptr;       // [H, D, D], of the sequence that this slab cuts
};

// Bytes of one call's scratch memory; above this the call runs in slabs.
inline constexpr int64_t kPrefillWorkspaceLimit = 248'000'000;
inline constexpr int kMaxUnitHeads = 8;
// Sequences with tokens in one call; the list of them is the one part that slabs cannot bound.
inline constexpr int64_t kMaxSequences = int64_t{1} << 22;

// Sequences that can have tokens.
inline int64_t entry_bound(const PrefillProblem& p) { return std::min(p.num_seqs, p.num_tokens); }

// Chunks of all sequences.
inline int64_t chunk_bound(const PrefillProblem& p) {
  return most_chunks(chunk_grid(p.checkpoint_every), p.num_tokens, entry_bound(p));
}

inline size_t plan_bytes(const PrefillProblem& p) {
  WorkspacePlan plan;
  plan.add(sizeof(PlanHeader));
  plan.add(static_cast<size_t>(entry_bound(p)) * sizeof(SequenceEntry));
  return plan.total();
}

// State heads that one block of prepare serves: they share a q and a k head.
inline int64_t unit_heads(const Heads& h) {
  if (h.q != h.k) return 1;
  const int64_t sharing = h.state / h.q;
  int64_t heads = std::min<int64_t>(sharing, kMaxUnitHeads);
  while (sharing % heads != 0) --heads;
  return heads;
}

inline int64_t chunk_bytes(const PrefillProblem& p, Staging staging) {
  const Heads& h = p.heads;
  const int64_t tile = kChunk * h.dim_k * 2;
  return h.state * static_cast<int64_t>(sizeof(ChunkRecord)) +
         (staging.qk ? 2 * (h.state / unit_heads(h)) * tile : 0) + (staging.v ? h.state * tile : 0);
}

// Staging that the host integers alone call for; addresses and strides may add to it.
inline Staging least_staging(const PrefillProblem& p) {
  const bool fp16_io = p.io == DType::kFloat16;
  return {.qk = fp16_io || p.qk_l2norm, .v = fp16_io};
}

// The size query and the launch build this from the same integers.
struct PrefillLayout {
  WorkspacePlan workspace;
  WorkspacePlan::Region plan, handover, chunks;

  explicit PrefillLayout(const PrefillProblem& p) {
    const int64_t bound = chunk_bound(p);
    plan = workspace.add(plan_bytes(p));
    const int64_t handover_bytes = 2 * p.heads.state_elements() * 4;
    const int64_t whole = bound * chunk_bytes(p, least_staging(p));
    const int64_t most = chunk_bytes(p, {.qk = true, .v = true});
    const int64_t room = kPrefillWorkspaceLimit - static_cast<int64_t>(workspace.total());
    // Addresses may call for more staging than the integers do: one chunk of that always fits.
    int64_t bytes = std::max(whole, most);
    if (bytes > room) {
      const int64_t each = chunk_bytes(p, least_staging(p));
      const int64_t capacity = std::max<int64_t>((room - handover_bytes) / each, 1);
      const int64_t slabs = (bound + capacity - 1) / capacity;
      bytes = std::max((bound + slabs - 1) / slabs * each, most);
    }
    if (bytes < bound * most) handover = workspace.add(static_cast<size_t>(handover_bytes));
    chunks = workspace.add(static_cast<size_t>(bytes));
  }

  int64_t slab_chunks(const PrefillProblem& p, Staging staging) const {
    return static_cast<int64_t>(chunks.bytes) / chunk_bytes(p, staging);
  }
};

}  // namespace gdn

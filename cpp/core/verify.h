// Draft tokens of speculative decoding: the checked call, the draft buffer's layout, and the rows
// that one sequence reads and writes. Host and device; no backend knows these rules by itself.
//
// A step folds the accepted prefix of the last step's draft tokens into the pages and runs the new
// ones. The pages hold the state after the last folded token, never one of a token that might be
// rejected; what a token would add to it waits in the draft buffer:
//
//     S_t = alpha_t S_{t-1} + u_t k_t^T
#pragma once

#include "core/slots.h"

namespace gdn {

inline constexpr int kMaxDraft = 8;  // tokens of a sequence and step

struct VerifyProblem {
  Device device;
  Threads threads;
  const char* backend = nullptr;
  Heads heads;
  int64_t num_seqs = 0;
  int64_t num_tokens = 0;
  int32_t max_draft = 0;
  DType io = DType::kFloat32;
  Tensor q, k, v;
  Tensor output;  // written
  Gates gates;    // form kRaw with g = a, beta = b as a logit
  float scale = 1.0f;
  bool qk_l2norm = false;
  IndexTable cu_seqlens;  // [num_seqs + 1]; absent in a commit: no new tokens
  PageTable table;        // without last_page_len
  Pool pool;
  IndexTable seq_lens;       // [num_seqs]: tokens before the new ones, accepted drafts included
  IndexTable accepted;       // [num_seqs]; absent: 0
  IndexTable draft_indices;  // [num_seqs]; absent: slot b
  void* drafts = nullptr;    // [num_drafts, H] records
  int64_t num_drafts = 0;
};

// The draft tokens of one (slot, state head). k is as it came, u carries its norm; both are stored
// token by token innermost, so that a column of k and a row of u are one short vector.
struct DraftHeader {
  int32_t count;  // tokens in the record; 0: none, or folded by a commit
  int32_t reserved[7];
  float alpha[kMaxDraft];
};
inline constexpr int64_t kDraftAlignment = 16;

struct DraftLayout {
  int32_t tokens;      // room per record: 4 or 8
  int64_t k, u;        // byte offsets of k [K, tokens] in the io dtype and u [V, tokens] in fp32
  int64_t bytes;       // of a record
  int64_t slot_bytes;  // of the H records of a slot
};

GDN_HOST_DEVICE inline DraftLayout draft_layout(const Heads& heads, DType io, int32_t max_draft) {
  DraftLayout layout{};
  layout.tokens = max_draft <= 4 ? 4 : kMaxDraft;
  layout.k = sizeof(DraftHeader);
  layout.u = layout.k +
             static_cast<int64_t>(heads.dim_k) * layout.tokens * (io == DType::kFloat32 ? 4 : 2);
  layout.u = (layout.u + kDraftAlignment - 1) / kDraftAlignment * kDraftAlignment;
  layout.bytes = layout.u + static_cast<int64_t>(heads.dim_v) * layout.tokens * 4;
  layout.bytes = (layout.bytes + 127) / 128 * 128;
  layout.slot_bytes = layout.bytes * heads.state;
  return layout;
}

GDN_HOST_DEVICE inline char* draft_record(const VerifyProblem& p, const DraftLayout& layout,
                                          int64_t slot, int64_t head) {
  return static_cast<char*>(p.drafts) + slot * layout.slot_bytes + head * layout.bytes;
}

// What one sequence of a step reads and writes.
struct VerifySequence {
  int64_t begin = 0;          // first row of q, k, v and output
  int64_t length = 0;         // new tokens; also of a dead sequence, whose outputs are zeroed
  int64_t slot = -1;          // of the draft buffer; -1: none
  int32_t accepted = 0;       // draft tokens to fold
  int32_t boundary = 0;       // of these up to a page end, whose state is stored; 0: none
  int64_t read_row = -1;      // -1: zero state
  int64_t boundary_row = -1;  // -1: no store
  int64_t write_row = -1;     // of the state after all accepted tokens; -1: no store
  bool live = false;          // false: nothing stored, outputs zero
};

// The fold by the page rules of prefill: it is the prefill of `accepted` tokens that end at
// `total`. Entries past the page of the last token are not looked at. False if the table is broken.
GDN_HOST_DEVICE inline bool fold_rows(const VerifyProblem& p, int64_t b, int64_t total,
                                      VerifySequence* s) {
  int64_t first, pages;
  if (!page_range(p.table, b, &first, &pages) || pages == 0) return false;
  const int64_t size = p.table.page_size, prefix = total - s->accepted;
  if (prefix < 0 || total / size > pages || (total / size == pages && total % size != 0)) {
    return false;
  }
  if (prefix > 0) s->read_row = p.table.indices[first + (prefix - 1) / size];
  if (s->accepted > 0) {
    // A page is longer than any draft, so at most one page end is crossed.
    const int64_t page_end = total / size * size;
    if (page_end > prefix) {
      s->boundary = static_cast<int32_t>(page_end - prefix);
      s->boundary_row = p.table.indices[first + page_end / size - 1];
    }
    if (page_end != total) s->write_row = p.table.indices[first + total / size];
  }
  return p.pool.accepts(s->read_row) && p.pool.accepts(s->boundary_row) &&
         p.pool.accepts(s->write_row);
}

// Everything a backend needs to know of sequence b. The record of a head has the last word: a
// sequence that accepts more tokens than the record counts is dead (`covers`).
GDN_HOST_DEVICE inline VerifySequence resolve_verify(const VerifyProblem& p, int64_t b) {
  VerifySequence s;
  const bool intact =
      !p.cu_seqlens || token_range(p.cu_seqlens, p.num_tokens, b, &s.begin, &s.length);
  if (!intact || s.length > p.max_draft) return s;
  const int64_t accepted = p.accepted ? p.accepted[b] : 0;
  const int64_t slot = p.draft_indices ? p.draft_indices[b] : b;
  if (accepted < 0 || accepted > p.max_draft || slot < -1 || slot >= p.num_drafts) return s;
  if (slot == -1 && accepted > 0) return s;
  s.slot = slot;
  s.accepted = static_cast<int32_t>(accepted);
  s.live = fold_rows(p, b, p.seq_lens[b], &s);
  return s;
}

GDN_HOST_DEVICE inline bool covers(const DraftHeader& header, const VerifySequence& s) {
  return s.accepted <= header.count && header.count <= kMaxDraft;
}

}  // namespace gdn

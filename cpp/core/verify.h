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

// What the tables say about a sequence, unchecked.
struct VerifyNumbers {
  int64_t begin = 0, end = 0;              // cu_seqlens
  int64_t accepted = 0, slot = 0;          // accepted, draft_indices
  int64_t total = 0;                       // seq_lens
  int64_t first_entry = 0, end_entry = 0;  // page_indptr
};

// Entries of page_indices that hold the rows of a sequence; -1: none.
struct VerifyEntries {
  int64_t read = -1, boundary = -1, write = -1;
};

GDN_HOST_DEVICE inline VerifyNumbers verify_numbers(const VerifyProblem& p, int64_t b) {
  return {.begin = p.cu_seqlens ? p.cu_seqlens[b] : 0,
          .end = p.cu_seqlens ? p.cu_seqlens[b + 1] : 0,
          .accepted = p.accepted ? p.accepted[b] : 0,
          .slot = p.draft_indices ? p.draft_indices[b] : b,
          .total = p.seq_lens[b],
          .first_entry = p.table.indptr[b],
          .end_entry = p.table.indptr[b + 1]};
}

// The fold by the page rules of prefill: it is the prefill of `accepted` tokens that end at
// `total`. Entries past the page of the last token are not looked at. False if the table is broken.
GDN_HOST_DEVICE inline bool fold_entries(const VerifyProblem& p, const VerifyNumbers& n,
                                         VerifySequence* s, VerifyEntries* entries) {
  if (n.first_entry < 0 || n.end_entry > p.table.indices.size) return false;
  if (n.end_entry <= n.first_entry || n.total < n.accepted) return false;
  const int64_t prefix = n.total - n.accepted, size = p.table.page_size;
  // Nearly always one 32-bit division: a GPU has no instruction for a 64-bit one.
  const int64_t full = n.total <= UINT32_MAX
                           ? static_cast<uint32_t>(n.total) / static_cast<uint32_t>(size)
                           : n.total / size;
  const int64_t page_end = full * size;
  if (full + (page_end != n.total) > n.end_entry - n.first_entry) return false;
  // A page is longer than any draft: the tokens before the fold end on this page or the one before.
  if (prefix > 0) entries->read = n.first_entry + full - (prefix > page_end ? 0 : 1);
  if (n.accepted == 0) return true;
  if (page_end > prefix) {
    s->boundary = static_cast<int32_t>(page_end - prefix);
    entries->boundary = n.first_entry + full - 1;
  }
  if (page_end != n.total) entries->write = n.first_entry + full;
  return true;
}

// All but the rows, which `set_rows` adds.
GDN_HOST_DEVICE inline VerifySequence resolve_numbers(const VerifyProblem& p,
                                                      const VerifyNumbers& n,
                                                      VerifyEntries* entries) {
  VerifySequence s;
  s.begin = n.begin;
  if (n.begin < 0 || n.begin > p.num_tokens || n.end < n.begin) return s;
  s.length = (n.end < p.num_tokens ? n.end : p.num_tokens) - n.begin;
  if (n.end > p.num_tokens || s.length > p.max_draft) return s;
  if (n.accepted < 0 || n.accepted > p.max_draft) return s;
  if (n.slot < -1 || n.slot >= p.num_drafts || (n.slot == -1 && n.accepted > 0)) return s;
  s.slot = n.slot;
  s.accepted = static_cast<int32_t>(n.accepted);
  s.live = fold_entries(p, n, &s, entries);
  return s;
}

GDN_HOST_DEVICE inline void set_rows(const VerifyProblem& p, int64_t read, int64_t boundary,
                                     int64_t write, VerifySequence* s) {
  s->read_row = read;
  s->boundary_row = boundary;
  s->write_row = write;
  s->live = s->live && p.pool.accepts(read) && p.pool.accepts(boundary) && p.pool.accepts(write);
}

// Everything a backend needs to know of sequence b. The record of a head has the last word: a
// sequence that accepts more tokens than the record counts is dead (`covers`).
GDN_HOST_DEVICE inline VerifySequence resolve_verify(const VerifyProblem& p, int64_t b) {
  VerifyEntries entries;
  VerifySequence s = resolve_numbers(p, verify_numbers(p, b), &entries);
  const auto row = [&p](int64_t entry) { return entry < 0 ? -1 : p.table.indices[entry]; };
  if (s.live) set_rows(p, row(entries.read), row(entries.boundary), row(entries.write), &s);
  return s;
}

// Whether a record that counts so many tokens holds the accepted ones.
GDN_HOST_DEVICE inline bool covers(int32_t count, const VerifySequence& s) {
  return s.accepted <= count && count <= kMaxDraft;
}

}  // namespace gdn

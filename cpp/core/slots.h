// Page arithmetic: from a page table (or slot arrays) to the rows one sequence reads and writes.
// The only place that knows these rules; host and device. Math kernels see `Sequence` alone.
#pragma once

#include "core/problem.h"

namespace gdn {

// What one sequence of a prefill call reads and writes.
struct Sequence {
  int64_t begin = 0;             // first row of q, k, v and output
  int64_t length = 0;            // new tokens; also of a dead sequence, whose outputs are zeroed
  int64_t prefix = 0;            // tokens before the new ones
  int64_t read_row = -1;         // -1: zero state
  int64_t write_row = -1;        // -1: no final store
  int64_t checkpoint_start = 0;  // entry of its first checkpoint
  bool live = false;             // false: nothing stored, outputs zero
};

// Rows of one decode step. (-1, -1) is padding: output zero, nothing stored.
struct DecodeRow {
  int64_t read_row = -1;
  int64_t write_row = -1;
  bool live = false;
};

// Slots of a sequence as gdn_prefill_slots returns them; prefix -1 marks a dead sequence.
struct PrefillSlots {
  int64_t read_row = -1;
  int64_t write_row = -1;
  int64_t checkpoint_start = 0;
  int64_t prefix = -1;
};

// position / size of non-negative numbers: nearly always one 32-bit division, as a GPU has no
// instruction for a 64-bit one.
GDN_HOST_DEVICE inline int64_t pages_before(int64_t position, int64_t size) {
  if ((position | size) <= INT64_C(0xffffffff)) {
    return static_cast<uint32_t>(position) / static_cast<uint32_t>(size);
  }
  return position / size;
}

// Page boundaries that lie in (prefix, prefix + length].
GDN_HOST_DEVICE inline int64_t checkpoint_count(int64_t prefix, int64_t length, int64_t every) {
  return every > 0 ? pages_before(prefix + length, every) - pages_before(prefix, every) : 0;
}

// Clips cu_seqlens[b] .. cu_seqlens[b + 1] into the token buffer; false if it is broken.
GDN_HOST_DEVICE inline bool token_range(const IndexTable& cu_seqlens, int64_t num_tokens, int64_t b,
                                        int64_t* begin, int64_t* length) {
  const int64_t first = cu_seqlens[b], end = cu_seqlens[b + 1];
  *begin = first;
  *length = 0;
  if (first < 0 || first > num_tokens || end < first) return false;
  *length = (end < num_tokens ? end : num_tokens) - first;
  return end <= num_tokens;
}

// Page range of sequence b; false if page_indptr is broken there.
GDN_HOST_DEVICE inline bool page_range(const PageTable& table, int64_t b, int64_t* first,
                                       int64_t* count) {
  *first = table.indptr[b];
  *count = 0;
  const int64_t end = table.indptr[b + 1];
  if (*first < 0 || end < *first || end > table.indices.size) return false;
  *count = end - *first;
  return true;
}

GDN_HOST_DEVICE inline bool valid_page(int64_t id, int64_t num_pages) {
  return id >= -1 && id < num_pages;
}

// The page that a sequence with a prefix starts from, `own` unless the caller names another one.
GDN_HOST_DEVICE inline int64_t initial_page(const PageTable& table, int64_t b, int64_t own) {
  const int64_t given = table.initial_pages ? table.initial_pages[b] : -1;
  return given == -1 ? own : given;
}

// The page rules. A sequence with an empty page list or with a broken table is dead (prefix -1).
// Pages that this call does not touch are not looked at.
GDN_HOST_DEVICE inline PrefillSlots prefill_slots(const PageTable& table, int64_t num_pages,
                                                  int64_t b, int64_t length) {
  PrefillSlots slots;
  int64_t first, pages;
  if (!page_range(table, b, &first, &pages) || pages == 0) return slots;
  const int64_t last = table.last_page_len[b];
  if (last < 1 || last > table.page_size) return slots;
  const int64_t total = (pages - 1) * table.page_size + last;
  const int64_t prefix = total - length;
  if (length < 0 || prefix < 0) return slots;
  const int64_t start = first + pages_before(prefix, table.page_size);
  for (int64_t entry = start; length > 0 && entry < first + pages; ++entry) {
    if (!valid_page(table.indices[entry], num_pages)) return slots;
  }
  int64_t read_row = -1;
  if (prefix > 0) {
    read_row =
        initial_page(table, b, table.indices[first + pages_before(prefix - 1, table.page_size)]);
    if (!valid_page(read_row, num_pages)) return slots;
  }
  slots.read_row = read_row;
  // A total on a page end is stored as that page's checkpoint, not twice.
  const bool stores_final = length > 0 && last != table.page_size;
  slots.write_row = stores_final ? table.indices[first + pages - 1] : -1;
  slots.checkpoint_start = start;
  slots.prefix = prefix;
  return slots;
}

GDN_HOST_DEVICE inline int64_t checkpoint_row(const PrefillProblem& p, const Sequence& s,
                                              int64_t j) {
  const int64_t entry = s.checkpoint_start + j;
  return p.checkpoint_indices ? p.checkpoint_indices[entry] : entry;
}

// Slots given by the caller are not trusted with memory: every row is checked against its pool.
GDN_HOST_DEVICE inline bool rows_in_range(const PrefillProblem& p, const Sequence& s) {
  if (p.initial && !p.initial.accepts(s.read_row)) return false;
  if (p.output_state && !p.output_state.accepts(s.write_row)) return false;
  if (!p.checkpoints) return true;
  const int64_t count = checkpoint_count(s.prefix, s.length, p.checkpoint_every);
  if (count == 0) return true;
  const int64_t entries = p.checkpoint_indices ? p.checkpoint_indices.size : p.checkpoints.num_rows;
  if (s.checkpoint_start < 0 || s.checkpoint_start > entries - count) return false;
  for (int64_t j = 0; j < count; ++j) {
    if (!p.checkpoints.accepts(checkpoint_row(p, s, j))) return false;
  }
  return true;
}

// Everything a backend needs to know of sequence b.
GDN_HOST_DEVICE inline Sequence resolve_sequence(const PrefillProblem& p, int64_t b) {
  Sequence s;
  const bool intact = token_range(p.cu_seqlens, p.num_tokens, b, &s.begin, &s.length);
  if (!intact || s.length == 0) return s;
  if (p.max_seqlen > 0 && s.length > p.max_seqlen) return s;
  if (p.paged && !p.slots_given) {
    const PrefillSlots slots = prefill_slots(p.table, p.initial.num_rows, b, s.length);
    s.prefix = slots.prefix;
    s.read_row = slots.read_row;
    s.write_row = slots.write_row;
    s.checkpoint_start = slots.checkpoint_start;
    s.live = slots.prefix >= 0;
    return s;  // prefill_slots has checked every row
  }
  s.prefix = p.prefix_lens ? p.prefix_lens[b] : 0;
  s.read_row = p.state_indices ? p.state_indices[b] : b;
  s.write_row = p.output_state_indices ? p.output_state_indices[b] : b;
  s.checkpoint_start = p.checkpoint_starts ? p.checkpoint_starts[b] : 0;
  const bool prefix_fits = s.prefix >= 0 && s.prefix <= INT64_MAX - s.length;
  s.live = prefix_fits && rows_in_range(p, s);
  return s;
}

// The rows of decode row b by the page rules. (-1, -1) for padding and broken tables.
GDN_HOST_DEVICE inline DecodeRow decode_slots(const PageTable& table, int64_t num_pages,
                                              int64_t b) {
  DecodeRow row;
  int64_t first, pages;
  if (!page_range(table, b, &first, &pages) || pages == 0) return row;
  const int64_t last_len = table.last_page_len[b];
  const int64_t write = table.indices[first + pages - 1];
  if (last_len < 1 || write == -1 || !valid_page(write, num_pages)) return row;
  int64_t read = write;
  // The token opens a page: continue the page before it; a sequence's first token has none.
  if (last_len == 1) read = pages >= 2 ? table.indices[first + pages - 2] : -1;
  if (last_len > 1 || pages >= 2) read = initial_page(table, b, read);
  if (!valid_page(read, num_pages)) return row;
  row.read_row = read;
  row.write_row = write;
  row.live = true;
  return row;
}

// Slots given by the caller are not trusted with memory: both rows are checked against their pool.
GDN_HOST_DEVICE inline DecodeRow checked_row(const DecodeProblem& p, int64_t read_row,
                                             int64_t write_row) {
  DecodeRow row;
  row.read_row = read_row;
  row.write_row = write_row;
  row.live = p.initial.accepts(read_row) && p.output_state.accepts(write_row) &&
             !(read_row == -1 && write_row == -1);
  return row;
}

GDN_HOST_DEVICE inline DecodeRow resolve_decode(const DecodeProblem& p, int64_t b) {
  if (p.paged && !p.slots_given) return decode_slots(p.table, p.initial.num_rows, b);
  const int64_t read_row = p.initial_indices ? p.initial_indices[b] : b;
  return checked_row(p, read_row, p.output_indices ? p.output_indices[b] : read_row);
}

}  // namespace gdn

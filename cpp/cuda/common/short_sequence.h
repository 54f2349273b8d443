// Short sequences of a prefill call, which take one pass over their state (cuda/short) in place of
// chunks: which calls have them, and what their kernel reads of each.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "core/slots.h"

namespace gdn {

inline constexpr int64_t kShortTokens = 16;  // new tokens of a short sequence, at most

// What the host's bounds say, and which kernels are launched for it:
//
//   regime  when                                             short kernel  plan, chunk kernels
//   kNone   GDN_BATCH_INVARIANT, or a single sequence        -             all sequences
//   kAll    max_seqlen or the tokens of the call are few     all           -
//   kMixed  else: the device decides by each true length     1 to 16       17 and more
//
// The two forms round differently. So a batch-invariant call, which also promises the same bytes
// for a sequence that is cut at a page end, keeps to chunks.
enum class ShortRegime { kNone, kAll, kMixed };

inline ShortRegime short_regime(const PrefillProblem& p) {
  const int64_t longest = p.max_seqlen > 0 ? std::min(p.max_seqlen, p.num_tokens) : p.num_tokens;
  // Items of the kernel, at most 8 parts of a state, are counted in 32 bits.
  const int64_t sequences = std::min(p.num_seqs, p.num_tokens);
  if (p.batch_invariant || sequences > INT32_MAX / 8 / p.heads.state) return ShortRegime::kNone;
  if (longest <= kShortTokens) return ShortRegime::kAll;
  return p.num_seqs == 1 ? ShortRegime::kNone : ShortRegime::kMixed;
}

// One short sequence as the plan lists it, in the places that the sequences with chunks leave.
struct alignas(16) ShortEntry {
  int32_t begin;             // first token
  int32_t length;            // new tokens
  int32_t to_page_end;       // tokens up to the first page end; past `length` if there is none
  int32_t no_chunk;          // in the place of SequenceEntry::chunk_begin: past all chunks
  int32_t live;              // 0: outputs are zeroed and nothing is stored
  int32_t read_row;          // -1: zero state
  int32_t write_row;         // -1: no final store
  int32_t checkpoint_start;  // entry of its first checkpoint
};

GDN_HOST_DEVICE inline ShortEntry short_entry(const PrefillProblem& p, const Sequence& s) {
  ShortEntry entry = {};
  entry.begin = static_cast<int32_t>(s.begin);
  entry.length = static_cast<int32_t>(s.length);
  entry.to_page_end = INT_MAX;
  entry.no_chunk = INT_MAX;
  entry.live = s.live;
  entry.read_row = static_cast<int32_t>(s.read_row);
  entry.write_row = static_cast<int32_t>(s.write_row);
  entry.checkpoint_start = static_cast<int32_t>(s.checkpoint_start);
  if (s.live && p.checkpoints && p.checkpoint_every > 0) {
    const int64_t every = p.checkpoint_every;
    const int64_t to_end = (pages_before(s.prefix, every) + 1) * every - s.prefix;
    if (to_end <= s.length) entry.to_page_end = static_cast<int32_t>(to_end);
  }
  return entry;
}

}  // namespace gdn

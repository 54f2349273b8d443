// The tables of a small batch, mostly intact: what page tables and slots say to a call.
#pragma once

#include <cstdint>
#include <vector>

#include "bytes.h"
#include "gdn_paged/gdn_paged.h"

namespace gdn_fuzz {

using Table = std::vector<int64_t>;

struct Batch {
  int64_t page_size = 64;
  int64_t num_rows = 10;  // of the pool
  int64_t num_seqs = 0, num_tokens = 0;
  Table cu_seqlens, indices, indptr, last_page_len;
  Table totals;  // tokens of each sequence, never damaged
  Table read_rows, write_rows, checkpoint_rows, checkpoint_starts, prefix_lens, initial_pages;

  Batch(Bytes& in, bool decode);

  uint64_t page_flags() const { return page_size % 64 ? GDN_ALLOW_UNALIGNED_PAGES : 0; }

 private:
  void add_sequence(Bytes& in, bool decode);
  void damage(Bytes& in);
};

inline Batch::Batch(Bytes& in, bool decode) {
  if (in.one_in(4)) page_size = in.flag() ? 128 : 1 + in.below(150);
  cu_seqlens = indptr = checkpoint_starts = {0};
  for (int64_t count = 1 + in.below(3); count > 0; --count) add_sequence(in, decode);
  num_seqs = static_cast<int64_t>(last_page_len.size());
  num_tokens = decode ? num_seqs : cu_seqlens.back() + in.below(3);
  if (!decode && in.one_in(16)) num_tokens = in.below(100);
  if (in.flag()) damage(in);
}

inline void Batch::add_sequence(Bytes& in, bool decode) {
  const int64_t pages = 1 + in.below(2), last = 1 + in.below(page_size);
  const int64_t total = (pages - 1) * page_size + last;
  int64_t length = decode ? 1 : in.below(100) % (total + 1);
  if (!decode && in.one_in(4)) length = total;
  const int64_t prefix = total - length, first = static_cast<int64_t>(indices.size());
  for (int64_t i = 0; i < pages; ++i) indices.push_back((first + i) * 3 % num_rows);
  const auto page = [&](int64_t i) { return indices[static_cast<size_t>(first + i)]; };
  indptr.push_back(first + pages);
  last_page_len.push_back(last);
  totals.push_back(total);
  cu_seqlens.push_back(cu_seqlens.back() + length);
  read_rows.push_back(prefix > 0 ? page((prefix - 1) / page_size) : -1);
  write_rows.push_back(decode || (length > 0 && last != page_size) ? page(pages - 1) : -1);
  prefix_lens.push_back(prefix);
  initial_pages.push_back(in.one_in(4) ? in.below(num_rows) : -1);
  checkpoint_starts.back() = first + prefix / page_size;
  checkpoint_starts.push_back(first + pages);
  checkpoint_rows = indices;
}

// Some entries become arbitrary numbers.
inline void Batch::damage(Bytes& in) {
  Table* const tables[] = {&cu_seqlens,  &indices,      &indptr,          &last_page_len,
                           &read_rows,   &write_rows,   &checkpoint_rows, &checkpoint_starts,
                           &prefix_lens, &initial_pages};
  for (int64_t count = 1 + in.below(4); count > 0; --count) {
    Table& table = *tables[in.below(10)];
    table[static_cast<size_t>(in.below(static_cast<int64_t>(table.size())))] = in.number();
  }
}

}  // namespace gdn_fuzz

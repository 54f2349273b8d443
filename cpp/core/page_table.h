// The page-table rules that gdn_validate_page_table checks, one sequence at a time; host and
// device. A check of a whole table finds the lowest (rule, sequence) of check_sequence; only a
// table without a finding is searched for pages that two sequences touch.
#pragma once

#include "core/slots.h"
#include "core/text.h"

namespace gdn {

using PageTableReport = gdn_page_table_report_t;

GDN_HOST_DEVICE inline PageTableReport broken(const PageTableProblem& p, int32_t rule, int64_t b) {
  PageTableReport report = {};
  report.rule = rule;
  report.is_decode = p.is_decode ? 1 : 0;
  report.sequence = b;
  report.entry = -1;
  return report;
}

GDN_HOST_DEVICE inline PageTableReport broken_at(PageTableReport report, int64_t entry,
                                                 int64_t value, int64_t expected) {
  report.entry = entry;
  report.value = value;
  report.expected = expected;
  return report;
}

// New tokens of sequence b; read only where cu_seqlens is intact.
GDN_HOST_DEVICE inline int64_t new_tokens(const PageTableProblem& p, int64_t b) {
  return p.is_decode ? 1 : p.cu_seqlens[b + 1] - p.cu_seqlens[b];
}

// Rules 1 to 6: the two arrays of offsets.
GDN_HOST_DEVICE inline PageTableReport check_offsets(const PageTableProblem& p, int64_t b) {
  const int64_t first = p.table.indptr[b], end = p.table.indptr[b + 1];
  if (b == 0 && first < 0) {
    return broken_at(broken(p, GDN_PAGE_TABLE_INDPTR_START, b), 0, first, 0);
  }
  if (end < first) {
    return broken_at(broken(p, GDN_PAGE_TABLE_INDPTR_ORDER, b), b + 1, end, first);
  }
  if (end > p.table.indices.size) {
    return broken_at(broken(p, GDN_PAGE_TABLE_INDPTR_END, b), b + 1, end, p.table.indices.size);
  }
  if (p.is_decode) return broken(p, GDN_PAGE_TABLE_OK, b);
  const int64_t begin = p.cu_seqlens[b], stop = p.cu_seqlens[b + 1];
  if (b == 0 && begin != 0) {
    return broken_at(broken(p, GDN_PAGE_TABLE_SEQLENS_START, b), 0, begin, 0);
  }
  if (stop < begin) {
    return broken_at(broken(p, GDN_PAGE_TABLE_SEQLENS_ORDER, b), b + 1, stop, begin);
  }
  if (stop > p.num_tokens) {
    return broken_at(broken(p, GDN_PAGE_TABLE_SEQLENS_END, b), b + 1, stop, p.num_tokens);
  }
  return broken(p, GDN_PAGE_TABLE_OK, b);
}

// Whether the flag GDN_ALLOW_PADDING takes decode row b for padding: its last page is -1.
GDN_HOST_DEVICE inline bool is_padding_row(const PageTableProblem& p, int64_t last_page) {
  return p.is_decode && p.allow_padding && last_page == -1;
}

// Rules 1 to 10 and 13 of sequence b, the first broken one or GDN_PAGE_TABLE_OK.
GDN_HOST_DEVICE inline PageTableReport check_sequence(const PageTableProblem& p, int64_t b) {
  const PageTableReport offsets = check_offsets(p, b);
  const int64_t first = p.table.indptr[b], end = p.table.indptr[b + 1];
  if (offsets.rule != GDN_PAGE_TABLE_OK) return offsets;
  // A negative offset here is reported by the sequence where the array goes wrong.
  if (first < 0 || (!p.is_decode && p.cu_seqlens[b] < 0)) return offsets;
  if (end == first) {
    return broken_at(broken(p, p.allow_padding ? GDN_PAGE_TABLE_OK : GDN_PAGE_TABLE_EMPTY, b), b,
                     first, 1);
  }
  const int64_t lowest = p.allow_padding ? -1 : 0;
  for (int64_t entry = first; entry < end; ++entry) {
    const int64_t page = p.table.indices[entry];
    if (page < lowest || page >= p.num_pages) {
      return broken_at(broken(p, GDN_PAGE_TABLE_PAGE_ID, b), entry, page, p.num_pages);
    }
  }
  if (is_padding_row(p, p.table.indices[end - 1])) return offsets;
  const int64_t last = p.table.last_page_len[b];
  if (last < 1 || (p.table.page_size > 0 && last > p.table.page_size)) {
    return broken_at(broken(p, GDN_PAGE_TABLE_LAST_PAGE_LEN, b), b, last, p.table.page_size);
  }
  const int64_t total = (end - first - 1) * p.table.page_size + last;
  if (!p.is_decode && new_tokens(p, b) > total) {
    return broken_at(broken(p, GDN_PAGE_TABLE_TOO_MANY_NEW, b), b, new_tokens(p, b), total);
  }
  const int64_t initial = initial_page(p.table, b, -1);
  if (!valid_page(initial, p.num_pages)) {
    return broken_at(broken(p, GDN_PAGE_TABLE_INITIAL_PAGE, b), b, initial, p.num_pages);
  }
  return offsets;
}

// What sequence b of an intact table reads and writes.
struct PageAccess {
  int64_t read = -1;                       // a page; -1: none
  int64_t read_entry = -1;                 // of page_indices; -1: initial_page_indices[b]
  int64_t write_begin = 0, write_end = 0;  // entries of page_indices
};

GDN_HOST_DEVICE inline PageAccess page_access(const PageTableProblem& p, int64_t b) {
  PageAccess access;
  const int64_t first = p.table.indptr[b], end = p.table.indptr[b + 1];
  const int64_t length = new_tokens(p, b);
  if (end == first || length == 0) return access;
  const int64_t last = p.table.last_page_len[b];
  access.write_end = end;
  if (p.is_decode) {
    if (p.table.indices[end - 1] == -1) return PageAccess();
    access.write_begin = end - 1;
    access.read_entry = last > 1 ? end - 1 : end - 2;
  } else {
    const int64_t prefix = (end - first - 1) * p.table.page_size + last - length;
    access.write_begin = first + prefix / p.table.page_size;
    access.read_entry = prefix > 0 ? first + (prefix - 1) / p.table.page_size : -1;
  }
  if (access.read_entry < first) return access;
  access.read = initial_page(p.table, b, -1);
  if (access.read >= 0) {
    access.read_entry = -1;
  } else {
    access.read = p.table.indices[access.read_entry];
  }
  return access;
}

// The sequence that owns an entry of page_indices; `indptr` is intact.
GDN_HOST_DEVICE inline int64_t sequence_of_entry(const PageTableProblem& p, int64_t entry) {
  int64_t low = 0, high = p.num_seqs;  // indptr[low] <= entry < indptr[high]
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (p.table.indptr[middle] <= entry) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Entry `entry` writes a page that the lower entry `other` writes too.
GDN_HOST_DEVICE inline PageTableReport two_writers(const PageTableProblem& p, int64_t entry,
                                                   int64_t other) {
  return broken_at(broken(p, GDN_PAGE_TABLE_TWO_WRITERS, sequence_of_entry(p, entry)), entry,
                   p.table.indices[entry], sequence_of_entry(p, other));
}

// Sequence b reads a page that another sequence writes at entry `writer`.
GDN_HOST_DEVICE inline PageTableReport write_and_read(const PageTableProblem& p, int64_t b,
                                                      int64_t writer) {
  const PageAccess access = page_access(p, b);
  return broken_at(broken(p, GDN_PAGE_TABLE_WRITE_AND_READ, b), access.read_entry, access.read,
                   sequence_of_entry(p, writer));
}

// The whole check on the host. Allocates: no launch function.
PageTableReport check_page_table(const PageTableProblem& p);

void write_report(const PageTableReport& report, Text* text);

}  // namespace gdn

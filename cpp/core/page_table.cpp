#include "core/page_table.h"

#include <algorithm>
#include <vector>

namespace gdn {
namespace {

struct WrittenPage {
  int64_t page;
  int64_t entry;

  bool operator<(const WrittenPage& other) const {
    return page != other.page ? page < other.page : entry < other.entry;
  }
};

std::vector<WrittenPage> written_pages(const PageTableProblem& p) {
  std::vector<WrittenPage> written;
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    const PageAccess access = page_access(p, b);
    for (int64_t entry = access.write_begin; entry < access.write_end; ++entry) {
      const int64_t page = p.table.indices[entry];
      if (page >= 0) written.push_back({page, entry});
    }
  }
  std::sort(written.begin(), written.end());
  return written;
}

PageTableReport find_two_writers(const PageTableProblem& p,
                                 const std::vector<WrittenPage>& written) {
  int64_t found = -1, other = -1;
  for (size_t i = 1, first = 0; i < written.size(); ++i) {
    if (written[i].page != written[first].page) {
      first = i;
    } else if (found < 0 || written[i].entry < found) {
      found = written[i].entry;
      other = written[first].entry;
    }
  }
  return found < 0 ? broken(p, GDN_PAGE_TABLE_OK, 0) : two_writers(p, found, other);
}

PageTableReport find_write_and_read(const PageTableProblem& p,
                                    const std::vector<WrittenPage>& written) {
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    const int64_t page = page_access(p, b).read;
    if (page < 0) continue;
    const auto writer = std::lower_bound(written.begin(), written.end(), WrittenPage{page, 0});
    if (writer == written.end() || writer->page != page) continue;
    if (sequence_of_entry(p, writer->entry) != b) return write_and_read(p, b, writer->entry);
  }
  return broken(p, GDN_PAGE_TABLE_OK, 0);
}

long long number(int64_t x) { return static_cast<long long>(x); }

// A report may come from anywhere, so entry - 1 may wrap.
long long before(int64_t x) { return number(static_cast<int64_t>(static_cast<uint64_t>(x) - 1)); }

void write_offsets(const PageTableReport& r, Text* text) {
  const bool pages = r.rule <= GDN_PAGE_TABLE_INDPTR_END;
  const char* array = pages ? "page_indptr" : "cu_seqlens";
  switch (r.rule) {
    case GDN_PAGE_TABLE_INDPTR_START:
      return text->add("page_indptr[0] is %lld, expected >= 0", number(r.value));
    case GDN_PAGE_TABLE_SEQLENS_START:
      return text->add("cu_seqlens[0] is %lld, expected 0", number(r.value));
    case GDN_PAGE_TABLE_INDPTR_ORDER:
    case GDN_PAGE_TABLE_SEQLENS_ORDER:
      return text->add("sequence %lld: %s[%lld] is %lld, less than %s[%lld] which is %lld",
                       number(r.sequence), array, number(r.entry), number(r.value), array,
                       before(r.entry), number(r.expected));
    default:
      return text->add("sequence %lld: %s[%lld] is %lld, but there are %lld %s", number(r.sequence),
                       array, number(r.entry), number(r.value), number(r.expected),
                       pages ? "entries of page_indices" : "tokens");
  }
}

void write_page_id(const PageTableReport& r, Text* text) {
  const bool initial = r.rule == GDN_PAGE_TABLE_INITIAL_PAGE;
  text->add("sequence %lld: %s[%lld] is %lld, expected ", number(r.sequence),
            initial ? "initial_page_indices" : "page_indices", number(r.entry), number(r.value));
  if (initial) text->add("-1 or ");
  if (r.expected == INT64_MAX) {
    text->add("a page id >= 0");
  } else {
    text->add("a page id in [0, %lld)", number(r.expected));
  }
}

void write_last_page_len(const PageTableReport& r, Text* text) {
  text->add("sequence %lld: last_page_len[%lld] is %lld, expected ", number(r.sequence),
            number(r.entry), number(r.value));
  if (r.expected == 0) {
    text->add(">= 1");
  } else {
    text->add("1 to page_size = %lld", number(r.expected));
  }
}

}  // namespace

PageTableReport check_page_table(const PageTableProblem& p) {
  PageTableReport found = broken(p, GDN_PAGE_TABLE_OK, 0);
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    const PageTableReport report = check_sequence(p, b);
    if (report.rule == GDN_PAGE_TABLE_OK) continue;
    if (found.rule == GDN_PAGE_TABLE_OK || report.rule < found.rule) found = report;
  }
  if (found.rule != GDN_PAGE_TABLE_OK) return found;
  const std::vector<WrittenPage> written = written_pages(p);
  found = find_two_writers(p, written);
  return found.rule != GDN_PAGE_TABLE_OK ? found : find_write_and_read(p, written);
}

void write_report(const PageTableReport& r, Text* text) {
  switch (r.rule) {
    case GDN_PAGE_TABLE_OK: return text->add("the page table is intact");
    case GDN_PAGE_TABLE_EMPTY:
      return text->add("sequence %lld has an empty page list (page_indptr[%lld] is %lld)",
                       number(r.sequence), number(r.entry), number(r.value));
    case GDN_PAGE_TABLE_PAGE_ID:
    case GDN_PAGE_TABLE_INITIAL_PAGE: return write_page_id(r, text);
    case GDN_PAGE_TABLE_LAST_PAGE_LEN: return write_last_page_len(r, text);
    case GDN_PAGE_TABLE_TOO_MANY_NEW:
      return text->add("sequence %lld has %lld new tokens but its table holds %lld",
                       number(r.sequence), number(r.value), number(r.expected));
    case GDN_PAGE_TABLE_TWO_WRITERS:
      if (r.expected == r.sequence) {
        return text->add("page %lld written twice by sequence %lld (page_indices[%lld])",
                         number(r.value), number(r.sequence), number(r.entry));
      }
      return text->add("page %lld written by sequences %lld and %lld (page_indices[%lld])",
                       number(r.value), number(r.expected), number(r.sequence), number(r.entry));
    case GDN_PAGE_TABLE_WRITE_AND_READ:
      return text->add("page %lld written by sequence %lld and read by sequence %lld (%s[%lld])",
                       number(r.value), number(r.expected), number(r.sequence),
                       r.entry < 0 ? "initial_page_indices" : "page_indices",
                       number(r.entry < 0 ? r.sequence : r.entry));
    default:
      if (r.rule >= GDN_PAGE_TABLE_INDPTR_START && r.rule <= GDN_PAGE_TABLE_SEQLENS_END) {
        return write_offsets(r, text);
      }
      return text->add("rule %d is unknown", r.rule);
  }
}

}  // namespace gdn

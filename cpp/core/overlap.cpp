#include "core/overlap.h"

#include "core/arguments.h"

namespace gdn {
namespace {

bool one_block(const Span& s) {
  return s.solid && (s.rows <= 1 || s.stride_bytes == 0 || s.stride_bytes == s.row_bytes);
}

uintptr_t end_of(const Span& s) {
  return s.begin + static_cast<uintptr_t>((s.rows - 1) * s.stride_bytes + s.row_bytes);
}

// With one common stride, rows share bytes exactly where their offsets modulo the stride do.
bool rows_meet(const Span& a, const Span& b) {
  const auto stride = static_cast<uintptr_t>(a.stride_bytes);
  const bool a_first = a.begin < b.begin;
  const uintptr_t offset = (a_first ? b.begin - a.begin : a.begin - b.begin) % stride;
  const auto first = static_cast<uintptr_t>(a_first ? a.row_bytes : b.row_bytes);
  const auto second = static_cast<uintptr_t>(a_first ? b.row_bytes : a.row_bytes);
  return offset < first || offset + second > stride;
}

bool overlap(const Span& a, const Span& b) {
  if (a.begin == 0 || b.begin == 0 || a.rows == 0 || b.rows == 0) return false;
  if (a.row_bytes == 0 || b.row_bytes == 0) return false;
  if (end_of(a) <= b.begin || end_of(b) <= a.begin) return false;
  if (one_block(a) && one_block(b)) return true;
  if (a.begin == b.begin) return true;  // each array uses its first element
  if (!a.solid || !b.solid || a.stride_bytes != b.stride_bytes) return false;
  return rows_meet(a, b);
}

}  // namespace

Span span_of(const char* name, const Tensor& t, int64_t rows, int64_t heads, int64_t dim) {
  const int64_t size = element_size(t.dtype);
  return {.name = name,
          .begin = reinterpret_cast<uintptr_t>(t.data),
          .rows = rows,
          .row_bytes = ((heads - 1) * t.head_stride + dim) * size,
          .stride_bytes = rows > 1 ? t.row_stride * size : 0,  // of one row it may be anything
          .solid = heads == 1 || t.head_stride <= dim};
}

Span span_of(const char* name, const IndexTable& table) {
  return {.name = name,
          .begin = reinterpret_cast<uintptr_t>(table.data),
          .row_bytes = table.size * (table.is_int64 ? 8 : 4)};
}

Span span_of(const char* name, const Pool& pool, int64_t elements) {
  const int64_t size = element_size(pool.dtype);
  return {.name = name,
          .begin = reinterpret_cast<uintptr_t>(pool.data),
          .rows = pool.num_rows,
          .row_bytes = elements * size,
          .stride_bytes = pool.num_rows > 1 ? pool.row_stride * size : 0};
}

void check_no_overlap(const Span& output, const Span& input) {
  GDN_REQUIRE(!overlap(output, input),
              "output: [%p, %p) given, which overlaps %s at [%p, %p); an output that shares no "
              "memory with an input is expected",
              reinterpret_cast<void*>(output.begin), reinterpret_cast<void*>(end_of(output)),
              input.name, reinterpret_cast<void*>(input.begin),
              reinterpret_cast<void*>(end_of(input)));
}

}  // namespace gdn

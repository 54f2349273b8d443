// Whether the output overlaps an input, as far as addresses and strides decide it.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace gdn {

// The bytes that an array covers: `rows` runs of `row_bytes`, `stride_bytes` apart. Within a row
// the array counts as solid only if it is (`solid`), so interleaved columns are not accused.
struct Span {
  const char* name = nullptr;
  uintptr_t begin = 0;  // 0: absent
  int64_t rows = 1;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;
  bool solid = true;
};

Span span_of(const char* name, const Tensor& tensor, int64_t rows, int64_t heads, int64_t dim);
Span span_of(const char* name, const IndexTable& table);
Span span_of(const char* name, const Pool& pool, int64_t elements);

// Throws GDN_INVALID_ARGUMENT when `input` certainly shares a byte with the output.
void check_no_overlap(const Span& output, const Span& input);

}  // namespace gdn

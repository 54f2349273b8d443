// One function per operation of the C API. A new operation: a function here, a line in the table
// of fuzz_api.cpp.
#pragma once

#include "bytes.h"

namespace gdn_fuzz {

void prefill_paged(Bytes& in);
void prefill_slots(Bytes& in);
void segment(Bytes& in);
void decode_paged(Bytes& in);
void decode_slots(Bytes& in);
void verify(Bytes& in);
void page_table(Bytes& in);
void page_stats(Bytes& in);
void report_text(Bytes& in);
void names(Bytes& in);

}  // namespace gdn_fuzz

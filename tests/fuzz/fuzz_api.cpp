// The C API under arbitrary input: params structs whose fields are spoiled at random, tables with
// arbitrary entries, any struct_size, with buffers that are exactly as large as the sizes say.
// No call may crash, report GDN_INTERNAL, fail without a text, or change a byte it does not own.
#include <cstddef>
#include <cstdint>

#include "bytes.h"
#include "ops.h"

namespace {

constexpr void (*kOperations[])(gdn_fuzz::Bytes&) = {
    gdn_fuzz::prefill_paged, gdn_fuzz::prefill_slots, gdn_fuzz::decode_paged,
    gdn_fuzz::decode_slots,  gdn_fuzz::page_table,    gdn_fuzz::page_stats,
    gdn_fuzz::verify,        gdn_fuzz::report_text,   gdn_fuzz::names,
    gdn_fuzz::segment,
};
constexpr int64_t kCount = sizeof kOperations / sizeof *kOperations;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  gdn_fuzz::Bytes in(data, size);
  kOperations[in.below(kCount)](in);
  return 0;
}

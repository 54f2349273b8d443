// The operations on page tables as core sees them.
#include "core/kernel.h"
#include "cuda/common/device.h"
#include "cuda/page_table.h"

namespace gdn {

const PageTableKernels kPageTableCuda = {
    .prefill_slots = prefill_slots_cuda,
    .decode_slots = decode_slots_cuda,
    .validate = validate_page_table_cuda,
    .validate_workspace = validate_page_table_workspace_cuda,
    .page_stats = page_stats_cuda,
};

void load_page_table_kernels() {
  load_slots_kernels();
  load_validate_kernels();
  load_page_stats_kernels();
}

}  // namespace gdn

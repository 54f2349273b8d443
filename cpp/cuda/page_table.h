// The device kernels behind kPageTableCuda, one launcher per operation.
#pragma once

#include <cstddef>

#include "core/problem.h"

namespace gdn {

void prefill_slots_cuda(const PageTableProblem& p);
void decode_slots_cuda(const PageTableProblem& p);
void validate_page_table_cuda(const PageTableProblem& p);
size_t validate_page_table_workspace_cuda(const PageTableProblem& p);
void page_stats_cuda(const PageStatsProblem& p);

void load_slots_kernels();
void load_validate_kernels();
void load_page_stats_kernels();

}  // namespace gdn

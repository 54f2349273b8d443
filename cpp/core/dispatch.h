// The ordered tables of kernel rows: the first row that does not refuse serves the call.
#pragma once

#include "core/kernel.h"
#include "core/text.h"

namespace gdn {

// The row that serves the problem, or the one that it forces by name. Throws INVALID_ARGUMENT for
// a name that no build knows, NOT_BUILT for a backend this build lacks, else UNSUPPORTED or
// NO_KERNEL_FOR_DEVICE with the reason of every row.
const PrefillRow& select(const PrefillProblem& problem);
const DecodeRowKernel& select(const DecodeProblem& problem);
const VerifyRow& select(const VerifyProblem& problem);

// Which row serves the problem and why each earlier one refuses. Throws as select does.
void explain(const PrefillProblem& problem, Text* text);
void explain(const DecodeProblem& problem, Text* text);
void explain(const VerifyProblem& problem, Text* text);

const PageTableKernels& page_table_kernels(const Device& device);

struct RowText {
  const char* name = nullptr;  // null: past the end
  const char* description = nullptr;
};
RowText row_of(gdn_op_t op, int32_t index);
RowText verify_row(int32_t index);   // of the table in dispatch_verify.cpp
RowText segment_row(int32_t index);  // of the table in dispatch_segment.cpp

// Of a last segment with these params.
void explain_segment(const gdn_prefill_params_t* params, Text* text);

}  // namespace gdn

// The extern "C" entries: fence, validate, dispatch; nothing else.
#include <cstring>

#include "core/dispatch.h"
#include "core/page_table.h"
#include "core/status.h"
#include "core/validate.h"
#include "core/verify.h"

namespace gdn {
namespace {

thread_local char last_error[2048];

void prefill(const gdn_prefill_params_t* params, Form form) {
  const PrefillProblem problem = prefill_problem(params, form, Use::kLaunch);
  const PrefillRow& row = select(problem);
  if (problem.num_seqs > 0 && problem.num_tokens > 0) row.launch(problem);
}

void decode(const gdn_decode_params_t* params, Form form) {
  const DecodeProblem problem = decode_problem(params, form);
  const DecodeRowKernel& row = select(problem);
  if (problem.batch > 0) row.launch(problem);
}

// Bytes of the plan; a row that needs none has no plan.
size_t plan_bytes(const PrefillProblem& problem) {
#if defined(GDN_WITH_CUDA)
  if (&select(problem) != &kPrefillCpu) return kPlanCuda.size(problem);
#else
  select(problem);
#endif
  return 0;
}

void make_plan(const gdn_prefill_params_t* params) {
  const PrefillProblem problem = prefill_problem(params, Form::kEither, Use::kPlan);
  if (plan_bytes(problem) == 0 || problem.num_seqs == 0 || problem.num_tokens == 0) return;
#if defined(GDN_WITH_CUDA)
  kPlanCuda.make(problem);
#endif
}

void validate_page_table(const gdn_page_table_params_t* params, bool is_decode) {
  PageTableProblem problem = page_table_problem(params, TableUse::kValidate, is_decode);
  const PageTableKernels& kernels = page_table_kernels(problem.device);
  if (problem.device.type != GDN_CPU) return kernels.validate(problem);
  PageTableReport report = {};
  PageTableReport* const wanted = problem.report;
  problem.report = &report;
  kernels.validate(problem);
  if (wanted != nullptr) *wanted = report;
  if (report.rule == GDN_PAGE_TABLE_OK) return;
  char storage[512];
  Text text(storage, sizeof storage);
  write_report(report, &text);
  throw Error(GDN_PAGE_TABLE, "page table: %s", text.c_str());
}

void require_pointer(const char* name, const void* pointer) {
  GDN_REQUIRE(pointer != nullptr, "%s: NULL given, a pointer expected", name);
}

void explain_operation(gdn_op_t op, const void* params, Text* text) {
  const auto* prefill_params = static_cast<const gdn_prefill_params_t*>(params);
  const auto* decode_params = static_cast<const gdn_decode_params_t*>(params);
  switch (op) {
    case GDN_OP_PREFILL_PAGED:
      return explain(prefill_problem(prefill_params, Form::kPaged, Use::kLaunch), text);
    case GDN_OP_PREFILL:
      return explain(prefill_problem(prefill_params, Form::kSlots, Use::kLaunch), text);
    case GDN_OP_DECODE_PAGED: return explain(decode_problem(decode_params, Form::kPaged), text);
    case GDN_OP_DECODE: return explain(decode_problem(decode_params, Form::kSlots), text);
    case GDN_OP_VERIFY_PAGED:
      return explain(
          verify_problem(static_cast<const gdn_verify_params_t*>(params), VerifyUse::kVerify),
          text);
    case GDN_OP_SEGMENT: return explain_segment(prefill_params, text);
    default:
      throw Error(GDN_INVALID_ARGUMENT,
                  "op: %d given, GDN_OP_PREFILL_PAGED (1) to GDN_OP_SEGMENT (6) expected", op);
  }
}

}  // namespace

void set_last_error(const char* text) noexcept {
  const size_t length = strnlen(text, sizeof last_error - 1);
  std::memcpy(last_error, text, length);
  last_error[length] = '\0';
}

}  // namespace gdn

using namespace gdn;

extern "C" {

const char* gdn_last_error(void) { return last_error; }

gdn_status_t gdn_prefill_paged(const gdn_prefill_params_t* params) {
  return fence([&] { prefill(params, Form::kPaged); });
}

gdn_status_t gdn_prefill(const gdn_prefill_params_t* params) {
  return fence([&] { prefill(params, Form::kSlots); });
}

gdn_status_t gdn_prefill_workspace_size(const gdn_prefill_params_t* params, size_t* bytes) {
  return fence([&] {
    require_pointer("bytes", bytes);
    const PrefillProblem problem = prefill_problem(params, Form::kEither, Use::kSize);
    *bytes = select(problem).workspace(problem);
  });
}

gdn_status_t gdn_prefill_plan_size(const gdn_prefill_params_t* params, size_t* bytes) {
  return fence([&] {
    require_pointer("bytes", bytes);
    *bytes = plan_bytes(prefill_problem(params, Form::kEither, Use::kSize));
  });
}

gdn_status_t gdn_prefill_plan(const gdn_prefill_params_t* params) {
  return fence([&] { make_plan(params); });
}

gdn_status_t gdn_decode_paged(const gdn_decode_params_t* params) {
  return fence([&] { decode(params, Form::kPaged); });
}

gdn_status_t gdn_decode(const gdn_decode_params_t* params) {
  return fence([&] { decode(params, Form::kSlots); });
}

gdn_status_t gdn_prefill_slots(const gdn_page_table_params_t* params) {
  return fence([&] {
    const PageTableProblem problem = page_table_problem(params, TableUse::kSlots, false);
    const PageTableKernels& kernels = page_table_kernels(problem.device);
    if (problem.num_seqs > 0) kernels.prefill_slots(problem);
  });
}

gdn_status_t gdn_decode_slots(const gdn_page_table_params_t* params) {
  return fence([&] {
    const PageTableProblem problem = page_table_problem(params, TableUse::kSlots, true);
    const PageTableKernels& kernels = page_table_kernels(problem.device);
    if (problem.num_seqs > 0) kernels.decode_slots(problem);
  });
}

gdn_status_t gdn_validate_page_table(const gdn_page_table_params_t* params, int32_t is_decode) {
  return fence([&] { validate_page_table(params, is_decode != 0); });
}

gdn_status_t gdn_validate_page_table_workspace_size(const gdn_page_table_params_t* params,
                                                    size_t* bytes) {
  return fence([&] {
    require_pointer("bytes", bytes);
    const PageTableProblem problem = page_table_problem(params, TableUse::kValidateSize, true);
    *bytes = page_table_kernels(problem.device).validate_workspace(problem);
  });
}

gdn_status_t gdn_page_table_report_text(const gdn_page_table_report_t* report, char* buf,
                                        size_t cap, size_t* need) {
  return fence([&] {
    require_pointer("report", report);
    Text text(buf, cap);
    write_report(*report, &text);
    if (need != nullptr) *need = text.need();
  });
}

gdn_status_t gdn_page_stats(const gdn_page_stats_params_t* params) {
  return fence([&] {
    const PageStatsProblem problem = page_stats_problem(params);
    const PageTableKernels& kernels = page_table_kernels(problem.device);
    if (problem.num_pages > 0) kernels.page_stats(problem);
  });
}

const char* gdn_kernel_row_name(gdn_op_t op, int32_t index) { return row_of(op, index).name; }

const char* gdn_kernel_row_description(gdn_op_t op, int32_t index) {
  return row_of(op, index).description;
}

gdn_status_t gdn_explain(gdn_op_t op, const void* params, char* buf, size_t cap, size_t* need) {
  return fence([&] {
    Text text(buf, cap);
    try {
      explain_operation(op, params, &text);
      if (need != nullptr) *need = text.need();
    } catch (const Error& error) {
      text.add("%s", error.what());
      if (need != nullptr) *need = text.need();
      throw;
    }
  });
}

}  // extern "C"

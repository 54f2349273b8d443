// From C params to checked problems: every rule the host can check, one GDN_REQUIRE each. A rule
// that fails throws before anything is written. Nothing here allocates.
#pragma once

#include "core/problem.h"

namespace gdn {

// What the params are read for. A size query needs host integers alone; a plan needs the tables
// too; a launch needs every pointer.
enum class Use { kLaunch, kPlan, kSize };

// kEither: the paged form when page_size or state_pool is set.
enum class Form { kPaged, kSlots, kEither };

PrefillProblem prefill_problem(const gdn_prefill_params_t* params, Form form, Use use);
DecodeProblem decode_problem(const gdn_decode_params_t* params, Form form);

// A verify has new tokens, a commit has none; a size query needs host integers alone.
enum class VerifyUse { kVerify, kCommit, kSize };

struct VerifyProblem;  // core/verify.h
VerifyProblem verify_problem(const gdn_verify_params_t* params, VerifyUse use);

enum class TableUse { kSlots, kValidate, kValidateSize };

PageTableProblem page_table_problem(const gdn_page_table_params_t* params, TableUse use,
                                    bool is_decode);
PageStatsProblem page_stats_problem(const gdn_page_stats_params_t* params);

}  // namespace gdn

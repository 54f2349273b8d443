// The table of verify rows.
#include <iterator>

#include "core/dispatch_table.h"
#include "core/verify.h"

namespace gdn {

static const char* state_dtype(const VerifyProblem& p) { return pool_dtype(p.pool, p.pool); }

namespace {

#if defined(GDN_WITH_CUDA)
constexpr const VerifyRow* kVerifyRows[] = {&kVerifyCuda, &kVerifyCpu};
constexpr const char* kUnbuiltVerify[] = {nullptr};
#else
constexpr const VerifyRow* kVerifyRows[] = {&kVerifyCpu};
constexpr const char* kUnbuiltVerify[] = {"cuda", nullptr};
#endif

constexpr Table<VerifyProblem> kVerifyTable = {"verify", kVerifyRows, std::size(kVerifyRows),
                                               kUnbuiltVerify};

}  // namespace

const VerifyRow& select(const VerifyProblem& problem) { return select_row(kVerifyTable, problem); }

void explain(const VerifyProblem& problem, Text* text) { explain_row(kVerifyTable, problem, text); }

RowText verify_row(int32_t index) { return row_text(kVerifyTable, index); }

}  // namespace gdn

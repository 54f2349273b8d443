#include "core/dispatch.h"

#include <cstring>
#include <iterator>

#include "core/arguments.h"
#include "core/slots.h"
#include "core/status.h"

namespace gdn {
namespace {

// Rows in the order of preference, and the names that only other builds have.
template <class Problem>
struct Table {
  const char* operation;
  const Row<Problem>* const* rows;
  int32_t count;
  const char* const* unbuilt;  // null-terminated
};

#if defined(GDN_WITH_CUDA)
#if defined(GDN_WITH_SM90)
constexpr const PrefillRow* kPrefillRows[] = {&kPrefillCudaSm90, &kPrefillCudaPortable,
                                              &kPrefillCpu};
constexpr const char* kUnbuiltPrefill[] = {nullptr};
#else
constexpr const PrefillRow* kPrefillRows[] = {&kPrefillCudaPortable, &kPrefillCpu};
constexpr const char* kUnbuiltPrefill[] = {"cuda_sm90", nullptr};
#endif
constexpr const DecodeRowKernel* kDecodeRows[] = {&kDecodeCuda, &kDecodeCpu};
constexpr const char* kUnbuiltDecode[] = {nullptr};
constexpr bool kWithCuda = true;
#else
constexpr const PrefillRow* kPrefillRows[] = {&kPrefillCpu};
constexpr const DecodeRowKernel* kDecodeRows[] = {&kDecodeCpu};
constexpr const char* kUnbuiltPrefill[] = {"cuda_sm90", "cuda_portable", nullptr};
constexpr const char* kUnbuiltDecode[] = {"cuda", nullptr};
constexpr bool kWithCuda = false;
#endif

constexpr Table<PrefillProblem> kPrefillTable = {"prefill", kPrefillRows, std::size(kPrefillRows),
                                                 kUnbuiltPrefill};
constexpr Table<DecodeProblem> kDecodeTable = {"decode", kDecodeRows, std::size(kDecodeRows),
                                               kUnbuiltDecode};

const char* pool_dtype(const Pool& first, const Pool& second) {
  const Pool& pool = first ? first : second;
  return pool ? dtype_name(static_cast<gdn_dtype_t>(pool.dtype)) : "none";
}

const char* state_dtype(const PrefillProblem& p) { return pool_dtype(p.initial, p.output_state); }
const char* state_dtype(const DecodeProblem& p) { return pool_dtype(p.initial, p.output_state); }

// What rows decide by: a refusal states the rule, this states what came.
template <class Problem>
void describe(const Problem& p, Text* text) {
  const Heads& h = p.heads;
  text->add(
      "num_q_heads = %d, num_k_heads = %d, num_v_heads = %d, head_dim_k = %d, head_dim_v = %d", h.q,
      h.k, h.v, h.dim_k, h.dim_v);
  text->add(", io %s, state %s, ", dtype_name(static_cast<gdn_dtype_t>(p.io)), state_dtype(p));
  if (p.device.type == GDN_CPU) return text->add("on the CPU");
  text->add("on CUDA device %d", p.device.id);
}

void require_backend(const Device& device) {
  if (device.type == GDN_CUDA_DEVICE && !kWithCuda) {
    throw Error(GDN_NOT_BUILT,
                "device_type: GDN_CUDA_DEVICE (2) given, but this build has no CUDA backend; "
                "GDN_CPU (1) expected");
  }
}

template <class Problem>
const Row<Problem>& row_by_name(const Table<Problem>& table, const char* name) {
  for (int32_t i = 0; i < table.count; ++i) {
    if (std::strcmp(table.rows[i]->name, name) == 0) return *table.rows[i];
  }
  char storage[512];
  Text names(storage, sizeof storage);
  for (int32_t i = 0; i < table.count; ++i) names.add(", '%s'", table.rows[i]->name);
  for (const char* const* unbuilt = table.unbuilt; *unbuilt != nullptr; ++unbuilt) {
    if (std::strcmp(*unbuilt, name) == 0) {
      throw Error(GDN_NOT_BUILT,
                  "backend: '%s' given, but this build does not hold it; 'auto'%s "
                  "expected",
                  name, names.c_str());
    }
  }
  throw Error(GDN_INVALID_ARGUMENT, "backend: '%.64s' given, a row of %s expected: 'auto'%s", name,
              table.operation, names.c_str());
}

template <class Problem>
const Row<Problem>& forced_row(const Table<Problem>& table, const Problem& problem) {
  const Row<Problem>& row = row_by_name(table, problem.backend);
  require_backend(problem.device);
  const char* reason = row.refuse(problem);
  if (reason == nullptr) return row;
  char storage[512];
  Text call(storage, sizeof storage);
  describe(problem, &call);
  throw Error(reason == kNoCodeForDevice ? GDN_NO_KERNEL_FOR_DEVICE : GDN_UNSUPPORTED,
              "backend: '%s' refuses this %s (%s): %s", row.name, table.operation, call.c_str(),
              reason);
}

template <class Problem>
[[noreturn]] void refuse_all(const Table<Problem>& table, const Problem& problem) {
  char storage[1536];
  Text reasons(storage, sizeof storage);
  describe(problem, &reasons);
  reasons.add("):");
  bool no_code = false;
  for (int32_t i = 0; i < table.count; ++i) {
    const char* reason = table.rows[i]->refuse(problem);
    no_code = no_code || reason == kNoCodeForDevice;
    reasons.add("%s %s: %s", i == 0 ? "" : ";", table.rows[i]->name, reason ? reason : "serves");
  }
  throw Error(no_code ? GDN_NO_KERNEL_FOR_DEVICE : GDN_UNSUPPORTED,
              "no kernel row serves this %s (%s", table.operation, reasons.c_str());
}

template <class Problem>
const Row<Problem>& select_row(const Table<Problem>& table, const Problem& problem) {
  if (problem.backend != nullptr) return forced_row(table, problem);
  require_backend(problem.device);
  for (int32_t i = 0; i < table.count; ++i) {
    if (table.rows[i]->refuse(problem) == nullptr) return *table.rows[i];
  }
  refuse_all(table, problem);
}

template <class Problem>
void explain_row(const Table<Problem>& table, const Problem& problem, Text* text) {
  const Row<Problem>& row = select_row(table, problem);
  text->add("%s: served by %s (%s)%s; workspace %zu bytes\n", table.operation, row.name,
            row.description(), problem.backend ? ", forced by name" : "", row.workspace(problem));
  text->add("  call: ");
  describe(problem, text);
  text->add("\n");
  if (row.explain != nullptr) row.explain(problem, text);
  for (int32_t i = 0; i < table.count && table.rows[i] != &row; ++i) {
    const char* reason = table.rows[i]->refuse(problem);
    text->add("  %s refuses: %s\n", table.rows[i]->name, reason ? reason : "not asked");
  }
  for (const char* const* name = table.unbuilt; *name != nullptr; ++name) {
    text->add("  %s refuses: not in this build\n", *name);
  }
}

template <class Problem>
RowText row_text(const Table<Problem>& table, int32_t index) {
  if (index < 0 || index >= table.count) return {};
  return {.name = table.rows[index]->name, .description = table.rows[index]->description()};
}

// The lengths that the host knows; device memory is never read here.
void explain_lengths(const PrefillProblem& p, Text* text) {
  const bool on_host = p.device.type == GDN_CPU;
  const IndexTable& lengths = p.cu_seqlens_host || !on_host ? p.cu_seqlens_host : p.cu_seqlens;
  if (!lengths || p.num_seqs == 0) return;
  int64_t shortest = INT64_MAX, longest = 0;
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    int64_t begin = 0, length = 0;
    token_range(lengths, p.num_tokens, b, &begin, &length);
    shortest = length < shortest ? length : shortest;
    longest = length > longest ? length : longest;
  }
  text->add("  sequences: %lld, of %lld to %lld new tokens\n", static_cast<long long>(p.num_seqs),
            static_cast<long long>(shortest), static_cast<long long>(longest));
}

}  // namespace

const PrefillRow& select(const PrefillProblem& problem) {
  return select_row(kPrefillTable, problem);
}

const DecodeRowKernel& select(const DecodeProblem& problem) {
  return select_row(kDecodeTable, problem);
}

void explain(const PrefillProblem& problem, Text* text) {
  explain_row(kPrefillTable, problem, text);
  explain_lengths(problem, text);
}

void explain(const DecodeProblem& problem, Text* text) { explain_row(kDecodeTable, problem, text); }

const PageTableKernels& page_table_kernels(const Device& device) {
  require_backend(device);
#if defined(GDN_WITH_CUDA)
  if (device.type == GDN_CUDA_DEVICE) return kPageTableCuda;
#endif
  return kPageTableCpu;
}

RowText prefill_row(int32_t index) { return row_text(kPrefillTable, index); }

RowText decode_row(int32_t index) { return row_text(kDecodeTable, index); }

}  // namespace gdn

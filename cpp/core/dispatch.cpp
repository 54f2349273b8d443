#include "core/dispatch.h"

#include <iterator>

#include "core/dispatch_table.h"
#include "core/slots.h"

namespace gdn {
namespace {

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
#else
constexpr const PrefillRow* kPrefillRows[] = {&kPrefillCpu};
constexpr const DecodeRowKernel* kDecodeRows[] = {&kDecodeCpu};
constexpr const char* kUnbuiltPrefill[] = {"cuda_sm90", "cuda_portable", nullptr};
constexpr const char* kUnbuiltDecode[] = {"cuda", nullptr};
#endif

constexpr Table<PrefillProblem> kPrefillTable = {"prefill", kPrefillRows, std::size(kPrefillRows),
                                                 kUnbuiltPrefill};
constexpr Table<DecodeProblem> kDecodeTable = {"decode", kDecodeRows, std::size(kDecodeRows),
                                               kUnbuiltDecode};

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

RowText row_of(gdn_op_t op, int32_t index) {
  switch (op) {
    case GDN_OP_PREFILL_PAGED:
    case GDN_OP_PREFILL: return row_text(kPrefillTable, index);
    case GDN_OP_DECODE_PAGED:
    case GDN_OP_DECODE: return row_text(kDecodeTable, index);
    case GDN_OP_VERIFY_PAGED: return verify_row(index);
    case GDN_OP_SEGMENT: return segment_row(index);
    default: return {};
  }
}

}  // namespace gdn

// Speculative decoding on the CPU: a task is one state head of one sequence.
#include "core/verify.h"

#include <algorithm>
#include <cstring>

#include "core/kernel.h"
#include "core/status.h"
#include "cpu/kernels.h"
#include "cpu/operand.h"
#include "cpu/units.h"

namespace gdn {
namespace {

using namespace cpu;

// Tokens [first, last) of the record. What stands before a reset does not count.
Fold make_fold(const DraftHeader& header, int first, int last) {
  Fold fold{};
  fold.keep = 1.0f;
  fold.first = static_cast<int8_t>(first);
  fold.last = static_cast<int8_t>(last);
  for (int t = last - 1; t >= first; --t) {
    fold.weight[t] = fold.keep;
    fold.keep *= header.alpha[t];
    if (header.alpha[t] == 0.0f) {
      fold.first = static_cast<int8_t>(t);
      fold.replace = true;
      break;
    }
  }
  return fold;
}

StateRows state_rows(const VerifyProblem& p, int64_t row, int64_t head) {
  return {.data = state_address(p.pool, p.heads, row, head, 0),
          .dtype = p.pool.dtype,
          .dim_k = p.heads.dim_k,
          .dim_v = p.heads.dim_v};
}

void set_folds(const VerifyProblem& p, const VerifySequence& s, int64_t head,
               const DraftHeader& header, VerifyStep* step) {
  int done = 0;
  if (s.boundary > 0) {
    Fold& fold = step->folds[step->num_folds++];
    fold = make_fold(header, 0, s.boundary);
    fold.write = state_rows(p, s.boundary_row, head);
    done = s.boundary;
  }
  if (done == s.accepted) return;
  Fold& fold = step->folds[step->num_folds++];
  fold = make_fold(header, done, s.accepted);
  fold.write = state_rows(p, s.write_row, head);
}

void zero_outputs(const VerifyProblem& p, const VerifySequence& s, int64_t head) {
  for (int64_t t = s.begin; t < s.begin + s.length; ++t) {
    std::memset(writable(p.output, t, head, 0), 0, p.heads.dim_v * element_bytes(p.io));
  }
}

void set_tokens(const VerifyProblem& p, const VerifySequence& s, int32_t head, VerifyStep* step) {
  step->tokens = static_cast<int32_t>(s.length);
  if (s.length == 0) return;
  step->q = address(p.q, s.begin, p.heads.q_of(head));
  step->k = address(p.k, s.begin, p.heads.k_of(head));
  step->v = address(p.v, s.begin, p.heads.v_of(head));
  step->output = writable(p.output, s.begin, head, 0);
  step->q_stride = p.q.row_stride;
  step->k_stride = p.k.row_stride;
  step->v_stride = p.v.row_stride;
  step->output_stride = p.output.row_stride;
  for (int32_t t = 0; t < step->tokens; ++t) {
    step->alpha[t] = read_alpha(p.gates, s.begin + t, head);
    step->beta[t] = read_beta(p.gates, s.begin + t, head);
  }
}

void run_unit(const VerifyProblem& p, const Kernels& table, int64_t unit, float* scratch) {
  const int32_t head = static_cast<int32_t>(unit % p.heads.state);
  const VerifySequence s = resolve_verify(p, unit / p.heads.state);
  if (!s.live) return zero_outputs(p, s, head);
  const DraftLayout layout = draft_layout(p.heads, p.io, p.max_draft);
  char* record = s.slot >= 0 ? draft_record(p, layout, s.slot, head) : nullptr;
  auto* header = reinterpret_cast<DraftHeader*>(record);
  const bool kept = header != nullptr && covers(header->count, s);
  if (s.accepted > 0 && !kept) return zero_outputs(p, s, head);
  VerifyStep step{};
  step.io = p.io;
  step.scale = p.scale;
  step.l2norm = p.qk_l2norm;
  step.scratch = scratch;
  step.read = state_rows(p, s.read_row, head);
  set_tokens(p, s, head, &step);
  if (record != nullptr) {
    step.draft_k = record + layout.k;
    step.draft_u = reinterpret_cast<float*>(record + layout.u);
    step.draft_tokens = layout.tokens;
    if (s.accepted > 0) set_folds(p, s, head, *header, &step);
  }
  if (step.tokens > 0 || step.num_folds > 0) table.verify(step);
  if (header == nullptr) return;
  header->count = step.tokens;
  std::copy_n(step.alpha, kMaxDraft, header->alpha);
}

void launch(const VerifyProblem& p) {
  Threads threads = p.threads;
  const int32_t count = threads_for_pass(p.num_seqs * p.heads.state_elements(), &threads);
  const int64_t units = p.num_seqs * p.heads.state;
  const Kernels& table = kernels();
  const size_t bytes = sizeof(float) * 3 * kMaxDraft * p.heads.dim_k;
  for_units(threads, count, units, bytes,
            [&](int64_t i, float* scratch) { run_unit(p, table, i, scratch); });
}

const char* refuse(const VerifyProblem& p) { return refuse_operands(p.device, p.heads); }

}  // namespace

const VerifyRow kVerifyCpu = {.name = "cpu",
                              .description = [] { return kernels().isa; },
                              .refuse = refuse,
                              .workspace = [](const VerifyProblem&) -> size_t { return 0; },
                              .launch = launch};

}  // namespace gdn

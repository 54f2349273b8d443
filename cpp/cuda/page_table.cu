// gdn_validate_page_table on the device: the report of core/page_table.h without the host. Five
// small launches: clear, check each sequence, enter written pages into a hash table, look for
// collisions, write the report. The lowest finding wins whatever the threads' order.
#include "core/page_table.h"
#include "core/workspace.h"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/page_table.h"

namespace gdn {
namespace {

using Word = unsigned long long;

constexpr int kThreads = 128;
constexpr Word kNone = ~Word{0};
constexpr int kRuleShift = 48;  // (rule, sequence) in one word that orders as the pair does

// What the launches hand on.
struct Findings {
  Word broken_rule;  // rule << kRuleShift | sequence
  Word rewritten;    // entry that writes a page which a lower entry writes
  Word misread;      // sequence that reads a page which another one writes
};

// Page to the lowest entry that writes it; open addressing, at most half full.
struct WriterTable {
  Word* pages;    // [capacity], kNone: free
  Word* entries;  // [capacity]
  Word capacity;  // a power of two

  __device__ Word home(Word page) const {
    return (page * 0x9e3779b97f4a7c15ull >> 20) & (capacity - 1);
  }
  __device__ void insert(Word page, Word entry) const {
    for (Word i = home(page);; i = (i + 1) & (capacity - 1)) {
      const Word found = atomicCAS(&pages[i], kNone, page);
      if (found != kNone && found != page) continue;
      atomicMin(&entries[i], entry);
      return;
    }
  }
  __device__ Word writer_of(Word page) const {
    for (Word i = home(page); pages[i] != kNone; i = (i + 1) & (capacity - 1)) {
      if (pages[i] == page) return entries[i];
    }
    return kNone;
  }
};

struct CheckParams {
  PageTableProblem problem;
  Findings* findings;
  WriterTable writers;
};

__device__ int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__global__ void __launch_bounds__(kThreads) clear_kernel(const __grid_constant__ CheckParams c) {
  const int64_t i = thread_index();
  if (i == 0) *c.findings = {kNone, kNone, kNone};
  if (i >= static_cast<int64_t>(c.writers.capacity)) return;
  c.writers.pages[i] = kNone;
  c.writers.entries[i] = kNone;
}

__global__ void __launch_bounds__(kThreads)
    sequences_kernel(const __grid_constant__ CheckParams c) {
  const int64_t b = thread_index();
  if (b >= c.problem.num_seqs) return;
  const Word rule = static_cast<Word>(check_sequence(c.problem, b).rule);
  if (rule != GDN_PAGE_TABLE_OK) {
    atomicMin(&c.findings->broken_rule, rule << kRuleShift | static_cast<Word>(b));
  }
}

__global__ void __launch_bounds__(kThreads) writers_kernel(const __grid_constant__ CheckParams c) {
  const int64_t b = thread_index();
  // Only an intact table may be followed; then all writes fit into the hash table.
  if (b >= c.problem.num_seqs || c.findings->broken_rule != kNone) return;
  const PageAccess access = page_access(c.problem, b);
  for (int64_t entry = access.write_begin; entry < access.write_end; ++entry) {
    const int64_t page = c.problem.table.indices[entry];
    if (page >= 0) c.writers.insert(static_cast<Word>(page), static_cast<Word>(entry));
  }
}

__global__ void __launch_bounds__(kThreads)
    conflicts_kernel(const __grid_constant__ CheckParams c) {
  const int64_t b = thread_index();
  if (b >= c.problem.num_seqs || c.findings->broken_rule != kNone) return;
  const PageAccess access = page_access(c.problem, b);
  for (int64_t entry = access.write_begin; entry < access.write_end; ++entry) {
    const int64_t page = c.problem.table.indices[entry];
    if (page < 0 || c.writers.writer_of(static_cast<Word>(page)) == static_cast<Word>(entry)) {
      continue;
    }
    atomicMin(&c.findings->rewritten, static_cast<Word>(entry));
    break;  // later entries are higher
  }
  if (access.read < 0) return;
  const Word writer = c.writers.writer_of(static_cast<Word>(access.read));
  if (writer != kNone && sequence_of_entry(c.problem, static_cast<int64_t>(writer)) != b) {
    atomicMin(&c.findings->misread, static_cast<Word>(b));
  }
}

__device__ PageTableReport make_report(const CheckParams& c) {
  const PageTableProblem& p = c.problem;
  const Findings found = *c.findings;
  if (found.broken_rule != kNone) {
    const Word sequence = found.broken_rule & ((Word{1} << kRuleShift) - 1);
    return check_sequence(p, static_cast<int64_t>(sequence));
  }
  const bool rewritten = found.rewritten != kNone;
  if (!rewritten && found.misread == kNone) return broken(p, GDN_PAGE_TABLE_OK, 0);
  const auto writer_of = [&c](int64_t page) {
    return static_cast<int64_t>(c.writers.writer_of(static_cast<Word>(page)));
  };
  if (rewritten) {
    const auto entry = static_cast<int64_t>(found.rewritten);
    return two_writers(p, entry, writer_of(p.table.indices[entry]));
  }
  const auto reader = static_cast<int64_t>(found.misread);
  return write_and_read(p, reader, writer_of(page_access(p, reader).read));
}

__global__ void report_kernel(const __grid_constant__ CheckParams c) {
  *c.problem.report = make_report(c);
}

// Sizes and places of the scratch memory.
struct CheckPlan {
  WorkspacePlan plan;
  WorkspacePlan::Region findings, pages, entries;
  Word capacity = 2;

  explicit CheckPlan(const PageTableProblem& p) {
    while (capacity < 2 * static_cast<Word>(p.table.indices.size)) capacity *= 2;
    findings = plan.add(sizeof(Findings));
    pages = plan.add(capacity * sizeof(Word));
    entries = plan.add(capacity * sizeof(Word));
  }
};

LaunchConfig threads_for(const PageTableProblem& p, int64_t count) {
  return {
      .blocks = (count + kThreads - 1) / kThreads, .threads = kThreads, .stream = p.device.stream};
}

}  // namespace

size_t validate_page_table_workspace_cuda(const PageTableProblem& p) {
  return CheckPlan(p).plan.total();
}

void validate_page_table_cuda(const PageTableProblem& p) {
  const CheckPlan plan(p);
  plan.plan.check("workspace", p.workspace, p.workspace_bytes);
  const LaunchScope scope(p.device);
  const CheckParams params = {
      .problem = p,
      .findings = WorkspacePlan::carve<Findings>(p.workspace, plan.findings),
      .writers = {.pages = WorkspacePlan::carve<Word>(p.workspace, plan.pages),
                  .entries = WorkspacePlan::carve<Word>(p.workspace, plan.entries),
                  .capacity = plan.capacity}};
  const LaunchConfig per_sequence = threads_for(p, p.num_seqs);
  launch(clear_kernel, threads_for(p, static_cast<int64_t>(plan.capacity)), params,
         "validate_page_table");
  launch(sequences_kernel, per_sequence, params, "validate_page_table");
  launch(writers_kernel, per_sequence, params, "validate_page_table");
  launch(conflicts_kernel, per_sequence, params, "validate_page_table");
  launch(report_kernel, {.blocks = 1, .threads = 1, .stream = p.device.stream}, params,
         "validate_page_table");
}

void load_validate_kernels() {
  load_kernel(clear_kernel, "validate_page_table");
  load_kernel(sequences_kernel, "validate_page_table");
  load_kernel(writers_kernel, "validate_page_table");
  load_kernel(conflicts_kernel, "validate_page_table");
  load_kernel(report_kernel, "validate_page_table");
}

}  // namespace gdn

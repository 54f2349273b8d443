// The plan of a call: the sequences that have tokens, and their chunks numbered through. It depends
// on lengths and tables alone, so all layers of a step can share one. Short sequences have no
// chunks (common/short_sequence.h); they are listed from the end of the list.
#pragma once

#include <cstddef>

#include "core/slots.h"
#include "cuda/common/dependent.cuh"
#include "cuda/common/short_sequence.h"
#include "cuda/sm80/params.h"

namespace gdn {

inline constexpr int kPlanThreads = 1024;

struct PlanParams {
  PrefillProblem problem;
  PlanHeader* header;
  SequenceEntry* entries;  // [entry_bound]
  int64_t entry_bound;
  int64_t chunk_bound;
  int64_t short_tokens;  // of a sequence that takes no chunks, at most
  ChunkGrid grid;
};
static_assert(sizeof(ShortEntry) == sizeof(SequenceEntry) &&
              offsetof(ShortEntry, no_chunk) == offsetof(SequenceEntry, chunk_begin));

// Entries and chunks up to some sequence. Sums over one block fit: 2^10 sequences of 2^26 chunks.
struct PlanCount {
  int64_t entries;
  int64_t chunks;
  int64_t shorts;
};

__device__ __forceinline__ SequenceEntry plan_entry(const ChunkGrid& grid, const Sequence& s) {
  SequenceEntry entry = {};
  const ChunkPlace place = chunk_place(grid, s.live ? s.prefix : 0);
  entry.begin = static_cast<int32_t>(s.begin);
  entry.length = static_cast<int32_t>(s.length);
  entry.pad = s.live ? static_cast<int32_t>(place.row) : -1;
  entry.first_checkpoint = static_cast<int32_t>(place.to_page_end);
  entry.read_row = static_cast<int32_t>(s.read_row);
  entry.write_row = static_cast<int32_t>(s.write_row);
  entry.checkpoint_start = static_cast<int32_t>(s.checkpoint_start);
  return entry;
}

// Sums over the threads before this one, and over all; `warp_totals` is shared scratch.
__device__ __forceinline__ PlanCount count_before(PlanCount own, PlanCount* warp_totals,
                                                  PlanCount* total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  PlanCount sum = own;
  for (int step = 1; step < 32; step *= 2) {
    const int64_t entries = __shfl_up_sync(kFullWarp, sum.entries, step);
    const int64_t chunks = __shfl_up_sync(kFullWarp, sum.chunks, step);
    const int64_t shorts = __shfl_up_sync(kFullWarp, sum.shorts, step);
    if (lane >= step) {
      sum.entries += entries;
      sum.chunks += chunks;
      sum.shorts += shorts;
    }
  }
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  PlanCount before = {sum.entries - own.entries, sum.chunks - own.chunks, sum.shorts - own.shorts};
  *total = {};
  for (int w = 0; w < warps; ++w) {
    if (w < warp) {
      before.entries += warp_totals[w].entries;
      before.chunks += warp_totals[w].chunks;
      before.shorts += warp_totals[w].shorts;
    }
    total->entries += warp_totals[w].entries;
    total->chunks += warp_totals[w].chunks;
    total->shorts += warp_totals[w].shorts;
  }
  __syncthreads();
  return before;
}

__global__ void __launch_bounds__(kPlanThreads) prefill_plan(const __grid_constant__ PlanParams p) {
  __shared__ PlanCount warp_totals[kPlanThreads / 32];
  __shared__ PlanHeader accepted;
  if (threadIdx.x == 0) accepted = {};
  dependency_wait();
  allow_dependents();
  __syncthreads();
  PlanCount done = {};
  for (int64_t first = 0; first < p.problem.num_seqs; first += blockDim.x) {
    const int64_t b = first + threadIdx.x;
    Sequence sequence;
    if (b < p.problem.num_seqs) sequence = resolve_sequence(p.problem, b);
    SequenceEntry entry = plan_entry(p.grid, sequence);
    const bool is_short = sequence.length > 0 && sequence.length <= p.short_tokens;
    const bool present = sequence.length > p.short_tokens;
    const int32_t chunks = present ? entry.chunk_count(p.grid) : 0;
    PlanCount total;
    PlanCount before = count_before({present, chunks, is_short}, warp_totals, &total);
    before.entries += done.entries;
    before.chunks += done.chunks;
    before.shorts += done.shorts;
    const bool has_place = before.entries + before.shorts < p.entry_bound;
    // NOTE: only a cu_seqlens that gives tokens twice passes the bounds; what passes is dropped.
    const int64_t chunk_end = before.chunks + chunks;
    if (present && has_place && chunk_end <= p.chunk_bound) {
      entry.chunk_begin = static_cast<int32_t>(before.chunks);
      p.entries[before.entries] = entry;
      atomicMax(&accepted.num_entries, static_cast<int32_t>(before.entries + 1));
      atomicMax(&accepted.num_chunks, static_cast<int32_t>(chunk_end));
    }
    if (is_short && has_place) {
      auto* last = reinterpret_cast<ShortEntry*>(p.entries + p.entry_bound - 1);
      *(last - before.shorts) = short_entry(p.problem, sequence);
      atomicMax(&accepted.num_short, static_cast<int32_t>(before.shorts + 1));
    }
    done.entries += total.entries;
    done.chunks += total.chunks;
    done.shorts += total.shorts;
  }
  __syncthreads();
  if (threadIdx.x == 0) *p.header = accepted;
  const int32_t unused = accepted.num_entries + static_cast<int32_t>(threadIdx.x);
  if (unused < min(p.entry_bound - accepted.num_short, int64_t{kPaddedEntries})) {
    SequenceEntry none = {};
    none.chunk_begin = kNoChunk;
    p.entries[unused] = none;
  }
}

}  // namespace gdn

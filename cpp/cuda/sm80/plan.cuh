// The plan of a call: the sequences that have tokens, and their chunks numbered through. It depends
// on lengths and tables alone, so all layers of a step can share one.
#pragma once

#include "core/slots.h"
#include "cuda/common/dependent.cuh"
#include "cuda/sm80/params.h"

namespace gdn {

inline constexpr int kPlanThreads = 1024;

struct PlanParams {
  PrefillProblem problem;
  PlanHeader* header;
  SequenceEntry* entries;  // [entry_bound]
  int64_t entry_bound;
  int64_t chunk_bound;
};

// Entries and chunks up to some sequence. Sums over one block fit: 2^10 sequences of 2^26 chunks.
struct PlanCount {
  int64_t entries;
  int64_t chunks;
};

__device__ __forceinline__ SequenceEntry plan_entry(const PrefillProblem& p, const Sequence& s) {
  SequenceEntry entry = {};
  entry.begin = static_cast<int32_t>(s.begin);
  entry.length = static_cast<int32_t>(s.length);
  entry.pad = s.live ? static_cast<int32_t>(s.prefix % kChunk) : -1;
  entry.read_row = static_cast<int32_t>(s.read_row);
  entry.write_row = static_cast<int32_t>(s.write_row);
  entry.checkpoint_start = static_cast<int32_t>(s.checkpoint_start);
  if (s.live && p.checkpoint_every > 0) {
    const int64_t grid_begin = s.prefix - s.prefix % kChunk;
    const int64_t to_page_end = p.checkpoint_every - grid_begin % p.checkpoint_every;
    entry.first_checkpoint = static_cast<int32_t>(min(to_page_end / kChunk, int64_t{INT32_MAX}));
  }
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
    if (lane >= step) {
      sum.entries += entries;
      sum.chunks += chunks;
    }
  }
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  PlanCount before = {sum.entries - own.entries, sum.chunks - own.chunks};
  *total = {};
  for (int w = 0; w < warps; ++w) {
    if (w < warp) {
      before.entries += warp_totals[w].entries;
      before.chunks += warp_totals[w].chunks;
    }
    total->entries += warp_totals[w].entries;
    total->chunks += warp_totals[w].chunks;
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
    SequenceEntry entry = plan_entry(p.problem, sequence);
    const bool present = sequence.length > 0;
    PlanCount total;
    PlanCount before =
        count_before({present, present ? entry.chunk_count() : 0}, warp_totals, &total);
    before.entries += done.entries;
    before.chunks += done.chunks;
    // NOTE: only a cu_seqlens that gives tokens twice passes the bounds; what passes is dropped.
    const int64_t chunk_end = before.chunks + entry.chunk_count();
    if (present && before.entries < p.entry_bound && chunk_end <= p.chunk_bound) {
      entry.chunk_begin = static_cast<int32_t>(before.chunks);
      p.entries[before.entries] = entry;
      atomicMax(&accepted.num_entries, static_cast<int32_t>(before.entries + 1));
      atomicMax(&accepted.num_chunks, static_cast<int32_t>(chunk_end));
    }
    done.entries += total.entries;
    done.chunks += total.chunks;
  }
  __syncthreads();
  if (threadIdx.x == 0) *p.header = accepted;
  const int32_t unused = accepted.num_entries + static_cast<int32_t>(threadIdx.x);
  if (unused < min(p.entry_bound, int64_t{kPaddedEntries})) {
    SequenceEntry none = {};
    none.chunk_begin = kNoChunk;
    p.entries[unused] = none;
  }
}

}  // namespace gdn

// The rules of core/verify.h in two trips to memory: every lane brings one number, and the numbers
// of a sequence are in flight together.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/verify/params.h"

namespace gdn {

__device__ __forceinline__ int64_t shuffle(int64_t x, int lane) {
  const int32_t low = __shfl_sync(kFullWarp, static_cast<int32_t>(x), lane);
  const int32_t high = __shfl_sync(kFullWarp, static_cast<int32_t>(x >> 32), lane);
  return static_cast<int64_t>(high) << 32 | static_cast<uint32_t>(low);
}

__device__ __forceinline__ VerifyNumbers load_numbers(const VerifyProblem& p, int64_t b) {
  const int lane = this_lane();
  const IndexTable& mine = lane < 2    ? p.cu_seqlens
                           : lane == 2 ? p.accepted
                           : lane == 3 ? p.draft_indices
                           : lane == 4 ? p.seq_lens
                                       : p.table.indptr;
  int64_t x = lane == 3 ? b : 0;  // where a table is absent
  const int64_t i = lane == 1 || lane == 6 ? b + 1 : b;
  if (lane < 7 && mine) x = mine[i];
  return {.begin = shuffle(x, 0),
          .end = shuffle(x, 1),
          .accepted = shuffle(x, 2),
          .slot = shuffle(x, 3),
          .total = shuffle(x, 4),
          .first_entry = shuffle(x, 5),
          .end_entry = shuffle(x, 6)};
}

// This lane's row of page_indices: lanes 0, 1 and 2 bring those to read and to write.
__device__ __forceinline__ int64_t load_row(const VerifyProblem& p, const VerifyEntries& entries) {
  const int lane = this_lane();
  const int64_t entry = lane == 0   ? entries.read
                        : lane == 1 ? entries.boundary
                        : lane == 2 ? entries.write
                                    : -1;
  return entry < 0 ? -1 : p.table.indices[entry];
}

}  // namespace gdn

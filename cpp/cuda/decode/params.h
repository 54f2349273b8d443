// What one decode launch gets.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/common/divide.h"

namespace gdn {

struct DecodeParams {
  DecodeProblem problem;
  int32_t groups = 0;              // row groups per warp: a power of two
  int32_t parts_log2 = 0;          // a state's V rows are split over 2^parts_log2 blocks
  int32_t tail_log2 = 0;           // the last blocks are split again, so that all SMs end together
  int64_t tail_block = INT64_MAX;  // the first of them
  SmallDivisor heads_per_q;        // state heads that share a q head
  SmallDivisor heads_per_k;
  SmallDivisor heads_per_v;
  bool expects_row = false;     // slots are read before the predecessor ends, and again after it
  int32_t prefetch_groups = 0;  // of each warp, requested before the predecessor ends
  int64_t prefetch_blocks = 0;  // the first blocks do it
  bool evict_first = false;     // states leave L2 first
};

}  // namespace gdn

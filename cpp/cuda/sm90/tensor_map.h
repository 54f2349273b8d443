// Tensor maps of [tokens, heads, 128] operands, made on the host by the driver's encoder.
#pragma once

#include "core/problem.h"
#include "core/status.h"
#include "cuda/common/driver.h"

namespace gdn::sm90 {

inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const PFN_cuTensorMapEncodeTiled_v12000 encoder = [] {
    PFN_cuTensorMapEncodeTiled_v12000 entry = nullptr;
    find_driver_entry("cuTensorMapEncodeTiled", &entry);
    return entry;
  }();
  return encoder;
}

// Whether the copy engine can take the operand: 16-byte steps, the heads of a token inside its row.
inline bool fits_tensor_map(const Tensor& x, int32_t heads) {
  constexpr int64_t kDim = 128, kStrideLimit = int64_t{1} << 38;
  const auto address = reinterpret_cast<uintptr_t>(x.data);
  const int64_t head_stride = heads == 1 ? kDim : x.head_stride;
  return address % 16 == 0 && x.row_stride % 8 == 0 && head_stride % 8 == 0 &&
         head_stride >= kDim && x.row_stride >= (heads - 1) * head_stride + kDim &&
         x.row_stride < kStrideLimit;
}

// Boxes of 64 tokens x 64 columns of one head, swizzled into one panel of shared memory.
inline CUtensorMap make_tensor_map(const Tensor& x, int32_t heads, int64_t tokens,
                                   const char* name) {
  const int64_t head_stride = heads == 1 ? 128 : x.head_stride;
  const cuuint64_t sizes[3] = {128, static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(head_stride) * 2,
                                 static_cast<cuuint64_t>(x.row_stride) * 2};
  const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(kChunk)};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      tensor_map_encoder()(&map,
                           x.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                           3, const_cast<void*>(x.data), sizes, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(GDN_CUDA, "%s: no tensor map for strides %lld, %lld (driver error %d)", name,
                static_cast<long long>(x.row_stride), static_cast<long long>(head_stride),
                static_cast<int>(result));
  }
  return map;
}

}  // namespace gdn::sm90

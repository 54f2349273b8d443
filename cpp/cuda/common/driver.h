// Entries of the CUDA driver, found at run time: the library does not link libcuda, and loads where
// there is none.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "cuda/common/launch.h"

namespace gdn {

// The entry as it is since CUDA 12.0 at the latest. Throws GDN_CUDA if there is no driver.
template <class Function>
void find_driver_entry(const char* name, Function* function) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check_cuda(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found),
             name);
  if (found != cudaDriverEntryPointSuccess) throw Error(GDN_CUDA, "the driver has no %s", name);
  *function = reinterpret_cast<Function>(entry);
}

// For calls that run before the runtime has a name for the error.
inline void check_driver(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  throw Error(GDN_CUDA, "%s: CUDA driver error %d", what, static_cast<int>(result));
}

}  // namespace gdn

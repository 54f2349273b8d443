// Checked CUDA runtime calls and kernel launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/status.h"

namespace gdn {

// Every runtime call goes through here: the text names what was tried.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a failed launch must not surface again in the caller's next check
  const bool no_code =
      error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction;
  throw Error(no_code ? GDN_NO_KERNEL_FOR_DEVICE : GDN_CUDA, "%s: %s (%s)", what,
              cudaGetErrorString(error), cudaGetErrorName(error));
}

struct LaunchConfig {
  int64_t blocks = 0;  // x only: y and z end at 65535
  int32_t threads = 0;
  size_t shared_bytes = 0;
  CUstream_st* stream = nullptr;
  // The kernel calls dependency_wait() before it touches memory, so that it may start early.
  bool early_start = false;
};

inline constexpr int64_t kMaxBlocks = 0x7fffffff;

// Launches kernel(params) with one struct by value; `name` appears in errors.
template <class Params>
void launch(void (*kernel)(Params), const LaunchConfig& config, const Params& params,
            const char* name) {
  if (config.blocks <= 0) return;
  if (config.blocks > kMaxBlocks) {
    throw Error(GDN_UNSUPPORTED, "%s: needs %lld blocks, a launch has at most %lld", name,
                static_cast<long long>(config.blocks), static_cast<long long>(kMaxBlocks));
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch_config{};
  launch_config.gridDim = dim3(static_cast<unsigned>(config.blocks));
  launch_config.blockDim = dim3(static_cast<unsigned>(config.threads));
  launch_config.dynamicSmemBytes = config.shared_bytes;
  launch_config.stream = config.stream;
  launch_config.attrs = &early;
  launch_config.numAttrs = config.early_start ? 1 : 0;
  void* arguments[] = {const_cast<Params*>(&params)};
  const cudaError_t error =
      cudaLaunchKernelExC(&launch_config, reinterpret_cast<const void*>(kernel), arguments);
  if (error == cudaErrorInvalidResourceHandle) {
    cudaGetLastError();
    throw Error(GDN_INVALID_ARGUMENT,
                "stream: %p is no stream of the device of this call; expected one of it",
                static_cast<void*>(config.stream));
  }
  check_cuda(error, name);
}

// Loads a kernel on the current device (runtimes load lazily, which a capture forbids) and raises
// its limit of dynamic shared memory.
template <class Params>
void load_kernel(void (*kernel)(Params), const char* name, size_t shared_bytes = 0) {
  const void* entry = reinterpret_cast<const void*>(kernel);
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, entry), name);
  if (shared_bytes > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)),
               name);
  }
}

}  // namespace gdn

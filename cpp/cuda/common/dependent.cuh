// Programmatic dependent launch: a kernel launched with `early_start` is placed on the GPU while
// its predecessor drains and waits here before it touches memory.
#pragma once

namespace gdn {

// All earlier work of the stream is complete and visible.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may be placed. Only after dependency_wait(): the next kernel may rely on work
// that lies before this one without waiting for it.
__device__ __forceinline__ void allow_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace gdn

#include "cuda/common/device.h"

#include <atomic>
#include <mutex>

#include "core/kernel.h"
#include "cuda/common/driver.h"
#include "cuda/common/launch.h"

namespace gdn {
namespace {

constexpr int32_t kMaxDevices = 64;

// The mutexes guard first uses alone; later calls of any thread read without a lock.
struct DeviceState {
  std::atomic<bool> known{false};
  std::atomic<bool> loaded{false};
  std::atomic<CUcontext> context{nullptr};  // the primary one, which every runtime shares
  CUdevice device = 0;                      // known with the context
  DeviceInfo info;
};

DeviceState states[kMaxDevices];
std::mutex info_mutex;
std::mutex context_mutex;
std::mutex load_mutex;

DeviceState& state_of(int32_t device_id) {
  GDN_REQUIRE(device_id >= 0 && device_id < kMaxDevices, "device_id: got %d, expected 0 .. %d",
              device_id, kMaxDevices - 1);
  return states[device_id];
}

int32_t attribute(cudaDeviceAttr which, int32_t device_id) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device_id), "reading the CUDA device");
  return value;
}

// What the runtime cannot do: to make a device current without creating a context on, or touching,
// the one that was current before.
struct ContextApi {
  PFN_cuDeviceGet_v2000 device;
  PFN_cuDevicePrimaryCtxRetain_v7000 retain_primary;
  PFN_cuCtxGetCurrent_v4000 current;
  PFN_cuCtxGetDevice_v2000 device_of_current;
  PFN_cuCtxPushCurrent_v4000 push;
  PFN_cuCtxPopCurrent_v4000 pop;
};

const ContextApi& context_api() {
  static const ContextApi api = [] {
    ContextApi found;
    find_driver_entry("cuDeviceGet", &found.device);
    find_driver_entry("cuDevicePrimaryCtxRetain", &found.retain_primary);
    find_driver_entry("cuCtxGetCurrent", &found.current);
    find_driver_entry("cuCtxGetDevice", &found.device_of_current);
    find_driver_entry("cuCtxPushCurrent", &found.push);
    find_driver_entry("cuCtxPopCurrent", &found.pop);
    return found;
  }();
  return api;
}

// Held until the process ends, as the runtime holds it.
CUcontext primary_context(DeviceState& state, int32_t device_id) {
  CUcontext context = state.context.load(std::memory_order_acquire);
  if (context != nullptr) return context;
  const std::lock_guard<std::mutex> lock(context_mutex);
  context = state.context.load(std::memory_order_relaxed);
  if (context != nullptr) return context;
  check_driver(context_api().device(&state.device, device_id), "device_id");
  check_driver(context_api().retain_primary(&context, state.device), "device_id");
  state.context.store(context, std::memory_order_release);
  return context;
}

// A first use during a capture of `stream` must not load anything.
bool is_capturing(CUstream_st* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error == cudaErrorStreamCaptureImplicit) {  // the legacy stream, while another one captures
    cudaGetLastError();
    return true;
  }
  check_cuda(error, "stream");
  return status != cudaStreamCaptureStatusNone;
}

void load_all_kernels() {
  load_page_table_kernels();
  load_decode_kernels();
  load_verify_kernels();
  load_short_kernels();
  load_segment_kernels();
  load_prefill_portable_kernels();
#if defined(GDN_WITH_SM90)
  load_prefill_sm90_kernels();
#endif
}

// The device is current.
void load_device(DeviceState& state) {
  const std::lock_guard<std::mutex> lock(load_mutex);
  if (state.loaded.load(std::memory_order_relaxed)) return;
  // Another thread's capture must not make loading fail here.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "preload");
  try {
    load_all_kernels();
  } catch (...) {
    cudaThreadExchangeStreamCaptureMode(&mode);
    throw;
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  state.loaded.store(true, std::memory_order_release);
}

}  // namespace

const DeviceInfo& device_info(int32_t device_id) {
  DeviceState& state = state_of(device_id);
  if (!state.known.load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(info_mutex);
    if (!state.known.load(std::memory_order_relaxed)) {
      DeviceInfo& info = state.info;
      info.num_sms = attribute(cudaDevAttrMultiProcessorCount, device_id);
      info.compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device_id) +
                                attribute(cudaDevAttrComputeCapabilityMinor, device_id);
      info.max_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device_id);
      info.shared_bytes_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device_id);
      state.known.store(true, std::memory_order_release);
    }
  }
  return state.info;
}

DeviceGuard::DeviceGuard(int32_t device_id) {
  DeviceState& state = state_of(device_id);
  const ContextApi& api = context_api();
  CUcontext current = nullptr;
  check_driver(api.current(&current), "current CUDA device");
  const CUcontext primary = primary_context(state, device_id);
  if (current == primary) return;
  CUdevice device = -1;
  if (current != nullptr) check_driver(api.device_of_current(&device), "current CUDA device");
  // A context of the caller's own on this device is where its memory and streams are.
  if (current != nullptr && device == state.device) return;
  check_driver(api.push(primary), "device_id");
  pushed_ = true;
}

DeviceGuard::~DeviceGuard() {
  CUcontext popped = nullptr;
  if (pushed_) context_api().pop(&popped);
}

LaunchScope::LaunchScope(const Device& device) : guard_(device.id) {
  DeviceState& state = state_of(device.id);
  if (state.loaded.load(std::memory_order_acquire)) return;
  if (is_capturing(device.stream)) {
    throw Error(GDN_NOT_PRELOADED,
                "first use of CUDA device %d inside a graph capture: call gdn_preload(%d) before "
                "the capture",
                device.id, device.id);
  }
  load_device(state);
}

void preload_cuda(int32_t device_id) {
  DeviceState& state = state_of(device_id);
  const DeviceGuard guard(device_id);
  load_device(state);
}

const char* cuda_build_info() { return GDN_CUDA_BUILD_INFO; }

}  // namespace gdn

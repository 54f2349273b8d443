// The GPU a call runs on: cached facts, the device guard, and loading of kernels before first use.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace gdn {

// What launchers ask about a device; read once, then cached.
struct DeviceInfo {
  int32_t num_sms = 0;
  int32_t compute_capability = 0;  // 10 major + minor
  int32_t max_shared_bytes = 0;    // per block, after opt-in
  int32_t shared_bytes_per_sm = 0;

  // A kernel may start while its predecessor drains (griddepcontrol).
  bool has_dependent_launch() const { return compute_capability >= 90; }
};

// Creates no CUDA context. Throws GDN_CUDA if there is no such device.
const DeviceInfo& device_info(int32_t device_id);

// Makes a device current while it lives; touches nothing if it is already. What was current before
// is so again afterwards, be it a device, a context of the caller's own, or none: a thread that
// never used device 0 gets no context there.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device_id);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  bool pushed_ = false;
};

// Every launch function begins with one: the call's device is current and its kernels are loaded.
// The first use of a device inside a capture throws GDN_NOT_PRELOADED.
class LaunchScope {
 public:
  explicit LaunchScope(const Device& device);

 private:
  DeviceGuard guard_;
};

// The kernels of one unit, loaded on the current device. load_device calls all of them.
void load_page_table_kernels();
void load_decode_kernels();
void load_verify_kernels();
void load_short_kernels();
void load_segment_kernels();
void load_prefill_portable_kernels();
void load_prefill_sm90_kernels();  // nothing to load on other GPUs
void load_segment_sm90_kernels();  // by the former

}  // namespace gdn

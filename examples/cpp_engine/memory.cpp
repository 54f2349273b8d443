#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#ifdef ENGINE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace {

constexpr size_t kAlignment = 256;

class HostMemory final : public Memory {
 public:
  gdn_device_type_t device() const override { return GDN_CPU; }

  void* allocate(size_t bytes) override {
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* data = std::aligned_alloc(kAlignment, rounded);
    if (!data) throw std::bad_alloc();
    return data;
  }

  void free(void* data) override { std::free(data); }
  void zero(void* data, size_t bytes) override { std::memset(data, 0, bytes); }

  void upload(void* to, const void* from, size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }

  void download(void* to, const void* from, size_t bytes) override { upload(to, from, bytes); }
};

#ifdef ENGINE_CUDA
// Everything runs on the legacy default stream, in order; cudaMemcpy waits where it has to.
class CudaMemory final : public Memory {
 public:
  CudaMemory() { check(cudaSetDevice(0), "cudaSetDevice"); }
  gdn_device_type_t device() const override { return GDN_CUDA_DEVICE; }

  void* allocate(size_t bytes) override {
    void* data = nullptr;
    check(cudaMalloc(&data, bytes), "cudaMalloc");
    return data;
  }

  void free(void* data) override { cudaFree(data); }

  void zero(void* data, size_t bytes) override { check(cudaMemset(data, 0, bytes), "cudaMemset"); }

  void upload(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }

  void download(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

 private:
  static void check(cudaError_t error, const char* call) {
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
  }
};
#endif

}  // namespace

std::unique_ptr<Memory> make_memory(const std::string& device) {
  if (device == "cpu") return std::make_unique<HostMemory>();
  if (device != "cuda") {
    throw std::runtime_error("--device: got '" + device + "', expected cpu or cuda");
  }
#ifdef ENGINE_CUDA
  return std::make_unique<CudaMemory>();
#else
  throw std::runtime_error(
      "--device cuda: this engine was built without CUDA; configure it with -DENGINE_CUDA=ON");
#endif
}

// Memory of one device: all that the engine knows of where it runs.
#pragma once

#include <gdn_paged/gdn_paged.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

class Memory {
 public:
  virtual ~Memory() = default;
  virtual gdn_device_type_t device() const = 0;
  virtual void* allocate(size_t bytes) = 0;  // at least 256-byte aligned
  virtual void free(void* data) = 0;
  virtual void zero(void* data, size_t bytes) = 0;
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;  // waits for the device
};

// "cpu" or "cuda". Throws std::runtime_error for a device that this build cannot serve.
std::unique_ptr<Memory> make_memory(const std::string& device);

// A block of device memory that grows when it has to.
class Buffer {
 public:
  explicit Buffer(Memory& memory) : memory_(memory) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { memory_.free(data_); }

  void* reserve(size_t bytes) {
    if (bytes > capacity_) {
      memory_.free(data_);
      data_ = nullptr;
      data_ = memory_.allocate(bytes);
      capacity_ = bytes;
    }
    return data_;
  }

  template <typename T>
  void* upload(const std::vector<T>& values) {
    const size_t bytes = values.size() * sizeof(T);
    memory_.upload(reserve(bytes), values.data(), bytes);
    return data_;
  }

  template <typename T>
  void download(std::vector<T>* values) const {
    memory_.download(values->data(), data_, values->size() * sizeof(T));
  }

  void* data() const { return data_; }

 private:
  Memory& memory_;
  void* data_ = nullptr;
  size_t capacity_ = 0;
};

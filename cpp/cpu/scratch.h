// Scratch memory of a worker thread: grows to what the largest call needed (some hundred KB at
// K = V = 128), lives as long as the thread.
#pragma once

#include <cstddef>
#include <new>

namespace gdn::cpu {

inline constexpr std::align_val_t kScratchAlignment{64};

class Scratch {
 public:
  // At least `bytes`, or null when memory is out. The next call invalidates it.
  void* reserve(size_t bytes) noexcept {
    if (bytes <= bytes_) return data_;
    release();
    data_ = ::operator new(bytes, kScratchAlignment, std::nothrow);
    bytes_ = data_ ? bytes : 0;
    return data_;
  }
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { release(); }

 private:
  void release() noexcept {
    ::operator delete(data_, kScratchAlignment);
    data_ = nullptr;
    bytes_ = 0;
  }
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

inline Scratch& thread_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

}  // namespace gdn::cpu

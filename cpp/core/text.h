// Text into a caller's buffer: what fits is written, with a final 0, and the rest is counted.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdio>

namespace gdn {

class Text {
 public:
  Text(char* buffer, size_t capacity) : buffer_(buffer), capacity_(buffer ? capacity : 0) {
    if (capacity_ > 0) buffer_[0] = '\0';
  }

  [[gnu::format(printf, 2, 3)]] void add(const char* format, ...) {
    va_list args;
    va_start(args, format);
    const bool full = length_ >= capacity_;
    const int added = full ? std::vsnprintf(nullptr, 0, format, args)
                           : std::vsnprintf(buffer_ + length_, capacity_ - length_, format, args);
    va_end(args);
    if (added > 0) length_ += static_cast<size_t>(added);
  }

  size_t need() const { return length_ + 1; }  // bytes, with the final 0
  const char* c_str() const { return capacity_ > 0 ? buffer_ : ""; }

 private:
  char* buffer_;
  size_t capacity_;
  size_t length_ = 0;
};

}  // namespace gdn

// Memory of a fuzzed call: regions between pages that no one may touch, so that a read or write
// past what a call was given ends the process. A region knows its bytes before the call.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace gdn_fuzz {

#define FUZZ_CHECK(condition)                                                                    \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      std::fprintf(stderr, "%s:%d: %s\n%s\n", __FILE__, __LINE__, #condition, gdn_last_error()); \
      std::abort();                                                                              \
    }                                                                                            \
  } while (false)

class Region {
 public:
  explicit Region(size_t size) : size_(size) {  // a multiple of 4096
    char* map = static_cast<char*>(mmap(nullptr, size + 2 * kPage, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (map == MAP_FAILED) std::abort();
    mprotect(map, kPage, PROT_NONE);
    mprotect(map + kPage + size, kPage, PROT_NONE);
    begin_ = map + kPage;
  }
  Region(const Region&) = delete;

  char* begin() const { return begin_; }
  size_t size() const { return size_; }

  // A place of `bytes` bytes, next to the page behind the region or to the one before it.
  char* place(size_t bytes, size_t alignment, bool at_end) const {
    const size_t used = std::min((bytes + alignment - 1) / alignment * alignment, size_);
    return at_end ? begin_ + size_ - used : begin_;
  }
  void protect() { mprotect(begin_, size_, PROT_READ); }

  // What the region holds before each call, and which bytes of it the call may change.
  void remember(const std::vector<char>& content) {
    before_ = content;
    may_change_.assign(size_, 0);
    restore();
  }
  void restore() { std::memcpy(begin_, before_.data(), size_); }
  bool contains(const char* p) const { return p >= begin_ && p < begin_ + size_; }
  void allow(const char* from, size_t bytes) {
    if (bytes > 0) std::memset(&may_change_[static_cast<size_t>(from - begin_)], 0xff, bytes);
  }

  void forbid() { std::memset(may_change_.data(), 0, size_); }

  // Whether only allowed bytes differ. Forgets what was allowed and restores the content.
  __attribute__((no_sanitize("address"))) bool intact() {
    const auto* now = reinterpret_cast<const uint64_t*>(begin_);
    const auto* before = reinterpret_cast<const uint64_t*>(before_.data());
    const auto* may_change = reinterpret_cast<const uint64_t*>(may_change_.data());
    uint64_t changed = 0;
    for (size_t i = 0; i < size_ / 8; ++i) changed |= (now[i] ^ before[i]) & ~may_change[i];
    forbid();
    restore();
    return changed == 0;
  }

 private:
  static constexpr size_t kPage = 4096;
  char* begin_ = nullptr;
  size_t size_;
  std::vector<char> before_, may_change_;
};

constexpr size_t kTableEntries = 128, kTables = 12;

struct Memory {
  Region inputs[3] = {Region(1 << 16), Region(1 << 16), Region(1 << 16)};  // read-only
  Region output{1 << 15};
  Region pools[3] = {Region(1 << 14), Region(1 << 14), Region(1 << 14)};
  std::vector<Region*> tables;
  Region params{1 << 16};  // zero between calls
  Region nested[4] = {Region(1 << 16), Region(1 << 16), Region(1 << 16), Region(1 << 16)};
  Region scratch{1 << 18};
  Region text{1 << 12};

  Memory();
  Region* writable(int i) { return i < 3 ? &pools[i] : &output; }
  // After a failed call nothing has changed; after another one, what was allowed.
  void check(bool failed);
};

Memory& memory();

}  // namespace gdn_fuzz

// Caller-given scratch memory: named, aligned regions of one block. The plan object that gives the
// size is the one that carves, so the two cannot differ.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"

namespace gdn {

inline constexpr size_t kWorkspaceAlignment = 256;

class WorkspacePlan {
 public:
  struct Region {
    size_t offset = 0;
    size_t bytes = 0;
  };

  Region add(size_t bytes) {
    const Region region{total_, bytes};
    total_ += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return region;
  }
  size_t total() const { return total_; }

  // Throws GDN_WORKSPACE unless `base` can hold the plan.
  void check(const char* name, const void* base, size_t bytes) const {
    if (bytes < total_ || (total_ > 0 && base == nullptr)) {
      throw Error(GDN_WORKSPACE, "%s: %zu bytes given, %zu needed", name, base ? bytes : size_t{0},
                  total_);
    }
    if (total_ > 0 && reinterpret_cast<uintptr_t>(base) % kWorkspaceAlignment != 0) {
      throw Error(GDN_WORKSPACE, "%s: %p is not %zu-byte aligned", name, base, kWorkspaceAlignment);
    }
  }

  template <class T>
  static T* carve(void* base, const Region& region) {
    return region.bytes == 0 ? nullptr
                             : reinterpret_cast<T*>(static_cast<char*>(base) + region.offset);
  }

 private:
  size_t total_ = 0;
};

}  // namespace gdn

// What the library is: version, build, names of the statuses, preload.
#include "core/kernel.h"
#include "core/status.h"
#include "core/text.h"

#define GDN_QUOTE_(x) #x
#define GDN_QUOTE(x) GDN_QUOTE_(x)

namespace {

struct BuildInfo {
  char storage[512];

  BuildInfo() {
    gdn::Text text(storage, sizeof storage);
    text.add("gdn_paged %d.%d.%d; ", GDN_VERSION_MAJOR, GDN_VERSION_MINOR, GDN_VERSION_PATCH);
#if defined(__clang__)
    text.add("clang " GDN_QUOTE(__clang_major__) "." GDN_QUOTE(__clang_minor__));
#else
    text.add("gcc " GDN_QUOTE(__GNUC__) "." GDN_QUOTE(__GNUC_MINOR__));
#endif
    text.add("; cpu: %s; ", gdn::kPrefillCpu.description());
#if defined(GDN_WITH_CUDA)
    text.add("cuda: %s", gdn::cuda_build_info());
#else
    text.add("cuda: not built");
#endif
  }
};

}  // namespace

extern "C" {

const char* gdn_status_string(gdn_status_t status) {
  switch (status) {
    case GDN_OK: return "GDN_OK";
    case GDN_INVALID_ARGUMENT: return "GDN_INVALID_ARGUMENT";
    case GDN_UNSUPPORTED: return "GDN_UNSUPPORTED";
    case GDN_NO_KERNEL_FOR_DEVICE: return "GDN_NO_KERNEL_FOR_DEVICE";
    case GDN_WORKSPACE: return "GDN_WORKSPACE";
    case GDN_PAGE_TABLE: return "GDN_PAGE_TABLE";
    case GDN_CUDA: return "GDN_CUDA";
    case GDN_NOT_BUILT: return "GDN_NOT_BUILT";
    case GDN_NOT_PRELOADED: return "GDN_NOT_PRELOADED";
    case GDN_INTERNAL: return "GDN_INTERNAL";
    default: return "GDN_UNKNOWN_STATUS";
  }
}

int32_t gdn_version(void) { return GDN_VERSION; }

const char* gdn_build_info(void) {
  static const BuildInfo info;
  return info.storage;
}

gdn_status_t gdn_preload(int32_t device_id) {
  return gdn::fence([&] {
    GDN_REQUIRE(device_id >= 0, "device_id: %d given, at least 0 expected", device_id);
#if defined(GDN_WITH_CUDA)
    gdn::preload_cuda(device_id);
#else
    throw gdn::Error(GDN_NOT_BUILT,
                     "device_id: %d given, but this build has no CUDA backend to preload",
                     device_id);
#endif
  });
}

}  // extern "C"

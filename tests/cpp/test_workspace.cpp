// White box: core/workspace.h. The plan that sizes a workspace is the one that carves it.
#include <cstdlib>

#include "check.h"
#include "core/workspace.h"

using gdn::Error;
using gdn::WorkspacePlan;

namespace {

gdn_status_t status_of(const WorkspacePlan& plan, const void* base, size_t bytes) {
  try {
    plan.check("workspace", base, bytes);
  } catch (const Error& error) {
    CHECK_CONTAINS(error.what(), "workspace");
    return error.status();
  }
  return GDN_OK;
}

}  // namespace

int main() {
  WorkspacePlan empty;
  CHECK_EQUAL(empty.total(), 0);
  CHECK_EQUAL(status_of(empty, nullptr, 0), GDN_OK);

  WorkspacePlan plan;
  const WorkspacePlan::Region first = plan.add(100), none = plan.add(0), second = plan.add(257);
  CHECK_EQUAL(first.offset, 0);
  CHECK_EQUAL(none.offset, 256);
  CHECK_EQUAL(second.offset, 256);
  CHECK_EQUAL(plan.total(), 256 + 512);

  char* base = static_cast<char*>(std::aligned_alloc(256, 1024));
  CHECK(WorkspacePlan::carve<float>(base, none) == nullptr);
  CHECK(static_cast<void*>(WorkspacePlan::carve<float>(base, second)) == base + 256);
  CHECK_EQUAL(status_of(plan, base, 768), GDN_OK);
  CHECK_EQUAL(status_of(plan, base, 767), GDN_WORKSPACE);
  CHECK_EQUAL(status_of(plan, nullptr, 768), GDN_WORKSPACE);
  CHECK_EQUAL(status_of(plan, base + 64, 960), GDN_WORKSPACE);
  try {
    plan.check("workspace", base, 5);
  } catch (const Error& error) {
    CHECK_CONTAINS(error.what(), "5 bytes given, 768 needed");
  }
  std::free(base);
}

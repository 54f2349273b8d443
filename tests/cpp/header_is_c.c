/* The header is strict C99 and may be included twice. */
#include "check.h"
#include "gdn_paged/gdn_paged.h"

int main(void) {
  const gdn_prefill_params_t params = GDN_PREFILL_PARAMS_INIT;
  const gdn_pool_t pool = GDN_POOL_INIT;
  CHECK_EQUAL(params.struct_size, sizeof(gdn_prefill_params_t));
  CHECK_EQUAL(pool.struct_size, sizeof(gdn_pool_t));
  CHECK(params.scale == 0 && params.q == NULL && pool.data == NULL);
  CHECK_EQUAL(gdn_version(), GDN_VERSION);
  CHECK_CONTAINS(gdn_build_info(), "gdn_paged 0.");
  return 0;
}

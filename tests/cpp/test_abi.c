/* The structs have the layout that callers were built with, and every function is there. */
#include "check.h"
#include "gdn_paged/gdn_paged.h"

int main(void) {
  CHECK_EQUAL(sizeof(void*), 8);
/* A struct may have grown; what it had is where it was. */
#define SIZE(type, size) CHECK(sizeof(type) >= (size));
#define FIELD(type, field, offset) CHECK_EQUAL(offsetof(type, field), offset);
#define FUNCTION(name) CHECK((void (*)(void))(name) != NULL);
#include "abi_0_1.inc"
  CHECK_EQUAL(sizeof(gdn_status_t), 4);
  CHECK_EQUAL(GDN_FLOAT32, 2 << 8 | 32);
  CHECK_EQUAL(GDN_BFLOAT16, 4 << 8 | 16);
  CHECK_EQUAL(GDN_INT64, 64);
  return 0;
}

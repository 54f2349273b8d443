/* A program that finds the library at run time: dlopen, dlsym, memset and struct_size. */
#include <dlfcn.h>
#include <math.h>

#include "check.h"
#include "gdn_paged/gdn_paged.h"

enum { kDim = 8 };

/* ISO C has no cast from an object pointer to a function pointer. */
static void find(void* library, const char* name, void* function) {
  void* const symbol = dlsym(library, name);
  CHECK(symbol != NULL);
  memcpy(function, &symbol, sizeof symbol);
}

int main(int argc, char** argv) {
  CHECK_EQUAL(argc, 2);
  void* const library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) fprintf(stderr, "%s\n", dlerror());
  CHECK(library != NULL);
  int32_t (*version)(void);
  const char* (*last_error)(void);
  gdn_status_t (*decode)(const gdn_decode_params_t*);
  find(library, "gdn_version", &version);
  find(library, "gdn_last_error", &last_error);
  find(library, "gdn_decode", &decode);
  CHECK_EQUAL(version(), GDN_VERSION);

  /* One token from the zero state: S = beta v k^T, out = scale beta (q k) v, beta = 1/2. */
  float q[kDim] = {1}, k[kDim] = {1}, v[kDim] = {2, 4}, out[kDim], state[kDim * kDim];
  float a = 0, b = 0, A_log = 0;
  const int32_t read_row = -1, write_row = 0;
  gdn_pool_t pool;
  memset(&pool, 0, sizeof pool);
  pool.struct_size = sizeof pool;
  pool.data = state;
  pool.num_rows = 1;
  gdn_decode_params_t params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.batch_size = 1;
  params.num_q_heads = params.num_k_heads = params.num_v_heads = 1;
  params.head_dim_k = params.head_dim_v = kDim;
  params.io_dtype = GDN_FLOAT32;
  params.q = q;
  params.k = k;
  params.v = v;
  params.output = out;
  params.a = &a;
  params.b = &b;
  params.A_log = &A_log;
  params.initial_state = &pool;
  params.initial_state_indices = &read_row;
  params.output_state_indices = &write_row;
  if (decode(&params) != GDN_OK) fprintf(stderr, "%s\n", last_error());
  CHECK_EQUAL(strlen(last_error()), 0);
  CHECK(state[0] == 1.0f && state[kDim] == 2.0f && state[1] == 0.0f);
  CHECK(fabs(out[0] - 1 / sqrt(8.0)) < 1e-6 && fabs(out[1] - 2 / sqrt(8.0)) < 1e-6);

  params.head_dim_k = 0;
  CHECK_EQUAL(decode(&params), GDN_INVALID_ARGUMENT);
  CHECK_CONTAINS(last_error(), "head_dim_k: 0 given");
  CHECK_EQUAL(dlclose(library), 0);
  return 0;
}

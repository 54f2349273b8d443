/* A program that finds the library when it runs: dlopen and dlsym, nothing is linked. What a plugin
 * does, or a binding of another language: memset, struct_size, and the fields that matter.
 *
 *   cc -std=c99 main.c -I$(python -m gdn_paged --include-dir) -ldl -lm -o load
 *   ./load $(python -m gdn_paged --lib-dir)/libgdn_paged.so */
#include <dlfcn.h>
#include <gdn_paged/gdn_paged.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { kDim = 8 };

/* The functions this program calls, by the types of the header. */
static struct {
  int32_t (*version)(void);
  const char* (*build_info)(void);
  const char* (*last_error)(void);
  gdn_status_t (*decode)(const gdn_decode_params_t* params);
} gdn;

/* ISO C has no cast from an object pointer to a function pointer. */
static int find(void* library, const char* name, void* function) {
  void* const symbol = dlsym(library, name);
  if (symbol == NULL) fprintf(stderr, "%s\n", dlerror());
  memcpy(function, &symbol, sizeof symbol);
  return symbol != NULL;
}

static int load(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 0;
  }
  return find(library, "gdn_version", &gdn.version) &&
         find(library, "gdn_build_info", &gdn.build_info) &&
         find(library, "gdn_last_error", &gdn.last_error) &&
         find(library, "gdn_decode", &gdn.decode);
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s PATH/libgdn_paged.so\n", argv[0]);
    return 2;
  }
  if (!load(argv[1])) return 1;
  printf("%s\n", gdn.build_info());
  /* A library of a later 0.1 knows every struct of this header; see gdn_paged.h. */
  if (gdn.version() / 100 != GDN_VERSION / 100) return 1;

  /* One token from the zero state: S = beta v k^T with beta = sigmoid(0), out = scale S q. */
  const float q[kDim] = {1}, k[kDim] = {1}, v[kDim] = {2, 4}, zero = 0;
  float out[kDim], state[kDim * kDim];
  const int32_t read_row = -1, write_row = 0;
  gdn_pool_t pool;
  memset(&pool, 0, sizeof pool);
  pool.struct_size = sizeof pool;
  pool.data = state;
  pool.num_rows = 1;
  gdn_decode_params_t p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.batch_size = 1;
  p.num_q_heads = p.num_k_heads = p.num_v_heads = 1;
  p.head_dim_k = p.head_dim_v = kDim;
  p.io_dtype = GDN_FLOAT32;
  p.q = q, p.k = k, p.v = v, p.output = out;
  p.a = p.b = p.A_log = &zero;
  p.initial_state = &pool;
  p.initial_state_indices = &read_row;
  p.output_state_indices = &write_row;
  if (gdn.decode(&p) != GDN_OK) {
    fprintf(stderr, "%s\n", gdn.last_error());
    return 1;
  }
  printf("state %.0f %.0f, output %.4f %.4f\n", state[0], state[kDim], out[0], out[1]);
  const float scale = 1 / sqrtf(kDim);
  return !(state[0] == 1 && state[kDim] == 2 && fabsf(out[1] - 2 * scale) < 1e-6f);
}

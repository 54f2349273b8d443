/* A request in plain C99: prefill of a prompt on pages, decode, reuse of the pages by a second one.
 *
 *   cc -std=c99 main.c -I$(python -m gdn_paged --include-dir) -L$lib -Wl,-rpath,$lib \
 *      -lgdn_paged -lm -o request            with lib=$(python -m gdn_paged --lib-dir)
 *
 * On a GPU the same structs hold device pointers, device_type = GDN_CUDA_DEVICE, a stream, and a
 * workspace of gdn_prefill_workspace_size bytes; q, k and v are then bf16 or fp16. */
#include <gdn_paged/gdn_paged.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { kPrompt = 150, kNew = 5, kTokens = kPrompt + kNew }; /* of the request */
enum { kQkHeads = 1, kHeads = 2, kDim = 32 };               /* GVA: two v heads share q and k */
enum { kPages = 8, kPageSize = 64, kState = kHeads * kDim * kDim };

/* What the projections of a GDN layer give, token by token. */
static float q[kTokens][kQkHeads][kDim], k[kTokens][kQkHeads][kDim], v[kTokens][kHeads][kDim];
static float a[kTokens][kHeads], b[kTokens][kHeads]; /* raw logits of decay and beta */
static const float A_log[kHeads] = {-2.0f, -1.0f}, dt_bias[kHeads] = {0.5f, 0.0f};

static float states[kPages][kState]; /* the pool: one state [H, V, K] per page */
static float out[kTokens][kHeads][kDim], out_second[kTokens][kHeads][kDim];

static float wave(unsigned i) { return (float)sin(0.7 * i + 0.1 * (i % 7)); }

static void project(void) {
  for (int t = 0; t < kTokens; ++t) {
    for (int i = 0; i < kDim; ++i) {
      q[t][0][i] = wave(t * kDim + i);
      k[t][0][i] = wave(7000 + t * kDim + i);
    }
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < kDim; ++i) v[t][h][i] = wave(9000 + (t * kHeads + h) * kDim + i);
      a[t][h] = wave(20000 + t * kHeads + h);
      b[t][h] = wave(30000 + t * kHeads + h);
    }
  }
}

static gdn_pool_t pool_of_pages(void) {
  gdn_pool_t pool = GDN_POOL_INIT; /* dtype 0 is fp32, row_stride 0 is dense */
  pool.data = states;
  pool.num_rows = kPages;
  return pool;
}

/* Tokens [begin, end) of a sequence that owns `pages`; what stands before begin is its prefix. */
static gdn_status_t prefill(int begin, int end, const int32_t* pages,
                            float (*output)[kHeads][kDim]) {
  const int num_pages = (end + kPageSize - 1) / kPageSize;
  const int32_t cu_seqlens[] = {0, end - begin}, indptr[] = {0, num_pages};
  const int32_t last_page_len[] = {end - (num_pages - 1) * kPageSize};
  const gdn_pool_t pool = pool_of_pages();
  gdn_prefill_params_t p = GDN_PREFILL_PARAMS_INIT; /* zero is every other field's default */
  p.num_seqs = 1;
  p.num_tokens = end - begin;
  p.num_q_heads = p.num_k_heads = kQkHeads;
  p.num_v_heads = kHeads;
  p.head_dim_k = p.head_dim_v = kDim;
  p.io_dtype = GDN_FLOAT32;
  p.flags = GDN_QK_L2NORM | GDN_BETA_IS_LOGIT;
  p.q = q[begin], p.k = k[begin], p.v = v[begin];
  p.gate = GDN_GATE_RAW; /* log alpha = -exp(A_log) softplus(g + dt_bias), as decode has it */
  p.g = a[begin], p.beta = b[begin];
  p.A_log = A_log, p.dt_bias = dt_bias;
  p.output = output[begin];
  p.cu_seqlens = cu_seqlens;
  p.state_pool = &pool;
  p.page_indices = pages, p.page_indptr = indptr, p.last_page_len = last_page_len;
  p.num_indices = num_pages;
  p.page_size = kPageSize;
  return gdn_prefill_paged(&p);
}

/* Token t alone: its page is updated in place, or the next one begun. */
static gdn_status_t decode(int t, const int32_t* pages) {
  const int32_t indptr[] = {0, t / kPageSize + 1}, last_page_len[] = {t % kPageSize + 1};
  const gdn_pool_t pool = pool_of_pages();
  gdn_decode_params_t p = GDN_DECODE_PARAMS_INIT;
  p.batch_size = 1;
  p.num_q_heads = p.num_k_heads = kQkHeads;
  p.num_v_heads = kHeads;
  p.head_dim_k = p.head_dim_v = kDim;
  p.io_dtype = GDN_FLOAT32;
  p.flags = GDN_QK_L2NORM;
  p.q = q[t], p.k = k[t], p.v = v[t], p.a = a[t], p.b = b[t];
  p.A_log = A_log, p.dt_bias = dt_bias;
  p.output = out[t];
  p.state_pool = &pool;
  p.page_indices = pages, p.page_indptr = indptr, p.last_page_len = last_page_len;
  p.num_indices = indptr[1];
  return gdn_decode_paged(&p);
}

static int ok(const char* what, gdn_status_t status) {
  if (status != GDN_OK) {
    fprintf(stderr, "%s: %s: %s\n", what, gdn_status_string(status), gdn_last_error());
  }
  return status == GDN_OK;
}

/* Largest difference over the largest value. */
static double difference(const float* x, const float* y, int n) {
  double largest = 0, scale = 0;
  for (int i = 0; i < n; ++i) {
    largest = fmax(largest, fabs((double)x[i] - y[i]));
    scale = fmax(scale, fabs(y[i]));
  }
  return scale > 0 ? largest / scale : 1e9; /* all zero is no result */
}

int main(void) {
  static float shared[2][kState];
  const int32_t first[] = {3, 1, 4}, second[] = {3, 1, 6}; /* pages 3 and 1 are shared */
  printf("%s\n", gdn_build_info());
  if (gdn_version() != GDN_VERSION) return 1; /* header and library of one version */
  project();

  /* The first request: 150 tokens of prompt, then 5 tokens one by one. */
  if (!ok("prefill", prefill(0, kPrompt, first, out))) return 1;
  for (int t = kPrompt; t < kTokens; ++t) {
    if (!ok("decode", decode(t, first))) return 1;
  }

  /* The second has the same first 128 tokens, so it starts from page 1 and computes 27. */
  memcpy(shared[0], states[3], sizeof shared[0]);
  memcpy(shared[1], states[1], sizeof shared[1]);
  if (!ok("prefill", prefill(2 * kPageSize, kTokens, second, out_second))) return 1;
  const double outputs = difference(out[kPrompt][0], out_second[kPrompt][0], kNew * kHeads * kDim);
  const double state = difference(states[4], states[6], kState);
  printf("decode against prefill: outputs %.1e, newest state %.1e\n", outputs, state);
  const int unchanged = memcmp(shared[0], states[3], sizeof shared[0]) == 0 &&
                        memcmp(shared[1], states[1], sizeof shared[1]) == 0;
  printf("shared pages 3 and 1 %s\n", unchanged ? "are unchanged" : "were written");
  if (!(outputs < 1e-4 && state < 1e-4 && unchanged)) return 1;

  /* A call that contradicts the contract says so and touches nothing. */
  gdn_decode_params_t wrong = GDN_DECODE_PARAMS_INIT;
  wrong.batch_size = 1;
  if (gdn_decode_paged(&wrong) != GDN_INVALID_ARGUMENT) return 1;
  printf("an empty call: %s\n", gdn_last_error());
  return 0;
}

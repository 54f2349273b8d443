/* One request by prefill and then token by token by decode: both must leave the same state.
 *
 * 70 tokens on pages of 64: page 3 holds the state after token 64, page 1 the newest one. The
 * tokens of decode carry their gates as logits, so prefill gets the same ones as values. */
#include <gdn_paged/gdn_paged.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { kTokens = 70, kHeads = 2, kDim = 32, kPages = 4, kPageSize = 64 };
enum { kState = kHeads * kDim * kDim };

typedef struct tokens {
  float q[kTokens][kDim], k[kTokens][kDim], v[kTokens][kHeads][kDim];
  float a[kTokens][kHeads], b[kTokens][kHeads];        /* decode: logits */
  float log_g[kTokens][kHeads], beta[kTokens][kHeads]; /* prefill: values */
} tokens_t;

static tokens_t tokens;
static float prefill_pool[kPages][kState], decode_pool[kPages][kState];
static float prefill_out[kTokens][kHeads][kDim], decode_out[kTokens][kHeads][kDim];
static const float A_log[kHeads] = {-2.0f, -1.0f};

static float value(unsigned i) { return (float)sin(0.7 * i + 0.1 * (i % 7)); }

static void fill(void) {
  for (int t = 0; t < kTokens; ++t) {
    for (int i = 0; i < kDim; ++i) {
      tokens.q[t][i] = value(t * kDim + i) / 4;
      tokens.k[t][i] = value(7000 + t * kDim + i) / 4;
    }
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < kDim; ++i) tokens.v[t][h][i] = value(9000 + (t * kHeads + h) * kDim + i);
      const float a = tokens.a[t][h] = value(20000 + t * kHeads + h);
      const float b = tokens.b[t][h] = value(21000 + t * kHeads + h);
      tokens.log_g[t][h] = -expf(A_log[h]) * log1pf(expf(a));
      tokens.beta[t][h] = 1.0f / (1.0f + expf(-b));
    }
  }
}

static int failed(const char* what, gdn_status_t status) {
  if (status == GDN_OK) return 0;
  fprintf(stderr, "%s: %s: %s\n", what, gdn_status_string(status), gdn_last_error());
  return 1;
}

static gdn_pool_t pool_of(float* data) {
  gdn_pool_t pool = GDN_POOL_INIT;
  pool.data = data;
  pool.num_rows = kPages;
  return pool;
}

static gdn_status_t prefill(void) {
  const gdn_pool_t pool = pool_of(prefill_pool[0]);
  const int32_t cu_seqlens[] = {0, kTokens}, pages[] = {3, 1}, indptr[] = {0, 2};
  const int32_t last_page_len[] = {kTokens - kPageSize};
  gdn_prefill_params_t p = GDN_PREFILL_PARAMS_INIT;
  p.num_seqs = 1;
  p.num_tokens = kTokens;
  p.num_q_heads = p.num_k_heads = 1;
  p.num_v_heads = kHeads;
  p.head_dim_k = p.head_dim_v = kDim;
  p.io_dtype = GDN_FLOAT32;
  p.q = tokens.q;
  p.k = tokens.k;
  p.v = tokens.v;
  p.g = tokens.log_g;
  p.gate = GDN_GATE_LOG;
  p.beta = tokens.beta;
  p.output = prefill_out;
  p.cu_seqlens = cu_seqlens;
  p.state_pool = &pool;
  p.page_indices = pages;
  p.page_indptr = indptr;
  p.last_page_len = last_page_len;
  p.num_indices = 2;
  p.page_size = kPageSize;
  return gdn_prefill_paged(&p);
}

static gdn_status_t decode(int t) {
  const gdn_pool_t pool = pool_of(decode_pool[0]);
  const int num_pages = t / kPageSize + 1;
  const int32_t pages[] = {3, 1}, indptr[] = {0, num_pages};
  const int32_t last_page_len[] = {t % kPageSize + 1};
  gdn_decode_params_t p = GDN_DECODE_PARAMS_INIT;
  p.batch_size = 1;
  p.num_q_heads = p.num_k_heads = 1;
  p.num_v_heads = kHeads;
  p.head_dim_k = p.head_dim_v = kDim;
  p.io_dtype = GDN_FLOAT32;
  p.q = tokens.q[t];
  p.k = tokens.k[t];
  p.v = tokens.v[t];
  p.a = tokens.a[t];
  p.b = tokens.b[t];
  p.A_log = A_log;
  p.output = decode_out[t];
  p.state_pool = &pool;
  p.page_indices = pages;
  p.page_indptr = indptr;
  p.last_page_len = last_page_len;
  p.num_indices = num_pages;
  return gdn_decode_paged(&p);
}

static double difference(const float* x, const float* y, int n) {
  double largest = 0, norm = 0;
  for (int i = 0; i < n; ++i) {
    largest = fmax(largest, fabs((double)x[i] - y[i]));
    norm = fmax(norm, fabs(y[i]));
  }
  return norm > 0 ? largest / norm : 1e9; /* all zero is no result */
}

int main(void) {
  printf("%s\n", gdn_build_info());
  if (gdn_version() != GDN_VERSION) return 1;
  fill();
  memset(decode_pool[2], 0x11, sizeof decode_pool[2]);
  memset(prefill_pool[2], 0x11, sizeof prefill_pool[2]);
  if (failed("prefill", prefill())) return 1;
  for (int t = 0; t < kTokens; ++t) {
    if (failed("decode", decode(t))) return 1;
  }
  const double out = difference(prefill_out[0][0], decode_out[0][0], kTokens * kHeads * kDim);
  const double full = difference(prefill_pool[3], decode_pool[3], kState);
  const double newest = difference(prefill_pool[1], decode_pool[1], kState);
  printf("prefill against decode: output %.2g, page 3 %.2g, page 1 %.2g\n", out, full, newest);
  if (!(out < 1e-4 && full < 1e-4 && newest < 1e-4)) return 1;
  if (memcmp(prefill_pool[2], decode_pool[2], sizeof prefill_pool[2]) != 0) return 1;

  gdn_decode_params_t wrong = GDN_DECODE_PARAMS_INIT;
  if (gdn_decode_paged(&wrong) != GDN_INVALID_ARGUMENT) return 1;
  return strstr(gdn_last_error(), "expected") == NULL;
}

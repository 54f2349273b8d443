/* gdn_paged: prefill and decode of the gated delta rule on a paged recurrent-state pool.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * C99, no CUDA include, raw pointers. The caller owns every buffer; a launch function does not
 * allocate, synchronise, print, read the environment or change the current device, and may be
 * captured in a CUDA graph.
 *
 * The rule, per state head (S is [V, K], kept in fp32 inside a call):
 *
 *     S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
 *     o_t = scale S_t q_t
 *
 * State heads, gate heads and output heads are H = max(num_q_heads, num_v_heads). With
 * num_v_heads >= num_q_heads = num_k_heads (GVA), head h reads q and k of h / (Hv / Hq); with
 * num_q_heads >= num_k_heads = num_v_heads (GQA), head h reads k and v of h / (Hq / Hk).
 *
 * Every struct starts with `struct_size`. Set it (the GDN_*_INIT macros do) and zero the rest:
 * zero is the default of every field. Sizes, counts and strides are in elements unless a name
 * says bytes. A stride of 0 means "dense", GDN_STRIDE_BROADCAST "does not move"; all others are
 * positive. Table arrays are dense and int32 unless their dtype field says GDN_INT64.
 */
#ifndef GDN_PAGED_GDN_PAGED_H_
#define GDN_PAGED_GDN_PAGED_H_

#include <stddef.h>
#include <stdint.h>

#define GDN_VERSION_MAJOR 0
#define GDN_VERSION_MINOR 1
#define GDN_VERSION_PATCH 0
#define GDN_VERSION (GDN_VERSION_MAJOR * 10000 + GDN_VERSION_MINOR * 100 + GDN_VERSION_PATCH)

#if defined(GDN_PAGED_BUILD)
#define GDN_API __attribute__((visibility("default")))
#else
#define GDN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ---------------------------------------------------------------------------- */

typedef int32_t gdn_status_t;
enum {
  GDN_OK = 0,
  GDN_INVALID_ARGUMENT = 1,     /* an argument contradicts the contract; the text names it */
  GDN_UNSUPPORTED = 2,          /* valid, but no kernel row serves it; the text says why */
  GDN_NO_KERNEL_FOR_DEVICE = 3, /* the build holds no code for this GPU */
  GDN_WORKSPACE = 4,            /* workspace or plan missing, too small or misaligned */
  GDN_PAGE_TABLE = 5,           /* the page table breaks a rule (gdn_validate_page_table) */
  GDN_CUDA = 6,                 /* the CUDA runtime returned an error */
  GDN_NOT_BUILT = 7,            /* the library was built without this backend */
  GDN_NOT_PRELOADED = 8,        /* first use of a device inside a capture: gdn_preload first */
  GDN_INTERNAL = 9              /* a fault of the library: please report it */
};

/* Name of a status ("GDN_OK", ...); never NULL. */
GDN_API const char* gdn_status_string(gdn_status_t status);

/* Text of the calling thread's last error, "" after a success; valid until its next call. */
GDN_API const char* gdn_last_error(void);

/* GDN_VERSION of the loaded library. */
GDN_API int32_t gdn_version(void);

/* One line: version, compiler, backends and architectures. Static storage. */
GDN_API const char* gdn_build_info(void);

/* ---- common types ---------------------------------------------------------------------- */

/* DLPack type code << 8 | bits. */
typedef int32_t gdn_dtype_t;
enum {
  GDN_DTYPE_DEFAULT = 0, /* state pools and gates: fp32; tables: int32; q, k, v: not allowed */
  GDN_INT32 = 0x020,
  GDN_INT64 = 0x040,
  GDN_FLOAT16 = 0x210,
  GDN_FLOAT32 = 0x220,
  GDN_BFLOAT16 = 0x410
};

/* DLPack device types. 0 is the CPU too. */
typedef int32_t gdn_device_type_t;
enum { GDN_CPU = 1, GDN_CUDA_DEVICE = 2 };

/* `struct CUstream_st*` is cudaStream_t; NULL is the legacy default stream. */
struct CUstream_st;

#define GDN_STRIDE_BROADCAST INT64_MIN

/* struct_size set, everything else zero. */
#ifdef __cplusplus
extern "C++" {
template <typename Struct>
inline Struct gdn_init_() { /* {sizeof(Struct)} would warn of missing initializers */
  Struct value = Struct();
  value.struct_size = sizeof(Struct);
  return value;
}
}
#define GDN_INIT_(type) gdn_init_<type>()
#else
#define GDN_INIT_(type) {.struct_size = sizeof(type)}
#endif

/* Rows of recurrent states, each a dense [H, V, K] block. */
typedef struct gdn_pool {
  size_t struct_size;
  void* data;        /* [num_rows, H, V, K] */
  gdn_dtype_t dtype; /* 0: fp32; fp32, bf16 or fp16 */
  int32_t reserved;
  int64_t num_rows;   /* ids in [0, num_rows) are valid, -1 reads zero and writes nothing */
  int64_t row_stride; /* elements from row to row, >= H V K; 0: H V K */
} gdn_pool_t;
#define GDN_POOL_INIT GDN_INIT_(gdn_pool_t)

/* The caller's threads for the CPU backend: run fn(arg, i) for every i in [0, n), in any order
 * and on any thread, and return when all are done. */
typedef void (*gdn_parallel_for_t)(void* context, int64_t n, void (*fn)(void* arg, int64_t i),
                                   void* arg);

/* Flags of the calls. Unknown bits are rejected. */
enum {
  GDN_QK_L2NORM = 1 << 0,       /* q, k := x rsqrt(sum x^2 + 1e-6) in fp32; prefill rounds the
                                   result to the io dtype, decode does not */
  GDN_BETA_IS_LOGIT = 1 << 1,   /* prefill: beta := sigmoid(beta), fp32 */
  GDN_EXPLICIT_SCALE = 1 << 2,  /* take `scale` as it is, also when it is 0 */
  GDN_BATCH_INVARIANT = 1 << 3, /* a sequence gives the same bytes whatever else is in the batch */
  GDN_ALLOW_PADDING = 1 << 4,   /* page-table check: -1 and empty page lists are not errors */
  GDN_EXACT_COUNTS = 1 << 5,    /* page-table check: num_tokens and num_pages of 0 are counts, not
                                   unknown */
  GDN_ALLOW_UNALIGNED_PAGES = 1 << 6 /* page_size and checkpoint_every_n_tokens may be any positive
                                        number; every page then ends in a shorter chunk */
};

/* What `g` holds. */
typedef int32_t gdn_gate_t;
enum {
  GDN_GATE_LINEAR = 0, /* alpha; 0 is an exact reset */
  GDN_GATE_LOG = 1,    /* ln alpha; -inf is an exact reset */
  GDN_GATE_RAW = 2     /* ln alpha = -exp(A_log) softplus(g + dt_bias); inf * 0 is alpha = 1 */
};

/* The context-parallel regime of CUDA rows. */
typedef int32_t gdn_use_cp_t;
enum { GDN_CP_AUTO = 0, GDN_CP_OFF = 1, GDN_CP_ON = 2 };

/* ---- prefill --------------------------------------------------------------------------- */

/* One struct for the paged form (gdn_prefill_paged), the slot form (gdn_prefill) and the packed
 * form (gdn_prefill with no state_indices).
 *
 * New tokens of all sequences are packed: sequence b owns rows cu_seqlens[b] .. cu_seqlens[b+1].
 *
 * Paged form: `state_pool` and the page table. Sequence b owns
 * page_indices[page_indptr[b] .. page_indptr[b+1]) and holds
 * (pages - 1) page_size + last_page_len[b] tokens after the call. state_indices,
 * output_state_indices, checkpoint_cu_starts and prefix_lens may be given as gdn_prefill_slots
 * wrote them (all four or none); they are derived inside the call otherwise.
 *
 * Slot form: `initial_state` is read at state_indices[b] (-1: zero), `output_state` is written at
 * output_state_indices[b] (-1: not; NULL array: state_indices), and `state_checkpoints` at
 * checkpoint_state_indices[checkpoint_cu_starts[b] + j] for the j-th absolute multiple of
 * checkpoint_every_n_tokens that the new tokens cross, counted from prefix_lens[b].
 * Packed form: row b of initial_state and output_state; row checkpoint_cu_starts[b] + j of
 * state_checkpoints. A NULL pool is a zero state or no store.
 *
 * A sequence whose tables are broken (row ids out of range, a negative or too large number of new
 * tokens, prefix_lens[b] < 0) stores nothing and its outputs are zero.
 *
 * Fork of a partly filled page (paged form): where initial_page_indices[b] is not -1, a sequence
 * with a prefix starts from that page instead of its own page of the last prefix token. What it
 * stores goes to its own pages, so a shared page is neither copied nor changed; from the next call
 * on the entry is -1 again. */
typedef struct gdn_prefill_params {
  size_t struct_size;

  /* where */
  gdn_device_type_t device_type;
  int32_t device_id;
  struct CUstream_st* stream;
  const char* backend; /* NULL or "auto": the first row that serves; else a row's name */
  uint64_t flags;      /* GDN_QK_L2NORM | GDN_BETA_IS_LOGIT | ... */

  /* sizes */
  int64_t num_seqs;
  int64_t num_tokens; /* rows of q, k, v, g, beta and output */
  int64_t max_seqlen; /* 0: unknown; else a promise, a longer sequence counts as broken */
  int32_t num_q_heads;
  int32_t num_k_heads;
  int32_t num_v_heads;
  int32_t head_dim_k;
  int32_t head_dim_v;
  gdn_dtype_t io_dtype; /* q, k, v and output */

  /* operands; the last dimension is dense */
  const void* q; /* [num_tokens, num_q_heads, head_dim_k] */
  const void* k; /* [num_tokens, num_k_heads, head_dim_k] */
  const void* v; /* [num_tokens, num_v_heads, head_dim_v] */
  void* output;  /* [num_tokens, H, head_dim_v], overlaps no input */
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t k_token_stride;
  int64_t k_head_stride;
  int64_t v_token_stride;
  int64_t v_head_stride;
  int64_t output_token_stride;
  int64_t output_head_stride;
  double scale; /* 0: 1 / sqrt(head_dim_k), see GDN_EXPLICIT_SCALE */

  /* gates */
  const void* g;    /* [num_tokens, H]; NULL: alpha = 1 */
  const void* beta; /* [num_tokens, H]; NULL: 1 */
  int64_t g_token_stride;
  int64_t g_head_stride;
  int64_t beta_token_stride;
  int64_t beta_head_stride;
  gdn_dtype_t g_dtype; /* 0: fp32; fp32, bf16 or fp16 */
  gdn_dtype_t beta_dtype;
  gdn_gate_t gate;
  gdn_dtype_t A_log_dtype;
  const void* A_log;   /* [H], GDN_GATE_RAW only */
  const void* dt_bias; /* [H], GDN_GATE_RAW only; NULL: 0 */
  gdn_dtype_t dt_bias_dtype;
  gdn_dtype_t cu_seqlens_dtype;

  /* sequences */
  const void* cu_seqlens;      /* [num_seqs + 1] */
  const void* cu_seqlens_host; /* host copy or NULL: a hint, and what gdn_explain reads */
  gdn_dtype_t cu_seqlens_host_dtype;

  /* page table (paged form) */
  gdn_dtype_t page_indices_dtype;
  gdn_dtype_t page_indptr_dtype;
  gdn_dtype_t last_page_len_dtype;
  const gdn_pool_t* state_pool;
  const void* page_indices;  /* [num_indices] */
  const void* page_indptr;   /* [num_seqs + 1] */
  const void* last_page_len; /* [num_seqs] */
  int64_t num_indices;
  int64_t page_size; /* a positive multiple of 64, see GDN_ALLOW_UNALIGNED_PAGES */

  /* slots (slot form; or the paged form's, computed before) */
  const gdn_pool_t* initial_state;
  const gdn_pool_t* output_state;
  const gdn_pool_t* state_checkpoints;
  const void* state_indices;            /* [num_seqs] */
  const void* output_state_indices;     /* [num_seqs] */
  const void* checkpoint_state_indices; /* [num_checkpoint_indices] */
  const void* checkpoint_cu_starts;     /* [num_seqs] or more */
  const void* prefix_lens;              /* [num_seqs]; NULL: 0 */
  gdn_dtype_t state_indices_dtype;
  gdn_dtype_t output_state_indices_dtype;
  gdn_dtype_t checkpoint_state_indices_dtype;
  gdn_dtype_t checkpoint_cu_starts_dtype;
  gdn_dtype_t prefix_lens_dtype;
  gdn_use_cp_t use_cp;
  int64_t num_checkpoint_indices;
  int64_t checkpoint_every_n_tokens; /* 0: none; else as page_size */

  /* scratch: gdn_prefill_workspace_size and gdn_prefill_plan_size say how much */
  void* workspace; /* 256-byte aligned, one per stream in flight */
  size_t workspace_bytes;
  void* plan; /* 256-byte aligned, written by gdn_prefill_plan; NULL: planned inside the call */
  size_t plan_bytes;

  /* CPU threads */
  gdn_parallel_for_t parallel_for; /* NULL: OpenMP */
  void* parallel_for_context;
  int32_t num_threads; /* 0: all; at most 1024 */
  int32_t reserved;

  /* paged form without slots, which hold it already */
  const void* initial_page_indices; /* [num_seqs], -1: the own page; NULL: all -1 */
  gdn_dtype_t initial_page_indices_dtype;
  int32_t reserved2;
} gdn_prefill_params_t;
#define GDN_PREFILL_PARAMS_INIT GDN_INIT_(gdn_prefill_params_t)

GDN_API gdn_status_t gdn_prefill_paged(const gdn_prefill_params_t* params);
GDN_API gdn_status_t gdn_prefill(const gdn_prefill_params_t* params);

/* Bytes of workspace the call with these params needs. Reads host integers alone (sizes, dtypes,
 * flags, device, max_seqlen), never device memory; pointers may still be NULL. */
GDN_API gdn_status_t gdn_prefill_workspace_size(const gdn_prefill_params_t* params, size_t* bytes);

/* The plan depends on the batch, not on the layer: write it once per step into params->plan and
 * hand it to every layer's call. Its size is 0 on the CPU, where gdn_prefill_plan does nothing. */
GDN_API gdn_status_t gdn_prefill_plan_size(const gdn_prefill_params_t* params, size_t* bytes);
GDN_API gdn_status_t gdn_prefill_plan(const gdn_prefill_params_t* params);

/* ---- decode ---------------------------------------------------------------------------- */

/* One token per row. Paged form (gdn_decode_paged): `state_pool` and the page table; when
 * last_page_len[b] == 1 the token opens a new page, so the previous page is read (the zero state
 * if there is none) and the last one written, else the last page is updated in place. A last page
 * of -1 or an empty page list is a padding row: pool untouched, output zeros. A row that is not its
 * sequence's first token starts from initial_page_indices[b] where that is not -1, as in prefill.
 * Slot form (gdn_decode): initial_state is read at initial_state_indices[b] (-1: zero) and
 * output_state written at output_state_indices[b] (-1: not); (-1, -1) is a padding row. NULL
 * output_state_indices: the read rows; NULL initial_state_indices: row b.
 * Needs no workspace.
 *
 *     alpha = exp(-exp(A_log) softplus(a + dt_bias)),  beta = sigmoid(b) */
typedef struct gdn_decode_params {
  size_t struct_size;

  gdn_device_type_t device_type;
  int32_t device_id;
  struct CUstream_st* stream;
  const char* backend;
  uint64_t flags; /* GDN_QK_L2NORM | GDN_EXPLICIT_SCALE | GDN_BATCH_INVARIANT */

  int64_t batch_size;
  int32_t num_q_heads;
  int32_t num_k_heads;
  int32_t num_v_heads;
  int32_t head_dim_k;
  int32_t head_dim_v;
  gdn_dtype_t io_dtype;

  const void* q; /* [batch_size, num_q_heads, head_dim_k] */
  const void* k; /* [batch_size, num_k_heads, head_dim_k] */
  const void* v; /* [batch_size, num_v_heads, head_dim_v] */
  void* output;  /* [batch_size, H, head_dim_v] */
  int64_t q_batch_stride;
  int64_t q_head_stride;
  int64_t k_batch_stride;
  int64_t k_head_stride;
  int64_t v_batch_stride;
  int64_t v_head_stride;
  int64_t output_batch_stride;
  int64_t output_head_stride;
  double scale;

  const void* a; /* [batch_size, H] */
  const void* b; /* [batch_size, H] */
  int64_t a_batch_stride;
  int64_t a_head_stride;
  int64_t b_batch_stride;
  int64_t b_head_stride;
  const void* A_log;   /* [H] */
  const void* dt_bias; /* [H]; NULL: 0 */
  gdn_dtype_t a_dtype;
  gdn_dtype_t b_dtype;
  gdn_dtype_t A_log_dtype;
  gdn_dtype_t dt_bias_dtype;

  /* paged form */
  const gdn_pool_t* state_pool;
  const void* page_indices;
  const void* page_indptr;
  const void* last_page_len;
  int64_t num_indices;
  gdn_dtype_t page_indices_dtype;
  gdn_dtype_t page_indptr_dtype;
  gdn_dtype_t last_page_len_dtype;

  /* slot form; or the paged form's slots as gdn_decode_slots wrote them (both or none) */
  gdn_dtype_t initial_state_indices_dtype;
  gdn_dtype_t output_state_indices_dtype;
  int32_t reserved;
  const gdn_pool_t* initial_state;
  const gdn_pool_t* output_state;    /* NULL: initial_state */
  const void* initial_state_indices; /* [batch_size] */
  const void* output_state_indices;  /* [batch_size] */

  gdn_parallel_for_t parallel_for;
  void* parallel_for_context;
  int32_t num_threads;
  int32_t reserved2;

  /* paged form without slots, which hold it already */
  const void* initial_page_indices; /* [batch_size], -1: the own page; NULL: all -1 */
  gdn_dtype_t initial_page_indices_dtype;
  int32_t reserved3;
} gdn_decode_params_t;
#define GDN_DECODE_PARAMS_INIT GDN_INIT_(gdn_decode_params_t)

GDN_API gdn_status_t gdn_decode_paged(const gdn_decode_params_t* params);
GDN_API gdn_status_t gdn_decode(const gdn_decode_params_t* params);

/* ---- speculative decoding -------------------------------------------------------------- */

/* Up to 8 draft tokens per sequence in one step, and the choice of how many to keep one step later.
 *
 * A step does two things in one pass over a state: it folds the first accepted[b] draft tokens of
 * the sequence's last step into its pages, and it runs the new tokens from there and writes their
 * outputs. The new tokens leave the pages alone: what each of them would add waits in `drafts`,
 * so nothing that a rejected token touched survives. seq_lens[b] counts the tokens before the new
 * ones, the accepted draft tokens included; page_indices[page_indptr[b] ..] holds their pages and
 * may go on with pages for later tokens. The fold follows the page rules of a prefill of
 * accepted[b] tokens that end at seq_lens[b]: it continues the page of the token before them,
 * stores the page end they cross and the page of the last of them. With accepted[b] = 0 the pool is
 * not written. After a prefill or a decode the first step has accepted[b] = 0.
 *
 *     drafts  = gdn_verify_draft_size bytes, uninitialised
 *     loop    : gdn_verify_paged(accepted, seq_lens)    outputs of the new tokens
 *               choose                                  accepted[b] = 0 .. new tokens
 *               seq_lens += accepted                    on the device, without a word to the host
 *     leave   : gdn_commit_paged(accepted, seq_lens)    the fold alone, e.g. before pages are
 * shared
 *
 * All layers of a model share the tables and have a `drafts` buffer each. A sequence keeps its slot
 * of the buffer from step to step; slots of one call are distinct. Slot -1 has no record: nothing
 * can be accepted and the new tokens cannot be kept. An empty page list is padding: its outputs are
 * zero. A broken sequence (ids out of range, too few pages, more than max_draft new tokens, more
 * accepted than its last step had, or accepted already) stores nothing, outputs are zero. */
typedef struct gdn_verify_params {
  size_t struct_size;

  gdn_device_type_t device_type;
  int32_t device_id;
  struct CUstream_st* stream;
  const char* backend;
  uint64_t flags; /* as in decode, and GDN_ALLOW_UNALIGNED_PAGES */

  int64_t num_seqs;
  int64_t num_tokens; /* rows of q, k, v, a, b and output */
  int32_t max_draft;  /* 1 to 8, the same in all steps: no sequence has more new tokens */
  int32_t num_q_heads;
  int32_t num_k_heads;
  int32_t num_v_heads;
  int32_t head_dim_k;
  int32_t head_dim_v;
  gdn_dtype_t io_dtype;
  int32_t reserved;

  /* gdn_commit_paged reads none of these */
  const void* q; /* [num_tokens, num_q_heads, head_dim_k] */
  const void* k; /* [num_tokens, num_k_heads, head_dim_k] */
  const void* v; /* [num_tokens, num_v_heads, head_dim_v] */
  void* output;  /* [num_tokens, H, head_dim_v] */
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t k_token_stride;
  int64_t k_head_stride;
  int64_t v_token_stride;
  int64_t v_head_stride;
  int64_t output_token_stride;
  int64_t output_head_stride;
  double scale;
  const void* a; /* [num_tokens, H], gates as in decode */
  const void* b; /* [num_tokens, H] */
  int64_t a_token_stride;
  int64_t a_head_stride;
  int64_t b_token_stride;
  int64_t b_head_stride;
  const void* A_log;   /* [H] */
  const void* dt_bias; /* [H]; NULL: 0 */
  gdn_dtype_t a_dtype;
  gdn_dtype_t b_dtype;
  gdn_dtype_t A_log_dtype;
  gdn_dtype_t dt_bias_dtype;
  const void* cu_seqlens; /* [num_seqs + 1] */

  const gdn_pool_t* state_pool;
  const void* page_indices; /* [num_indices] */
  const void* page_indptr;  /* [num_seqs + 1] */
  const void* seq_lens;     /* [num_seqs] */
  const void* accepted;     /* [num_seqs]; NULL: 0 */
  int64_t num_indices;
  int64_t page_size;         /* as in prefill, more than 8 */
  void* drafts;              /* 16-byte aligned */
  int64_t num_drafts;        /* slots of the buffer */
  const void* draft_indices; /* [num_seqs]; NULL: slot b */
  gdn_dtype_t cu_seqlens_dtype;
  gdn_dtype_t page_indices_dtype;
  gdn_dtype_t page_indptr_dtype;
  gdn_dtype_t seq_lens_dtype;
  gdn_dtype_t accepted_dtype;
  gdn_dtype_t draft_indices_dtype;

  gdn_parallel_for_t parallel_for;
  void* parallel_for_context;
  int32_t num_threads;
  int32_t reserved2;
} gdn_verify_params_t;
#define GDN_VERIFY_PARAMS_INIT GDN_INIT_(gdn_verify_params_t)

GDN_API gdn_status_t gdn_verify_paged(const gdn_verify_params_t* params);
GDN_API gdn_status_t gdn_commit_paged(const gdn_verify_params_t* params);
/* Bytes of num_drafts slots, from the sizes alone: heads, dims, io_dtype and max_draft. */
GDN_API gdn_status_t gdn_verify_draft_size(const gdn_verify_params_t* params, size_t* bytes);

/* ---- one prompt over several devices ---------------------------------------------------- */

/* Over a run of tokens the state moves by an affine map, S_end = S_start M + N, with M [K, K] and
 * N [V, K] per state head. Where the tokens of one prompt lie on several devices, each device
 * calls, for the segment that it holds,
 *
 *     gdn_segment_begin      all that does not depend on the state before the segment; M and N
 *                            send M and N to the devices behind, 128 KB a head at K = V = 128
 *     gdn_segment_combine    the state before the segment, from the maps before it
 *     gdn_segment_finish     outputs, page ends and the final state
 *
 * instead of waiting for the devices before it. `params` are those of a gdn_prefill_paged of one
 * sequence whose prefix are the tokens before the segment (pages of theirs that lie elsewhere are
 * -1 in its table; slots are served, a plan is not). Begin and finish take the same params and the
 * same pointers, with the workspace untouched between them; a begin serves one finish. The bytes
 * of q, k, v, gates and tables must not change in between; begin writes neither pool nor output.
 *
 * Which segment it is, its pointers say:
 *     first    offset                              begins at its page, or at zero; offset is then
 *                                                  the state after it
 *     middle   initial_state, transition, offset
 *     last     initial_state                       nobody asks for its map
 * A broken sequence has the map of no token, M = I and N = 0; finish stores nothing and zeroes the
 * outputs. */
typedef struct gdn_segment {
  size_t struct_size;
  const float* initial_state; /* [H, V, K], read by finish in place of a page; 16-byte aligned */
  float* transition;          /* M [H, K, K], written by begin; 16-byte aligned */
  float* offset;              /* N [H, V, K], written by begin; 16-byte aligned */
} gdn_segment_t;
#define GDN_SEGMENT_INIT GDN_INIT_(gdn_segment_t)

GDN_API gdn_status_t gdn_segment_begin(const gdn_prefill_params_t* params,
                                       const gdn_segment_t* segment);
GDN_API gdn_status_t gdn_segment_finish(const gdn_prefill_params_t* params,
                                        const gdn_segment_t* segment);

/* Bytes of params->workspace for both. As gdn_prefill_workspace_size; of the pointers in `segment`
 * it counts which are NULL. Unlike a prefill, all tokens are in flight at once: on CUDA 5.6 KB per
 * 64 tokens and state head. */
GDN_API gdn_status_t gdn_segment_workspace_size(const gdn_prefill_params_t* params,
                                                const gdn_segment_t* segment, size_t* bytes);

/* state = (initial_state M_0 + N_0) M_1 + N_1 ..., in fp32. Zeros of M drop what the state holds
 * there even if it is not finite. */
typedef struct gdn_segment_combine_params {
  size_t struct_size;
  gdn_device_type_t device_type;
  int32_t device_id;
  struct CUstream_st* stream;
  int64_t num_maps;
  int32_t num_heads; /* H */
  int32_t head_dim_k;
  int32_t head_dim_v;
  int32_t num_threads;        /* of the CPU; 0: all */
  const float* transitions;   /* [num_maps, H, K, K] */
  const float* offsets;       /* [num_maps, H, V, K] */
  int64_t transition_stride;  /* elements from map to map; 0: dense */
  int64_t offset_stride;      /* elements from map to map; 0: dense */
  const float* initial_state; /* [H, V, K]; NULL: zero, and M_0 is not read */
  float* state;               /* [H, V, K], written; may be initial_state */
  gdn_parallel_for_t parallel_for;
  void* parallel_for_context;
} gdn_segment_combine_params_t;
#define GDN_SEGMENT_COMBINE_PARAMS_INIT GDN_INIT_(gdn_segment_combine_params_t)

GDN_API gdn_status_t gdn_segment_combine(const gdn_segment_combine_params_t* params);

/* ---- page tables: slots and checks ----------------------------------------------------- */

/* One page table. gdn_prefill_slots needs cu_seqlens and page_size, gdn_decode_slots neither. */
typedef struct gdn_page_table_params {
  size_t struct_size;

  gdn_device_type_t device_type;
  int32_t device_id;
  struct CUstream_st* stream;
  uint64_t flags; /* GDN_ALLOW_PADDING | GDN_EXACT_COUNTS | GDN_ALLOW_UNALIGNED_PAGES */

  int64_t num_seqs;
  int64_t num_tokens;        /* rows of q; the bound of cu_seqlens. 0: unknown */
  int64_t num_indices;       /* entries of page_indices */
  int64_t num_pages;         /* rows of the pool; 0: unknown */
  int64_t page_size;         /* prefill: as in its params; decode: 0 is unknown */
  const void* cu_seqlens;    /* [num_seqs + 1]; decode: NULL, one new token each */
  const void* page_indices;  /* [num_indices] */
  const void* page_indptr;   /* [num_seqs + 1] */
  const void* last_page_len; /* [num_seqs] */
  gdn_dtype_t cu_seqlens_dtype;
  gdn_dtype_t page_indices_dtype;
  gdn_dtype_t page_indptr_dtype;
  gdn_dtype_t last_page_len_dtype;

  /* gdn_prefill_slots and gdn_decode_slots write these, int32 [num_seqs]. Broken and padding
   * sequences become prefix_lens = -1 (prefill) or rows (-1, -1) (decode). */
  int32_t* state_indices;        /* row to read, -1: zero state (decode: initial_state_indices) */
  int32_t* output_state_indices; /* row of the final state, -1: none */
  int32_t* checkpoint_cu_starts; /* prefill only: entry of the first page end to store */
  int32_t* prefix_lens;          /* prefill only */

  /* gdn_validate_page_table on device arrays */
  struct gdn_page_table_report* report; /* device memory; written by the check */
  void* workspace; /* 256-byte aligned device memory of gdn_validate_page_table_workspace_size */
  size_t workspace_bytes;

  gdn_parallel_for_t parallel_for;
  void* parallel_for_context;
  int32_t num_threads;
  int32_t reserved;

  const void* initial_page_indices; /* [num_seqs], as in prefill and decode; NULL: all -1 */
  gdn_dtype_t initial_page_indices_dtype;
  int32_t reserved2;
} gdn_page_table_params_t;
#define GDN_PAGE_TABLE_PARAMS_INIT GDN_INIT_(gdn_page_table_params_t)

GDN_API gdn_status_t gdn_prefill_slots(const gdn_page_table_params_t* params);
GDN_API gdn_status_t gdn_decode_slots(const gdn_page_table_params_t* params);

/* What a page-table check found: the lowest broken rule at its lowest sequence, or
 * GDN_PAGE_TABLE_OK. Rules 11 and 12 come last: they are looked at where no other is broken. */
typedef struct gdn_page_table_report {
  int32_t rule; /* GDN_PAGE_TABLE_* */
  int32_t is_decode;
  int64_t sequence;
  int64_t entry;    /* position in the array the rule is about, -1: none */
  int64_t value;    /* what stands there */
  int64_t expected; /* the bound it breaks, or the other sequence */
} gdn_page_table_report_t;

enum {
  GDN_PAGE_TABLE_OK = 0,
  GDN_PAGE_TABLE_INDPTR_START = 1,    /* page_indptr[0] < 0 */
  GDN_PAGE_TABLE_INDPTR_ORDER = 2,    /* page_indptr decreases */
  GDN_PAGE_TABLE_INDPTR_END = 3,      /* page_indptr runs past num_indices */
  GDN_PAGE_TABLE_SEQLENS_START = 4,   /* cu_seqlens[0] != 0 */
  GDN_PAGE_TABLE_SEQLENS_ORDER = 5,   /* cu_seqlens decreases */
  GDN_PAGE_TABLE_SEQLENS_END = 6,     /* cu_seqlens runs past num_tokens */
  GDN_PAGE_TABLE_EMPTY = 7,           /* an empty page list */
  GDN_PAGE_TABLE_PAGE_ID = 8,         /* a page id outside [0, num_pages) */
  GDN_PAGE_TABLE_LAST_PAGE_LEN = 9,   /* last_page_len outside [1, page_size] */
  GDN_PAGE_TABLE_TOO_MANY_NEW = 10,   /* more new tokens than the table holds */
  GDN_PAGE_TABLE_TWO_WRITERS = 11,    /* a page written by two sequences */
  GDN_PAGE_TABLE_WRITE_AND_READ = 12, /* a page written by one sequence and read by another; entry
                                         -1: by initial_page_indices[sequence] */
  GDN_PAGE_TABLE_INITIAL_PAGE = 13    /* an id of initial_page_indices outside [-1, num_pages) */
};

/* Checks every rule of a page table; is_decode selects the rows that the call would touch.
 * Host arrays (GDN_CPU): returns GDN_PAGE_TABLE, and gdn_last_error names sequence, entry and
 * value; fills `report` too if it is given. Device arrays: enqueues the check on the stream and
 * returns GDN_OK; poll `report` later and turn it into words with gdn_page_table_report_text. */
GDN_API gdn_status_t gdn_validate_page_table(const gdn_page_table_params_t* params,
                                             int32_t is_decode);
GDN_API gdn_status_t gdn_validate_page_table_workspace_size(const gdn_page_table_params_t* params,
                                                            size_t* bytes);
/* Writes the text of a (host copy of a) report into buf, at most cap bytes with the final 0, and
 * the bytes needed into *need (may be NULL). */
GDN_API gdn_status_t gdn_page_table_report_text(const gdn_page_table_report_t* report, char* buf,
                                                size_t cap, size_t* need);

/* Health of pages: NaN and inf counts and the largest finite magnitude of each page. */
typedef struct gdn_page_stats_params {
  size_t struct_size;
  gdn_device_type_t device_type;
  int32_t device_id;
  struct CUstream_st* stream;
  const gdn_pool_t* pool;
  int64_t row_elements;     /* H V K */
  int64_t num_pages;        /* entries of page_indices, or all rows of the pool if NULL */
  const void* page_indices; /* [num_pages]; ids outside the pool give counts of -1 */
  gdn_dtype_t page_indices_dtype;
  int32_t num_threads;
  int64_t* nan_count; /* [num_pages] */
  int64_t* inf_count; /* [num_pages] */
  float* abs_max;     /* [num_pages] */
} gdn_page_stats_params_t;
#define GDN_PAGE_STATS_PARAMS_INIT GDN_INIT_(gdn_page_stats_params_t)

GDN_API gdn_status_t gdn_page_stats(const gdn_page_stats_params_t* params);

/* ---- kernel rows and devices ----------------------------------------------------------- */

typedef int32_t gdn_op_t;
enum {
  GDN_OP_PREFILL_PAGED = 1, /* gdn_prefill_params_t */
  GDN_OP_PREFILL = 2,       /* gdn_prefill_params_t */
  GDN_OP_DECODE_PAGED = 3,  /* gdn_decode_params_t */
  GDN_OP_DECODE = 4,        /* gdn_decode_params_t */
  GDN_OP_VERIFY_PAGED = 5,  /* gdn_verify_params_t */
  GDN_OP_SEGMENT = 6        /* gdn_prefill_params_t, as of a last segment */
};

/* Name and description of row `index` of an operation's table, in the order of preference;
 * NULL past the end. Static storage. */
GDN_API const char* gdn_kernel_row_name(gdn_op_t op, int32_t index);
GDN_API const char* gdn_kernel_row_description(gdn_op_t op, int32_t index);

/* Which row would serve this call and why each earlier one refuses. Returns the status the call
 * would return, without launching. Text as in gdn_page_table_report_text. */
GDN_API gdn_status_t gdn_explain(gdn_op_t op, const void* params, char* buf, size_t cap,
                                 size_t* need);

/* Loads the kernels of a CUDA device, so that no later call loads anything. */
GDN_API gdn_status_t gdn_preload(int32_t device_id);

#ifdef __cplusplus
}
#endif

#endif /* GDN_PAGED_GDN_PAGED_H_ */

"""Two requests that share a prefix, on NumPy: prefill onto pages, resume from them, decode."""

import ml_dtypes
import numpy as np

import gdn_paged

PAGE_SIZE, NUM_PAGES = 64, 8
HEADS_QK, HEADS_V, DIM = 2, 4, 64
rng = np.random.default_rng(0)


def random_tokens(count: int) -> dict[str, np.ndarray]:
    """q, k, v, decay and beta of `count` new tokens."""
    return {
        "q": rng.standard_normal((count, HEADS_QK, DIM), np.float32),
        "k": rng.standard_normal((count, HEADS_QK, DIM), np.float32),
        "v": rng.standard_normal((count, HEADS_V, DIM), np.float32),
        "g": rng.uniform(0.8, 1.0, (count, HEADS_V)).astype(np.float32),
        "beta": rng.uniform(0.0, 1.0, (count, HEADS_V)).astype(np.float32),
    }


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def prefill(pool: np.ndarray, tokens: dict[str, np.ndarray], pages: list[int], total: int):
    """Runs the last tokens of one sequence that holds `total` tokens on `pages` afterwards."""
    return gdn_paged.chunk_gated_delta_rule_paged(
        **tokens,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=int32(0, len(tokens["q"])),
        state_pool=pool,
        page_indices=int32(*pages),
        page_indptr=int32(0, len(pages)),
        page_size=PAGE_SIZE,
        last_page_len=int32(total - (len(pages) - 1) * PAGE_SIZE),
    )


# One state [H, V, K] per page: page j of a sequence holds the state after its last token.
pool = np.zeros((NUM_PAGES, HEADS_V, DIM, DIM), np.float32)

# The first request: 150 tokens on pages 5, 2 (full) and 7 (22 tokens).
prompt = random_tokens(150)
first = prefill(pool, prompt, [5, 2, 7], 150)

# The second request has the same first 128 tokens: it starts from page 2 and runs only its own.
# Pages 5 and 2 are read, never written.
shared = pool[[5, 2]].copy()
tail = random_tokens(30)
resumed = prefill(pool, tail, [5, 2, 0], 158)
assert np.array_equal(pool[[5, 2]], shared)

# The same sequence without reuse, from the first token on: equal to the last bit.
whole = {name: np.concatenate([prompt[name][:128], tail[name]]) for name in prompt}
recomputed = prefill(pool, whole, [1, 3, 4], 158)
assert np.array_equal(resumed, recomputed[128:])
assert np.array_equal(pool[0], pool[4])

# One token for each of the two requests. Decode takes the raw gate inputs a and b.
step = {name: x[:, None] for name, x in random_tokens(2).items()}
out = gdn_paged.gated_delta_rule_decode_paged(
    step["q"],
    step["k"],
    step["v"],
    A_log=np.zeros(HEADS_V, np.float32),
    a=rng.standard_normal((2, 1, HEADS_V), np.float32),
    dt_bias=np.full(HEADS_V, -3.0, np.float32),
    b=rng.standard_normal((2, 1, HEADS_V), np.float32),
    state_pool=pool,
    page_indices=int32(5, 2, 7, 5, 2, 0),
    page_indptr=int32(0, 3, 6),
    last_page_len=int32(151 - 128, 159 - 128),
)
assert out.shape == (2, 1, HEADS_V, DIM)
assert np.array_equal(pool[[5, 2]], shared)
print(f"reused 128 of 158 prompt tokens, same result; decoded {out.shape[0]} tokens")

# 16 bits: NumPy has no bfloat16 of its own, the dtype of ml_dtypes is taken as it is. The states
# may be bfloat16 too; inside a call they are float32.
half = prompt | {name: prompt[name].astype(ml_dtypes.bfloat16) for name in ("q", "k", "v")}
rounded = prefill(np.zeros(pool.shape, ml_dtypes.bfloat16), half, [5, 2, 7], 150)
assert rounded.dtype == ml_dtypes.bfloat16
error = np.linalg.norm(rounded.astype(np.float32) - first) / np.linalg.norm(first)
assert error < 1e-2
print(f"in bfloat16 the prompt's output differs by {error:.1e} (relative L2)")

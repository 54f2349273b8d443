"""The case list that feeds pytest, the golden files and the benchmarks: seeded data and D01 .. D20.

The cases come from bug reports against public Gated Delta Net kernels. D13 (32-bit page offsets)
and D14 (grid limits) need buffers of their own and live in `test_large.py`; `cases_more.py` adds
single faults.
"""

from __future__ import annotations

import numpy as np

from calls import Case, Decode, PageTable, Prefill, page_table, rounded


def U(seed: int, shape: tuple[int, ...]) -> np.ndarray:  # noqa: N802
    """Uniform in [-1, 1) on a 24-bit grid: splitmix64 of (seed << 32) + i, easy to redo in C++."""
    x = (np.uint64(seed) << np.uint64(32)) + np.arange(int(np.prod(shape)), dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0).reshape(shape)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True))


def uniform(seed: int, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
    """fp32 values in [low, high)."""
    return rounded(low + (high - low) * (U(seed, shape) + 1) / 2, "fp32")


class Defaults:
    """`conftest.py` sets the head size that the target of a test serves."""

    head_size = 64


def head_dims(dim) -> tuple[int, int]:
    """(K, V) of a head size, of a pair, or of the default."""
    dim = Defaults.head_size if dim is None else dim
    return dim if isinstance(dim, tuple) else (dim, dim)


def make_prefill(seed: int, rows, heads=(2, 4), dim=None, **options) -> Prefill:
    """Unit q and k, v in [-1, 1), alpha in [0.9, 1), beta in [0.05, 0.95); bf16 values.

    `heads` is (Hq, Hv) or (Hq, Hk, Hv), `dim` is D, (K, V) or None for the default; options replace
    fields.
    """
    Hq, Hv = heads[0], heads[-1]
    Hk = heads[1] if len(heads) == 3 else min(Hq, Hv)
    K, V = head_dims(dim)
    T, H = int(rows.cu_seqlens[-1]), max(Hq, Hv)
    operands = {
        "q": rounded(unit(U(seed * 8 + 1, (T, Hq, K))), "bf16"),
        "k": rounded(unit(U(seed * 8 + 2, (T, Hk, K))), "bf16"),
        "v": rounded(U(seed * 8 + 3, (T, Hv, V)), "bf16"),
        "g": uniform(seed * 8 + 4, (T, H), 0.90, 1.0),
        "beta": uniform(seed * 8 + 5, (T, H), 0.05, 0.95),
    }
    return Prefill(rows=rows, **(operands | options))


def make_decode(seed: int, rows, heads=(2, 4), dim=128, **options) -> Decode:
    """One token per row from seeds `seed` .. `seed + 6`; bf16 operands, fp32 parameters."""
    Hq, Hv = heads[0], heads[-1]
    Hk = heads[1] if len(heads) == 3 else min(Hq, Hv)
    K, V = head_dims(dim)
    B, H = (rows.num_seqs if isinstance(rows, PageTable) else len(rows.initial), max(Hq, Hv))
    operands = {
        "q": rounded(U(seed, (B, Hq, K)), "bf16"),
        "k": rounded(U(seed + 1, (B, Hk, K)), "bf16"),
        "v": rounded(U(seed + 2, (B, Hv, V)), "bf16"),
        "a": rounded(U(seed + 3, (B, H)), "bf16"),
        "b": rounded(U(seed + 4, (B, H)), "bf16"),
        "A_log": rounded(U(seed + 5, (H,)), "fp32"),
        "dt_bias": rounded(U(seed + 6, (H,)), "fp32"),
    }
    return Decode(rows=rows, **(operands | options))


def make_pool(
    seed: int, rows: int, heads: int, dim=None, dtype="fp32", amplitude=0.1
) -> np.ndarray:
    K, V = head_dims(dim)
    return rounded(amplitude * U(seed * 8 + 6, (rows, heads, V, K)), dtype)


def paged_case(name, seed, rows, page_size, *spans, heads=(2, 4), dim=None, pool=None, **options):
    """One prefill call over spans (page ids, tokens before, tokens after); `rows` of pool."""
    case_fields = {k: options.pop(k) for k in list(options) if k in Case.__dataclass_fields__}
    call = make_prefill(seed, page_table(page_size, *spans), heads, dim, **options)
    state_dtype = case_fields.get("state_dtype", "fp32")
    if pool is None:
        pool = make_pool(seed, rows, call.heads, dim, state_dtype)
    return Case(name, (call,), pool, **case_fields)


def chain(call: Prefill, page_size: int, ids: list[int], *cuts: int) -> tuple[Prefill, ...]:
    """One sequence of `call` as several calls that end at the absolute positions `cuts`."""
    calls, done = [], 0
    for end in cuts:
        pages = ids[: -(-end // page_size)]
        calls.append(call.part(done, end, page_table(page_size, (pages, done, end))))
        done = end
    return tuple(calls)


def single_key(tokens: int, heads=1, dim=128) -> np.ndarray:
    """The same unit vector e0 for every token and head."""
    x = np.zeros((tokens, heads, dim))
    x[..., 0] = 1
    return x


def _odd_splits() -> Case:
    whole = make_prefill(103, page_table(64, ([3, 0, 5], 0, 150)))
    return Case("D03", chain(whole, 64, [3, 0, 5], 1, 63, 64, 65, 150), make_pool(103, 6, 4))


def _contained_nan() -> Case:
    spans = ([0, 1], 0, 65), ([2], 0, 63), ([3], 0, 1)
    case = paged_case("D07", 107, 6, 64, *spans, ignored_tokens=tuple(range(65, 128)),
                      ignored_rows=(2,))  # fmt: skip
    case.calls[0].v[65:128] = np.nan
    return case


def _strong_decay() -> Case:
    g = np.full((130, 4), -20.0)
    g[[5, 63, 64, 100]] = -316.0
    return paged_case("D08", 108, 5, 64, ([3, 1, 0, 4], 64, 194), gate="log", g=g)


def _exact_reset() -> Case:
    case = paged_case("D09", 109, 4, 64, ([2, 0], 0, 100))
    case.calls[0].g[[37, 64]] = 0.0
    return case


def _repeated_key() -> Case:
    e0, v = single_key(129), rounded(np.sign(U(110, (129, 1, 128)) + 1e-9), "bf16")
    ones, pool = np.ones((129, 1)), np.zeros((4, 1, 128, 128))
    call = Prefill(e0, e0, v, page_table(64, ([1, 3, 0], 0, 129)), ones, ones)
    rows = {row: np.zeros((1, 128, 128)) for row in (1, 3, 0)}
    for row, t in ((1, 63), (3, 127), (0, 128)):
        rows[row][0, :, 0] = v[t, 0]
    return Case("D10", (call,), pool, closed_out=v / 128**0.5, closed_rows=rows)


def _shared_decode() -> Case:
    table = page_table(64, ([4, 6], 64, 65), ([4, 1], 64, 65), ([5], 16, 17), decode=True)
    return Case("D15", (make_decode(115, table),), make_pool(115, 8, 4, 128))


def _padded_decode() -> Case:
    spans = [([2, 7], 64, 65), ([0], 63, 64), ([5], 8, 9)] + [([p], 1, 2) for p in (9, 10, 11)]
    call, pool = (make_decode(125, page_table(64, *spans, decode=True)), make_pool(116, 12, 4, 128))
    pool[[9, 10, 11]] = np.nan
    for operand in (call.q, call.k, call.v):
        operand[3:] = np.nan
    return Case("D16", (call,), pool, ignored_tokens=(3, 4, 5), ignored_rows=(9, 10, 11))


def _one_rounding() -> Case:
    e0, pool = single_key(64), np.zeros((3, 1, 128, 128))
    pool[0, 0, :, 0] = 256
    table, zeros = page_table(64, ([0, 2], 64, 128)), np.zeros((64, 1))
    call = Prefill(e0, e0, np.zeros_like(e0), table, np.full((64, 1), 1 - 2.0**-10), zeros, 1.0)
    stored = np.zeros((1, 128, 128))
    stored[0, :, 0] = 240  # 256 if every token rounds
    return Case("D17", (call,), pool, "bf16", closed_rows={2: stored})


def _scalar_gates() -> Case:
    e0, pool = single_key(1), np.zeros((2, 2, 128, 128))
    pool[1, 1, :, 5] = 1.0
    call = Decode(e0, e0, np.ones((1, 2, 128)), np.array([0.0, np.log(0.01)]),
                  np.array([[0.0, 100.0]]), np.zeros(2), np.full((1, 2), 0.5),
                  page_table(64, ([1], 4, 5), decode=True), 1.0, l2norm=False)  # fmt: skip
    row = np.zeros((2, 128, 128))
    row[:, :, 0] = 0.6224593312  # sigmoid(0.5); 0.62109375 if rounded to bf16
    row[1, :, 5] = 0.3678794412  # exp(-0.01 softplus(100))
    return Case("D18", (call,), pool, tight=True, closed_rows={1: row})


def _strided_decode() -> Case:
    fused, ab = rounded(U(141, (4, 3, 4, 64)), "bf16"), rounded(U(142, (4, 8)), "bf16")
    spans = ([3, 8], 64, 65), ([1], 63, 64), ([0], 1, 2), ([5], 39, 40)
    call = Decode(fused[:, 0], fused[:, 1], fused[:, 2], rounded(U(143, (4,)), "fp32"), ab[:, 0::2],
                  rounded(U(144, (4,)), "fp32"), ab[:, 1::2],
                  page_table(64, *spans, decode=True))  # fmt: skip
    return Case("D19", (call,), make_pool(119, 9, 4), layout="fused", index_dtype="int64")


SHARED = ([7, 3, 12], 128, 133), ([7, 3, 1, 14], 128, 198)
EMPTY = (([0], 33, 33), ([1], 0, 3), ([2, 3], 128, 128), ([4], 1, 1), ([5, 6], 0, 70),
         ([7], 64, 64))  # fmt: skip
BATCH = ([2], 20, 25), ([0, 4, 7], 0, 130), ([5, 1], 40, 104)

CASES = [
    paged_case("D01", 101, 8, 64, ([5, 2], 64, 74)),
    paged_case("D02", 102, 16, 64, *SHARED),
    _odd_splits(),
    paged_case("D04", 104, 12, 64, ([11, 4, 9, 2, 6], 100, 300)),
    paged_case("D05", 105, 4, 64, ([2, 0], 0, 70), pool=np.full((4, 4, 64, 64), np.nan)),
    paged_case("D06", 106, 9, 64, *EMPTY),
    _contained_nan(),
    _strong_decay(),
    _exact_reset(),
    _repeated_key(),
    paged_case("D11", 111, 3, 64, ([1], 5, 45), heads=(2, 8), dim=128),
    paged_case("D12", 112, 7, 64, ([6, 2, 5], 78, 168), row_padding=96),
    _shared_decode(),
    _padded_decode(),
    _one_rounding(),
    _scalar_gates(),
    _strided_decode(),
    paged_case("D20", 145, 9, 64, *BATCH),
]

"""More cases, one fault each: boundaries, stale pages, strong gates, head maps, norms, -1 entries.

Names beginning with B point at a row of the bug-report log that the D-cases came from.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from calls import Case, Decode, Prefill, page_table, rounded
from cases import (
    EMPTY,
    SHARED,
    U,
    chain,
    make_decode,
    make_pool,
    make_prefill,
    paged_case,
    single_key,
    uniform,
)


def _chain_case(name, seed, rows, page_size, ids, *cuts, **options) -> Case:
    whole = make_prefill(seed, page_table(page_size, (ids, 0, cuts[-1])), **options)
    return Case(name, chain(whole, page_size, ids, *cuts), make_pool(seed, rows, whole.heads))


def _with_pool(case: Case, name: str, rows: list[int], value: float) -> Case:
    pool = case.pool.copy()
    pool[rows] = value
    return replace(case, name=name, pool=pool)


def boundaries() -> list[Case]:
    two_sizes = (make_prefill(203, page_table(64, ([0, 1], 0, 100))),
                 make_prefill(204, page_table(192, ([2], 0, 100))))  # fmt: skip
    next_tenant = (make_prefill(222, page_table(64, ([1], 0, 64))),
                   make_prefill(223, page_table(64, ([1, 2], 0, 70))))  # fmt: skip
    rerun = (make_prefill(208, page_table(64, ([6], 0, 20))),
             make_prefill(208, page_table(64, ([6], 0, 12))),
             make_prefill(209, page_table(64, ([6], 12, 20))))  # fmt: skip
    far = list(range(2300, 65, -1))
    return [
        paged_case("B02-whole", 202, 6, 128, ([4, 1, 0], 0, 300)),
        _chain_case("B02-cut", 202, 6, 128, [4, 1, 0], 128, 256, 300),
        Case("B03-two-page-sizes", two_sizes, make_pool(203, 4, 4)),
        paged_case("B05-far", 205, 2301, 64, (far, 143000, 143040), heads=(1, 1)),
        *(_chain_case(f"B06-{j}", 206, 5, 64, [3, 0, 1], 64 + j, 140) for j in (4, 7, 10)),
        Case("B08-rerun", rerun, make_pool(208, 7, 4)),
        _with_pool(paged_case("", 104, 12, 64, ([11, 4, 9, 2, 6], 100, 300)), "B09-nan-pages",
                   [9, 2, 6], np.nan),
        *(paged_case(f"B16-{a}-{b}", 216, 5, 64, ([3, 1], a, b))
          for a, b in ((64, 65), (65, 66), (127, 128))),
        paged_case("B17-window", 217, 3, 64, ([0, 1], 64, 128)),
        Case("B22-next-tenant", next_tenant, make_pool(222, 4, 4)),
        _with_pool(paged_case("", 223, 4, 64, ([2], 0, 1)), "B23-first-token", [2], np.nan),
        paged_case("empty-list", 224, 5, 64, ([], 0, 0), ([1, 3], 60, 70), ([], 0, 0)),
        paged_case("large-page", 225, 4, 1024, ([2, 0], 1000, 1100)),
        _counting_states(),
    ]  # fmt: skip


def _counting_states() -> Case:
    """alpha = beta = 1, k = e0, v_t = (t, 0, ...): row 5 holds 64, row 6 128, row 7 192."""
    e0 = single_key(192, 1, 64)
    v, ones = np.zeros((192, 1, 64)), np.ones((192, 1))
    v[:, 0, 0] = np.arange(1, 193)
    rows = {row: np.zeros((1, 64, 64)) for row in (5, 6, 7)}
    for row, count in ((5, 64), (6, 128), (7, 192)):
        rows[row][0, 0, 0] = count
    call = Prefill(e0, e0, v, page_table(64, ([5, 6, 7], 0, 192)), ones, ones)
    return Case("B18-after-not-before", (call,), make_pool(218, 8, 1), closed_rows=rows)


def gates() -> list[Case]:
    span = ([0, 1], 64, 128)
    log_gate = np.full((64, 4), -0.01)
    log_gate[0] = -88
    raw = {"gate": "raw", "beta_is_logit": True, "A_log": uniform(251, (4,), -2, 1),
               "dt_bias": uniform(252, (4,), -1, 1)}  # fmt: skip
    resets = {"linear": np.full((6, 4), 0.95), "log": np.full((6, 4), -0.05)}
    resets["linear"][0], resets["log"][0] = 0.0, -np.inf
    flat = {"A_log": np.full(4, 95.0), "dt_bias": np.full(4, -50.0), "g": np.full((9, 4), -100.0)}
    carried = np.full((512, 1), 1 - 2.0**-12)
    e0 = single_key(512, 1, 64)
    held = Prefill(e0, e0, 0 * e0, page_table(64, ([0, *range(2, 10)], 64, 576)), carried,
                   np.zeros((512, 1)))  # fmt: skip
    return [
        paged_case("B37-tiny-alpha", 237, 2, 64, ([0], 0, 64),
                   g=rounded(np.full((64, 4), 1e-12), "fp32")),
        *(paged_case(f"B38-log{g}", 238, 4, 64, ([0, 2, 1], 30, 160), gate="log",
                     g=np.full((130, 4), g)) for g in (-2, -2.5, -5, -20)),
        _with_pool(paged_case("", 241, 3, 64, span, gate="log", g=log_gate), "B41-two-factors",
                   [0], 1.0),
        paged_case("B43-no-gates", 243, 6, 64, ([0, 1, 2, 3, 4], 0, 300), g=None, beta=None),
        paged_case("raw-gates", 250, 4, 64, ([2, 0], 40, 120), g=uniform(253, (80, 4), -4, 4),
                   beta=uniform(254, (80, 4), -3, 3), **raw),
        paged_case("raw-no-bias", 255, 4, 64, ([2, 0], 40, 120), g=uniform(256, (80, 4), -4, 4),
                   **(raw | {"dt_bias": None, "beta_is_logit": False})),
        paged_case("B54-inf-times-zero", 257, 3, 64, ([0, 1], 64, 73), gate="raw", **flat),
        *(_with_pool(paged_case("", 258, 3, 64, ([0, 1], 64, 70), gate=gate, g=g),
                     f"reset-nan-{gate}", [0], np.nan) for gate, g in resets.items()),
        Case("half-carry", (held,), np.ones((10, 1, 64, 64))),
    ]  # fmt: skip


def numbers() -> list[Case]:
    wide = {x: rounded(3 * U(seed, (64, 2, 64)), "bf16") for x, seed in (("q", 245), ("k", 246))}
    tiny = {x: 1e-4 * single_key(5, 2, 64) for x in ("q", "k")}
    half = np.full((1, 1), 0.5)
    e0, v = single_key(1, 1, 64), np.zeros((1, 1, 64))
    v[0, 0, 0] = 1
    first = np.zeros((2, 1, 64, 64))
    first[0, 0, 0, 0] = 1
    decayed = np.zeros((1, 64, 64))
    decayed[0, 0, 0] = 1.0  # 0.5 if the error is taken before the decay
    order = Prefill(e0, e0, v, page_table(64, ([0], 5, 6)), half, np.ones((1, 1)), 1.0)
    torn = (([0], 0, 1), ([1], 0, 63), ([2], 0, 127))
    return [
        paged_case("B45-long-keys", 245, 2, 64, ([0], 0, 64), g=np.ones((64, 4)),
                   beta=rounded(np.full((64, 4), 0.005), "fp32"), **wide),
        *(paged_case(f"B46-{n}", 247, 4, 64, ([1, 2], 10, 10 + n), dim=128)
          for n in (2, 15, 16, 17, 63, 64, 65)),
        *(paged_case(f"B47-scale{s}", 101, 8, 64, ([5, 2], 64, 74), scale=s) for s in (0.5, 1.0)),
        *(_huge_neighbour(n) for n in (1, 63, 65, 127)),
        paged_case("prefill-l2norm", 260, 5, 64, ([1, 0], 20, 100), l2norm=True,
                   q=rounded(U(261, (80, 2, 64)), "bf16"), k=rounded(U(262, (80, 2, 64)), "bf16")),
        paged_case("B60-tiny-norm", 263, 2, 64, ([1], 20, 25), l2norm=True, **tiny),
        Case("B61-decay-first", (order,), first, closed_rows={0: decayed}),
        *(paged_case(f"state-{d}", 102, 16, 64, *SHARED, state_dtype=d) for d in ("bf16", "fp16")),
        paged_case("skipped-stores", 264, 6, 64, ([-1, -1, 2, -1], 0, 200), ([3, -1, 4], 70, 150),
                   ([-1, 5], 60, 70)),
        paged_case("int64-tables", 106, 9, 64, *EMPTY, index_dtype="int64"),
        *(paged_case(f"layout-{x}", 265, 6, 64, *torn[1:], layout=x)
          for x in ("padded", "swapped")),
    ]  # fmt: skip


def _huge_neighbour(n: int) -> Case:
    pages = list(range(-(-n // 64)))
    case = paged_case(f"B56-{n}", 256, 4, 64, (pages, 0, n), ([3], 0, 9), ignored_rows=(3,),
                      ignored_tokens=tuple(range(n, n + 9)))  # fmt: skip
    for operand in (case.calls[0].q, case.calls[0].k, case.calls[0].v):
        operand[n:] = rounded(1e30, "bf16")
    return case


def head_maps() -> list[Case]:
    maps = [(2, 8), (8, 24), (3, 3), (1, 7), (5, 10), (4, 4), (8, 2)]
    dims = [8, 32, 80, 256, (24, 40), (40, 16)]
    steps = page_table(64, ([1, 2], 64, 65), ([0], 6, 7), decode=True)
    return [
        *(paged_case(f"B75-{q}-{v}", 275, 3, 64, ([1, 2], 60, 70), heads=(q, v)) for q, v in maps),
        *(Case(f"B75-decode-{q}-{v}", (make_decode(276, steps, (q, v), 64),),
               make_pool(276, 3, max(q, v))) for q, v in maps),
        *(paged_case(f"B76-{d}", 277, 3, 64, ([1, 2], 60, 70), heads=(1, 2), dim=d, cpu_only=True)
          for d in dims),
    ]  # fmt: skip


def decodes() -> list[Case]:
    # Each row but the last two is an ordinary step; row 2 is padding by -1, row 3 has no pages.
    spans = (
        ([4], 0, 1),
        ([7], 0, 1),
        ([3, -1], 70, 71),
        ([], 0, 0),
        ([2, 1], 64, 65),
        ([0], 9, 10),
    )
    first = make_decode(281, page_table(64, *spans, decode=True), dim=64)
    pool = make_pool(281, 9, 4)
    pool[[4, 7, 8]] = np.nan
    tiny = {x: 1e-4 * single_key(2, 2, 64) for x in ("q", "k")}
    tiny["q"][1] = tiny["k"][1] = 0
    small = make_decode(282, page_table(64, ([0], 5, 6), ([1], 5, 6), decode=True), dim=64, **tiny)
    edge = make_decode(283, page_table(64, ([0], 5, 6), decode=True), dim=64,
                       A_log=np.array([95.0, 0, 0, 0]), a=np.array([[-100.0, 0, 0, 0]]),
                       dt_bias=np.array([-50.0, 0, 0, 0]))  # fmt: skip
    e1, v2 = np.zeros((5, 1, 64)), np.zeros((5, 1, 64))
    e1[..., 1], v2[..., 2] = 1, 1
    write = Prefill(e1, e1, v2, page_table(64, ([1], 0, 5)), np.ones((5, 1)), np.full((5, 1), 0.5))
    read = Decode(e1[:1], e1[:1], v2[:1], np.zeros(1), np.full((1, 1), -2.0), np.zeros(1),
                  np.full((1, 1), 0.5), page_table(64, ([1], 5, 6), decode=True))  # fmt: skip
    far = [3, -1, 8, 0, 5]
    read_minus = make_decode(284, page_table(64, (far, 256, 257), ([4, -1, 6], 128, 129),
                                             decode=True), dim=64)  # fmt: skip
    strided = make_decode(287, page_table(64, ([2], 3, 4), ([0], 8, 9), decode=True), dim=64)
    twice = tuple(
        make_decode(285 + n, page_table(64, ([1], 4 + n, 5 + n), decode=True), dim=64)
        for n in (0, 1)
    )
    return [
        Case("B11-first-token", (first,), pool, ignored_rows=()),
        Case("B60-decode-tiny-norm", (small,), make_pool(282, 3, 4)),
        Case("B54-decode-inf-times-zero", (edge,), make_pool(283, 2, 4)),
        Case("B72-prefill-then-decode", (write, read), make_pool(272, 3, 1)),
        Case("decode-reads-minus-one", (read_minus,), make_pool(284, 9, 4)),
        *(Case(f"B52-twice-{d}", twice, make_pool(285, 3, 4, dtype=d), d)
          for d in ("bf16", "fp16")),
        *(Case(f"decode-{x}", (strided,), make_pool(287, 4, 4), layout=x)
          for x in ("padded", "swapped")),
    ]  # fmt: skip


MORE_CASES = boundaries() + gates() + numbers() + head_maps() + decodes()

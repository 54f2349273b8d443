"""Random calls for the property tests: hypothesis picks the shape of a call, a seed its numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from calls import DTYPES, Decode, PageTable, Prefill, Slots, rounded
from cases_slots import SlotCase

HEADS = [(1, 1), (1, 2), (2, 2), (2, 4), (1, 3), (3, 3), (4, 2), (6, 2), (3, 6)]
CPU_DIMS = [8, 16, 24, 64, 128, (16, 8), (8, 24), (40, 16), (64, 128)]
LAYOUTS = ["dense", "dense", "padded", "swapped"]


@dataclass(frozen=True, eq=False)
class Random:
    """A call on a pool; rows that no sequence may touch and rows between hold NaN."""

    call: Any
    pool: np.ndarray
    io: str
    state_dtype: str
    gap: int
    forms: dict[str, str]  # layout, index_dtype, gate_dtype

    def __repr__(self) -> str:
        call, table = self.call, self.call.rows
        options = {x: getattr(call, x) for x in ("scale", "gate", "l2norm") if hasattr(call, x)}
        shapes = call.q.shape, call.v.shape
        return (
            f"{type(call).__name__}({shapes}, {table}, {options}, {self.io}, {self.state_dtype}, "
            f"gap={self.gap}, {self.forms})"
        )


def _operands(rng, rows: int, heads, dims, io: str) -> dict[str, np.ndarray]:
    Hq, Hv = heads
    K, V = dims if isinstance(dims, tuple) else (dims, dims)
    Hk = min(Hq, Hv)
    made = {x: rng.standard_normal((rows, h, K)) for x, h in (("q", Hq), ("k", Hk))}
    made = {x: y / np.sqrt((y * y).sum(-1, keepdims=True)) for x, y in made.items()}
    made["v"] = rng.uniform(-1, 1, (rows, Hv, V))
    return {x: rounded(y, io) for x, y in made.items()}


def _gates(draw, rng, T: int, H: int, dtype: str) -> dict[str, Any]:
    form = draw(st.sampled_from(["linear", "log", "raw", "none"]))
    gates: dict[str, Any] = {"gate": "linear" if form == "none" else form}
    alpha = rng.uniform(0.85, 1, (T, H))
    if form == "linear":
        alpha[rng.random((T, H)) < 0.05 * draw(st.integers(0, 1))] = 0
        gates["g"] = rounded(alpha, dtype)
    elif form == "log":
        g = np.log(alpha)
        g[rng.random((T, H)) < 0.1 * draw(st.integers(0, 1))] = -300
        gates["g"] = rounded(g, dtype)
    elif form == "raw":
        gates["g"] = rounded(rng.uniform(-6, 2, (T, H)), dtype)
        gates["A_log"] = rounded(rng.uniform(-3, 1, H), dtype)
        gates["dt_bias"] = rounded(rng.uniform(-1, 1, H), dtype) if draw(st.booleans()) else None
    gates["beta_is_logit"] = draw(st.booleans())
    if draw(st.booleans()):
        low, high = (-3, 3) if gates["beta_is_logit"] else (0.05, 0.95)
        gates["beta"] = rounded(rng.uniform(low, high, (T, H)), dtype)
    else:
        gates["beta_is_logit"] = False
    return gates


def _page_lists(draw, rng, lengths: list[tuple[int, int]], page_size: int):
    """Page ids for (prefix, new tokens); full prefix pages may be shared, some ids are -1."""
    counts = [max(-(-(p + n) // page_size), 1) for p, n in lengths]
    num_rows = sum(counts) + draw(st.integers(1, 4))
    free = [int(row) for row in rng.permutation(num_rows)]
    share, holes = draw(st.booleans()), draw(st.booleans())
    lists: list[list[int]] = []
    for (prefix, _), count in zip(lengths, counts, strict=True):
        full = prefix // page_size
        donors = [(ids, p // page_size) for ids, (p, _) in zip(lists, lengths, strict=False)]
        usable = max((min(f, full) for _, f in donors), default=0) if share else 0
        donor = next((ids for ids, f in donors if min(f, full) == usable), [])
        ids = donor[:usable] + [free.pop() for _ in range(count - usable)]
        if holes:
            ids = [-1 if rng.random() < 0.15 and j >= full else row for j, row in enumerate(ids)]
        lists.append(ids)
    return lists, num_rows


def _poisoned_pool(rng, shape, state_dtype: str, readable: set[int]) -> np.ndarray:
    pool = np.full(shape, np.nan)
    for row in readable:
        pool[row] = rounded(0.2 * rng.standard_normal(shape[1:]), state_dtype)
    return pool


def _table(lists, totals, page_size: int, cu) -> PageTable:
    last = [t - (len(ids) - 1) * page_size for ids, t in zip(lists, totals, strict=True)]
    return PageTable(
        np.array([row for ids in lists for row in ids], np.int64),
        np.cumsum([0] + [len(ids) for ids in lists]),
        np.array(last, np.int64),
        page_size,
        cu,
    )


def _forks(draw, rng, table: PageTable, spans, pool: np.ndarray, state_dtype: str):
    """Some sequences with a prefix start from a page of their own choice, past the pool's last; the
    page they would start from is then poisoned. `spans`: tokens before and new ones."""
    if not draw(st.booleans()):
        return table, pool
    initial = np.full(len(spans), -1)
    extra = [pool]
    for b, (prefix, new) in enumerate(spans):
        if not prefix or not new or rng.random() < 0.4:
            continue
        own = int(table.indices[table.indptr[b] + (prefix - 1) // table.page_size])
        initial[b] = sum(map(len, extra))
        extra.append(rounded(0.2 * rng.standard_normal((1, *pool.shape[1:])), state_dtype))
        first = table.indptr[b] + prefix // table.page_size
        if own >= 0 and own in table.indices[first : table.indptr[b + 1]]:  # b's alone
            pool[own] = np.nan
    return replace(table, initial_pages=initial), np.concatenate(extra)


def _forms(draw, gate_dtype: str) -> dict[str, str]:
    return {
        "layout": draw(st.sampled_from(LAYOUTS)),
        "index_dtype": draw(st.sampled_from(["int32", "int64"])),
        "gate_dtype": gate_dtype,
    }


def _common(draw, device: str):
    cpu = device == "cpu"
    io = draw(st.sampled_from(DTYPES if cpu else ("bf16", "fp16")))
    state_dtype, gate_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    dims = draw(st.sampled_from(CPU_DIMS if cpu else [64, 128]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return io, state_dtype, gate_dtype, dims, draw(st.sampled_from(HEADS)), rng


@st.composite
def prefills(draw, device: str = "cpu", max_seqs: int = 4, max_new: int = 150) -> Random:
    io, state_dtype, gate_dtype, dims, heads, rng = _common(draw, device)
    page_size = draw(st.sampled_from([64, 64, 128, 192, 16, 100]))
    near = st.sampled_from([0, 0, 1, 63, 64, 65, 127, 128, 192])
    near |= st.sampled_from([page_size - 1, page_size, page_size + 1])
    prefix, new = near | st.integers(0, 200), st.integers(1, max_new) | near
    lengths = draw(st.lists(st.tuples(prefix, new), min_size=min(1, max_seqs), max_size=max_seqs))
    lengths = [(p or int(n == 0), n) for p, n in lengths]  # a sequence holds a token at least
    lists, num_rows = _page_lists(draw, rng, lengths, page_size)
    cu = np.cumsum([0] + [n for _, n in lengths])
    table = _table(lists, [p + n for p, n in lengths], page_size, cu)
    T, H = int(cu[-1]), max(heads)
    K, V = dims if isinstance(dims, tuple) else (dims, dims)
    readable = {
        ids[(p - 1) // page_size] for ids, (p, n) in zip(lists, lengths, strict=True) if p and n
    }
    pool = _poisoned_pool(rng, (num_rows, H, V, K), state_dtype, readable - {-1})
    table, pool = _forks(draw, rng, table, lengths, pool, state_dtype)
    call = Prefill(
        **_operands(rng, T, heads, dims, io),
        rows=table,
        **_gates(draw, rng, T, H, gate_dtype),
        scale=draw(st.sampled_from([None, 0.5])),
        l2norm=draw(st.booleans()),
    )
    gap = draw(st.sampled_from([0, 8, 96]))
    return Random(call, pool, io, state_dtype, gap, _forms(draw, gate_dtype))


@st.composite
def decodes(draw, device: str = "cpu", max_rows: int = 6) -> Random:
    io, state_dtype, gate_dtype, dims, heads, rng = _common(draw, device)
    near = st.sampled_from([0, 0, 1, 2, 62, 63, 64, 65, 128]) | st.integers(0, 200)
    prefixes = draw(st.lists(near, min_size=1, max_size=max_rows))
    lists, num_rows = _page_lists(draw, rng, [(p, 1) for p in prefixes], 64)
    B, H = len(prefixes), max(heads)
    K, V = dims if isinstance(dims, tuple) else (dims, dims)
    readable = {ids[(p - 1) // 64] for ids, p in zip(lists, prefixes, strict=True) if p}
    pool = _poisoned_pool(rng, (num_rows, H, V, K), state_dtype, readable - {-1})
    table = _table(lists, [p + 1 for p in prefixes], 64, None)
    table, pool = _forks(draw, rng, table, [(p, 1) for p in prefixes], pool, state_dtype)
    call = Decode(
        **_operands(rng, B, heads, dims, io),
        A_log=rng.uniform(-3, 1, H).astype(np.float32).astype(np.float64),
        dt_bias=rng.uniform(-1, 1, H).astype(np.float32).astype(np.float64),
        a=rounded(rng.uniform(-6, 2, (B, H)), gate_dtype),
        b=rounded(rng.uniform(-3, 3, (B, H)), gate_dtype),
        rows=table,
        scale=draw(st.sampled_from([None, 0.5])),
        l2norm=draw(st.booleans()),
    )
    gap = draw(st.sampled_from([0, 8, 96]))
    return Random(call, pool, io, state_dtype, gap, _forms(draw, gate_dtype))


def _distinct(rng, count: int, rows: int, holes: bool) -> np.ndarray:
    """`count` different rows, some of them -1."""
    picked = rng.permutation(rows)[:count]
    return np.where(rng.random(count) < 0.2 * holes, -1, picked)


@st.composite
def slot_prefills(draw, device: str = "cpu") -> SlotCase:
    """Slot form with three pools, or one pool in all roles whose rows do not meet."""
    io, state_dtype, gate_dtype, dims, heads, rng = _common(draw, device)
    near = st.sampled_from([0, 1, 63, 64, 65, 128]) | st.integers(0, 150)
    lengths = draw(st.lists(st.tuples(near, near), min_size=1, max_size=4))
    every, one_pool = draw(st.sampled_from([0, 64, 128, 16, 100])), draw(st.booleans())
    holes, N = draw(st.booleans()), len(lengths)
    counts = [(p + n) // every - p // every if every else 0 for p, n in lengths]
    cu, starts = np.cumsum([0] + [n for _, n in lengths]), np.cumsum([0, *counts])
    size = 2 * N + int(starts[-1]) + 2
    rows = _distinct(rng, size, size, holes)
    slots = Slots(
        cu,
        state_indices=rows[:N],
        output_state_indices=rows[N : 2 * N] if draw(st.booleans()) else None,
        checkpoint_state_indices=rows[2 * N : 2 * N + starts[-1]] if every else None,
        checkpoint_cu_starts=starts[: N + draw(st.integers(0, 1))] if every else None,
        checkpoint_every=every,
        prefix_lens=[p for p, _ in lengths] if every else None,
    )
    T, H = int(cu[-1]), max(heads)
    K, V = dims if isinstance(dims, tuple) else (dims, dims)
    call = Prefill(
        **_operands(rng, T, heads, dims, io),
        rows=slots,
        **_gates(draw, rng, T, H, gate_dtype),
        l2norm=draw(st.booleans()),
    )
    read = {int(row) for row, (_, n) in zip(rows, lengths, strict=False) if n} - {-1}
    initial = _poisoned_pool(rng, (size, H, V, K), state_dtype, read)
    others = [initial if one_pool else np.full_like(initial, np.nan) for _ in range(2)]
    checkpoints = others[1] if every else None
    index_dtype = draw(st.sampled_from(["int32", "int64"]))
    return SlotCase(io, call, initial, others[0], checkpoints, state_dtype, index_dtype)


def permuted_pages(made: Random, order: np.ndarray) -> Random:
    """The same call with page p renamed order[p]."""
    table = made.call.rows
    names = {"indices": table.indices}
    if table.initial_pages is not None:
        names["initial_pages"] = table.initial_pages
    renamed = {
        name: np.array([order[row] if row >= 0 else row for row in rows], np.int64)
        for name, rows in names.items()
    }
    pool = np.empty_like(made.pool)
    pool[order] = made.pool
    call = replace(made.call, rows=replace(table, **renamed))
    return replace(made, call=call, pool=pool)

"""Hostile tables: a broken sequence stores nothing and outputs zeros, its neighbours are exact.

Release builds do not check device tables on the host, so ids, lengths and offsets come into the
kernels as they are. Every table here is broken in the middle sequence alone, or anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from calls import DecodeSlots, PageTable, Slots, page_table
from cases import make_decode, make_pool, make_prefill
from compare import bars, relative_error
from oracle import Oracle

ROWS = 10
HUGE = 2**31 - 1
SPANS = ([5, 2], 60, 70), ([0, 7, 9], 30, 150), ([1], 0, 9)
GOOD = page_table(64, *SPANS)
DECODE_SPANS = ([5, 2], 64, 65), ([0, 7], 70, 71), ([1], 8, 9)
GOOD_DECODE = page_table(64, *DECODE_SPANS, decode=True)


def edited(table, **changes):
    """Entries of arrays replaced: name=(entry, value)."""
    arrays = {}
    for name, (entry, value) in changes.items():
        arrays[name] = getattr(table, name).copy()
        arrays[name][entry] = value
    return replace(table, **arrays)


@dataclass(frozen=True, eq=False)
class Broken:
    name: str
    table: PageTable
    dead: tuple[int, ...] = (1,)

    def __str__(self) -> str:
        return self.name


IDS = (ROWS, HUGE, -2, -HUGE)
PREFILL = [
    *(Broken(f"read id {i}", edited(GOOD, indices=(2, i))) for i in IDS),
    *(Broken(f"boundary id {i}", edited(GOOD, indices=(3, i))) for i in IDS),
    *(Broken(f"last id {i}", edited(GOOD, indices=(4, i))) for i in IDS),
    *(Broken(f"last_page_len {n}", edited(GOOD, last_page_len=(1, n)))
      for n in (0, -1, 65, HUGE, -HUGE)),
    Broken("more new than held", replace(GOOD, indices=np.array([5, 2, 9, 1]),
                                         indptr=np.array([0, 2, 3, 4]))),
    Broken("indptr decreases", edited(GOOD, indptr=(1, 7)), dead=(0, 1)),
    Broken("indptr negative", edited(GOOD, indptr=(0, -3)), dead=(0,)),
    Broken("indptr huge", edited(GOOD, indptr=(3, HUGE)), dead=(2,)),
    Broken("indptr huge inside", edited(GOOD, indptr=(1, HUGE)), dead=(0, 1)),
    Broken("indptr far below", edited(GOOD, indptr=(0, -HUGE)), dead=(0,)),
]  # fmt: skip


def run_prefill(target, call, rows, io="bf16"):
    pool = target.pool(rows).view
    output = target.array(np.full((call.q.shape[0], call.heads, call.v.shape[2]), 7.0), io)
    target.prefill(call, pool, io, options={"output": output})
    return output, pool


@pytest.mark.parametrize("broken", PREFILL, ids=str)
def test_broken_page_table(target, broken):
    call, rows = make_prefill(530, GOOD), make_pool(530, ROWS, 4)
    out, pool = run_prefill(target, call, rows)
    bad_out, bad_pool = run_prefill(target, replace(call, rows=broken.table), rows)
    start = target.bits(target.pool(rows).view)
    for b, (ids, before, _after) in enumerate(SPANS):
        tokens, written = slice(*GOOD.cu_seqlens[b : b + 2]), ids[before // 64 :]
        if b in broken.dead:
            assert not target.values(bad_out)[tokens].any()
            assert np.array_equal(target.bits(bad_pool)[written], start[written])
        else:
            assert np.array_equal(target.bits(bad_out)[tokens], target.bits(out)[tokens])
            assert np.array_equal(target.bits(bad_pool)[written], target.bits(pool)[written])
    idle = [3, 4, 6, 8]
    assert np.array_equal(target.bits(bad_pool)[idle], start[idle])


@pytest.mark.parametrize(
    "cu",
    [
        [0, 10, 500, 139],
        [0, 10, HUGE, 139],
        [0, 10, -5, 139],
        [0, 10, 5, 139],
        [-3, 10, 130, 139],
        [HUGE, 10, 130, 139],
    ],
    ids=str,
)
def test_broken_cu_seqlens(target, cu):
    """A sequence whose own entries are fine keeps its pages, and its output where no broken one
    claims the same tokens; a broken one stores nothing."""
    call, rows = make_prefill(530, GOOD), make_pool(530, ROWS, 4)
    out, pool = run_prefill(target, call, rows)
    bad = replace(call, rows=replace(GOOD, cu_seqlens=np.array(cu)))
    bad_out, bad_pool = run_prefill(target, bad, rows)
    start = target.bits(target.pool(rows).view)
    claimed = [(s.begin, s.begin + s.length) for s in Oracle().sequences(bad, (rows,) * 3)]
    for b, (ids, before, _) in enumerate(SPANS):
        begin, end = cu[b : b + 2]
        written = ids[before // 64 :]
        if (begin, end) == tuple(GOOD.cu_seqlens[b : b + 2]):
            assert np.array_equal(target.bits(bad_pool)[written], target.bits(pool)[written])
            if sum(first < end and begin < last for first, last in claimed) == 1:
                tokens = slice(begin, end)
                assert np.array_equal(target.bits(bad_out)[tokens], target.bits(out)[tokens])
        elif not 0 <= begin <= end <= call.q.shape[0]:
            assert np.array_equal(target.bits(bad_pool)[written], start[written])


DECODE = [
    *(Broken(f"last id {i}", edited(GOOD_DECODE, indices=(3, i))) for i in (*IDS, -1)),
    *(Broken(f"previous id {i}", edited(GOOD_DECODE, indices=(0, i)), dead=(0,)) for i in IDS),
    *(Broken(f"last_page_len {n}", edited(GOOD_DECODE, last_page_len=(1, n)))
      for n in (0, -1, -HUGE)),
    Broken("indptr decreases", edited(GOOD_DECODE, indptr=(1, 5)), dead=(0, 1)),
    Broken("indptr negative", edited(GOOD_DECODE, indptr=(0, -3)), dead=(0,)),
    Broken("indptr huge", edited(GOOD_DECODE, indptr=(3, HUGE)), dead=(2,)),
]  # fmt: skip


@pytest.mark.parametrize("broken", DECODE, ids=str)
def test_broken_decode_table(target, broken):
    if broken.name == "indptr decreases":
        # Row 0 now ends on page 1, whose owner is row 2: rows of one call must not share a write.
        broken = replace(broken, table=edited(GOOD_DECODE, indptr=(1, 9)))
    call, rows = make_decode(531, GOOD_DECODE, dim=None), make_pool(531, ROWS, 4)
    pools = [target.pool(rows).view for _ in range(2)]
    start = target.bits(pools[0]).copy()
    out = target.bits(target.decode(call, pools[0], "bf16"))
    bad = target.decode(replace(call, rows=broken.table), pools[1], "bf16")
    for b, (ids, _, _) in enumerate(DECODE_SPANS):
        if b in broken.dead:
            assert not target.values(bad)[b].any()
            assert np.array_equal(target.bits(pools[1])[ids[-1]], start[ids[-1]])
        else:
            assert np.array_equal(target.bits(bad)[b], out[b])
            assert np.array_equal(target.bits(pools[1])[ids[-1]], target.bits(pools[0])[ids[-1]])


SLOT_FAULTS = {
    "state_indices": (ROWS, HUGE, -2),
    "output_state_indices": (ROWS, HUGE, -2),
    "checkpoint_state_indices": (ROWS, HUGE, -2),
    "checkpoint_cu_starts": (-1, 5, HUGE, -HUGE),
    "prefix_lens": (-1, -HUGE),
}


@pytest.mark.parametrize(
    "name, value", [(n, v) for n, values in SLOT_FAULTS.items() for v in values]
)
def test_broken_slots(target, name, value):
    """Slot form: the first of two sequences is broken."""
    good = {
        "state_indices": [0, 1],
        "output_state_indices": [2, 3],
        "checkpoint_state_indices": [4, 5],
        "checkpoint_cu_starts": [0, 1, 2],
        "checkpoint_every": 64,
        "prefix_lens": [0, 0],
    }
    results = []
    for spoiled in (False, True):
        slots = good | ({name: [value, *good[name][1:]]} if spoiled else {})
        call = make_prefill(535, Slots(np.array([0, 70, 134]), **slots))
        pool = target.pool(make_pool(535, ROWS, 4)).view
        options = dict.fromkeys(("initial_state", "output_state", "state_checkpoints"), pool)
        out, _ = target.slot_prefill(call, "bf16", options=options | {"output_final_state": True})
        results.append((target.bits(out), target.bits(pool)))
    (out, pool), (bad_out, bad_pool) = results
    start = target.bits(target.pool(make_pool(535, ROWS, 4)).view)
    assert not bad_out[:70].any()
    assert np.array_equal(bad_out[70:], out[70:])
    assert np.array_equal(bad_pool[[0, 2, 4]], start[[0, 2, 4]])
    assert np.array_equal(bad_pool[[1, 3, 5]], pool[[1, 3, 5]])


@pytest.mark.parametrize(
    "read, write", [(ROWS, 2), (HUGE, 2), (-2, 2), (0, ROWS), (0, -2), (-HUGE, -HUGE)]
)
def test_broken_decode_slots(target, read, write):
    slots = DecodeSlots(np.array([read, 1]), np.array([write, 3]))
    call, rows = make_decode(536, slots, dim=None), make_pool(536, ROWS, 4)
    view, truth = target.pool(rows).view, rows.copy()
    start = target.bits(view).copy()
    out, _ = target.slot_decode(call, "bf16", options={"initial_state": view})
    expected = Oracle().decode(call, truth)
    assert not target.values(out)[0].any() and expected[1].any()
    assert relative_error(target.values(out)[:, 0], expected) <= bars(target.device, "bf16").out
    kept = [row for row in range(ROWS) if row != 3]
    assert np.array_equal(target.bits(view)[kept], start[kept])


def test_max_seqlen_is_a_promise(target):
    """A sequence longer than promised counts as broken; within the promise nothing changes."""
    results = []
    for bound in (None, 64, 70, 1000):
        call = make_prefill(537, Slots(np.array([0, 70, 134]), state_indices=[0, 1]))
        pool = target.pool(make_pool(537, 3, 4)).view
        options = {"initial_state": pool, "output_state": pool, "output_final_state": True}
        out, _ = target.slot_prefill(call, "bf16", options=options | {"max_seqlen": bound})
        results.append((target.bits(out), target.bits(pool)))
    (out, pool), (short_out, short_pool), *rest = results
    start = target.bits(target.pool(make_pool(537, 3, 4)).view)
    assert not short_out[:70].any() and np.array_equal(short_out[70:], out[70:])
    assert np.array_equal(short_pool[[0]], start[[0]]) and np.array_equal(short_pool[1:], pool[1:])
    for other_out, other_pool in rest:
        assert np.array_equal(other_out, out) and np.array_equal(other_pool, pool)

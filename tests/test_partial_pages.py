"""initial_page_indices: a sequence starts from a page of another one, a fork without a copy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import gdn_paged
from calls import PageTable, page_table
from cases import make_decode, make_pool, make_prefill
from compare import bars, relative_error, untouched_rows
from oracle import Oracle
from test_hostile import HUGE, edited

ROWS = 12
# Sequence 0 forks page 9 at token 70 (own page 2 is fresh), 1 has no prefix, 2 goes on by itself,
# 3 forks page 9 too, at a page end.
SPANS = ([5, 2], 70, 120), ([3], 0, 40), ([7, 4], 80, 100), ([6, 8], 64, 90)
INITIAL = np.array([9, -1, -1, 9])
DECODE_SPANS = ([5, 2], 70, 71), ([3], 0, 1), ([7, 4], 80, 81), ([6, 8], 64, 65), ([-1], 8, 9)
DECODE_INITIAL = np.array([9, 10, -1, 9, 10])


def forked() -> PageTable:
    return replace(page_table(64, *SPANS), initial_pages=INITIAL)


def fork_pool(seed: int, heads: int) -> np.ndarray:
    """Pages that nothing may read hold NaN: 2 and 6 are replaced by page 9."""
    pool = make_pool(seed, ROWS, heads)
    pool[[2, 3, 5, 6, 7, 8, 10, 11]] = np.nan
    return pool


def check(target, call, pool, options=None):
    array = target.pool(pool).view
    start = target.bits(array).copy()
    is_decode = call.rows.cu_seqlens is None
    run = target.decode if is_decode else target.prefill
    out = target.values(run(call, array, "bf16", options=options))
    expected_pool, oracle = pool.copy(), Oracle()
    if is_decode:
        out, expected = out[:, 0], oracle.decode(call, expected_pool)
    else:
        expected = oracle.prefill(call, expected_pool, "bf16")
    allowed = bars(target.device, "bf16")
    assert relative_error(out, expected) <= allowed.out
    assert relative_error(target.values(array), expected_pool) <= allowed.rows
    kept = untouched_rows(pool, expected_pool)
    assert np.array_equal(target.bits(array)[kept], start[kept])
    assert 9 in kept
    return out, target.bits(array)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_prefill_starts_from_the_given_page(target, index_dtype):
    call, pool = make_prefill(950, forked(), (1, 2)), fork_pool(950, 2)
    initial = {"initial_page_indices": target.table(INITIAL, index_dtype)}
    out, _ = check(target, call, pool, initial)
    plain = target.pool(pool).view
    own = target.values(target.prefill(replace(call, rows=page_table(64, *SPANS)), plain, "bf16"))
    assert np.isnan(own[:50]).any() and not np.isnan(out).any()


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_decode_starts_from_the_given_page(target, index_dtype):
    table = replace(page_table(64, *DECODE_SPANS, decode=True), initial_pages=DECODE_INITIAL)
    call, pool = make_decode(951, table, (1, 2), None), fork_pool(951, 2)
    check(target, call, pool, {"initial_page_indices": target.table(DECODE_INITIAL, index_dtype)})


def test_fork_equals_a_copy(target):
    """The bytes of a fork are those of a call on a copied page, in prefill and in the decode after
    it, which names no page any more."""
    call, pool = make_prefill(952, forked(), (1, 2)), make_pool(952, ROWS, 2)
    copied = pool.copy()
    copied[2] = copied[6] = pool[9]
    fork, copy = target.pool(pool).view, target.pool(copied).view
    out = target.prefill(call, fork, "bf16")
    out_copy = target.prefill(replace(call, rows=page_table(64, *SPANS)), copy, "bf16")
    assert np.array_equal(target.bits(out), target.bits(out_copy))
    kept = [row for row in range(ROWS) if row != 6]  # no chunk of the fork writes its full page 6
    assert np.array_equal(target.bits(fork)[kept], target.bits(copy)[kept])
    spans = [(ids, after, after + 1) for ids, _, after in SPANS]
    step = make_decode(953, page_table(64, *spans, decode=True), (1, 2), None)
    outs = [target.bits(target.decode(step, array, "bf16")) for array in (fork, copy)]
    assert np.array_equal(*outs)


def test_slots_hold_the_given_page(target):
    table = forked()
    pages = target.page_arguments(table)
    slots = gdn_paged.gdn_paged_prefill_slots(target.table(table.cu_seqlens), **pages, page_size=64)
    assert target.values(slots.state_indices).tolist() == [9, -1, 4, 9]
    call, pool = make_prefill(954, table, (1, 2)), make_pool(954, ROWS, 2)
    bare = replace(call, rows=page_table(64, *SPANS))
    arrays = [target.pool(pool).view for _ in range(2)]
    out = target.prefill(call, arrays[0], "bf16")
    by_slots = target.prefill(bare, arrays[1], "bf16", options={"slots": slots})
    assert np.array_equal(target.bits(out), target.bits(by_slots))
    assert np.array_equal(target.bits(arrays[0]), target.bits(arrays[1]))
    with pytest.raises(ValueError, match=r"initial_page_indices: given with slots"):
        target.prefill(call, arrays[0], "bf16", options={"slots": slots})


def test_decode_slots_hold_the_given_page(target):
    table = replace(page_table(64, *DECODE_SPANS, decode=True), initial_pages=DECODE_INITIAL)
    slots = gdn_paged.gdn_paged_decode_slots(**target.page_arguments(table))
    assert target.values(slots[0]).tolist() == [9, -1, 4, 9, -1]
    assert target.values(slots[1]).tolist() == [2, 3, 4, 8, -1]
    call, pool = make_decode(955, table, (1, 2), None), target.pool(make_pool(955, ROWS, 2)).view
    with pytest.raises(ValueError, match=r"initial_page_indices: given with slots"):
        target.decode(call, pool, "bf16", options={"slots": slots})


@pytest.mark.parametrize("page", [ROWS, HUGE, -2, -HUGE])
def test_page_out_of_range(target, page):
    """The sequence stores nothing and its outputs are zero; the others keep their bytes."""
    good = make_prefill(956, forked(), (1, 2))
    bad = replace(good, rows=edited(good.rows, initial_pages=(0, page)))
    pool = make_pool(956, ROWS, 2)
    arrays = [target.pool(pool).view for _ in range(2)]
    outs = [target.prefill(c, a, "bf16") for c, a in zip((good, bad), arrays, strict=True)]
    assert not target.values(outs[1])[:50].any()
    assert np.array_equal(target.bits(outs[0])[50:], target.bits(outs[1])[50:])
    start = target.bits(target.pool(pool).view)
    changed, kept = target.bits(arrays[1]), [5, 2, 9]
    assert np.array_equal(changed[kept], start[kept])
    others = [row for row in range(ROWS) if row not in kept]
    assert np.array_equal(changed[others], target.bits(arrays[0])[others])


@pytest.mark.parametrize("page", [ROWS, HUGE, -2, -HUGE])
def test_decode_page_out_of_range(target, page):
    table = page_table(64, *DECODE_SPANS, decode=True)
    table = replace(table, initial_pages=edited_array(DECODE_INITIAL, 0, page))
    call, pool = make_decode(957, table, (1, 2), None), make_pool(957, ROWS, 2)
    array = target.pool(pool).view
    out = target.values(target.decode(call, array, "bf16"))[:, 0]
    assert not out[0].any() and out[3].any()
    assert np.array_equal(target.bits(array)[2], target.bits(target.pool(pool).view)[2])


def edited_array(x: np.ndarray, entry: int, value: int) -> np.ndarray:
    x = x.copy()
    x[entry] = value
    return x


# (entries of initial_page_indices to change, words of the check)
CONFLICTS = {
    "outside the pool": ((0, ROWS), "sequence 0: initial_page_indices[0] is 12, expected -1 or a"),
    "below -1": ((3, -7), "sequence 3: initial_page_indices[3] is -7, expected -1 or a"),
    "written by another": (
        (0, 4), "page 4 written by sequence 2 and read by sequence 0 (initial_page_indices[0])"),
}  # fmt: skip


def modes(target) -> list[str]:
    return ["host"] if target.device == "cpu" else ["host", "device"]


@pytest.mark.parametrize("name", CONFLICTS)
def test_check_names_the_entry(target, name):
    change, words = CONFLICTS[name]
    table = edited(forked(), initial_pages=change)
    call, pool = make_prefill(958, table, (1, 2)), target.pool(make_pool(958, ROWS, 2)).view
    before = target.bits(pool).copy()
    for mode in modes(target):
        with pytest.raises(ValueError) as error:
            target.prefill(call, pool, "bf16", options={"validate": mode})
        assert words in str(error.value)
    assert np.array_equal(target.bits(pool), before)


def test_check_of_a_decode_table(target):
    table = page_table(64, *DECODE_SPANS[:4], decode=True)
    for entry, page, words in (
        (0, 4, "page 4 written by sequence 2 and read by sequence 0 (initial_page_indices[0])"),
        (2, -9, "sequence 2: initial_page_indices[2] is -9"),
        (1, 4, ""),  # a first token starts from zero: its entry is not used
    ):
        initial = edited_array(DECODE_INITIAL[:4], entry, page)
        report = gdn_paged.page_table_report(
            **target.page_arguments(replace(table, initial_pages=initial)), num_pages=ROWS
        )
        assert words in report.text() and bool(words) == bool(report.text())


def test_good_fork_passes_the_check(target):
    call, pool = make_prefill(959, forked(), (1, 2)), target.pool(make_pool(959, ROWS, 2)).view
    for mode in modes(target):
        target.prefill(call, pool, "bf16", options={"validate": mode})


@pytest.mark.parametrize("wrong", [np.zeros(3, np.int32), np.zeros(4, np.float32)])
def test_wrong_arrays_are_refused(target, wrong):
    call, pool = make_prefill(960, forked(), (1, 2)), target.pool(make_pool(960, ROWS, 2)).view
    options = {"initial_page_indices": target.arrays.array(wrong)}
    with pytest.raises(ValueError, match="initial_page_indices"):
        target.prefill(call, pool, "bf16", options=options)

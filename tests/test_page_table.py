"""`validate="host"` and `validate_page_table`: every rule, named by sequence, entry and value."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

import gdn_paged
from calls import PageTable, page_table
from cases import make_decode, make_pool, make_prefill

ROWS = 12
GOOD = page_table(64, ([7, 3, 10], 128, 133), ([7, 3, 1, 6], 128, 198), ([5], 3, 10))


def edited(table: PageTable, name: str, entry: int, value: int) -> PageTable:
    array = getattr(table, name).copy()
    array[entry] = value
    return replace(table, **{name: array})


@dataclass(frozen=True, eq=False)
class Broken:
    name: str
    table: PageTable
    words: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


PREFILL = [
    Broken("id -1", edited(GOOD, "indices", 2, -1), ("sequence 0", "-1", "12")),
    Broken("id num_pages", edited(GOOD, "indices", 5, 12), ("sequence 1", "12")),
    Broken("id far out", edited(GOOD, "indices", 7, 2**31 - 1), ("sequence 2", "2147483647")),
    Broken("last_page_len 0", edited(GOOD, "last_page_len", 1, 0), ("sequence 1", "0", "64")),
    Broken("last_page_len 65", edited(GOOD, "last_page_len", 2, 65), ("sequence 2", "65", "64")),
    Broken("empty page list", page_table(64, ([5], 0, 4), ([], 0, 0)), ("sequence 1", "empty")),
    Broken("indptr decreases", edited(GOOD, "indptr", 1, 8), ("sequence 1", "7", "8")),
    Broken("indptr below 0", edited(GOOD, "indptr", 0, -2), ("page_indptr", "-2")),
    Broken("indptr past the end", edited(GOOD, "indptr", 3, 9), ("sequence 2", "9", "8")),
    Broken("cu_seqlens decreases", edited(GOOD, "cu_seqlens", 1, 80), ("sequence 1", "75", "80")),
    Broken("cu_seqlens[0]", edited(GOOD, "cu_seqlens", 0, 2), ("cu_seqlens", "2", "0")),
    Broken("cu_seqlens past the end", edited(GOOD, "cu_seqlens", 3, 90), ("90", "82")),
    Broken("more new than the table holds", edited(edited(GOOD, "cu_seqlens", 2, 6), "cu_seqlens",
                                                   1, 6),
           ("sequence 2", "76", "10")),
    Broken("page written twice", page_table(64, ([2, 5], 70, 80), ([2, 5], 70, 90)),
           ("page 5", "0", "1", "written")),
    Broken("page written and read", page_table(64, ([2, 5], 64, 80), ([5, 4], 64, 90)),
           ("page 5", "0", "1")),
    Broken("own page twice", page_table(64, ([2, 2], 0, 80)), ("page 2", "sequence 0")),
]  # fmt: skip

GOOD_DECODE = page_table(64, ([7, 3], 64, 65), ([7, 1], 70, 71), ([5], 3, 4), decode=True)
DECODE = [
    Broken("id -1", edited(GOOD_DECODE, "indices", 1, -1), ("sequence 0", "-1")),
    Broken("id num_pages", edited(GOOD_DECODE, "indices", 4, 12), ("sequence 2", "12")),
    Broken("last_page_len 0", edited(GOOD_DECODE, "last_page_len", 1, 0), ("sequence 1", "0")),
    Broken("empty page list", page_table(64, ([5], 3, 4), ([], 0, 0), decode=True),
           ("sequence 1", "empty")),
    Broken("indptr decreases", edited(GOOD_DECODE, "indptr", 1, 5), ("sequence 1", "4", "5")),
    Broken("page written twice", page_table(64, ([2, 5], 70, 71), ([5], 9, 10), decode=True),
           ("page 5", "0", "1", "written")),
    Broken("page written and read", page_table(64, ([2], 9, 10), ([2, 4], 64, 65), decode=True),
           ("page 2", "0", "1")),
]  # fmt: skip


def modes(target) -> list[str]:
    return ["host"] if target.device == "cpu" else ["host", "device"]


def named(error, words):
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


def checked(target, table: PageTable, mode: str, num_tokens: int, **options) -> None:
    prefill = {"cu_seqlens": target.table(table.cu_seqlens)} if table.cu_seqlens is not None else {}
    gdn_paged.validate_page_table(
        **target.page_arguments(table),
        **prefill,
        page_size=table.page_size,
        num_pages=ROWS,
        num_tokens=num_tokens,
        mode=mode,
        **options,
    )


@pytest.mark.parametrize("broken", PREFILL, ids=str)
def test_prefill_call_refuses(target, broken):
    tokens = 82 if broken.table.num_seqs == 3 else int(broken.table.cu_seqlens[-1])
    call = make_prefill(410, page_table(64, (list(range(9)), 0, max(tokens, 1))))
    call = replace(call.part(0, tokens, broken.table))
    pool = target.pool(make_pool(410, ROWS, 4)).view
    output = target.array(np.full(call.v.shape, 7.0), "bf16")
    before = target.bits(pool).copy()
    for mode in modes(target):
        options = {"validate": mode, "output": output}
        with pytest.raises(ValueError) as error:
            target.prefill(call, pool, "bf16", options=options)
        named(error, broken.words)
        with pytest.raises(ValueError) as error:
            checked(target, broken.table, mode, tokens)
        named(error, broken.words)
    assert np.array_equal(target.bits(pool), before)
    assert np.all(target.values(output) == 7)


@pytest.mark.parametrize("broken", DECODE, ids=str)
def test_decode_call_refuses(target, broken):
    call = make_decode(411, broken.table, dim=None)
    pool = target.pool(make_pool(411, ROWS, 4)).view
    output = target.array(np.full((broken.table.num_seqs, 1, *call.v.shape[1:]), 7.0), "bf16")
    before = target.bits(pool).copy()
    for mode in modes(target):
        with pytest.raises(ValueError) as error:
            target.decode(call, pool, "bf16", options={"validate": mode, "output": output})
        named(error, broken.words)
        with pytest.raises(ValueError) as error:
            checked(target, broken.table, mode, 0)
        named(error, broken.words)
    assert np.array_equal(target.bits(pool), before)
    assert np.all(target.values(output) == 7)


@pytest.mark.parametrize("broken", [*PREFILL, *DECODE], ids=str)
def test_report_is_asked_later(target, broken):
    """The form without waiting: nothing raises until the report is asked."""
    table = broken.table
    prefill = {} if table.cu_seqlens is None else {"cu_seqlens": target.table(table.cu_seqlens)}
    report = gdn_paged.page_table_report(
        **target.page_arguments(table),
        **prefill,
        page_size=table.page_size,
        num_pages=ROWS,
        num_tokens=82 if table.num_seqs == 3 or not prefill else int(table.cu_seqlens[-1]),
    )
    assert not [word for word in broken.words if word not in report.text()]
    with pytest.raises(ValueError, match="page table: "):
        report.raise_if_broken()


def test_report_of_a_good_table(target):
    report = gdn_paged.page_table_report(**target.page_arguments(GOOD_DECODE), num_pages=ROWS)
    assert report.text() == "" and target.arrays.numpy(report.array).shape == (40,)
    report.raise_if_broken()


def test_empty_arrays_are_bounds(target):
    """A call that has no rows of q, or no pages, has room for no token and no page."""
    call = make_prefill(415, GOOD)
    pool = target.pool(make_pool(415, ROWS, 4)).view
    for mode in modes(target):
        none = target.prefill_arguments(call.part(0, 0, GOOD).cast("bf16"), "bf16")
        with pytest.raises(ValueError, match=r"sequence 0.* 5, but there are 0 tokens"):
            gdn_paged.chunk_gated_delta_rule_paged(**none, state_pool=pool, validate=mode)
        with pytest.raises(ValueError, match=r"page_indices\[0\] is 7, expected .* \[0, 0\)"):
            target.prefill(call, pool[:0], "bf16", options={"validate": mode})
        decode = make_decode(416, GOOD_DECODE, dim=None)
        with pytest.raises(ValueError, match=r"page_indices\[0\] is 7, expected .* \[0, 0\)"):
            target.decode(decode, pool[:0], "bf16", options={"validate": mode})


def test_good_tables_pass(target):
    for mode in modes(target):
        checked(target, GOOD, mode, 82)
        checked(target, GOOD_DECODE, mode, 0)
        checked(target, page_table(64), mode, 0)


def test_validated_calls_run(target):
    """A checked call gives the bytes of an unchecked one."""
    call, rows = make_prefill(412, GOOD), make_pool(412, ROWS, 4)
    pools = [target.pool(rows).view for _ in range(2)]
    outs = [
        target.prefill(call, pool, "bf16", options={"validate": mode})
        for pool, mode in zip(pools, (None, "host"), strict=True)
    ]
    assert np.array_equal(*(target.bits(x) for x in outs))
    assert np.array_equal(*(target.bits(x) for x in pools))


def test_padding_on_request(target):
    """-1 and empty lists are errors unless the caller says that it pads."""
    tables = (
        page_table(64, ([3, -1], 64, 70), ([], 0, 0)),
        page_table(64, ([3, -1], 70, 71), ([], 0, 0), decode=True),
    )
    for mode in modes(target):
        for table in tables:
            checked(target, table, mode, 6, allow_padding=True)
            with pytest.raises(ValueError, match=r"sequence 1.*empty page list"):
                checked(target, table, mode, 6)
        with pytest.raises(ValueError, match="-2"):
            checked(target, page_table(64, ([-2], 0, 5)), mode, 5, allow_padding=True)


def test_shared_pages_may_be_read_by_all(target):
    shared = page_table(64, ([7, 3, 1], 128, 140), ([7, 3, 2], 128, 150), ([7, 4], 64, 65))
    for mode in modes(target):
        checked(target, shared, mode, 35)


@pytest.mark.parametrize(
    "domain, g, words",
    [("linear", -0.5, ("g", "linear", "log")), ("log", 0.5, ("g", "log", "linear"))],
)
def test_gate_domain_mix_up(target, domain, g, words):
    """Log gates given as linear ones, and the other way round."""
    call = make_prefill(413, GOOD, gate=domain, g=np.full((82, 4), g))
    pool = target.pool(make_pool(413, ROWS, 4)).view
    before = target.bits(pool).copy()
    with pytest.raises(ValueError) as error:
        target.prefill(call, pool, "bf16", options={"validate": "host"})
    named(error, words)
    assert np.array_equal(target.bits(pool), before)


def test_page_stats(target):
    """NaN and inf counts and the largest magnitude per page, -1 for ids outside the pool."""
    rows = make_pool(414, 5, 2)
    rows[1, 0, 0, :3], rows[3, 1, 2, 2] = np.nan, -np.inf
    pool = target.pool(rows, gap=32).view
    stats = gdn_paged.page_stats(pool, target.table([3, 1, 0, 9, -1]))
    nan, inf, largest = (target.arrays.numpy(x) for x in stats)
    assert nan.tolist() == [0, 3, 0, -1, -1] and inf.tolist() == [1, 0, 0, -1, -1]
    finite = np.where(np.isfinite(rows), np.abs(rows), 0).reshape(5, -1).max(axis=1)
    assert largest[:3] == pytest.approx(finite[[3, 1, 0]], rel=1e-6)
    assert target.arrays.numpy(gdn_paged.page_stats(pool).nan_count).tolist() == [0, 3, 0, 0, 0]

"""The slot helpers: rows per sequence, as numbers, and their use as the `slots` argument."""

import numpy as np
import pytest

import gdn_paged
from calls import PageTable, page_table
from cases import SHARED, make_decode, make_pool, make_prefill, paged_case

PREFILL_FIELDS = ("state_indices", "output_state_indices", "checkpoint_cu_starts", "prefix_lens")
DECODE_FIELDS = ("initial_state_indices", "output_state_indices")

# name: (page table, expected columns of PREFILL_FIELDS); None where the value has no meaning
PREFILL = {
    "shared prefix": (page_table(64, *SHARED), [[3, 3], [12, 14], [2, 5], [128, 128]]),
    "empty prefix": (page_table(64, ([2, 0], 0, 70)), [[-1], [0], [0], [0]]),
    "inside a page": (page_table(64, ([11, 4, 9, 2, 6], 100, 300)), [[4], [6], [1], [100]]),
    "ends on a page end": (page_table(64, ([5, 2], 64, 128)), [[5], [-1], [1], [64]]),
    "no new tokens": (page_table(64, ([5, 2], 70, 70)), [[2], [-1], [1], [70]]),
    "one token on": (page_table(64, ([5, 2], 64, 65)), [[5], [2], [1], [64]]),
    "page of 192": (page_table(192, ([5, 2], 191, 200)), [[5], [2], [0], [191]]),
    "minus one to read": (page_table(64, ([-1, 2], 64, 70)), [[-1], [2], [1], [64]]),
    "minus one to write": (page_table(64, ([3, -1], 64, 70)), [[3], [-1], [1], [64]]),
    "empty list": (
        page_table(64, ([], 0, 0), ([4], 0, 5)),
        [[-1, -1], [-1, 4], [None, 0], [-1, 0]],
    ),
    "too many new": (
        PageTable(np.array([0, 1]), np.array([0, 2]), np.array([8]), 64, np.array([0, 200])),
        [[-1], [-1], [None], [-1]],
    ),
    "none": (page_table(64), [[], [], [], []]),
}
DECODE = {
    "opens a page": (page_table(64, ([4, 6], 64, 65), decode=True), [[4], [6]]),
    "in place": (page_table(64, ([4, 6], 65, 66), decode=True), [[6], [6]]),
    "fills a page": (page_table(64, ([4, 6], 127, 128), decode=True), [[6], [6]]),
    "first token": (page_table(64, ([4], 0, 1), ([7], 0, 1), decode=True), [[-1, -1], [4, 7]]),
    "padding": (page_table(64, ([3, -1], 70, 71), ([], 0, 0), decode=True), [[-1, -1], [-1, -1]]),
    "minus one before": (page_table(64, ([-1, 2], 64, 65), decode=True), [[-1], [2]]),
    "none": (page_table(64, decode=True), [[], []]),
}


def check(target, got, names, expected):
    assert got._fields == names
    for name, column in zip(names, expected, strict=True):
        array = getattr(got, name)
        assert str(array.dtype).endswith("int32") and tuple(array.shape) == (len(column),)
        values = target.arrays.numpy(array).tolist()
        assert [v for v, e in zip(values, column, strict=True) if e is not None] == [
            e for e in column if e is not None
        ], name


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", PREFILL)
def test_prefill_slots(target, name, index_dtype):
    table, expected = PREFILL[name]
    got = gdn_paged.gdn_paged_prefill_slots(
        target.table(table.cu_seqlens, index_dtype),
        **target.page_arguments(table, index_dtype),
        page_size=table.page_size,
    )
    assert type(got) is gdn_paged.GDNPagedPrefillSlots
    check(target, got, PREFILL_FIELDS, expected)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", DECODE)
def test_decode_slots(target, name, index_dtype):
    table, expected = DECODE[name]
    got = gdn_paged.gdn_paged_decode_slots(**target.page_arguments(table, index_dtype))
    assert type(got) is gdn_paged.GDNPagedDecodeSlots
    check(target, got, DECODE_FIELDS, expected)


def test_prefill_with_slots_is_the_same_call(target):
    """`slots` given by the helper and derived inside give the same bytes."""
    case = paged_case("", 102, 16, 64, *SHARED, ([9], 0, 0), ([-1, 8], 60, 70))
    table = case.calls[0].rows
    slots = gdn_paged.gdn_paged_prefill_slots(
        target.table(table.cu_seqlens), **target.page_arguments(table), page_size=64
    )
    bits = []
    for options in ({}, {"slots": slots}):
        pool = target.pool(case.pool).view
        out = target.prefill(case.calls[0], pool, "bf16", options=options)
        bits.append((target.bits(out), target.bits(pool)))
    assert np.array_equal(bits[0][0], bits[1][0]) and np.array_equal(bits[0][1], bits[1][1])


def test_decode_with_slots_is_the_same_call(target):
    spans = ([4, 6], 64, 65), ([5], 16, 17), ([3, -1], 70, 71), ([1], 0, 1)
    call = make_decode(115, page_table(64, *spans, decode=True), dim=None)
    slots = gdn_paged.gdn_paged_decode_slots(**target.page_arguments(call.rows))
    bits = []
    for options in ({}, {"slots": slots}):
        pool = target.pool(make_pool(115, 8, 4)).view
        out = target.decode(call, pool, "bf16", options=options)
        bits.append((target.bits(out), target.bits(pool)))
    assert np.array_equal(bits[0][0], bits[1][0]) and np.array_equal(bits[0][1], bits[1][1])


def test_slots_serve_every_layer(target):
    """Slots made once per step serve calls on other pools, heads and dtypes."""
    table = page_table(64, *SHARED)
    slots = gdn_paged.gdn_paged_prefill_slots(
        target.table(table.cu_seqlens), **target.page_arguments(table), page_size=64
    )
    for heads, dtype in (((2, 4), "fp32"), ((4, 4), "bf16"), ((1, 3), "fp16")):
        call = make_prefill(150, table, heads)
        pools = [target.pool(make_pool(150, 16, call.heads, dtype=dtype), dtype).view for _ in "ab"]
        outs = [
            target.prefill(call, pool, "bf16", options=options)
            for pool, options in zip(pools, ({}, {"slots": slots}), strict=True)
        ]
        assert np.array_equal(*(target.bits(x) for x in outs))
        assert np.array_equal(*(target.bits(x) for x in pools))

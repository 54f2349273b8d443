"""Tables of arbitrary numbers: no crash, and what the rules call live matches the truth."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cases import make_decode, make_pool, make_prefill
from compare import bars, relative_error, untouched_rows
from oracle import Oracle
from test_hostile import GOOD, GOOD_DECODE, HUGE, ROWS, run_prefill

wild = st.integers(-3, 12) | st.sampled_from([HUGE, -HUGE, 64, 65, 139, 200, 1000])


@given(data=st.data())
def test_any_table(target, data):
    """Tables of arbitrary numbers: no crash, and what the rules call live matches the truth."""
    call, rows = make_prefill(532, GOOD, (1, 2)), make_pool(532, ROWS, 2)
    table = replace(
        GOOD,
        indices=np.array(data.draw(st.lists(wild, min_size=6, max_size=6))),
        indptr=np.array(data.draw(st.lists(wild, min_size=4, max_size=4))),
        last_page_len=np.array(data.draw(st.lists(wild, min_size=3, max_size=3))),
    )
    call = replace(call, rows=table)
    oracle, written = Oracle(), []
    for s in oracle.sequences(call, (rows, rows, rows)):
        written += [row for _, row in s.checkpoints if row >= 0] + [s.write_row] * (
            s.write_row >= 0
        )
        written += [s.read_row] * (s.read_row >= 0 and s.live)
    out, pool = run_prefill(target, call, rows)
    if len(set(written)) < len(written):
        return  # two sequences on one row: any order of theirs is fine
    expected_pool = rows.copy()
    expected = oracle.prefill(call, expected_pool, "bf16")
    allowed = bars(target.device, "bf16")
    assert relative_error(target.values(out), expected) <= allowed.out
    assert relative_error(target.values(pool), expected_pool) <= allowed.rows
    kept = untouched_rows(rows, expected_pool)
    assert np.array_equal(target.bits(pool)[kept], target.bits(target.pool(rows).view)[kept])


@given(cu=st.lists(wild, min_size=4, max_size=4))
def test_any_cu_seqlens(target, cu):
    """No crash, and no page of a sequence with a broken length changes."""
    call, rows = make_prefill(533, GOOD, (1, 2)), make_pool(533, ROWS, 2)
    call = replace(call, rows=replace(GOOD, cu_seqlens=np.array(cu)))
    live = [s for s in Oracle().sequences(call, (rows, rows, rows)) if s.live]
    writable = {row for s in live for row in [s.write_row, *(r for _, r in s.checkpoints)]}
    _, pool = run_prefill(target, call, rows)
    kept = [row for row in range(ROWS) if row not in writable]
    assert np.array_equal(target.bits(pool)[kept], target.bits(target.pool(rows).view)[kept])


@given(data=st.data())
def test_any_decode_table(target, data):
    call, rows = make_decode(534, GOOD_DECODE, (1, 2), None), make_pool(534, ROWS, 2)
    table = replace(
        GOOD_DECODE,
        indices=np.array(data.draw(st.lists(wild, min_size=5, max_size=5))),
        indptr=np.array(data.draw(st.lists(wild, min_size=4, max_size=4))),
        last_page_len=np.array(data.draw(st.lists(wild, min_size=3, max_size=3))),
    )
    call, oracle = replace(call, rows=table), Oracle()
    pairs = [oracle.decode_rows(table, b, ROWS) for b in range(3)]
    pool = target.pool(rows).view
    out = target.values(target.decode(call, pool, "bf16"))[:, 0]
    touched = [row for pair in pairs for row in set(pair) if row >= 0]
    if len(set(touched)) < len(touched):
        return
    expected_pool = rows.copy()
    expected = oracle.decode(call, expected_pool)
    allowed = bars(target.device, "bf16")
    assert relative_error(out, expected) <= allowed.out
    assert relative_error(target.values(pool), expected_pool) <= allowed.rows

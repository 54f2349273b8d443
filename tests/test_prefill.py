"""Paged prefill: arguments, dtypes, and calls cut in any way."""

import numpy as np
import pytest

import gdn_paged
from calls import page_table
from cases import chain, make_pool, make_prefill
from compare import bars, relative_error
from oracle import Oracle

SPANS = ([5, 2], 64, 110), ([0, 7, 3], 30, 150), ([1], 0, 9)
TABLE = page_table(64, *SPANS)


def truth(call, rows, io="bf16", state_dtype="fp32"):
    pool = rows.copy()
    return Oracle().prefill(call.cast(io), pool, io, state_dtype), pool


def close(target, got, pool, expected, io="bf16", state_dtype="fp32"):
    allowed = bars(target.device, io, state_dtype)
    assert relative_error(target.values(got), expected[0]) <= allowed.out
    assert relative_error(target.values(pool), expected[1]) <= allowed.rows


@pytest.mark.parametrize("gate_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("form", ["linear", "log", "raw"])
def test_gate_dtypes(target, gate_dtype, form):
    """g, beta, A_log and dt_bias are read in fp32 whatever their dtype."""
    from dataclasses import replace

    from calls import rounded
    from cases import uniform

    low, high = {"linear": (0.9, 1), "log": (-0.2, 0), "raw": (-4, 4)}[form]
    call = make_prefill(421, TABLE, g=uniform(422, (175, 4), low, high), gate=form)
    if form == "raw":
        biases = uniform(423, (4,), -2, 1), uniform(424, (4,), -1, 1)
        call = replace(call, A_log=biases[0], dt_bias=biases[1])
    names = [x for x in ("g", "beta", "A_log", "dt_bias") if getattr(call, x) is not None]
    call = replace(call, **{x: rounded(getattr(call, x), gate_dtype) for x in names})
    rows = make_pool(421, 8, 4)
    pool = target.pool(rows).view
    got = target.prefill(call, pool, "bf16", gate_dtype=gate_dtype)
    close(target, got, pool, truth(call, rows))


@pytest.mark.parametrize("scale, used", [(None, None), (0.0, None), (0.5, 0.5), (-1.0, -1.0)])
def test_scale(target, scale, used):
    """None and 0.0 are 1/sqrt(K)."""
    from dataclasses import replace

    call, rows = make_prefill(425, TABLE, scale=scale), make_pool(425, 8, 4)
    used = used or call.q.shape[2] ** -0.5
    pool = target.pool(rows).view
    got = target.prefill(call, pool, "bf16")
    close(target, got, pool, truth(replace(call, scale=used), rows))


def test_output_is_returned(target):
    call, rows = make_prefill(426, TABLE), make_pool(426, 8, 4)
    output = target.array(np.zeros(call.v.shape), "bf16", "padded")
    pool = target.pool(rows).view
    got = target.prefill(call, pool, "bf16", options={"output": output})
    assert got is output
    close(target, got, pool, truth(call, rows))
    fresh = target.prefill(call, target.pool(rows).view, "bf16")
    assert tuple(fresh.shape) == call.v.shape and fresh.dtype == output.dtype
    assert np.array_equal(target.bits(fresh), target.bits(output))


@pytest.mark.parametrize("mixed", ["cu_seqlens", "page_indices", "page_indptr", "last_page_len"])
def test_tables_of_mixed_width(target, mixed):
    """Each table may be int32 or int64 by itself."""
    call, rows = make_prefill(427, TABLE), make_pool(427, 8, 4)
    names = {"page_indices": "indices", "page_indptr": "indptr"}
    wide = target.table(getattr(TABLE, names.get(mixed, mixed)), "int64")
    pools = [target.pool(rows).view for _ in range(2)]
    outs = [
        target.prefill(call, pool, "bf16", options=o)
        for pool, o in zip(pools, ({}, {mixed: wide}), strict=True)
    ]
    assert np.array_equal(*(target.bits(x) for x in outs))
    assert np.array_equal(*(target.bits(x) for x in pools))


@pytest.mark.parametrize("spans", [(), (([], 0, 0),), (([3], 5, 5), ([2], 64, 64))], ids=len)
def test_no_tokens(target, spans):
    """No sequences, or none with tokens: fine, and the pool keeps its bytes."""
    call = make_prefill(428, page_table(64, *spans))
    pool = target.pool(make_pool(428, 4, 4)).view
    before = target.bits(pool).copy()
    out = target.prefill(call, pool, "bf16")
    assert tuple(out.shape) == call.v.shape
    assert np.array_equal(target.bits(pool), before)


def test_page_size_is_an_index(target):
    """Anything with __index__ but bool."""
    call, rows = make_prefill(429, TABLE), make_pool(429, 8, 4)
    pool = target.pool(rows).view
    got = target.prefill(call, pool, "bf16", options={"page_size": np.int64(64)})
    close(target, got, pool, truth(call, rows))


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "cuts",
    [(64, 128, 192, 230), (10, 74, 75, 138, 230), (230,), tuple(range(23, 231, 23))],
    ids=len,
)
def test_chunked_prefill(target, cuts, state_dtype):
    """A prompt in pieces against the truth of the same pieces, page by page."""
    ids = [3, 0, 5, 6]
    whole = make_prefill(430, page_table(64, (ids, 0, 230)))
    rows = make_pool(430, 7, 4, dtype=state_dtype)
    pool, expected_pool, outs, expected = target.pool(rows, state_dtype).view, rows.copy(), [], []
    for call in chain(whole, 64, ids, *cuts):
        outs.append(target.values(target.prefill(call, pool, "bf16")))
        expected.append(Oracle().prefill(call, expected_pool, "bf16", state_dtype))
    allowed = bars(target.device, "bf16", state_dtype)
    # With a 16-bit pool an early rounding to the other neighbour is carried on by later pieces.
    slack = 1 if state_dtype == "fp32" else 4
    assert relative_error(np.concatenate(outs), np.concatenate(expected)) <= allowed.out * slack
    assert relative_error(target.values(pool), expected_pool) <= allowed.rows * slack


def test_one_call_or_many(target):
    """Pieces give what the whole prompt gives (fp32 pool)."""
    ids = [3, 0, 5, 6]
    whole = make_prefill(431, page_table(64, (ids, 0, 230)))
    pools = [target.pool(make_pool(431, 7, 4)).view for _ in range(2)]
    out = target.values(target.prefill(whole, pools[0], "bf16"))
    pieces = [
        target.values(target.prefill(call, pools[1], "bf16"))
        for call in chain(whole, 64, ids, 1, 63, 64, 65, 150, 230)
    ]
    allowed = bars(target.device, "bf16")
    assert relative_error(np.concatenate(pieces), out) <= allowed.out
    assert relative_error(*(target.values(p) for p in pools)) <= allowed.rows


def test_workspace_and_plan(target):
    """Workspace and plan from their size functions serve the call; the bytes do not change."""
    call, rows = make_prefill(432, TABLE), make_pool(432, 8, 4)
    arguments = target.prefill_arguments(call, "bf16")
    pools = [target.pool(rows).view for _ in range(2)]
    plan = gdn_paged.prefill_plan(**arguments, state_pool=pools[0])
    outs = [
        gdn_paged.chunk_gated_delta_rule_paged(**arguments, state_pool=pools[0]),
        gdn_paged.chunk_gated_delta_rule_paged(**arguments, state_pool=pools[1], plan=plan),
    ]
    assert np.array_equal(*(target.bits(x) for x in outs))
    assert np.array_equal(*(target.bits(x) for x in pools))

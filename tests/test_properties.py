"""Property tests: random page tables, lengths, heads, dtypes, gates and strides.

Rows that a call may not read hold NaN, so a wrong row shows as NaN in the result. `--examples N`
sets the number of examples of each test and target.
"""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from calls import Prefill, as_prefill, page_table
from cases import chain
from compare import bars, relative_error, untouched_rows
from oracle import Oracle
from random_calls import Random, decodes, permuted_pages, prefills

FLOOR = {"cpu": 0.0, "cuda": 0.1}  # see relative_error
SPARE = 5  # poisoned token rows past cu_seqlens[-1]


def truth_of(made: Random):
    pool = made.pool.copy()
    if isinstance(made.call, Prefill):
        return Oracle().prefill(made.call, pool, made.io, made.state_dtype), pool
    return Oracle().decode(made.call, pool, made.state_dtype), pool


def product(target, made: Random, options=None):
    """(output, pool values, pool bits before, pool bits after, gap intact)."""
    pool = target.pool(made.pool, made.state_dtype, made.gap)
    before = target.bits(pool.view).copy()
    run = target.prefill if isinstance(made.call, Prefill) else target.decode
    out = run(made.call, pool.view, made.io, options=options, **made.forms)
    size = int(np.prod(made.pool.shape[1:]))
    gap = np.array_equal(target.bits(pool.base)[:, size:], pool.start_bits[:, size:])
    out = out if isinstance(made.call, Prefill) else out[:, 0]
    return out, target.values(pool.view), before, target.bits(pool.view), gap


def check(target, made: Random) -> None:
    out, pool, before, after, gap = product(target, made)
    expected_out, expected_pool = truth_of(made)
    io, normed = made.io, False
    if isinstance(made.call, Prefill):
        io, normed = target.arithmetic(io), made.call.l2norm
    allowed = bars(target.device, io, made.state_dtype, normed=normed)
    kept = untouched_rows(made.pool, expected_pool)
    assert np.array_equal(after[kept], before[kept])
    assert gap
    assert relative_error(target.values(out), expected_out, FLOOR[target.device]) <= allowed.out
    assert relative_error(pool, expected_pool) <= allowed.rows


@given(data=st.data())
def test_prefill(target, data):
    check(target, data.draw(prefills(target.device)))


@given(data=st.data())
def test_decode(target, data):
    check(target, data.draw(decodes(target.device)))


@given(data=st.data())
def test_spare_tokens_are_not_touched(target, data):
    """Rows of q, k, v and gates past cu_seqlens[-1] hold NaN, those of the output keep bytes."""
    made = data.draw(prefills(target.device))
    names = [x for x in ("q", "k", "v", "g", "beta") if getattr(made.call, x) is not None]
    tail = {x: (0, SPARE) for x in names}
    longer = {
        x: np.concatenate([y := getattr(made.call, x), np.full((n[1], *y.shape[1:]), np.nan)])
        for x, n in tail.items()
    }
    T, H = made.call.q.shape[0], made.call.heads
    output = target.array(np.full((T + SPARE, H, made.call.v.shape[2]), 7.0), made.io)
    spare = replace(made, call=replace(made.call, **longer))
    product(target, spare, {"output": output})
    assert np.all(target.values(output)[T:] == 7)
    plain = target.bits(product(target, made)[0])
    assert np.array_equal(target.bits(output)[:T], plain)


@given(
    data=st.data(),
    cuts=st.lists(st.integers(1, 299), max_size=6, unique=True),
    page_size=st.sampled_from([64, 128, 100]),
)
def test_chain_equals_one_call(target, data, cuts, page_size):
    """One sequence in any pieces (fp32 pool) gives what one call gives."""
    made = data.draw(prefills(target.device, max_seqs=1, max_new=300))
    call, io = made.call, made.io
    tokens, H = call.q.shape[0], call.heads
    ends = sorted({c for c in cuts if c < tokens} | {tokens}) if tokens else []
    ids = [int(p) for p in np.random.default_rng(len(cuts)).permutation(6)]
    pages = ids[: max(-(-tokens // page_size), 1)]
    shape = (7, H, call.v.shape[2], call.k.shape[2])
    whole = replace(
        call, rows=page_table(page_size, (pages, 0, tokens)) if tokens else page_table(64)
    )
    pools = [target.pool(np.full(shape, np.nan)).view for _ in range(2)]
    out = target.values(target.prefill(whole, pools[0], io))
    parts = [
        target.values(target.prefill(c, pools[1], io)) for c in chain(whole, page_size, ids, *ends)
    ]
    allowed = bars(target.device, target.arithmetic(io), normed=call.l2norm)
    error = relative_error(np.concatenate([*parts, out[:0]]), out, FLOOR[target.device])
    assert error <= allowed.out
    assert relative_error(*(target.values(p) for p in pools)) <= allowed.rows


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_page_ids_are_names(target, data, seed):
    """Renaming the pages moves the rows and changes no byte of them."""
    made = data.draw(prefills(target.device) | decodes(target.device))
    order = np.random.default_rng(seed).permutation(len(made.pool))
    first, second = product(target, made), product(target, permuted_pages(made, order))
    assert np.array_equal(target.bits(first[0]), target.bits(second[0]))
    assert np.array_equal(first[3], second[3][order])


@given(data=st.data())
def test_order_of_sequences(target, data):
    """The batch in reverse order gives every sequence the same bytes (CPU; bars elsewhere)."""
    made = data.draw(decodes(target.device))
    table, call = made.call.rows, made.call
    lists = [table.indices[a:b] for a, b in zip(table.indptr[:-1], table.indptr[1:], strict=True)]
    backwards = replace(
        table,
        indices=np.concatenate(lists[::-1]),
        indptr=np.cumsum([0] + [len(ids) for ids in lists[::-1]]),
        last_page_len=table.last_page_len[::-1],
        initial_pages=None if table.initial_pages is None else table.initial_pages[::-1],
    )
    fields = {x: getattr(call, x)[::-1] for x in ("q", "k", "v", "a", "b")}
    reverse = replace(made, call=replace(call, rows=backwards, **fields))
    first, second = product(target, made), product(target, reverse)
    assert np.array_equal(target.bits(first[0]), target.bits(second[0])[::-1])
    assert np.array_equal(first[3], second[3])


@given(data=st.data(), steps=st.integers(1, 8), start=st.sampled_from([0, 1, 60, 63, 64, 126]))
def test_decode_chain_equals_prefill(target, data, steps, start):
    """Steps one by one against one prefill of the same tokens (fp32 pool)."""
    made = data.draw(decodes(target.device, max_rows=1))
    call, io = made.call, made.io
    grow = {x: np.repeat(getattr(call, x), steps, axis=0) for x in ("q", "k", "v", "a", "b")}
    shift = 1 - 0.1 * np.arange(steps)
    grow["a"] = (grow["a"].T * shift).T.astype(np.float32).astype(np.float64)
    ids, total = [4, 0, 2], start + steps
    rows = np.random.default_rng(start).uniform(-0.2, 0.2, (5, *made.pool.shape[1:]))
    rows = rows.astype(np.float32).astype(np.float64)
    pools = [target.pool(rows).view for _ in range(2)]
    outs = []
    for t in range(steps):
        pages = ids[: (start + t) // 64 + 1]
        table = page_table(64, (pages, start + t, start + t + 1), decode=True)
        step = replace(call, rows=table, l2norm=False, **{x: y[t : t + 1] for x, y in grow.items()})
        outs.append(target.values(target.decode(step, pools[0], io))[:, 0])
    table = page_table(64, (ids[: -(-total // 64)], start, total))
    whole = as_prefill(replace(call, **grow), table)
    out = target.values(target.prefill(whole, pools[1], io))
    allowed = bars(target.device, target.arithmetic(io))
    error = relative_error(np.concatenate(outs), out, FLOOR[target.device])
    assert error <= allowed.out * 2
    assert relative_error(*(target.values(p) for p in pools)) <= allowed.rows

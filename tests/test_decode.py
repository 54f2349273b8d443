"""Decode: one token per row, chains of steps, and the slot form."""

from dataclasses import replace

import numpy as np
import pytest

from calls import DecodeSlots, as_prefill, page_table, rounded
from cases import U, make_decode, make_pool, make_prefill, uniform
from compare import bars, relative_error
from oracle import Oracle

HEAD_SIZE = 64

SPANS = ([4, 6], 64, 65), ([5], 16, 17), ([3, -1], 70, 71), ([1], 0, 1)


def test_output_is_returned(target):
    call = make_decode(440, page_table(64, *SPANS, decode=True), dim=64)
    output = target.array(np.zeros((4, 1, 4, 64)), "bf16")
    rows = make_pool(440, 8, 4)
    assert target.decode(call, target.pool(rows).view, "bf16", options={"output": output}) is output
    fresh = target.decode(call, target.pool(rows).view, "bf16")
    assert np.array_equal(target.bits(fresh), target.bits(output))


@pytest.mark.parametrize("scale", [0.0, 0.5, None])
def test_scale(target, scale):
    """0.0 is 0 here, None is 1/sqrt(K)."""
    call = make_decode(441, page_table(64, *SPANS, decode=True), dim=64, scale=scale)
    rows = make_pool(441, 8, 4)
    expected = Oracle().decode(call, rows.copy())
    out = target.values(target.decode(call, target.pool(rows).view, "bf16"))[:, 0]
    assert relative_error(out, expected) <= bars(target.device, "bf16").out
    assert (scale == 0) == (not out.any())


def test_empty_batch(target):
    call = make_decode(442, page_table(64, decode=True), dim=64)
    pool = target.pool(make_pool(442, 3, 4)).view
    before = target.bits(pool).copy()
    assert tuple(target.decode(call, pool, "bf16").shape) == (0, 1, 4, 64)
    assert np.array_equal(target.bits(pool), before)


def decode_chain(target, call, ids, start, steps, pool, io, state_dtype="fp32"):
    """Steps of one sequence; `call` holds one row per step. Returns outputs and their truth."""
    view, truth, outs, expected = target.pool(pool, state_dtype).view, pool.copy(), [], []
    for t in range(steps):
        pages = ids[: (start + t) // 64 + 1]
        table = page_table(64, (pages, start + t, start + t + 1), decode=True)
        names = "q", "k", "v", "a", "b"
        step = replace(call, rows=table, **{x: getattr(call, x)[t : t + 1] for x in names})
        outs.append(target.values(target.decode(step, view, io))[:, 0])
        expected.append(Oracle().decode(step.cast(io), truth, state_dtype))
    return np.concatenate(outs), np.concatenate(expected), view, truth


def steps_of(seed, count, heads=(1, 2), dim=64, **options):
    rows = DecodeSlots(np.zeros(count, np.int64))
    return make_decode(seed, rows, heads, dim, **options)


def test_512_steps_keep_fp32(target):
    """io bf16, fp32 pool, alpha near 0.999: 1e-2 off if the state were rounded on the way."""
    slow = {
        "A_log": np.full(2, -3.0),
        "dt_bias": np.zeros(2),
        "a": rounded(np.full((512, 2), -4.0), "bf16"),
        "b": uniform(451, (512, 2), -4, -2),
    }
    call = steps_of(450, 512, **slow)
    ids = list(range(9))
    out, expected, view, truth = decode_chain(
        target, call, ids, 5, 512, make_pool(450, 9, 2), "bf16"
    )
    assert relative_error(out, expected) <= bars(target.device, "bf16").out
    assert relative_error(target.values(view), truth) <= 1e-5


def test_16_bit_pools_round_every_step(target):
    call = steps_of(452, 70)
    for dtype in ("bf16", "fp16"):
        rows = make_pool(452, 3, 2, 64, dtype)
        out, expected, view, truth = decode_chain(target, call, [2, 0], 40, 70, rows, "bf16", dtype)
        # A value near a tie may round to the other neighbour and is carried on.
        assert relative_error(out, expected) <= 4e-3
        assert relative_error(target.values(view), truth) <= 4e-3


def test_decode_chain_equals_prefill(target):
    """130 steps across two page ends against one prefill of 130 tokens."""
    call, ids, rows = steps_of(453, 130), [3, 1, 0], make_pool(453, 4, 2)
    io = "fp32" if target.device == "cpu" else "bf16"
    out, _, view, _ = decode_chain(target, call, ids, 30, 130, rows, io)
    prefill = as_prefill(call, page_table(64, (ids, 30, 160)), Oracle().l2norm)
    pool = target.pool(rows).view
    got = target.values(target.prefill(prefill, pool, io))
    allowed = bars(target.device, io)
    # In 16 bits each side may be off by the bar, and tokens that cancel leave no digits.
    sides, floor = (1, 0.0) if target.device == "cpu" else (2, 0.1)
    assert relative_error(got, out, floor) <= sides * allowed.out
    assert relative_error(target.values(pool), target.values(view)) <= allowed.rows


def test_4096_steps(target):
    """fp32 pool: 4096 steps against the truth, 1e-4."""
    call = steps_of(454, 4096, heads=(1, 1))
    io = "fp32" if target.device == "cpu" else "bf16"
    ids = list(range(64))
    out, expected, view, truth = decode_chain(target, call, ids, 0, 4096, make_pool(454, 64, 1), io)
    assert relative_error(out, expected) <= bars(target.device, io).out
    assert relative_error(target.values(view), truth) <= 1e-4


@pytest.mark.parametrize("decode_too", [False, True])
def test_one_token_tail(target, decode_too):
    """One token after a prefix of 64: by prefill and by decode, the same state."""
    call = steps_of(455, 1)
    rows, io = make_pool(455, 4, 2), "fp32" if target.device == "cpu" else "bf16"
    results = []
    for total in (65, 66, 128):
        pool = target.pool(rows).view
        table = page_table(64, ([3, 1], total - 1, total), decode=decode_too)
        if decode_too:
            out = target.values(target.decode(replace(call, rows=table), pool, io))[:, 0]
        else:
            out = target.values(target.prefill(as_prefill(call, table, Oracle().l2norm), pool, io))
        truth = rows.copy()
        step = page_table(64, ([3, 1], total - 1, total), decode=True)
        expected = Oracle().decode(replace(call, rows=step).cast(io), truth)
        allowed = bars(target.device, io)
        assert relative_error(out, expected) <= allowed.out
        assert relative_error(target.values(pool), truth) <= allowed.rows
        results.append(target.bits(pool).copy())
    assert not np.array_equal(results[0], results[1])


# ---- slot form ------------------------------------------------------------------------------
SLOTS = {
    "in place": DecodeSlots(np.array([3, 0, 5, 1])),
    "read and write": DecodeSlots(np.array([3, 0, 5, 1]), np.array([4, 2, 5, 1])),
    "zero start": DecodeSlots(np.array([-1, 0, -1, 1]), np.array([4, 0, 5, 1])),
    "skipped store": DecodeSlots(np.array([3, 0, 5, 1]), np.array([-1, 0, -1, 1])),
    "padding": DecodeSlots(np.array([3, -1, 5, -1]), np.array([4, -1, 5, -1])),
    "padding in place": DecodeSlots(np.array([3, -1, 5, -1])),
}


@pytest.mark.parametrize("heads", [(2, 4), (8, 2)], ids=["gva", "gqa"])
@pytest.mark.parametrize("name", SLOTS)
def test_slot_form(target, name, heads):
    call = make_decode(460, SLOTS[name], heads, 64)
    rows = make_pool(460, 7, call.heads)
    view, truth = target.pool(rows, gap=32).view, rows.copy()
    out, state = target.slot_decode(call, "bf16", options={"initial_state": view})
    assert state is view
    expected = Oracle().decode(call, truth)
    allowed = bars(target.device, "bf16")
    assert relative_error(target.values(out)[:, 0], expected) <= allowed.out
    assert relative_error(target.values(view), truth) <= allowed.rows
    same = (truth == rows).reshape(7, -1).all(axis=1)
    kept = (target.values(view) == rows).reshape(7, -1).all(axis=1)
    assert kept[same].all()


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "fp16"])
def test_state_in_place(target, state_dtype):
    """`state` holds row b of batch row b."""
    call = make_decode(461, DecodeSlots(np.arange(3)), dim=64)
    rows = make_pool(461, 3, 4, 64, state_dtype)
    view, truth = target.pool(rows, state_dtype).view, rows.copy()
    options = {"state": view, "initial_state_indices": None}
    out, state = target.slot_decode(call, "bf16", options=options)
    assert state is view
    allowed = bars(target.device, "bf16", state_dtype)
    assert (
        relative_error(target.values(out)[:, 0], Oracle().decode(call, truth, state_dtype))
        <= allowed.out
    )
    assert relative_error(target.values(view), truth) <= allowed.rows


def test_slot_form_int64(target):
    call, rows = make_decode(462, SLOTS["read and write"], dim=64), make_pool(462, 7, 4)
    results = []
    for index_dtype in ("int32", "int64"):
        view = target.pool(rows).view
        out, _ = target.slot_decode(
            call, "bf16", options={"initial_state": view}, index_dtype=index_dtype
        )
        results.append((target.bits(out), target.bits(view)))
    assert np.array_equal(results[0][0], results[1][0])
    assert np.array_equal(results[0][1], results[1][1])


def test_two_requests_after_a_prefill(target):
    """Decode rows use their own tables, not the prefill's token count (shared buffers)."""
    prefill = make_prefill(463, page_table(64, ([0], 0, 3), ([1], 0, 4)))
    rows = make_pool(463, 4, 4)
    pool, truth = target.pool(rows).view, rows.copy()
    target.prefill(prefill, pool, "bf16")
    Oracle().prefill(prefill, truth, "bf16")
    decode = make_decode(
        464,
        page_table(64, ([0], 3, 4), ([1], 4, 5), ([2], 9, 10), decode=True),
        dim=64,
        q=rounded(U(470, (3, 2, 64)), "bf16"),
    )
    out = target.values(target.decode(decode, pool, "bf16"))[:, 0]
    allowed = bars(target.device, "bf16")
    assert relative_error(out, Oracle().decode(decode, truth)) <= allowed.out
    assert relative_error(target.values(pool), truth) <= allowed.rows

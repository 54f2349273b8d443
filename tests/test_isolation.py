"""What a call may not touch, and what one sequence may not do to another."""

import numpy as np
import pytest

import gdn_paged
from arrays import NATIVE, native
from calls import page_table
from cases import make_decode, make_pool, make_prefill
from guarded import GuardedMemory, shifted
from targets import available_targets

SPANS = ([5, 2], 60, 70), ([0, 7], 30, 95), ([1], 0, 1), ([3], 4, 4)
DECODE_SPANS = ([5, 2], 64, 65), ([0], 30, 31), ([1], 0, 1)
DIMS = [64, (24, 40), 8]
OPERANDS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "a", "b", "output", "state_pool")


@pytest.fixture
def numpy_cpu():
    return next(t for t in available_targets() if t.arrays.name == "numpy")


def calls_of(target, io, dim):
    """(function, arguments with pool and output) of a prefill and of a decode."""
    prefill = make_prefill(
        500, page_table(64, *SPANS), (2, 4), dim, gate="raw", A_log=np.zeros(4), dt_bias=np.zeros(4)
    )
    decode = make_decode(501, page_table(64, *DECODE_SPANS, decode=True), (2, 4), dim)
    pool = make_pool(500, 8, 4, dim)
    made = []
    for call, function, build in (
        (prefill, gdn_paged.chunk_gated_delta_rule_paged, target.prefill_arguments),
        (decode, gdn_paged.gated_delta_rule_decode_paged, target.decode_arguments),
    ):
        arguments = build(call.cast(io), io)
        shape = (*arguments["v"].shape[:-2], 4, call.v.shape[2])
        arguments["output"] = np.zeros(shape, NATIVE[io])
        arguments["state_pool"] = native(pool, "fp32")
        made.append((function, arguments))
    return made


def is_array(x) -> bool:
    return isinstance(x, np.ndarray)


def run(function, arguments):
    function(**arguments)
    return arguments["output"].copy(), arguments["state_pool"].copy()


@pytest.mark.parametrize("at_end", [True, False], ids=["end", "start"])
@pytest.mark.parametrize("io", ["fp32", "bf16"])
@pytest.mark.parametrize("dim", DIMS, ids=str)
def test_guard_pages(numpy_cpu, dim, io, at_end):
    """Every array borders on a page without access; an access past it would kill the process."""
    for function, arguments in calls_of(numpy_cpu, io, dim):
        expected = run(function, {k: v.copy() if is_array(v) else v for k, v in arguments.items()})
        memory = GuardedMemory()
        guarded = {k: memory.array(v, at_end) if is_array(v) else v for k, v in arguments.items()}
        for got, plain in zip(run(function, guarded), expected, strict=True):
            assert np.array_equal(got, plain)


@pytest.mark.parametrize(
    "name", [*OPERANDS, "page_indices", "page_indptr", "last_page_len", "cu_seqlens"]
)
@pytest.mark.parametrize("io", ["fp32", "bf16"])
def test_alignment(numpy_cpu, name, io):
    """An array one element off any alignment gives the same bytes."""
    for function, arguments in calls_of(numpy_cpu, io, 64):
        if name not in arguments:
            continue
        expected = run(function, {k: v.copy() if is_array(v) else v for k, v in arguments.items()})
        moved = arguments | {name: shifted(arguments[name])}
        for got, plain in zip(run(function, moved), expected, strict=True):
            assert np.array_equal(got, plain), function.__name__


@pytest.mark.parametrize("heads, dim", [((3, 3), 64), ((1, 3), 64), ((2, 2), (8, 24))], ids=str)
def test_output_within_a_buffer(target, heads, dim):
    """The output lies in the middle of a larger buffer of sentinels."""
    if target.device != "cpu" and dim != 64:
        pytest.skip("head sizes 64 and 128 on CUDA")
    call = make_prefill(502, page_table(64, *SPANS), heads, dim)
    T, H, V = call.q.shape[0], call.heads, call.v.shape[2]
    buffer = target.array(np.full((T + 2, H + 2, V + 8), 7.0), "bf16")
    inside = buffer[1 : T + 1, 1 : H + 1, :V]
    target.prefill(
        call, target.pool(make_pool(502, 8, H, dim)).view, "bf16", options={"output": inside}
    )
    values = target.values(buffer)
    written = np.zeros(values.shape, bool)
    written[1 : T + 1, 1 : H + 1, :V] = True
    assert np.all(values[~written] == 7) and not np.any(values[written] == 7)


POISON = {"nan": np.nan, "inf": np.inf, "minus inf": -np.inf, "huge": 3e38}


@pytest.mark.parametrize("value", POISON.values(), ids=POISON.keys())
@pytest.mark.parametrize("where", ["q", "k", "v", "g", "beta", "page"])
def test_poison_stays_in_its_sequence(target, value, where):
    """The middle sequence is poisoned; its neighbours give the bytes of a clean run."""
    spans = ([0, 4], 60, 130), ([1, 5], 30, 93), ([2, 3], 64, 65)
    bits = []
    for poisoned in (False, True):
        call = make_prefill(503, page_table(64, *spans))
        rows = make_pool(503, 7, 4)
        if poisoned and where == "page":
            rows[1] = value
        elif poisoned:
            getattr(call, where)[70:133] = value
        pool = target.pool(rows).view
        out = target.bits(target.prefill(call, pool, "bf16"))
        bits.append((out[:70], out[133:], target.bits(pool)[[0, 4, 2, 3, 6]]))
    for clean, beside_poison in zip(*bits, strict=True):
        assert np.array_equal(clean, beside_poison)


@pytest.mark.parametrize("value", POISON.values(), ids=POISON.keys())
@pytest.mark.parametrize("where", ["q", "k", "v", "a", "b", "page"])
def test_poison_stays_in_its_decode_row(target, value, where):
    bits = []
    for poisoned in (False, True):
        spans = ([0, 4], 64, 65), ([1], 30, 31), ([2], 9, 10)
        call, rows = (
            make_decode(504, page_table(64, *spans, decode=True), dim=None),
            make_pool(504, 5, 4),
        )
        if poisoned and where == "page":
            rows[1] = value
        elif poisoned:
            getattr(call, where)[1] = value
        pool = target.pool(rows).view
        out = target.bits(target.decode(call, pool, "bf16"))
        bits.append((out[[0, 2]], target.bits(pool)[[0, 4, 2, 3]]))
    for clean, beside_poison in zip(*bits, strict=True):
        assert np.array_equal(clean, beside_poison)


@pytest.mark.parametrize("pad", [0, 3])
def test_stale_pages_are_never_read(target, pad):
    """Pages that are written but not read may hold NaN, in fp32 and in 16 bits."""
    for dtype in ("fp32", "bf16", "fp16"):
        bits = []
        for stale in (0.0, np.nan):
            call = make_prefill(505, page_table(64, ([3, 1, 4], 64, 150), ([2], 0, 60 + pad)))
            rows = make_pool(505, 6, 4, dtype=dtype)
            rows[[1, 4, 2]] = stale
            pool = target.pool(rows, dtype).view
            out = target.prefill(call, pool, "bf16")
            bits.append((target.bits(out).copy(), target.bits(pool)[[3, 1, 4, 2]]))
        assert np.array_equal(bits[0][0], bits[1][0]) and np.array_equal(bits[0][1], bits[1][1])


def test_the_call_does_not_remember(target):
    """Two page sizes and two pools, one after the other and back: no state between calls."""

    def once(size, spans, seed):
        pool = target.pool(make_pool(seed, 8, 4)).view
        out = target.prefill(make_prefill(seed, page_table(size, *spans)), pool, "bf16")
        return target.bits(out).copy(), target.bits(pool).copy()

    first = once(64, SPANS, 506)
    once(192, (([2], 0, 100),), 507)
    again = once(64, SPANS, 506)
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])

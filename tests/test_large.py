"""Sizes beyond 32 bits and beyond grid limits (D13, D14), and many sequences at once."""

from dataclasses import replace

import numpy as np
import pytest

from arrays import NATIVE, bits_of, native
from calls import PageTable, Prefill, page_table, rounded
from cases import U, make_decode, make_pool, make_prefill
from compare import bars, relative_error
from guarded import reserved
from oracle import Oracle

STRIDE = 2**26  # elements between pool rows: row 33 lies past 2^31, row 65 past 2^32
SPANS = ([33], 0, 10), ([0, 65], 64, 70)


def far_pool(target):
    """66 rows of bf16 states, 2^26 elements apart; rows that are not touched cost no memory."""
    if target.device != "cpu":
        flat = target.arrays.array(np.zeros(1, np.int16))
        cells = 65 * STRIDE + 4 * 64 * 64
        if target.arrays.name == "torch":
            torch = target.arrays.torch
            store = torch.empty(cells, dtype=torch.bfloat16, device=flat.device)
            return torch.as_strided(store, (66, 4, 64, 64), (STRIDE, 4096, 64, 1))
        cupy = target.arrays.cupy
        store = cupy.empty(cells, np.uint16).view(native(np.zeros(1), "bf16").dtype)
        strides = tuple(2 * s for s in (STRIDE, 4096, 64, 1))
        return cupy.lib.stride_tricks.as_strided(store, (66, 4, 64, 64), strides)
    pool = reserved(66, (4, 64, 64), STRIDE, np.uint16)
    if target.arrays.name == "torch":
        return target.arrays.torch.from_numpy(pool.view(np.int16)).view(
            target.arrays.torch.bfloat16
        )
    return pool.view(native(np.zeros(1), "bf16").dtype)


def test_page_offsets_past_32_bits(target):
    """D13: pages 33 and 65 of a pool with a row stride of 2^26 elements."""
    rows = make_pool(113, 4, 4, 64, "bf16")  # near rows 0 .. 3 stand for far rows 0, 1, 33, 65
    far_ids = [0, 1, 33, 65]
    pool = far_pool(target)
    for near, far in enumerate(far_ids):
        pool[far] = target.array(rows[near], "bf16")
    call = make_prefill(113, page_table(64, *SPANS), dim=64)
    out = target.prefill(call, pool, "bf16")

    small = target.pool(rows, "bf16").view
    near_call = replace(call, rows=page_table(64, ([2], 0, 10), ([0, 3], 64, 70)))
    expected = target.prefill(near_call, small, "bf16")
    assert np.array_equal(target.bits(out), target.bits(expected))
    for near, far in enumerate(far_ids):
        assert np.array_equal(target.bits(pool[far]), target.bits(small)[near]), f"row {far}"
    assert np.array_equal(target.bits(pool[1]), bits_of(native(rows[1], "bf16")))


def test_decode_offsets_past_32_bits(target):
    rows = make_pool(570, 4, 4, 64, "bf16")
    pool, far_ids = far_pool(target), [0, 1, 33, 65]
    for near, far in enumerate(far_ids):
        pool[far] = target.array(rows[near], "bf16")
    far_table = page_table(64, ([33], 5, 6), ([0, 65], 64, 65), decode=True)
    call = make_decode(570, far_table, dim=64)
    out = target.decode(call, pool, "bf16")
    small = target.pool(rows, "bf16").view
    near_table = page_table(64, ([2], 5, 6), ([0, 3], 64, 65), decode=True)
    expected = target.decode(replace(call, rows=near_table), small, "bf16")
    assert np.array_equal(target.bits(out), target.bits(expected))
    for near, far in enumerate(far_ids):
        assert np.array_equal(target.bits(pool[far]), target.bits(small)[near]), f"row {far}"


def test_many_sequences(target):
    """D14: one token each; more sequences than a grid dimension holds. S = beta v k^T."""
    if target.device == "cpu":
        N, Hq, Hv, D, state_dtype = 66000, 1, 1, 64, "bf16"
    else:
        N, Hq, Hv, D, state_dtype = 2100, 16, 32, 128, "bf16"
    pages = (np.arange(N) * 37) % N
    assert len(set(pages)) == N
    table = PageTable(pages, np.arange(N + 1), np.ones(N, np.int64), 64, np.arange(N + 1))
    call = make_prefill(114, table, (Hq, Hv), D)
    zeros = target.arrays.array(np.zeros((N, Hv, D, D), NATIVE[state_dtype]))
    out = target.values(target.prefill(call, zeros, "bf16"))
    head = np.arange(Hv) // (Hv // Hq)
    allowed = bars(target.device, "bf16", state_dtype)
    for i in (0, 2047, 2048, 2099, N - 1):
        q, k, v, beta = call.q[i, head], call.k[i, head], call.v[i], call.beta[i]
        dots = D**-0.5 * beta * (q * k).sum(-1)
        assert relative_error(out[i][None], (dots[:, None] * v)[None]) <= allowed.out
        state = rounded(beta[:, None, None] * v[:, :, None] * k[:, None, :], state_dtype)
        row = target.values(zeros[int(pages[i])])
        assert relative_error(row[None], state[None]) <= allowed.rows


def test_many_decode_rows(target):
    """70000 rows of one small head, each on its own page."""
    B, D = (70000, 8) if target.device == "cpu" else (70000, 64)
    pages = (np.arange(B) * 3) % B
    assert len(set(pages)) == B
    table = PageTable(pages, np.arange(B + 1), np.full(B, 2))
    call = make_decode(571, table, (1, 1), D)
    start = rounded(0.1 * U(572, (1, 1, D, D)), "bf16")
    pool = target.array(np.broadcast_to(start.astype(np.float32), (B, 1, D, D)), "bf16")
    out = target.values(target.decode(call, pool, "bf16"))[:, 0]
    allowed = bars(target.device, "bf16", "bf16")
    chosen = np.array([0, 1, 65535, 65536, B - 1])
    few = PageTable(np.arange(5), np.arange(6), np.full(5, 2))
    names = ("q", "k", "v", "a", "b")
    truth = np.repeat(start, 5, axis=0)
    part = replace(call, rows=few, **{x: getattr(call, x)[chosen] for x in names})
    expected = Oracle().decode(part, truth, "bf16")
    assert relative_error(out[chosen], expected) <= allowed.out
    got = np.stack([target.values(pool[int(pages[i])]) for i in chosen])
    assert relative_error(got, truth) <= allowed.rows


def test_one_token_rows_beside_a_long_one(target):
    """953 sequences of one token and one of 700: each is what it is alone."""
    rng = np.random.default_rng(573)
    ids = rng.permutation(1000)
    spans = [([int(ids[i])], 3, 4) for i in range(953)]
    spans.insert(400, ([int(i) for i in ids[953:964]], 0, 700))
    table = page_table(64, *spans)
    call, rows = make_prefill(573, table, (1, 1)), make_pool(573, 1000, 1)
    pool, truth = target.pool(rows).view, rows.copy()
    out = target.prefill(call, pool, "bf16")
    expected = Oracle().prefill(call, truth, "bf16")
    allowed = bars(target.device, "bf16")
    assert isinstance(call, Prefill)
    assert relative_error(target.values(out), expected) <= allowed.out
    assert relative_error(target.values(pool), truth) <= allowed.rows


@pytest.mark.parametrize("tokens", [64, 4096])
def test_long_prompt(target, tokens):
    """A long sequence on pages of 1024."""
    pages = list(range(-(-tokens // 1024)))[::-1]
    call = make_prefill(574, page_table(1024, (pages, 0, tokens)), (1, 2))
    rows = make_pool(574, 5, 2)
    pool, truth = target.pool(rows).view, rows.copy()
    out = target.prefill(call, pool, "bf16")
    expected = Oracle().prefill(call, truth, "bf16")
    allowed = bars(target.device, "bf16")
    assert relative_error(target.values(out), expected) <= allowed.out
    assert relative_error(target.values(pool), truth) <= allowed.rows

"""Short prefills: sequences of at most 16 new tokens, alone and beside longer ones.

CUDA rows give them one pass over their state in place of chunks; nothing but the time may tell.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdn_paged
from calls import Slots, page_table, rounded
from cases import make_pool, make_prefill
from compare import bars, relative_error, untouched_rows
from oracle import Oracle

MOST = 16
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17)
PREFIXES = (0, 1, 20, 50, 63, 64, 120)
# A long prompt, decode-like rows, a first token, page ends in the middle and at the last token.
MIXED = (
    ([0, 1, 2], 0, 150),
    ([3], 9, 10),
    ([4], 0, 1),
    ([5, 6], 60, 70),
    ([7], 48, 64),
    ([8, 9], 64, 65),
    ([10, 11], 30, 47),
    ([12], 8, 24),
)
ROWS = 15


def check(target, call, rows, io="bf16", state="fp32", **forms):
    """One call against the truth; pages that it may not write keep their bytes, all in bits."""
    pool = target.pool(rows, state)
    out = target.prefill(call, pool.view, io, **forms)
    expected = rows.copy()
    truth = Oracle().prefill(call.cast(io), expected, io, state)
    allowed = bars(target.device, target.arithmetic(io), state, normed=call.l2norm)
    assert relative_error(target.values(out), truth) <= allowed.out
    assert relative_error(target.values(pool.view), expected) <= allowed.rows
    still, start = untouched_rows(rows, expected), pool.start_bits.reshape(rows.shape)
    bits = target.bits(pool.view).copy()
    assert np.array_equal(bits[still], start[still])
    return target.bits(out).copy(), bits


def span_of(prefix: int, new: int) -> tuple[list[int], int, int]:
    return list(range(-(-(prefix + new) // 64))), prefix, prefix + new


@pytest.mark.parametrize("prefix", PREFIXES)
def test_lengths_and_prefixes(target, prefix):
    """Every length around the border, alone, on every place of a page."""
    for new in LENGTHS:
        call = make_prefill(900 + new, page_table(64, span_of(prefix, new)))
        check(target, call, make_pool(900, 4, 4))


@pytest.mark.parametrize("heads", [(2, 4), (1, 3), (3, 3), (4, 2)], ids=str)
@pytest.mark.parametrize("state", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("io", ["bf16", "fp16"])
def test_dtypes_and_head_maps(target, io, state, heads):
    table, H = page_table(64, *MIXED[1:4]), max(heads)
    check(target, make_prefill(910, table, heads), make_pool(910, ROWS, H, dtype=state), io, state)


RAW = {"gate": "raw", "A_log": np.linspace(-2, 1, 4), "dt_bias": np.linspace(-1, 1, 4)}


@pytest.mark.parametrize("l2norm", [False, True], ids=["plain", "l2norm"])
@pytest.mark.parametrize("form", ["none", "log", "raw", "strong"])
def test_gate_forms(target, form, l2norm):
    table = page_table(64, ([3], 20, 36), ([5, 6], 60, 70))
    noise = np.random.default_rng(911).uniform(-1, 1, (26, 4))
    options = {
        "none": {"g": None, "beta": None},
        "log": {"gate": "log", "g": rounded(noise - 1, "fp32")},
        "raw": RAW | {"g": rounded(3 * noise, "fp32"), "beta": noise, "beta_is_logit": True},
        "strong": {"gate": "log", "g": rounded(40 * (noise - 1), "fp32")},
    }[form]
    check(target, make_prefill(911, table, l2norm=l2norm, **options), make_pool(911, ROWS, 4))


@pytest.mark.parametrize("layout", ["padded", "swapped"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_strided_operands(target, layout, index):
    call = make_prefill(912, page_table(64, *MIXED[1:6]))
    check(target, call, make_pool(912, ROWS, 4), layout=layout, index_dtype=index)


def test_mixed_batch(target):
    """Short and long sequences of one call, in any order, are the same sequences."""
    call, rows = make_prefill(913, page_table(64, *MIXED)), make_pool(913, ROWS, 4)
    out, pool = check(target, call, rows)
    ends = call.rows.cu_seqlens
    for order in ((7, 6, 5, 4, 3, 2, 1, 0), (3, 0, 7, 1, 6, 2, 5, 4)):
        tokens = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in order])
        fields = {x: getattr(call, x)[tokens] for x in ("q", "k", "v", "g", "beta")}
        moved = type(call)(rows=page_table(64, *(MIXED[i] for i in order)), **fields)
        moved_out, moved_pool = check(target, moved, rows)
        for i, b in zip(order, range(len(order)), strict=True):
            if ends[i + 1] - ends[i] > MOST:
                continue  # of a long one the batch may choose how it is cut
            new = slice(*moved.rows.cu_seqlens[b : b + 2])
            assert np.array_equal(moved_out[new], out[ends[i] : ends[i + 1]])
            assert np.array_equal(moved_pool[MIXED[i][0]], pool[MIXED[i][0]])


def test_alone_equals_mixed(target):
    """A short sequence has the same bytes by itself, where nothing but short ones can be."""
    call, rows = make_prefill(914, page_table(64, *MIXED)), make_pool(914, ROWS, 4)
    out, pool = check(target, call, rows)
    ends = call.rows.cu_seqlens
    for i, span in enumerate(MIXED):
        if ends[i + 1] - ends[i] > MOST:
            continue
        alone = call.part(ends[i], ends[i + 1], page_table(64, span))
        alone_out, alone_pool = check(target, alone, rows)
        assert np.array_equal(alone_out, out[ends[i] : ends[i + 1]])
        assert np.array_equal(alone_pool[span[0]], pool[span[0]])


@pytest.mark.parametrize("bound", [16, 17, 9])
def test_promised_bound(target, bound):
    """max_seqlen may spare the chunk kernels; it changes no byte, and a longer sequence is dead."""
    spans = MIXED[1:]
    call, rows = make_prefill(923, page_table(64, *spans)), make_pool(923, ROWS, 4)
    out, pool = check(target, call, rows)
    view = target.pool(rows).view
    got = target.prefill(call, view, "bf16", options={"max_seqlen": bound})
    ends, start = call.rows.cu_seqlens, target.bits(target.pool(rows).view)
    for b, (ids, before, after) in enumerate(spans):
        tokens, written = slice(ends[b], ends[b + 1]), ids[before // 64 :]
        if after - before > bound:
            assert not target.values(got)[tokens].any()
            assert np.array_equal(target.bits(view)[written], start[written])
        else:
            assert np.array_equal(target.bits(got)[tokens], out[tokens])
            assert np.array_equal(target.bits(view)[written], pool[written])


def test_many_short_sequences(target):
    """More than the list's padding, with empty sequences and long ones between them."""
    spans, page = [], 0
    for i in range(70):
        new = (1, 3, 0, 16, 17, 5)[i % 6] if i != 40 else 70
        count = -(-(30 + new) // 64)
        spans.append((list(range(page, page + count)), 30, 30 + new))
        page += count
    call = make_prefill(915, page_table(64, *spans), (1, 2))
    check(target, call, make_pool(915, page, 2))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_later_tokens_and_old_states_stay_out(target, poison):
    """Poison in token 10 reaches neither earlier tokens nor the page that ends before it, and a
    state before a reset nothing behind it."""
    call, rows = make_prefill(916, page_table(64, ([0, 1], 58, 74))), make_pool(916, 3, 4)
    clean_out, clean = check(target, call, rows)
    poisoned = replace(call, k=call.k.copy(), v=call.v.copy())
    poisoned.v[10] = poison
    poisoned.k[10] = poison
    pool = target.pool(rows)
    out = target.bits(target.prefill(poisoned, pool.view, "bf16"))
    assert np.array_equal(out[:10], clean_out[:10])
    assert np.array_equal(target.bits(pool.view)[0], clean[0])

    g = call.g.copy()
    g[[0, 5]] = 0.0
    stale = rows.copy()
    stale[0] = poison
    check(target, replace(call, g=g), stale)


def test_skipped_stores_and_stale_pages(target):
    """-1 reads zero and stores nothing; the old bytes of a page that is only written are unread."""
    spans = ([-1, 4], 60, 70), ([3, -1], 60, 70), ([-1], 5, 12), ([5, 6], 64, 70)
    call, rows = make_prefill(917, page_table(64, *spans)), make_pool(917, ROWS, 4)
    rows[[4, 6]] = np.nan
    check(target, call, rows)


@pytest.mark.parametrize(
    "field, entry, value",
    [("indices", 1, 99), ("indices", 2, -2), ("last_page_len", 1, 0), ("last_page_len", 1, 65),
     ("indptr", 2, 2**31 - 1)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("beside_a_long_one", [False, True], ids=["short", "mixed"])
def test_broken_tables(target, field, entry, value, beside_a_long_one):
    """A broken short sequence stores nothing and outputs zeros; its neighbours keep their bytes."""
    spans = [([5], 8, 9), ([3, 4], 60, 70), ([1], 0, 9)]
    if beside_a_long_one:
        spans.append(([6, 7], 0, 80))
    table = page_table(64, *spans)
    call, rows = make_prefill(918, table), make_pool(918, ROWS, 4)
    out, pool = check(target, call, rows)
    array = getattr(table, field).copy()
    array[entry] = value
    broken = replace(call, rows=replace(table, **{field: array}))
    view = target.pool(rows).view
    output = target.array(np.full((len(call.q), 4, call.v.shape[2]), 7.0), "bf16")
    target.prefill(broken, view, "bf16", options={"output": output})
    start, dead = target.bits(target.pool(rows).view), {1, 2} if field == "indptr" else {1}
    for b, (ids, before, _) in enumerate(spans):
        tokens, written = slice(*table.cu_seqlens[b : b + 2]), ids[before // 64 :]
        if b in dead:
            assert not target.values(output)[tokens].any()
            assert np.array_equal(target.bits(view)[written], start[written])
        else:
            assert np.array_equal(target.bits(output)[tokens], out[tokens])
            assert np.array_equal(target.bits(view)[written], pool[written])


@pytest.mark.parametrize("states", [("fp32", "bf16", "fp16"), ("fp16", "fp32", "bf16")], ids=str)
@pytest.mark.parametrize("bound", [None, MOST, 5], ids=str)
def test_slot_form(target, states, bound):
    """Three pools with rows at any element, and a promised bound that longer sequences break."""
    new = (16, 1, 6, 4)
    slots = Slots(
        np.cumsum([0, *new]),
        state_indices=np.array([2, -1, 0, 1]),
        output_state_indices=np.array([0, 3, -1, 1]),
        checkpoint_state_indices=np.array([2, 0]),
        checkpoint_cu_starts=np.array([0, 1, 1, 2]),
        checkpoint_every=64,
        prefix_lens=np.array([60, 0, 58, 3]),
    )
    call, start = make_prefill(919, slots), make_pool(919, 4, 4)
    pools = [target.pool(start, dtype, gap=8) for dtype in states]
    names = ("initial_state", "output_state", "state_checkpoints")
    options = dict(zip(names, (pool.view for pool in pools), strict=True))
    options |= {"output_final_state": True, "max_seqlen": bound}
    expected = [rounded(start, dtype) for dtype in states]
    try:
        out, _ = target.slot_prefill(call, "bf16", options=options)
    except NotImplementedError as error:
        pytest.skip(str(error))
    kept = [b for b, n in enumerate(new) if bound is None or n <= bound]
    values, ends = target.values(out), slots.cu_seqlens
    truth = Oracle().prefill(call.cast("bf16"), tuple(expected), "bf16", "fp32")
    for b in range(4):
        tokens = slice(ends[b], ends[b + 1])
        if b not in kept:
            assert not values[tokens].any()
            continue
        assert relative_error(values[tokens], truth[tokens]) <= 2e-2
    for pool, dtype, rows, truth_rows in zip(
        pools[1:], states[1:], ({0: 0, 1: 3, 3: 1}, {0: 2, 2: 0}), expected[1:], strict=True
    ):
        for b, row in rows.items():
            wanted = truth_rows[row] if b in kept else rounded(start, dtype)[row]
            assert relative_error(target.values(pool.view)[row], wanted) <= 2e-2


@given(data=st.data())
def test_random_short_batches(target, data):
    """Up to five sequences of 0 to 20 new tokens, on pages of 64 or 128."""
    size = data.draw(st.sampled_from([64, 128]))
    spans, page = [], 0
    for _ in range(data.draw(st.integers(1, 5))):
        prefix = data.draw(st.integers(0, 140) | st.sampled_from([0, 63, 64, 120, 127, 128]))
        new = data.draw(st.integers(int(prefix == 0), 20))
        count = -(-(prefix + new) // size)
        spans.append((list(range(page, page + count)), prefix, prefix + new))
        page += count
    seed = data.draw(st.integers(1000, 2000))
    call = make_prefill(
        seed, page_table(size, *spans), data.draw(st.sampled_from([(1, 1), (1, 3)]))
    )
    check(
        target,
        call,
        make_pool(seed, page, call.heads),
        data.draw(st.sampled_from(["bf16", "fp16"])),
    )


def test_a_plan_of_either_form(torch_cuda):
    """A plan that was made without `deterministic` serves a call with it, and the other way."""
    target = torch_cuda
    call, rows = make_prefill(920, page_table(64, *MIXED)), make_pool(920, ROWS, 4)
    pool = target.pool(rows)
    arguments = target.prefill_arguments(call, "bf16") | {"state_pool": pool.view}
    expected = rows.copy()
    truth = Oracle().prefill(call, expected, "bf16")
    for of_plan, of_call in (("batch", None), (None, "batch"), (None, None)):
        plan = gdn_paged.prefill_plan(**arguments, deterministic=of_plan)
        pool.view.copy_(target.pool(rows).view)
        out = gdn_paged.chunk_gated_delta_rule_paged(**arguments, plan=plan, deterministic=of_call)
        assert relative_error(target.values(out), truth) <= 2e-2
        assert relative_error(target.values(pool.view), expected) <= 2e-2


def test_lengths_that_cross_the_border_in_a_graph(torch_cuda):
    """One captured call whose sequences become short and long between replays."""
    target, torch = torch_cuda, torch_cuda.arrays.torch
    steps = [
        (([0, 1], 60, 77), ([2], 10, 26), ([3], 5, 6)),  # 17, 16, 1
        (([0, 1], 60, 76), ([2], 10, 27), ([3], 5, 6)),  # 16, 17, 1
        (([0, 1], 60, 61), ([2], 10, 11), ([3], 5, 37)),  # 1, 1, 32
        (([0, 1], 60, 94), ([2], 10, 10), ([3], 5, 5)),  # 34, 0, 0
    ]
    rows = make_pool(921, 4, 4)
    call = make_prefill(921, page_table(64, *steps[0]))
    arguments = target.prefill_arguments(call, "bf16") | {
        "output": target.array(np.zeros(call.v.shape), "bf16"),
        "state_pool": target.pool(rows).view,
    }
    gdn_paged.chunk_gated_delta_rule_paged(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gdn_paged.chunk_gated_delta_rule_paged(**arguments)
    for spans in (*steps[1:], *steps, steps[0]):
        table = page_table(64, *spans)
        for name, fresh in target.page_arguments(table).items():
            arguments[name].copy_(fresh)
        arguments["cu_seqlens"].copy_(target.table(table.cu_seqlens))
        arguments["state_pool"].copy_(target.pool(rows).view)
        graph.replay()
        tokens, pool = int(table.cu_seqlens[-1]), rows.copy()
        expected = Oracle().prefill(replace(call, rows=table), pool, "bf16")
        out = target.values(arguments["output"])
        assert relative_error(out[:tokens], expected[:tokens]) <= 2e-2
        assert relative_error(target.values(arguments["state_pool"]), pool) <= 2e-2


def test_explain_says_who_is_short(torch_cuda):
    def text(spans, **options):
        call = make_prefill(922, page_table(64, *spans))
        arguments = torch_cuda.prefill_arguments(call, "bf16") | options
        pool = torch_cuda.pool(make_pool(922, ROWS, 4)).view
        function = gdn_paged.chunk_gated_delta_rule_paged
        return gdn_paged.explain(function, **arguments, state_pool=pool)

    assert "no chunks, no workspace" in text(MIXED[1:3])
    assert "workspace 0 bytes" in text(MIXED[1:3])
    assert "true lengths decide" in text(MIXED)
    assert "chunks (a single sequence)" in text(MIXED[:1])
    assert "chunks (batch-invariant)" in text(MIXED, deterministic="batch")

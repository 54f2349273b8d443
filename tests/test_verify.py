"""Speculative decoding: a step equals single decodes of the accepted tokens, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calls import Decode, page_table
from cases import make_pool
from compare import bars, relative_error, untouched_rows
from oracle import Oracle
from verify_calls import (
    Verify,
    VerifyOracle,
    drafts_of,
    engines,
    run_commit,
    run_verify,
    token_operands,
)

HEADS, DIM, PAGES, ROWS = (1, 2), 64, [4, 0, 6], 9
TOKENS = ("q", "k", "v", "a", "b")


def step_of(operands, lengths, seq_lens, accepted=None, pages=None, **more) -> Verify:
    """One step of sequences that own `pages` (one list each)."""
    lists = pages or [PAGES]
    return Verify(
        **operands,
        cu_seqlens=np.cumsum([0, *lengths]),
        indices=np.concatenate([np.array(x, np.int64) for x in lists]),
        indptr=np.cumsum([0] + [len(x) for x in lists]),
        seq_lens=np.array(seq_lens),
        accepted=None if accepted is None else np.array(accepted),
        **more,
    )


def first_tokens(operands, begin, end):
    return {x: y[begin:end] if x in TOKENS else y for x, y in operands.items()}


def io_of(target) -> str:
    return "fp32" if target.device == "cpu" else "bf16"


def allowed(target, io, state_dtype="fp32"):
    """(outputs, pages): fp32 outputs and fp32 pages are held to 1e-5 (CPU) and 1e-3 (GPU), what is
    stored in 16 bits to its rounding."""
    exact = 1e-5 if target.device == "cpu" else 1e-3
    rows = bars("cpu", io, state_dtype).rows if target.device == "cpu" else 4e-3
    out = exact if io == "fp32" else {"bf16": 4e-3, "fp16": 1e-3}[io]
    return out, exact if state_dtype == "fp32" else rows


def single_decodes(operands, start, count, rows):
    """(outputs, [pool after n tokens]) of `count` decodes one by one, float64."""
    pool, outs, pools = rows.copy(), [], [rows.copy()]
    for t in range(count):
        pages = PAGES[: (start + t) // 64 + 1]
        table = page_table(64, (pages, start + t, start + t + 1), decode=True)
        call = Decode(**first_tokens(operands, t, t + 1), rows=table)
        outs.append(Oracle().decode(call, pool))
        pools.append(pool.copy())
    return np.concatenate(outs), pools


@pytest.mark.parametrize("start", [0, 1, 57, 60, 63, 64, 100, 125])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_every_accepted_length(target, length, start):
    """Outputs of all draft tokens, then the fold of every prefix of them, over page ends."""
    io, rng = io_of(target), np.random.default_rng(length * 1000 + start)
    operands = token_operands(rng, 2 * length, HEADS, DIM, io)
    rows = make_pool(700, ROWS, 2, DIM)
    if start == 0:
        rows[:] = np.nan
    draft = first_tokens(operands, 0, length)
    outs, pools = single_decodes(draft, start, length, rows)
    out_bar, row_bar = allowed(target, io)
    for accepted in range(length + 1):
        pool = target.pool(rows).view
        call = step_of(draft, [length], [start], max_draft=length)
        drafts = drafts_of(target, call, io, 1)
        out = run_verify(target, call, pool, drafts, io)
        assert relative_error(target.values(out), outs) <= out_bar
        assert np.array_equal(target.bits(pool), target.bits(target.pool(rows).view))
        fresh = first_tokens(operands, length, 2 * length)
        call = step_of(fresh, [length], [start + accepted], [accepted], max_draft=length)
        out = run_verify(target, call, pool, drafts, io)
        kept = pools[accepted]
        assert relative_error(target.values(pool), kept) <= row_bar
        same = untouched_rows(rows, kept)
        assert np.array_equal(target.bits(pool)[same], target.bits(target.pool(rows).view)[same])
        expected, _ = single_decodes(fresh, start + accepted, length, kept)
        assert relative_error(target.values(out), expected) <= out_bar


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("accepted", range(6))
def test_rejected_tokens_leave_no_trace(target, accepted, poison):
    """The tokens after the accepted ones hold NaN or inf: not a byte of the pages, of later outputs
    and of the outputs before them differs."""
    io, results = io_of(target), []
    operands = token_operands(np.random.default_rng(701), 10, HEADS, DIM, io)
    rows = make_pool(701, ROWS, 2, DIM)
    for spoiled in (False, True):
        draft = {x: y.copy() for x, y in first_tokens(operands, 0, 5).items()}
        for name in TOKENS if spoiled else ():
            draft[name][accepted:] = poison
        pool = target.pool(rows).view
        call = step_of(draft, [5], [62])
        drafts = drafts_of(target, call, io, 1)
        first = run_verify(target, call, pool, drafts, io)
        fresh = first_tokens(operands, 5, 10)
        call = step_of(fresh, [5], [62 + accepted], [accepted])
        second = run_verify(target, call, pool, drafts, io)
        run_commit(target, step_of(fresh, [5], [62 + accepted + 5], [5]), pool, drafts, io)
        results.append([target.bits(x) for x in (first[:accepted], second, pool)])
    for clean, spoiled in zip(*results, strict=True):
        assert np.array_equal(clean, spoiled)


@given(data=st.data())
def test_random_engines(target, data):
    """Ragged batches over several steps against the truth; pages that no rule names keep bytes."""
    made = data.draw(engines(target.device))
    pool = target.pool(made.pool, made.state_dtype, made.gap)
    truth, waiting = made.pool.copy(), {}
    drafts = drafts_of(target, made.steps[0], made.io, made.slots)
    out_bar, row_bar = allowed(target, made.io, made.state_dtype)
    if made.state_dtype != "fp32":
        out_bar = max(out_bar, 8e-3)
    floor = 0.0 if target.device == "cpu" else 0.1
    for call in made.steps:
        before, start = target.bits(pool.view).copy(), truth.copy()
        out = run_verify(target, call, pool.view, drafts, made.io, **made.forms)
        expected = VerifyOracle().verify(call, truth, waiting, made.slots, made.state_dtype)
        assert relative_error(target.values(out), expected, max(floor, 0.02)) <= out_bar
        assert relative_error(target.values(pool.view), truth) <= row_bar
        kept = untouched_rows(start, truth)
        kept = [row for row in kept if not changed_by_rule(call, row)]
        assert np.array_equal(target.bits(pool.view)[kept], before[kept])
    size = int(np.prod(made.pool.shape[1:]))
    assert np.array_equal(target.bits(pool.base)[:, size:], pool.start_bits[:, size:])


def changed_by_rule(call: Verify, row: int) -> bool:
    """Whether a fold of the step may store this row (to the value it had, then)."""
    rules = VerifyOracle()
    for b in range(call.num_seqs):
        accepted = 0 if call.accepted is None else int(call.accepted[b])
        found = rules.fold_rows(call, b, accepted, 2**31)
        if found and row in [r for _, r in found[1]]:
            return True
    return False


wild = st.integers(-3, 12) | st.sampled_from([2**31 - 1, -(2**31) + 1, 64, 65, 139, 200, 1000])


@given(data=st.data())
def test_any_table(target, data):
    """Tables of arbitrary numbers: no crash, and what the rules call live is right."""
    io, names = io_of(target), ("cu_seqlens", "indptr", "seq_lens", "accepted", "draft_indices")
    operands = token_operands(np.random.default_rng(702), 8, HEADS, DIM, io)
    lists, lens = [[5, 2], [0, 7], [1]], [60, 100, 9]
    good = step_of(operands, [3, 4, 1], lens, [0, 0, 0], lists, draft_indices=np.arange(3))
    rows = make_pool(702, ROWS, 2, DIM)
    pool, truth, waiting = target.pool(rows).view, rows.copy(), {}
    drafts = drafts_of(target, good, io, 3)
    run_verify(target, good, pool, drafts, io)
    VerifyOracle().verify(good.cast(io), truth, waiting, 3)
    changes = {}
    for name in data.draw(st.sets(st.sampled_from([*names, "indices"]), min_size=1)):
        array = getattr(good, name).copy()
        array[data.draw(st.integers(0, len(array) - 1))] = data.draw(wild)
        changes[name] = array
    if data.draw(st.booleans()):
        changes.setdefault("accepted", np.array([2, 4, 1]))
    bad = replace(good, **changes)
    output = target.array(np.zeros((8, 2, DIM)), io)
    run_verify(target, bad, pool, drafts, io, options={"output": output})
    if conflicts(bad, waiting):
        return
    expected = VerifyOracle().verify(bad.cast(io), truth, waiting, 3)
    out_bar, row_bar = allowed(target, io)
    assert relative_error(target.values(output), expected) <= out_bar
    assert relative_error(target.values(pool), truth) <= row_bar


def conflicts(call: Verify, waiting) -> bool:
    """Sequences that share tokens, a slot, or a row that one of them writes."""
    rules, tokens, slots, written, read = VerifyOracle(), [], [], [], []
    for b in range(call.num_seqs):
        found = rules.resolve(call, b, waiting, 3, ROWS)
        tokens += range(found[0], found[0] + found[1])
        slot = b if call.draft_indices is None else int(call.draft_indices[b])
        slots += [slot] if slot >= 0 else []  # also of a broken one: what it finds there may be new
        if len(found) > 2:
            own = {row for _, row in found[5] if row >= 0}
            written += own
            read += [found[4]] if found[4] >= 0 and found[4] not in own else []
    shared = set(written) & set(read)
    return bool(shared) or any(len(set(x)) < len(x) for x in (tokens, slots, written))


def test_drafts_are_folded_once(target):
    """More than the last step had, the same tokens again, a slot of -1: nothing is stored."""
    io = io_of(target)
    operands = token_operands(np.random.default_rng(703), 3, HEADS, DIM, io)
    pool = target.pool(make_pool(703, ROWS, 2, DIM)).view
    call = step_of(operands, [3], [62])
    drafts = drafts_of(target, call, io, 1)
    run_verify(target, call, pool, drafts, io)
    before = target.bits(pool).copy()
    for accepted, more in ((4, {}), (9, {}), (-1, {}), (1, {"draft_indices": np.array([-1])})):
        out = run_verify(target, step_of(operands, [3], [70], [accepted], **more), pool, drafts, io)
        assert not target.values(out).any()
        assert np.array_equal(target.bits(pool), before)
    folded = step_of(operands, [3], [65], [3])
    run_commit(target, folded, pool, drafts, io)
    after = target.bits(pool).copy()
    assert not np.array_equal(after, before)
    run_commit(target, folded, pool, drafts, io)
    out = run_verify(target, replace(folded, accepted=np.array([1])), pool, drafts, io)
    assert not target.values(out).any()
    assert np.array_equal(target.bits(pool), after)


@pytest.mark.parametrize("start, accepted", [(60, 3), (62, 2), (62, 4), (63, 5), (0, 1), (64, 0)])
def test_commit_stores_what_a_step_would(target, start, accepted):
    io, pools = io_of(target), []
    operands = token_operands(np.random.default_rng(704), 10, HEADS, DIM, io)
    for fold in (run_verify, run_commit):
        pool = target.pool(make_pool(704, ROWS, 2, DIM)).view
        call = step_of(first_tokens(operands, 0, 5), [5], [start])
        drafts = drafts_of(target, call, io, 1)
        run_verify(target, call, pool, drafts, io)
        fold(target, step_of(first_tokens(operands, 5, 10), [5], [start + accepted], [accepted]),
             pool, drafts, io)  # fmt: skip
        pools.append(target.bits(pool))
    assert np.array_equal(*pools)


def test_a_row_gives_the_same_bytes_in_any_batch(target):
    io, starts = io_of(target), [3, 62, 127]
    lists = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    operands = token_operands(np.random.default_rng(705), 12, HEADS, DIM, io)
    call = step_of(operands, [4, 4, 4], starts, pages=lists)
    pool = target.pool(make_pool(705, ROWS, 2, DIM)).view
    out = target.bits(run_verify(target, call, pool, drafts_of(target, call, io, 3), io))
    for b in range(3):
        alone = step_of(first_tokens(operands, 4 * b, 4 * b + 4), [4], starts[b : b + 1],
                        pages=lists[b : b + 1])  # fmt: skip
        again = run_verify(target, alone, pool, drafts_of(target, call, io, 1), io)
        assert np.array_equal(target.bits(again), out[4 * b : 4 * b + 4])


def test_padding_and_no_tokens(target):
    """An empty page list is padding; a sequence without new tokens is folded all the same."""
    io = io_of(target)
    operands = token_operands(np.random.default_rng(706), 6, HEADS, DIM, io)
    lists, rows = [[5], [], [3]], make_pool(706, ROWS, 2, DIM)
    call = step_of(operands, [2, 2, 2], [10, 0, 20], pages=lists)
    pool, drafts = target.pool(rows).view, drafts_of(target, call, io, 3)
    out = target.values(run_verify(target, call, pool, drafts, io))
    assert not out[2:4].any() and out[:2].any() and out[4:].any()
    fresh = first_tokens(operands, 0, 2)
    call = step_of(fresh, [0, 0, 2], [12, 0, 20], [2, 0, 0], pages=lists)
    run_verify(target, call, pool, drafts, io)
    changed = [r for r in range(ROWS) if not np.array_equal(
        target.bits(pool)[r], target.bits(target.pool(rows).view)[r])]  # fmt: skip
    assert changed == [5]

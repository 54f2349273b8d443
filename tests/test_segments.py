"""Context-parallel prefill: sequences cut into segments that run at once."""

import re
from dataclasses import replace

import numpy as np
import pytest

import gdn_paged
from calls import page_table, rounded
from cases import U, make_pool, make_prefill, unit
from compare import bars, relative_error
from oracle import Oracle
from test_capture import captured, copy_tables

D = 128
SERVES = "cuda_sm90"  # the row with a context-parallel regime


@pytest.fixture
def cut_target(target):
    if target.prefill_row != SERVES:
        pytest.skip("this row has no context parallelism")
    return target


@pytest.fixture
def cut_torch(torch_cuda):
    if torch_cuda.prefill_row != SERVES:
        pytest.skip("this row has no context parallelism")
    return torch_cuda


def span(first_page, before, after, page_size):
    """A sequence on neighbouring pages."""
    pages = -(-after // page_size)
    return list(range(first_page, first_page + pages)), before, after


def spans_of(page_size, *lengths):
    """Sequences (tokens before, tokens after) on pages of their own, and the number of pages."""
    found, first = [], 0
    for before, after in lengths:
        found.append(span(first, before, after, page_size))
        first += len(found[-1][0])
    return found, first


def slot_form(target, arguments, pool, use_cp):
    """The paged call as the slot form, which takes `use_cp`."""
    names = ("cu_seqlens", "page_indices", "page_indptr", "last_page_len")
    tables = {name: arguments[name] for name in names}
    page_size = arguments["page_size"]
    slots = gdn_paged.gdn_paged_prefill_slots(**tables, page_size=page_size)
    paged = (*names[1:], "page_size", "state_pool")
    return {name: x for name, x in arguments.items() if name not in paged} | {
        "initial_state": pool, "output_state": pool, "state_checkpoints": pool,
        "output_final_state": True, "state_indices": slots.state_indices,
        "output_state_indices": slots.output_state_indices, "prefix_lens": slots.prefix_lens,
        "checkpoint_cu_starts": slots.checkpoint_cu_starts,
        "checkpoint_state_indices": tables["page_indices"],
        "checkpoint_every_n_tokens": page_size, "use_cp": use_cp,
    }  # fmt: skip


def run(target, call, rows, io="bf16", state_dtype="fp32", use_cp="auto", **options):
    pool = target.pool(rows, state_dtype).view
    if use_cp == "auto":
        return target.prefill(call, pool, io, options=options), pool
    arguments = target.prefill_arguments(call.cast(io), io) | options
    out, _ = gdn_paged.chunk_gated_delta_rule(**slot_form(target, arguments, pool, use_cp))
    return out, pool


def check(target, call, rows, io="bf16", state_dtype="fp32", **options):
    out, pool = run(target, call, rows, io, state_dtype, **options)
    expected_pool = rows.copy()
    expected = Oracle().prefill(call.cast(io), expected_pool, io, state_dtype)
    allowed = bars(target.device, io, state_dtype)
    assert relative_error(target.values(out), expected) <= allowed.out
    assert relative_error(target.values(pool), expected_pool) <= allowed.rows


MIXES = {
    "one": ((0, 1300),),
    "prefix in a chunk": ((70, 1100),),
    "borders": ((64, 64 + 512), (0, 1024), (128, 129 + 512)),
    "mixed": ((1000, 1900), (5, 20), (0, 0), (63, 700), (64, 65)),
}


@pytest.mark.parametrize("page_size", [64, 256, 1024, 4096])
@pytest.mark.parametrize("mix", MIXES)
def test_against_the_truth(cut_target, mix, page_size):
    spans, pages = spans_of(page_size, *MIXES[mix])
    call = make_prefill(700, page_table(page_size, *spans), dim=D)
    check(cut_target, call, make_pool(700, pages, 4, D), use_cp=True)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("io", ["bf16", "fp16"])
def test_dtypes(cut_target, io, state_dtype):
    spans, pages = spans_of(128, (70, 900), (0, 400))
    call = make_prefill(701, page_table(128, *spans), (1, 2), D)
    rows = make_pool(701, pages, 2, D, state_dtype)
    check(cut_target, call, rows, io, state_dtype, use_cp=True)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2, 2), (1, 6)], ids=str)
def test_heads(cut_target, heads):
    spans, pages = spans_of(64, (70, 600))
    call = make_prefill(702, page_table(64, *spans), heads, D)
    check(cut_target, call, make_pool(702, pages, max(heads), D), use_cp=True)


def test_l2norm(cut_target):
    spans, pages = spans_of(64, (70, 600))
    call = make_prefill(703, page_table(64, *spans), dim=D, l2norm=True)
    check(cut_target, call, make_pool(703, pages, 4, D), use_cp=True)


def test_the_prefix_page_is_rewritten(cut_target):
    """The page that holds the prefix gets the state of its end while later segments still need the
    state before it: many segments, and the same bytes each time."""
    spans, pages = spans_of(2048, (1000, 3000))
    call, rows = (
        make_prefill(704, page_table(2048, *spans), (1, 2), D),
        make_pool(704, pages, 2, D),
    )
    check(cut_target, call, rows, use_cp=True)
    first = None
    for _ in range(20):
        got = tuple(cut_target.bits(x).copy() for x in run(cut_target, call, rows, use_cp=True))
        first = first or got
        assert all(np.array_equal(x, y) for x, y in zip(got, first, strict=True))


def test_one_page_is_read_and_written(cut_target):
    """Prefix and new tokens lie in one page, which is read first and stored last."""
    table = page_table(8192, ([1], 100, 4000))
    call, rows = make_prefill(705, table, (1, 2), D), make_pool(705, 3, 2, D)
    check(cut_target, call, rows, use_cp=True)


def test_a_reset_ends_what_came_before(cut_target):
    """alpha = 0 inside a later segment: a NaN in the initial state goes no further."""
    spans, pages = spans_of(64, (64, 64 + 1280))
    call = make_prefill(706, page_table(64, *spans), (1, 2), D)
    call.g[0] = 0.0
    call.g[700] = 0.0
    rows = make_pool(706, pages, 2, D)
    rows[0] = np.nan
    out, pool = run(cut_target, call, rows, use_cp=True)
    clean = rows.copy()
    clean[0] = 0
    expected_pool = clean.copy()
    expected = Oracle().prefill(call.cast("bf16"), expected_pool, "bf16")
    assert relative_error(cut_target.values(out), expected) <= 2e-2
    assert relative_error(cut_target.values(pool)[1:], expected_pool[1:]) <= 2e-2


def test_a_late_reset_ends_a_nan(cut_target):
    """What is not finite lives until a reset at the start of a chunk and not past it."""
    spans, pages = spans_of(64, (64, 64 + 1280))
    call = make_prefill(707, page_table(64, *spans), (1, 2), D)
    call.g[704] = 0.0
    rows = make_pool(707, pages, 2, D)
    rows[0] = np.nan
    results = [
        [cut_target.values(x) for x in run(cut_target, call, rows, use_cp=cut)]
        for cut in (True, False)
    ]
    for cut, whole in zip(*results, strict=True):
        assert np.array_equal(np.isnan(cut), np.isnan(whole))
        finite = ~np.isnan(whole)
        assert np.abs(cut[finite] - whole[finite]).max() <= 2e-2 * np.abs(whole[finite]).max()


def long_call(seed, gate, correlated):
    tokens, heads = 32768, 2
    table = page_table(4096, (list(range(9)), 1000, 1000 + tokens))
    call = make_prefill(seed, table, (1, heads), D)
    g = None
    if gate == "mild":  # logsigmoid(x) / 16 of x in [-2, 2)
        g = rounded((1 + np.exp(-2 * U(seed, (tokens, heads)))) ** (-1 / 16), "fp32")
    k = call.k
    if correlated:
        k = rounded(
            unit(0.5 * unit(U(seed + 1, k.shape)) + unit(U(seed + 2, (1, 1, D)))),
            "bf16",
        )
    return replace(call, g=g, k=k)


@pytest.mark.parametrize("correlated", [False, True], ids=["unit", "correlated"])
@pytest.mark.parametrize("gate", ["none", "mild"])
def test_no_less_accurate_than_one_pass(cut_target, gate, correlated):
    """32768 tokens against float64: at most 1.1 times the error of the serial pass."""
    call, rows = long_call(708, gate, correlated), make_pool(708, 9, 2, D)
    expected_pool = rows.copy()
    expected = Oracle().prefill(call.cast("bf16"), expected_pool, "bf16")
    errors = []
    for cut in (True, False):
        out, pool = run(cut_target, call, rows, use_cp=cut)
        pairs = (
            (cut_target.values(out), expected),
            (cut_target.values(pool), expected_pool),
        )
        errors.append([np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs])
    for cut, whole in zip(*errors, strict=True):
        assert cut <= 1.1 * whole


def test_graph_with_new_lengths(cut_torch):
    """One captured call: one long sequence, then many short ones, then none, then a mixture; the
    bytes of a plain call each time."""
    target, tokens, pages = cut_torch, 2400, 60
    function = gdn_paged.chunk_gated_delta_rule_paged
    batches = (
        [(100, 2500), *[(0, 0)] * 5],
        [(0, 500), (70, 470), (64, 564), (3, 103), (0, 300), (1, 401)],
        [(0, 0)] * 6,
        [*[(0, 0)] * 4, (64, 2000), (0, 400)],
    )
    call = make_prefill(709, page_table(64, *spans_of(64, (0, tokens))[0]), (1, 2), D)
    rows = make_pool(709, pages, 2, D)

    def table_of(batch):
        table = page_table(64, *spans_of(64, *batch)[0])
        wide = np.zeros(pages, np.int64)
        wide[: len(table.indices)] = table.indices
        return replace(table, indices=wide)

    def arguments_of(batch):
        arguments = target.prefill_arguments(replace(call, rows=table_of(batch)), "bf16")
        output = target.array(np.zeros((tokens, 2, D)), "bf16")
        return arguments | {"output": output, "state_pool": target.pool(rows).view}

    replayed = arguments_of(batches[0])
    graph = captured(target, function, replayed)
    for batch in batches:
        copy_tables(target, replayed, table_of(batch))
        replayed["state_pool"].copy_(target.pool(rows).view)
        replayed["output"].zero_()
        graph.replay()
        plain = arguments_of(batch)
        function(**plain)
        for name in ("output", "state_pool"):
            assert np.array_equal(target.bits(replayed[name]), target.bits(plain[name]))


def test_batch_invariance(cut_target):
    """deterministic="batch" cuts nothing: alone, in a batch or without the regime, one result."""
    lengths = (70, 2000), (0, 300)
    spans, pages = spans_of(64, *lengths)
    call, rows = (
        make_prefill(710, page_table(64, *spans), (1, 2), D),
        make_pool(710, pages, 2, D),
    )
    whole, pool = (cut_target.bits(x).copy() for x in run(cut_target, call, rows, use_cp=False))
    batched = run(cut_target, call, rows, deterministic="batch")
    assert np.array_equal(cut_target.bits(batched[0]), whole)
    assert np.array_equal(cut_target.bits(batched[1]), pool)
    alone = call.part(0, 1930, page_table(64, spans[0]))
    out, alone_pool = run(cut_target, alone, rows, deterministic="batch")
    assert np.array_equal(cut_target.bits(out), whole[:1930])
    ids = spans[0][0]
    assert np.array_equal(cut_target.bits(alone_pool)[ids], pool[ids])
    with pytest.raises(NotImplementedError, match="use_cp"):
        run(cut_target, call, rows, use_cp=True, deterministic="batch")


def explained(target, lengths, use_cp="auto", **options):
    spans, pages = spans_of(1024, *lengths)
    call = make_prefill(711, page_table(1024, *spans), (1, 2), D)
    arguments = target.prefill_arguments(call, "bf16") | options
    arguments["cu_seqlens_cpu"] = np.asarray(call.rows.cu_seqlens, np.int32)
    pool = target.pool(make_pool(711, pages, 2, D)).view
    arguments = slot_form(target, arguments, pool, use_cp)
    return gdn_paged.explain(gdn_paged.chunk_gated_delta_rule, **arguments)


def test_explain_says_the_regime(cut_target):
    long = (0, 8192), (0, 100)
    text = explained(cut_target, long)
    assert "context parallel" in text and "sequence 1 in 1" in text
    assert "use_cp forbids it" in explained(cut_target, long, use_cp=False)
    assert "batch-invariant" in explained(cut_target, long, deterministic="batch")
    one = explained(cut_target, ((0, 64),))
    assert "one pass" in one and "two blocks" in one


@pytest.mark.parametrize("heads", [(2, 8), (8, 32), (16, 64)], ids=str)
def test_workspace_of_a_long_prompt(target, heads):
    """32768 tokens fit 256 MB with the maps of the segments, on every row and number of heads."""
    hq, hv = heads
    for use_cp in ("auto", False) if target.prefill_row != SERVES else ("auto", True, False):
        size = gdn_paged.prefill_workspace_size(
            1, 32768, hq, hq, hv, D, device=target.device, backend=target.prefill_row, use_cp=use_cp
        )
        assert size <= 256_000_000
        assert size > 0 or target.device == "cpu"


def test_workspace_is_exact(torch_cuda):
    """A call is served by the workspace that it names when it refuses a smaller one, and the size
    function gives no less: 32768 tokens, 64 heads."""
    target, torch = torch_cuda, torch_cuda.arrays.torch
    (hq, hv), tokens, page_size = (16, 64), 32768, 4096
    size = gdn_paged.prefill_workspace_size(
        1, tokens, hq, hq, hv, D, page_size=page_size, device="cuda", backend=target.prefill_row
    )
    shapes = {"q": (tokens, hq, D), "k": (tokens, hq, D), "v": (tokens, hv, D)}
    operands = {
        name: torch.full(shape, 0.01, dtype=torch.bfloat16, device="cuda")
        for name, shape in shapes.items()
    }
    table = page_table(page_size, (list(range(8)), 0, tokens))
    arguments = operands | target.page_arguments(table) | {
        "cu_seqlens": target.table(table.cu_seqlens), "page_size": page_size,
        "state_pool": torch.zeros(8, hv, D, D, device="cuda"), "backend": target.prefill_row,
    }  # fmt: skip
    scratch = torch.empty(size + 256, dtype=torch.uint8, device="cuda")
    scratch = scratch[-scratch.data_ptr() % 256 :]

    def needed(given):
        with pytest.raises(ValueError, match=r"workspace: \d+ bytes given, \d+ needed") as refusal:
            gdn_paged.chunk_gated_delta_rule_paged(**arguments, workspace=scratch[:given])
        return int(re.search(r"(\d+) needed", str(refusal.value))[1])

    exact = needed(256)
    assert exact <= size <= 256_000_000
    assert needed(exact - 1) == exact
    out = gdn_paged.chunk_gated_delta_rule_paged(**arguments, workspace=scratch[:exact])
    assert bool(torch.isfinite(out).all())

"""Page sizes that are no multiple of 64 (allow_unaligned_pages): chunks are cut at page ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import gdn_paged
from calls import Prefill, Slots, page_table
from cases import Defaults, chain, make_pool, make_prefill
from compare import bars, relative_error, untouched_rows
from oracle import Oracle
from test_hostile import GOOD, HUGE, edited

SIZES = (16, 100, 528, 816, 1648)
# (tokens before, new tokens) in pages and tokens: prefixes inside pages, at their ends, around
# the ends of chunks; new tokens inside a page, up to its end, and over several.
SPANS = {
    "from zero": [(0, 3, 5), (0, 1, 0), (0, 0, 1)],
    "inside pages": [(1, 0.5, 2.25), (0, 0.9, 1.3), (2, 0.1, 0.2)],
    "at page ends": [(1, 0, 1), (2, 0, 0.5), (1, 0.25, 0.75)],
}


def spans_of(name: str, size: int) -> list[tuple[int, int]]:
    """(tokens before, tokens after) of each sequence."""
    found = []
    for pages, begin, new in SPANS[name]:
        before = round((pages + begin) * size) if name != "from zero" else 0
        new = round(new * size) if name != "from zero" else round(begin * size) + new
        found.append((before, before + new))
    return found


def table_of(size: int, spans: list[tuple[int, int]], first_page=0):
    """Pages in a scrambled order, none shared; the table and the number of pages."""
    counts = [-(-after // size) for _, after in spans]
    pages = [int(p) for p in np.random.default_rng(size).permutation(sum(counts) + 2)]
    lists = [[pages.pop() + first_page for _ in range(n)] for n in counts]
    return page_table(size, *((ids, *s) for ids, s in zip(lists, spans, strict=True))), (
        sum(counts) + 2
    )


def made(seed: int, size: int, spans, heads=(1, 2), **options) -> tuple[Prefill, np.ndarray]:
    table, rows = table_of(size, spans)
    call = make_prefill(seed, table, heads, **options)
    return call, make_pool(seed, rows, call.heads)


def check(target, call: Prefill, pool: np.ndarray, options=None) -> tuple[np.ndarray, np.ndarray]:
    """Output and pages against the truth; the bits of both."""
    array = target.pool(pool).view
    start = target.bits(array).copy()
    out = target.prefill(call, array, "bf16", options=options)
    expected_pool = pool.copy()
    expected = Oracle().prefill(call, expected_pool, "bf16")
    allowed = bars(target.device, "bf16", normed=call.l2norm)
    floor = 0.0 if target.device == "cpu" else 0.1
    assert relative_error(target.values(out), expected, floor) <= allowed.out
    assert relative_error(target.values(array), expected_pool) <= allowed.rows
    kept = untouched_rows(pool, expected_pool)
    assert np.array_equal(target.bits(array)[kept], start[kept])
    return target.bits(out), target.bits(array)


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("name", SPANS)
@pytest.mark.parametrize("size", SIZES)
def test_equals_truth(target, size, name, l2norm):
    call, pool = made(900 + size, size, spans_of(name, size), l2norm=l2norm)
    first = check(target, call, pool)
    again = check(target, call, pool)
    assert all(np.array_equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("size", [1, 3, 15, 17, 63, 65, 127, 129])
def test_odd_sizes(target, size):
    """Pages shorter than a chunk, and those that end just before or after one."""
    spans = [(2 * size - 1, 2 * size + 200), (0, 70), (size, size + 1)]
    check(target, *made(920, size, spans))


@pytest.mark.parametrize("size", [100, 528])
def test_resets_at_page_ends(target, size):
    """alpha = 0 on the tokens around a page end, and NaN in the state before the reset."""
    spans = [(size // 2, 2 * size + 30)]
    call, pool = made(930, size, spans)
    for token in (size // 2 - 1, size // 2, 3 * size // 2, 20):
        call.g[token] = 0
    check(target, call, pool)
    call.g[0] = 0
    pool[call.rows.indices[0]] = np.nan
    check(target, call, pool)


def test_later_tokens_do_not_reach_a_page(target):
    """NaN in the first tokens of the next page, which share the short chunk's memory."""
    size = 100
    call, pool = made(931, size, [(0, 250)])
    for x in (call.q, call.k, call.v):
        x[size:] = np.nan
    array = target.pool(pool).view
    out = target.values(target.prefill(call, array, "bf16"))
    clean, _ = made(931, size, [(0, 250)])
    expected_pool = pool.copy()
    expected = Oracle().prefill(clean, expected_pool, "bf16")
    allowed = bars(target.device, "bf16")
    page = int(call.rows.indices[0])
    assert relative_error(out[:size], expected[:size]) <= allowed.out
    assert relative_error(target.values(array)[[page]], expected_pool[[page]]) <= allowed.rows


@pytest.mark.parametrize("size", [100, 528])
def test_cut_at_page_ends_gives_the_same_bytes(target, size):
    """One call against a call per page (fp32 pool): every row starts its chunks at page starts."""
    whole, pool = made(932, size, [(0, 3 * size + 40)])
    ids = [int(p) for p in whole.rows.indices]
    cuts = (size, 2 * size, 3 * size, 3 * size + 40)
    options = {"deterministic": "batch"}
    one, many = target.pool(pool).view, target.pool(pool).view
    out = target.bits(target.prefill(whole, one, "bf16", options=options))
    parts = [
        target.bits(target.prefill(part, many, "bf16", options=options))
        for part in chain(whole, size, ids, *cuts)
    ]
    assert np.array_equal(np.concatenate(parts), out)
    assert np.array_equal(target.bits(one), target.bits(many))


def test_aligned_sizes_do_not_depend_on_the_switch(target):
    call, pool = made(933, 128, [(70, 300), (0, 128)])
    results = []
    for allowed in (False, True):
        array = target.pool(pool).view
        options = {"allow_unaligned_pages": allowed}
        out = target.prefill(call, array, "bf16", options=options)
        results.append((target.bits(out), target.bits(array)))
    for x, y in zip(*results, strict=True):
        assert np.array_equal(x, y)


def test_many_sequences(target):
    """More sequences than a warp has lanes, of uneven lengths."""
    rng = np.random.default_rng(934)
    spans = [(int(b), int(b + n)) for b, n in rng.integers(0, 260, (70, 2))]
    spans = [(b, max(a, b + 1)) for b, a in spans]
    call, pool = made(934, 80, spans, heads=(1, 1))
    array = target.pool(pool).view
    out = target.prefill(call, array, "bf16")
    expected_pool = pool.copy()
    expected = Oracle().prefill(call, expected_pool, "bf16")
    allowed = bars(target.device, "bf16")
    assert relative_error(target.values(out), expected, 0.1) <= allowed.out
    assert relative_error(target.values(array), expected_pool) <= allowed.rows


def test_slots_and_plan(target):
    """Slots and a plan made before give the bytes of a call that makes them itself."""
    size = 528
    call, pool = made(935, size, [(500, 1200), (528, 1057), (0, 40)])
    table = target.page_arguments(call.rows)
    sizes = {"page_size": size, "allow_unaligned_pages": True}
    cu = target.table(call.rows.cu_seqlens)
    slots = gdn_paged.gdn_paged_prefill_slots(cu, **table, **sizes)
    arguments = target.prefill_arguments(call.cast("bf16"), "bf16")
    arrays = [target.pool(pool).view for _ in range(3)]
    plan = gdn_paged.prefill_plan(**arguments, state_pool=arrays[0], slots=slots)
    outs = [
        target.bits(target.prefill(call, array, "bf16", options=options))
        for array, options in zip(
            arrays, ({}, {"slots": slots}, {"slots": slots, "plan": plan}), strict=True
        )
    ]
    assert all(np.array_equal(outs[0], out) for out in outs[1:])
    bits = [target.bits(array) for array in arrays]
    assert all(np.array_equal(bits[0], x) for x in bits[1:])


def test_slot_form(target):
    """checkpoint_every_n_tokens = 100 of the slot form against the paged call."""
    size = 100
    call, pool = made(936, size, [(130, 430)])
    table = call.rows
    ids = [int(p) for p in table.indices]
    slots = Slots(table.cu_seqlens, [ids[1]], [ids[-1]], table.indices, [1], size, [130])
    paged, state = target.pool(pool).view, target.pool(pool).view
    by_table = target.prefill(call, paged, "bf16")
    options = dict.fromkeys(("initial_state", "output_state", "state_checkpoints"), state)
    options["output_final_state"] = True
    by_slots, _ = target.slot_prefill(replace(call, rows=slots), "bf16", options=options)
    assert np.array_equal(target.bits(by_slots), target.bits(by_table))
    assert np.array_equal(target.bits(state), target.bits(paged))


@pytest.mark.parametrize("entry", [3, HUGE, -5])
def test_broken_sequence_beside_good_ones(target, entry):
    """The tables of the hostile suite on pages of 80 tokens: neighbours keep their bytes."""
    good = replace(GOOD, page_size=80, last_page_len=np.array([20, 70, 9]))
    call, rows = make_prefill(937, good), make_pool(937, 10, 4)
    bad = replace(call, rows=edited(good, last_page_len=(1, 80 + abs(entry))))
    if entry < 0:
        bad = replace(call, rows=edited(good, indices=(3, entry)))
    pools = [target.pool(rows).view for _ in range(2)]
    outs = [target.prefill(c, p, "bf16") for c, p in zip((call, bad), pools, strict=True)]
    first, second = (target.bits(out) for out in outs)
    broken = slice(*good.cu_seqlens[1:3])
    assert not target.values(outs[1])[broken].any()
    first[broken] = second[broken] = 0
    assert np.array_equal(first, second)
    kept = [p for p in range(10) if p not in (0, 7, 9)]
    assert np.array_equal(target.bits(pools[0])[kept], target.bits(pools[1])[kept])


def test_validation_takes_the_switch(target):
    table = replace(GOOD, page_size=80, last_page_len=np.array([20, 70, 9]))
    call, pool = make_prefill(938, table), target.pool(make_pool(938, 10, 4)).view
    options = {"validate": "host"}
    assert target.prefill(call, pool, "bf16", options=options) is not None
    options["allow_unaligned_pages"] = False
    with pytest.raises(ValueError, match=r"page_size: 80 given.*allow_unaligned_pages"):
        target.prefill(call, pool, "bf16", options=options)
    sizes = {"page_size": 80, "cu_seqlens": target.table(table.cu_seqlens)}
    with pytest.raises(ValueError, match="allow_unaligned_pages"):
        gdn_paged.validate_page_table(**target.page_arguments(table), **sizes)
    wrong = edited(table, last_page_len=(1, 81))
    with pytest.raises(ValueError, match="1 to page_size = 80"):
        gdn_paged.validate_page_table(
            **target.page_arguments(wrong), **sizes, allow_unaligned_pages=True
        )


@pytest.mark.parametrize("byte", [0, 255])
def test_workspace_size_is_enough(torch_cuda, byte):
    """The size from host integers serves the call: short sequences around the ends of short pages,
    in scratch memory that holds anything."""
    import torch

    call, pool = made(939, 16, [(b, b + 3) for b in range(13, 53)])
    q, k, v = call.q, call.k, call.v
    size = gdn_paged.prefill_workspace_size(
        call.rows.num_seqs, len(q), q.shape[1], k.shape[1], v.shape[1], Defaults.head_size,
        page_size=16, allow_unaligned_pages=True, device="cuda", backend=torch_cuda.prefill_row,
    )  # fmt: skip
    scratch = torch.full((size + 256,), byte, dtype=torch.uint8, device="cuda")
    check(torch_cuda, call, pool, {"workspace": scratch[-scratch.data_ptr() % 256 :][:size]})


@pytest.mark.parametrize("size", [80, 528])
def test_segments_and_slabs(torch_cuda, size):
    """Sequences that the context-parallel regime cuts, and a batch that does not fit into one
    slab of the workspace, against the serial truth."""
    call, pool = made(940, size, [(size // 2, size // 2 + 4000)], heads=(1, 1))
    check(torch_cuda, call, pool)
    slots = gdn_paged.gdn_paged_prefill_slots(
        torch_cuda.table(call.rows.cu_seqlens), **torch_cuda.page_arguments(call.rows),
        page_size=size, allow_unaligned_pages=True,
    )  # fmt: skip
    if torch_cuda.prefill_row != "cuda_sm90":
        return
    table = call.rows
    rows = Slots(
        table.cu_seqlens, torch_cuda.values(slots[0]).astype(int),
        torch_cuda.values(slots[1]).astype(int), table.indices,
        torch_cuda.values(slots[2]).astype(int), size, torch_cuda.values(slots[3]).astype(int),
    )  # fmt: skip
    outs = []
    for use_cp in (False, True):
        state = torch_cuda.pool(pool).view
        options = dict.fromkeys(("initial_state", "output_state", "state_checkpoints"), state)
        options |= {"output_final_state": True, "use_cp": use_cp}
        out, _ = torch_cuda.slot_prefill(replace(call, rows=rows), "bf16", options=options)
        outs.append((torch_cuda.values(out), torch_cuda.values(state)))
    allowed = bars("cuda", "bf16")
    assert relative_error(outs[1][0], outs[0][0], 0.1) <= allowed.out
    assert relative_error(outs[1][1], outs[0][1]) <= allowed.rows


def test_slabs(torch_cuda):
    """Heads and tokens whose chunks need more memory than a call may have: the state is handed
    over between slabs, whose ends lie anywhere in a page."""
    import torch

    heads, size, tokens = 64, 100, 90_000
    D = torch_cuda.head_size
    torch.manual_seed(941)
    q, k = (torch.randn(tokens, 1, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(tokens, heads, D, device="cuda", dtype=torch.bfloat16) / 8
    g = torch.rand(tokens, heads, device="cuda") * 0.1 + 0.9
    pages = tokens // size
    table = torch_cuda.page_arguments(page_table(size, (list(range(3)), 0, 3 * size)))
    table["page_indices"] = torch.arange(pages, device="cuda", dtype=torch.int32) % 8
    table["page_indices"][-3:] = torch.tensor([8, 9, 10])
    table["page_indptr"] = torch.tensor([0, pages], device="cuda", dtype=torch.int32)

    def run(begin):
        """The last tokens from `begin` on, after the page before them."""
        pool = torch.zeros(11, heads, D, D, device="cuda")
        options = {"use_qk_l2norm_in_kernel": True, "backend": torch_cuda.prefill_row}
        options |= {"page_size": size, "allow_unaligned_pages": True, **table}
        cu = torch.tensor([0, tokens - begin], device="cuda", dtype=torch.int32)
        parts = (x[begin:] for x in (q, k, v, g))
        out = gdn_paged.chunk_gated_delta_rule_paged(
            *parts, cu_seqlens=cu, state_pool=pool, **options
        )
        return out, pool

    out, pool = run(0)
    # Gates below 1 make what is older than some thousand tokens vanish.
    short_out, short_pool = run(tokens - 3000)
    for x, y, bar in ((out[-1000:], short_out[-1000:], 4e-3), (pool[8:], short_pool[8:], 1e-3)):
        error = (x.float() - y.float()).flatten(1).norm(dim=1) / y.float().flatten(1).norm(dim=1)
        assert error.max() <= bar


@pytest.mark.parametrize("size", [80, 528])
def test_graph_replays_with_new_lengths(torch_cuda, size):
    """One captured graph serves tables whose page ends lie elsewhere."""
    import torch

    batches = ([(0, 600), (70, 700)], [(size - 1, size + 599), (0, 630)], [(40, 640), (1, 631)])
    calls = [made(942, size, spans) for spans in batches]
    most = max(len(pool) for _, pool in calls)
    entries = max(len(call.rows.indices) for call, _ in calls)
    pool = torch_cuda.pool(np.zeros((most, *calls[0][1].shape[1:]))).view
    first = torch_cuda.prefill_arguments(calls[0][0].cast("bf16"), "bf16")
    first["page_indices"] = torch.zeros(entries, dtype=torch.int32, device="cuda")
    output = torch.zeros_like(torch_cuda.array(calls[0][0].v, "bf16"))
    run = gdn_paged.chunk_gated_delta_rule_paged
    run(**first, state_pool=pool, output=output)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(**first, state_pool=pool, output=output)
    for call, rows in calls:
        arguments = torch_cuda.prefill_arguments(call.cast("bf16"), "bf16")
        for name, x in arguments.items():
            if isinstance(x, torch.Tensor):
                first[name][: len(x)].copy_(x)
        pool[: len(rows)].copy_(torch_cuda.pool(rows).view)
        graph.replay()
        eager = torch_cuda.pool(rows).view
        expected = torch_cuda.prefill(call, eager, "bf16")
        assert torch.equal(output, expected)
        assert torch.equal(pool[: len(rows)], eager)

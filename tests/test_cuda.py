"""What only a GPU shows: streams, scratch memory, repeats, far offsets."""

import numpy as np
import pytest

import gdn_paged
from calls import page_table
from cases import BATCH, make_pool, make_prefill
from compare import bars, relative_error
from oracle import Oracle

ROWS, H = 12, 4


def test_poisoned_workspace(torch_cuda):
    """Scratch memory full of NaN gives the bytes of fresh scratch memory."""
    target, torch = torch_cuda, torch_cuda.arrays.torch
    call, rows = make_prefill(604, page_table(64, *BATCH)), make_pool(604, ROWS, H)
    size = gdn_paged.prefill_workspace_size(
        3, 199, 2, 2, H, target.head_size, page_size=64, device="cuda", backend=target.prefill_row
    )
    results = []
    for byte in (0, 0xFF, 0x7F):
        scratch = torch.full((size + 256,), byte, dtype=torch.uint8, device="cuda")
        options = {"workspace": scratch[-scratch.data_ptr() % 256 :][:size]}
        pool = target.pool(rows).view
        out = target.prefill(call, pool, "bf16", options=options)
        results.append((target.bits(out).copy(), target.bits(pool).copy()))
    for out, pool in results[1:]:
        assert np.array_equal(out, results[0][0]) and np.array_equal(pool, results[0][1])


@pytest.mark.parametrize("how", ["current", "object", "int"])
def test_side_stream(torch_cuda, how):
    """Inputs written on a side stream after a delay; the call is ordered behind them."""
    target, torch = torch_cuda, torch_cuda.arrays.torch
    call, rows = make_prefill(605, page_table(64, *BATCH)), make_pool(605, ROWS, H)
    arguments, pool = target.prefill_arguments(call, "bf16"), target.pool(rows).view
    good, output = arguments["v"].clone(), target.array(np.zeros(call.v.shape), "bf16")
    arguments["v"].fill_(float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        arguments["v"].copy_(good)
        options = {
            "current": {},
            "object": {"stream": stream},
            "int": {"stream": stream.cuda_stream},
        }
        gdn_paged.chunk_gated_delta_rule_paged(
            **arguments, state_pool=pool, output=output, **options[how]
        )
    stream.synchronize()
    truth = rows.copy()
    expected = Oracle().prefill(call, truth, "bf16")
    assert relative_error(target.values(output), expected) <= bars("cuda", "bf16").out
    assert relative_error(target.values(pool), truth) <= bars("cuda", "bf16").rows


def test_200_repeats(torch_cuda):
    target, torch = torch_cuda, torch_cuda.arrays.torch
    call, rows = (
        make_prefill(606, page_table(64, *BATCH), (4, 8), 128),
        make_pool(606, ROWS, 8, 128),
    )
    arguments, start = target.prefill_arguments(call, "bf16"), target.pool(rows).view
    first = None
    for _ in range(200):
        pool = start.clone()
        out = gdn_paged.chunk_gated_delta_rule_paged(**arguments, state_pool=pool)
        first = first or (out, pool)
        assert torch.equal(out, first[0]) and torch.equal(pool, first[1])


def test_items_cut_between_blocks(torch_cuda):
    """160 sequence-heads on 132 multiprocessors: a row may cut some, and no bit may show it."""
    target, lengths, page = torch_cuda, (1100, 1216, 1024, 1290, 1170), 256
    spans, row = [], 0
    for n in lengths:
        pages = -(-n // page)
        spans.append((list(range(row, row + pages)), 0, n))
        row += pages
    call = make_prefill(607, page_table(page, *spans), (4, 32), 128)
    options = {"deterministic": "batch"}
    pool = target.pool(np.zeros((row, 32, 128, 128))).view
    out = target.bits(target.prefill(call, pool, "bf16", options=options)).copy()
    states, begin = target.bits(pool).copy(), 0
    for span in spans:
        alone = call.part(begin, begin + span[2], page_table(page, span))
        view = target.pool(np.zeros((row, 32, 128, 128))).view
        own = target.bits(target.prefill(alone, view, "bf16", options=options))
        assert np.array_equal(own, out[begin : begin + span[2]])
        assert np.array_equal(target.bits(view)[span[0]], states[span[0]])
        begin += span[2]


@pytest.mark.parametrize("prefix", [0, 37])
def test_ragged_lengths_end(torch_cuda, prefix):
    """Lengths that hung another kernel; 200 runs, the same bytes each time."""
    target, torch = torch_cuda, torch_cuda.arrays.torch
    lengths, spans, row = (1238, 1199, 1240, 1216, 1187, 1203, 519), [], 0
    for n in lengths:
        pages = -(-(prefix + n) // 1024)
        spans.append((list(range(row, row + pages)), prefix, prefix + n))
        row += pages
    call = make_prefill(607, page_table(1024, *spans), (16, 48), 128)
    arguments = target.prefill_arguments(call, "bf16")
    start = target.array(0.1 * np.ones((row, 48, 128, 128)), "bf16")
    first = None
    for _ in range(200):
        pool = start.clone()
        out = gdn_paged.chunk_gated_delta_rule_paged(**arguments, state_pool=pool)
        first = first or (out, pool)
    assert torch.equal(out, first[0]) and torch.equal(pool, first[1])
    assert bool(torch.isfinite(out).all())


def test_token_offsets_past_32_bits(torch_cuda):
    """T H V > 2^31; alpha = 0 three tokens before the end, so the last three alone count."""
    target, torch = torch_cuda, torch_cuda.arrays.torch
    T, heads = 262145, 64
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of device memory")
    generator = torch.Generator("cuda").manual_seed(608)
    q, k = (
        torch.nn.functional.normalize(
            torch.randn(T, 1, 128, device="cuda", generator=generator), dim=-1
        ).bfloat16()
        for _ in "qk"
    )
    v = torch.empty(T, heads, 128, dtype=torch.bfloat16, device="cuda").uniform_(-1, 1)
    g = torch.full((T, 1), 0.95, device="cuda").expand(T, heads).contiguous()
    g[T - 3] = 0
    pages = list(range(-(-T // 4096)))
    table = page_table(4096, (pages, 0, T))
    pool = torch.zeros(len(pages), heads, 128, 128, dtype=torch.bfloat16, device="cuda")
    out = gdn_paged.chunk_gated_delta_rule_paged(
        q,
        k,
        v,
        g,
        **target.page_arguments(table),
        cu_seqlens=target.table(table.cu_seqlens),
        page_size=4096,
        state_pool=pool,
        backend=target.prefill_row,
    )
    tail = [target.values(x[T - 3 :]) for x in (q, k, v, g)]
    short = make_prefill(
        608,
        page_table(64, ([0], 1, 4)),
        (1, heads),
        128,
        q=tail[0],
        k=tail[1],
        v=tail[2],
        g=tail[3],
        beta=None,
    )
    expected = Oracle().prefill(short, np.zeros((1, heads, 128, 128)), "bf16")
    assert relative_error(target.values(out[T - 3 :]), expected) <= bars("cuda", "bf16").out

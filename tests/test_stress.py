"""Many launches in a row on a GPU: random batches, no hang, no state out of bounds."""

from __future__ import annotations

import time

import numpy as np
import pytest

import gdn_paged
from test_segments import slot_form

LAUNCHES = 10_000
ROWS, TOKENS, DIM, PAGE = 1500, 6000, 128, 64
SECONDS = 120  # a hang must not hang the tests


class Tables:
    """Integer tables of many calls in one array on the device."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.begins = [0]

    def add(self, *tables: np.ndarray) -> None:
        for table in tables:
            self.parts.append(table.astype(np.int32))
            self.begins.append(self.begins[-1] + len(table))

    def on_device(self, target) -> list:
        array = target.arrays.array(np.concatenate(self.parts))
        return [array[a:b] for a, b in zip(self.begins[:-1], self.begins[1:], strict=True)]


def prefill_tables(rng: np.random.Generator, tables: Tables, most: int = 300) -> None:
    """cu_seqlens, page_indices, page_indptr and last_page_len of up to `most` ragged sequences."""
    count = int(rng.integers(1, most if rng.random() < 0.25 else min(most, 12)))
    new = rng.integers(0, max(2, TOKENS // count), count) * (rng.random(count) > 0.2)
    prefix = rng.integers(0, 150, count) * (rng.random(count) > 0.3)
    prefix = np.maximum(prefix, new == 0)
    pages = -(-(prefix + new) // PAGE)
    indptr = np.concatenate([[0], np.cumsum(pages)])
    last = prefix + new - (pages - 1) * PAGE
    tables.add(np.cumsum([0, *new]), rng.permutation(ROWS)[: indptr[-1]], indptr, last)


def decode_tables(rng: np.random.Generator, tables: Tables) -> None:
    """Rows to read and to write: in place, on a new page, first tokens, padding."""
    count = int(rng.integers(1, ROWS // 2))
    rows = rng.permutation(ROWS)
    kind = rng.random(count)
    write = np.where(kind < 0.05, -1, rows[:count])
    read = np.where(kind > 0.8, rows[count : 2 * count], write)
    tables.add(np.where(kind > 0.95, -1, read), write)


def wait(torch) -> None:
    event, limit = torch.cuda.Event(), time.monotonic() + SECONDS
    event.record()
    while not event.query():
        if time.monotonic() > limit:
            pytest.exit(f"the GPU has not come to an end within {SECONDS} s", returncode=3)
        time.sleep(0.01)


def operands(torch, rows: int, heads: tuple[int, int]) -> dict:
    generator = torch.Generator("cuda").manual_seed(700)

    def randn(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    def unit(*shape):
        return torch.nn.functional.normalize(randn(*shape), dim=-1).bfloat16()

    hq, hv = heads
    made = {"q": unit(rows, hq, DIM), "k": unit(rows, hq, DIM)}
    return made | {"v": randn(rows, hv, DIM).clamp(-3, 3).bfloat16()}


def test_random_prefills(torch_cuda):
    target, torch = torch_cuda, torch_cuda.arrays.torch
    rng, tables, (hq, hv) = np.random.default_rng(701), Tables(), (2, 4)
    for _ in range(LAUNCHES):
        prefill_tables(rng, tables)
    parts = tables.on_device(target)
    arguments = operands(torch, TOKENS, (hq, hv)) | {
        "g": torch.rand(TOKENS, hv, device="cuda") * 0.2 + 0.8,
        "beta": torch.rand(TOKENS, hv, device="cuda"),
        "output": torch.zeros(TOKENS, hv, DIM, dtype=torch.bfloat16, device="cuda"),
        "state_pool": torch.zeros(ROWS, hv, DIM, DIM, device="cuda"),
        "page_size": PAGE,
        "backend": target.prefill_row,
    }
    names = ("cu_seqlens", "page_indices", "page_indptr", "last_page_len")
    for i in range(0, len(parts), 4):
        gdn_paged.chunk_gated_delta_rule_paged(
            **arguments, **dict(zip(names, parts[i : i + 4], strict=True))
        )
    wait(torch)
    for name in ("output", "state_pool"):
        assert bool(torch.isfinite(arguments[name]).all())
    # The last call once more, alone: what the many calls before it left does not matter.
    pool, output = arguments["state_pool"], arguments["output"]
    results = []
    for _ in range(2):
        output.zero_()
        pool.fill_(0.01)
        gdn_paged.chunk_gated_delta_rule_paged(
            **arguments, **dict(zip(names, parts[-4:], strict=True))
        )
        results.append((output.clone(), pool.clone()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert float(pool.abs().max()) > 0.01


def test_random_segments(torch_cuda):
    """Sequences cut into segments, where the call demands it and where the device chooses, against
    the row that cuts none; both go on from the same pool."""
    target, torch = torch_cuda, torch_cuda.arrays.torch
    if target.prefill_row != "cuda_sm90":
        pytest.skip("this row has no context parallelism")
    rng, tables, (hq, hv) = np.random.default_rng(703), Tables(), (1, 2)
    for _ in range(LAUNCHES):
        prefill_tables(rng, tables, most=8)
    parts = tables.on_device(target)
    output = torch.zeros(TOKENS, hv, DIM, dtype=torch.bfloat16, device="cuda")
    pool = torch.full((ROWS, hv, DIM, DIM), 0.01, device="cuda")
    arguments = operands(torch, TOKENS, (hq, hv)) | {
        "g": torch.rand(TOKENS, hv, device="cuda") * 0.2 + 0.8,
        "beta": torch.rand(TOKENS, hv, device="cuda"),
        "page_size": PAGE,
    }
    expected, expected_pool = torch.zeros_like(output), pool.clone()
    worst = torch.zeros(2, device="cuda")
    names = ("cu_seqlens", "page_indices", "page_indptr", "last_page_len")
    for i in range(0, len(parts), 4):
        call = arguments | dict(zip(names, parts[i : i + 4], strict=True))
        use_cp = "auto" if i % 8 else True
        cut = slot_form(target, call | {"output": output}, pool, use_cp)
        gdn_paged.chunk_gated_delta_rule(**cut, backend="cuda_sm90")
        gdn_paged.chunk_gated_delta_rule_paged(
            **call, output=expected, state_pool=expected_pool, backend="cuda_portable"
        )
        own_pages = expected_pool[call["page_indices"].long()]
        errors = [
            (x.float() - y.float()).norm() / truth.float().norm().clamp_min(1e-3)
            for x, y, truth in (
                (output, expected, expected),
                (pool, expected_pool, own_pages),
            )
        ]
        worst = torch.maximum(worst, torch.stack(errors))
        expected_pool.copy_(pool)
    wait(torch)
    assert bool((worst <= 2e-2).all()), worst


def test_random_decodes(torch_cuda):
    target, torch = torch_cuda, torch_cuda.arrays.torch
    rng, tables, (hq, hv) = np.random.default_rng(702), Tables(), (2, 4)
    for _ in range(LAUNCHES):
        decode_tables(rng, tables)
    parts = tables.on_device(target)
    whole = operands(torch, ROWS, (hq, hv))
    whole |= {name: torch.randn(ROWS, hv, device="cuda") for name in ("a", "b")}
    gates = {name: torch.zeros(hv, device="cuda") for name in ("A_log", "dt_bias")}
    output = torch.zeros(ROWS, 1, hv, DIM, dtype=torch.bfloat16, device="cuda")
    pool = torch.zeros(ROWS, hv, DIM, DIM, device="cuda")
    for read, write in zip(parts[0::2], parts[1::2], strict=True):
        count = len(read)
        gdn_paged.gated_delta_rule_decode_pretranspose(
            **{name: x[:count, None] for name, x in whole.items()},
            **gates,
            state=None,
            initial_state=pool,
            initial_state_indices=read,
            output_state_indices=write,
            output=output[:count],
            use_qk_l2norm=True,
        )
    wait(torch)
    assert bool(torch.isfinite(output).all()) and bool(torch.isfinite(pool).all())
    assert float(pool.abs().max()) > 0.01

"""Fifty generated page tables with broken sequences, between red zones.

In each table some sequences are broken at random places by random values. They store nothing and
their outputs are zero, the others give the bytes of the intact table, and no byte changes outside
the pages and outputs of the call. README.md says how they run under compute-sanitizer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from arrays import native
from calls import PageTable, page_table
from cases import make_decode, make_pool, make_prefill
from targets import SENTINEL

SEEDS = range(20260100, 20260150)
ROWS, SEQUENCES, ZONE = 24, 5, 4096
BAD_IDS = (ROWS, ROWS + 1, -2, -ROWS, 2**31 - 1, -(2**31), 2**20)
WIDE_IDS = (2**32 + 3, 2**40, -(2**40), 2**63 - 1, -(2**63))  # would wrap into the pool as int32
BAD_OFFSETS = (-1, -5, 2**31 - 1, -(2**31), 10**6)
BAD_LENGTHS = (0, -1, 65, 2**31 - 1, -(2**31))


def spans(rng: np.random.Generator, decode: bool) -> list[tuple[list[int], int, int]]:
    """Pages of no other sequence, but the first two may share their first page to read it."""
    ids = [int(page) for page in rng.permutation(ROWS)]
    made = []
    for _ in range(SEQUENCES):
        count = int(rng.integers(1, 4))
        after = int(rng.integers((count - 1) * 64 + 1, count * 64 + 1))
        before = after - 1 if decode else int(rng.integers(0, after))
        made.append(([ids.pop() for _ in range(count)], before, after))
    if all(before >= 64 and len(pages) > 1 for pages, before, _ in made[:2]):
        made[1][0][0] = made[0][0][0]
    return made


class Damage:
    """A copy of a table whose sequences `dead` are broken."""

    def __init__(self, rng: np.random.Generator, table: PageTable, wide: bool):
        self.rng, self.wide, self.dead = rng, wide, set[int]()
        self.arrays = {x: getattr(table, x).copy() for x in ("indices", "indptr", "last_page_len")}
        self.decode = table.cu_seqlens is None
        for _ in range(int(rng.integers(1, 4))):
            kind = rng.choice([self.page_id, self.offset, self.length])
            kind(int(rng.integers(0, SEQUENCES)), table)
        self.table = replace(table, **self.arrays)

    def page_id(self, b: int, table: PageTable) -> None:
        """The last page, which every call touches."""
        choices = BAD_IDS + (WIDE_IDS if self.wide else ()) + ((-1,) if self.decode else ())
        self.arrays["indices"][table.indptr[b + 1] - 1] = self.rng.choice(choices)
        self.dead.add(b)

    def offset(self, b: int, table: PageTable) -> None:
        self.arrays["indptr"][b] = self.rng.choice(BAD_OFFSETS)
        self.dead |= {b, b - 1} - {-1}

    def length(self, b: int, table: PageTable) -> None:
        choices = BAD_LENGTHS[:2] + BAD_LENGTHS[4:] if self.decode else BAD_LENGTHS
        self.arrays["last_page_len"][b] = self.rng.choice(choices)
        self.dead.add(b)


class Zoned:
    """An array between two red zones of sentinels."""

    def __init__(self, target, x: np.ndarray, dtype: str):
        flat = np.concatenate([np.full(ZONE, SENTINEL), x.reshape(-1), np.full(ZONE, SENTINEL)])
        self.target, self.base = target, target.arrays.array(native(flat, dtype))
        self.view = self.base[ZONE : ZONE + x.size].reshape(x.shape)

    def bits(self) -> np.ndarray:
        """Of the view, after a look at the zones."""
        values = self.target.values(self.base)
        assert np.all(values[:ZONE] == SENTINEL) and np.all(values[-ZONE:] == SENTINEL)
        return self.target.bits(self.view)


def served(target) -> int:
    return 128 if target.prefill_row == "cuda_sm90" else 64


def run(target, call, rows, *, decode: bool, wide: bool):
    shape = (len(call.q), 1, 4, rows.shape[2]) if decode else (len(call.q), 4, rows.shape[2])
    output, pool = Zoned(target, np.full(shape, 7.0), "bf16"), Zoned(target, rows, "fp32")
    forms = {"options": {"output": output.view}, "index_dtype": "int64" if wide else "int32"}
    (target.decode if decode else target.prefill)(call, pool.view, "bf16", **forms)
    return output.bits(), pool.bits()


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("seed", SEEDS)
def test_hostile_table(target, seed, decode):
    rng = np.random.default_rng(seed)
    made, wide = spans(rng, decode), bool(rng.integers(0, 2))
    table, dim = page_table(64, *made, decode=decode), served(target)
    call = (make_decode if decode else make_prefill)(seed % 1000, table, dim=dim)
    rows = make_pool(seed % 1000, ROWS, 4, dim)
    damage = Damage(rng, table, wide)
    out, pool = run(target, call, rows, decode=decode, wide=wide)
    bad_out, bad_pool = run(
        target, replace(call, rows=damage.table), rows, decode=decode, wide=wide
    )
    start = target.bits(target.pool(rows).view)
    ends = range(SEQUENCES + 1) if decode else table.cu_seqlens
    expected, allowed = start.copy(), []
    for b, (pages, before, _) in enumerate(made):
        tokens = slice(ends[b], ends[b + 1])
        if b in damage.dead:
            assert not np.any(bad_out[tokens] & 0x7FFF), f"output of sequence {b}"
            continue
        assert np.array_equal(bad_out[tokens], out[tokens]), f"output of sequence {b}"
        allowed += pages[before // 64 :]
    expected[allowed] = pool[allowed]
    assert np.array_equal(bad_pool, expected)

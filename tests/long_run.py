"""Long runs: an engine that decodes and prefills for hours while its pages change hands.

    python tests/long_run.py --decode 1000000 --prefill 100000
    python tests/long_run.py --device cuda --seconds 25 --decode 1000000 --prefill 100000

Sequences grow, end, and start again, from nothing or on full pages of another sequence that they
share. A page that nobody holds is filled with NaN and reused. Sampled pages are recomputed in
float64 from the tokens of their sequence; nothing of the library takes part in that. At the end
memory, handles, threads and time per call must not have grown.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import gdn_paged

PAGE, DIM, HEADS, VOCABULARY = 64, 64, 2, 4096
LONGEST = 9 * PAGE
BARS = {"cpu": 1e-4, "cuda": 2e-2}


class Tokens:
    """The operands of every token that a sequence can hold, as the library and as float64."""

    def __init__(self, seed: int, device: str):
        rng = np.random.default_rng(seed)
        q, k = rng.standard_normal((2, VOCABULARY, 1, DIM))
        v = rng.standard_normal((VOCABULARY, HEADS, DIM))
        operands = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)] + [v]
        gates = list(rng.uniform(-3, 3, (2, VOCABULARY, HEADS)))
        heads = list(rng.uniform(-1, 1, (2, HEADS)))
        io: Any = ml_dtypes.bfloat16 if device == "cuda" else np.float32
        stored = [x.astype(io) for x in operands] + [x.astype(np.float32) for x in gates + heads]
        self.q, self.k, self.v, self.a, self.b, A_log, dt_bias = (
            x.astype(np.float64) for x in stored
        )
        rate = np.exp(A_log) * np.logaddexp(0, self.a + dt_bias)
        self.alpha, self.beta = np.exp(-rate), 1 / (1 + np.exp(-self.b))
        self.native = stored

    def state(self, ids: list[int]) -> np.ndarray:
        """[H, V, K] after these tokens, by the recurrence."""
        state = np.zeros((HEADS, DIM, DIM))
        for t in ids:
            k = self.k[t, 0]
            state *= self.alpha[t, :, None, None]
            change = self.beta[t, :, None] * (self.v[t] - state @ k)
            state += change[:, :, None] * k
        return state


class Host:
    """NumPy on the CPU."""

    def __init__(self, tokens: Tokens, pages: int):
        self.operands = tokens.native
        self.pool = np.full((pages, HEADS, DIM, DIM), np.nan, np.float32)

    def table(self, x: list[int]) -> Any:
        return np.array(x, np.int32)

    def rows(self, ids: list[int]) -> list[Any]:
        picked = np.array(ids)
        return [x[picked] for x in self.operands[:5]]

    def poison(self, page: int) -> None:
        self.pool[page] = np.nan

    def page(self, page: int) -> np.ndarray:
        return self.pool[page].astype(np.float64)

    def memory(self) -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Cuda(Host):
    """torch on a GPU."""

    def __init__(self, tokens: Tokens, pages: int):
        import torch

        self.torch = torch
        self.operands = [self._tensor(x) for x in tokens.native]
        self.pool: Any = torch.full((pages, HEADS, DIM, DIM), torch.nan, device="cuda")

    def _tensor(self, x: np.ndarray) -> Any:
        tensor = self.torch.from_numpy(x.astype(np.float32)).cuda()
        return tensor.bfloat16() if x.dtype == ml_dtypes.bfloat16 else tensor

    def table(self, x: list[int]) -> Any:
        return self.torch.tensor(x, dtype=self.torch.int32, device="cuda")

    def rows(self, ids: list[int]) -> list[Any]:
        picked = self.torch.tensor(ids, device="cuda")
        return [x.index_select(0, picked) for x in self.operands[:5]]

    def page(self, page: int) -> np.ndarray:
        return self.pool[page].double().cpu().numpy()

    def memory(self) -> float:
        """Of the host and of torch: what the card has given out is others' too."""
        return super().memory() + self.torch.cuda.memory_reserved() / 2**20


@dataclass
class Sequence:
    limit: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Engine:
    """Sequences on a pool, with reference counts for the pages that they share."""

    def __init__(self, seed: int, device: str, sequences: int = 8):
        self.random = random.Random(seed)
        self.tokens = Tokens(seed, device)
        pages = sequences * (LONGEST // PAGE + 1) + 8
        self.arrays = (Cuda if device == "cuda" else Host)(self.tokens, pages)
        self.bar = BARS[device]
        self.free = list(range(pages))
        self.holders = [0] * pages
        self.sequences = [Sequence(self.limit()) for _ in range(sequences)]
        self.sampled = self.reused = self.shared = 0
        self.worst = 0.0

    def limit(self) -> int:
        return self.random.randint(1, LONGEST)

    def release(self, sequence: Sequence) -> None:
        for page in sequence.pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.arrays.poison(page)
                self.free.append(page)
        sequence.pages, sequence.tokens, sequence.limit = [], [], self.limit()

    def restart(self, sequence: Sequence) -> None:
        """From nothing, or on full pages of another sequence."""
        self.release(sequence)
        donor = self.random.choice(self.sequences)
        full = min(len(donor.tokens), sequence.limit - 1) // PAGE
        if donor is sequence or full == 0 or self.random.random() < 0.4:
            return
        count = self.random.randint(1, full)
        sequence.pages = donor.pages[:count]
        sequence.tokens = donor.tokens[: count * PAGE]
        self.shared += count
        for page in sequence.pages:
            self.holders[page] += 1

    def grow(self, sequence: Sequence, count: int) -> list[int]:
        """New tokens and the pages for them."""
        new = [self.random.randrange(VOCABULARY) for _ in range(count)]
        sequence.tokens += new
        while len(sequence.pages) * PAGE < len(sequence.tokens):
            page = self.free.pop(self.random.randrange(len(self.free)))
            self.holders[page] = 1
            self.reused += 1
            sequence.pages.append(page)
        return new

    def table(self, batch: list[Sequence]) -> dict[str, Any]:
        indices = [page for s in batch for page in s.pages]
        indptr = [0]
        for s in batch:
            indptr.append(indptr[-1] + len(s.pages))
        last = [(len(s.tokens) - 1) % PAGE + 1 for s in batch]
        names = ("page_indices", "page_indptr", "last_page_len")
        arrays = map(self.arrays.table, (indices, indptr, last))
        return dict(zip(names, arrays, strict=True))

    def decode(self) -> None:
        for s in self.sequences:
            if len(s.tokens) >= s.limit:
                self.restart(s)
        ids = [self.grow(s, 1)[0] for s in self.sequences]
        q, k, v, a, b = (x[:, None] for x in self.arrays.rows(ids))
        A_log, dt_bias = self.arrays.operands[5:]
        gdn_paged.gated_delta_rule_decode_paged(
            q, k, v, A_log, a, dt_bias, b, use_qk_l2norm=False, state_pool=self.arrays.pool,
            num_threads=1, **self.table(self.sequences),
        )  # fmt: skip

    def prefill(self) -> None:
        batch = self.random.sample(self.sequences, self.random.randint(1, 4))
        ids, cu_seqlens = [], [0]
        for s in batch:
            if len(s.tokens) >= s.limit:
                self.restart(s)
            ids += self.grow(s, min(self.random.randint(1, 100), s.limit - len(s.tokens)))
            cu_seqlens.append(len(ids))
        q, k, v, a, b = self.arrays.rows(ids)
        A_log, dt_bias = self.arrays.operands[5:]
        gdn_paged.chunk_gated_delta_rule_paged(
            q, k, v, a, b, cu_seqlens=self.arrays.table(cu_seqlens), page_size=PAGE,
            state_pool=self.arrays.pool, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
            beta_is_logit=True, num_threads=1, **self.table(batch),
        )  # fmt: skip

    def check(self) -> None:
        """Recomputes one page of one sequence."""
        s = self.random.choice(self.sequences)
        if not s.pages:
            return
        entry = self.random.randrange(len(s.pages))
        expected = self.tokens.state(s.tokens[: (entry + 1) * PAGE])
        got = self.arrays.page(s.pages[entry])
        error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
        if not error <= self.bar:
            raise AssertionError(
                f"page {s.pages[entry]} is off by {error:.3g} ({self.bar} allowed)"
            )
        self.worst = max(self.worst, error)
        self.sampled += 1


@dataclass
class Window:
    """What a tenth of a run cost, and what the process holds at its end."""

    calls: int
    microseconds: float
    memory: float
    handles: int
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.calls:9d} calls  {self.microseconds:7.1f} us  {self.memory:8.1f} MiB  "
            f"{self.handles} handles  {self.threads} threads"
        )


def run(engine: Engine, what: str, calls: int, seconds: float, every: int) -> list[Window]:
    """`calls` calls, or as many as fit; a page is recomputed after `every` calls."""
    windows: list[Window] = []
    step, done, start = getattr(engine, what), 0, time.monotonic()
    while done < calls and (not seconds or time.monotonic() - start < seconds):
        size = min(max(calls // 10, 1), calls - done) if not seconds else 2000
        before, spent = time.process_time(), 0.0
        for i in range(size):
            step()
            if i % every == every - 1:
                pause = time.process_time()
                engine.check()
                spent += time.process_time() - pause
        spent = time.process_time() - before - spent
        done += size
        handles, threads = (len(os.listdir(f"/proc/self/{x}")) for x in ("fd", "task"))
        windows.append(Window(done, spent / size * 1e6, engine.arrays.memory(), handles, threads))
    return windows


def report(what: str, engine: Engine, windows: list[Window], bar: float) -> None:
    """Prints the run, at most ten windows of it, and raises if something grew."""
    print(f"{what}: {windows[-1].calls} calls")
    for window in windows[:: max(len(windows) // 10, 1)]:
        print(f"  {window}")
    print(
        f"  {engine.sampled} pages recomputed, worst {engine.worst:.2g}; {engine.reused} pages "
        f"taken, {engine.shared} shared"
    )
    settled = windows[len(windows) // 5 :]
    third = max(len(settled) // 3, 1)
    first, last = settled[0], settled[-1]
    early = statistics.median(w.microseconds for w in settled[:third])
    late = statistics.median(w.microseconds for w in settled[-third:])
    print(f"  time per call: late / early = {late / early:.3f}")
    assert last.memory <= first.memory + 8, "memory grows"
    assert last.handles == first.handles and last.threads == first.threads, "handles or threads"
    assert late <= bar * early, "calls get slower"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--decode", type=int, default=1_000_000, help="decode steps")
    parser.add_argument("--prefill", type=int, default=100_000, help="prefill calls")
    parser.add_argument("--seconds", type=float, default=0, help="for each of both; 0: no limit")
    parser.add_argument("--seed", type=int, default=20260101)
    parser.add_argument("--every", type=int, default=500, help="calls between recomputed pages")
    parser.add_argument("--bar", type=float, default=1.25, help="late time / early time, at most")
    options = parser.parse_args()
    engine = Engine(options.seed, options.device)
    for what in ("decode", "prefill"):
        calls = getattr(options, what)
        if calls > 0:
            windows = run(engine, what, calls, options.seconds, options.every)
            report(what, engine, windows, options.bar)


if __name__ == "__main__":
    sys.exit(main())

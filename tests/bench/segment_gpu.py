"""One prompt over two GPUs: its two halves as segments, against one GPU that runs all of it.

    python tests/bench/segment_gpu.py [--heads 16/64] [--tokens 131072] [--share 0.5] [--groups 2]

With two GPUs: the wall time of both, and the two passes that an exchange of states takes. With one:
the time of every step of either GPU, one after the other on the same device, and what they add up
to if the devices ran side by side, which is printed as a prediction. Microseconds; the median of
several runs. `--share` is the first GPU's part of the tokens, `--groups` the calls that the heads
are shared out to, so that one group's state is on its way while the next one begins.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

import gdn_paged

PAGE_SIZE, DIM, ROUNDS = 1024, 128, 7


class Tokens:
    """Operands of the tokens [begin, end) of a prompt on a device, with a pool for their pages."""

    def __init__(self, device: int, heads: tuple[int, int], begin: int, end: int) -> None:
        self.device = torch.device("cuda", device)
        self.begin, self.heads = begin, heads
        generator = torch.Generator(self.device).manual_seed(begin)

        def normal(*shape: int) -> torch.Tensor:
            kwargs: dict[str, Any] = {"device": self.device, "generator": generator}
            return torch.randn((end - begin, *shape), **kwargs, dtype=torch.bfloat16)

        unit = torch.nn.functional.normalize
        self.operands = {
            "q": unit(normal(heads[0], DIM), dim=-1),
            "k": unit(normal(heads[0], DIM), dim=-1),
            "v": normal(heads[1], DIM),
            "g": 1 - torch.sigmoid(normal(heads[1]).float()) / 64,
            "beta": torch.sigmoid(normal(heads[1]).float()),
        }
        self.place(begin, end)

    @classmethod
    def joined(cls, parts: list[Tokens]) -> Tokens:
        """The tokens of all parts on the device of the first."""
        whole = cls.__new__(cls)
        whole.device, whole.begin, whole.heads = parts[0].device, 0, parts[0].heads
        whole.operands = {
            name: torch.cat([part.operands[name].to(whole.device) for part in parts])
            for name in parts[0].operands
        }
        whole.place(0, len(whole.operands["q"]))
        return whole

    def place(self, begin: int, end: int) -> None:
        before, pages = begin // PAGE_SIZE, -(-end // PAGE_SIZE)
        own = list(range(pages - before))
        self.pool = torch.zeros(len(own), self.heads[1], DIM, DIM, device=self.device)

        def int32(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        self.output = torch.empty_like(self.operands["v"])
        self.state = torch.zeros(self.heads[1], DIM, DIM, device=self.device)
        self.arguments = self.operands | {
            "cu_seqlens": int32([0, end - begin]),
            "page_indices": int32([-1] * before + own),
            "page_indptr": int32([0, pages]),
            "page_size": PAGE_SIZE,
            "last_page_len": int32([end - (pages - 1) * PAGE_SIZE]),
            "state_pool": self.pool,
            "output": self.output,
        }

    def group(self, i: int, groups: int) -> Tokens:
        """Views of one of so many groups of heads."""
        part = Tokens.__new__(Tokens)
        part.device, part.begin = self.device, self.begin
        part.heads = (self.heads[0] // groups, self.heads[1] // groups)

        def of(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
            return x.chunk(groups, dim)[i]

        part.pool, part.output, part.state = of(self.pool), of(self.output), of(self.state, 0)
        operands = {name: of(x) for name, x in self.operands.items()}
        part.arguments = self.arguments | operands | {
            "state_pool": part.pool, "output": part.output,
        }  # fmt: skip
        return part

    def prefill(self) -> None:
        gdn_paged.chunk_gated_delta_rule_paged(**self.arguments)

    def begin_segment(self, last: bool) -> gdn_paged.Segment:
        state = None if self.begin == 0 else self.state
        with torch.cuda.device(self.device):
            return gdn_paged.segment_begin(**self.arguments, initial_state=state, last=last)


def timed(call: Callable[[], Any]) -> float:
    """From a device that waits, so the host's part of the call is in it."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[1:])[len(times) // 2]


def wall(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times[1:])[len(times) // 2]


def run_both(first: list[Tokens], second: list[Tokens]) -> None:
    """Groups of heads of the two segments: begin on both devices, the first one's states to the
    second, finish on both. The first group's state is on its way while the next one begins."""
    begun, ready = [], []
    with torch.cuda.device(first[0].device):
        for part in first:
            begun.append(part.begin_segment(last=False))
            ready.append(torch.cuda.Event())
            ready[-1].record()
    waiting = [part.begin_segment(last=True) for part in second]
    with torch.cuda.device(second[0].device):
        for i, part in enumerate(second):
            torch.cuda.current_stream().wait_event(ready[i])
            part.state.copy_(begun[i].offset, non_blocking=True)
            waiting[i].finish()
    with torch.cuda.device(first[0].device):
        for segment in begun:
            segment.finish()


def relative(x: torch.Tensor, expected: torch.Tensor) -> float:
    x, expected = x.to(expected.device).float(), expected.float()
    return ((x - expected).norm() / expected.norm()).item()


def steps_of(first: Tokens, second: Tokens) -> dict[str, float]:
    """Each step alone, on one device."""
    times = {
        "begin first": timed(lambda: first.begin_segment(last=False)),
        "begin last": timed(lambda: second.begin_segment(last=True)),
    }
    for name, part, last in (("finish first", first, False), ("finish last", second, True)):
        both = timed(lambda part=part, last=last: part.begin_segment(last=last).finish())
        times[name] = both - times[name.replace("finish", "begin")]
    middle = second.begin_segment(last=False)
    times["begin middle"] = timed(lambda: second.begin_segment(last=False))
    maps = middle.transition[None], middle.offset[None]
    times["combine"] = timed(
        lambda: gdn_paged.segment_combine(*maps, initial_state=first.state, state=second.state)
    )
    return times


def predicted(times: dict[str, float], groups: int, heads: int) -> float:
    """When both devices are done, if the steps of `times` ran side by side."""
    transfer = heads * DIM * DIM * 4 / 200e3 + 10  # the copy of a state at 200 GB/s, and a launch
    first_done = groups * (times["begin first"] + times["finish first"])
    second = groups * times["begin last"]
    for i in range(groups):
        arrival = (i + 1) * times["begin first"] + transfer
        second = max(second, arrival) + times["finish last"]
    return max(first_done, second)


def measure(heads: tuple[int, int], tokens: int, share: float, groups: int) -> None:
    devices = (0, 1) if torch.cuda.device_count() > 1 else (0, 0)
    cut = round(tokens * share / PAGE_SIZE) * PAGE_SIZE
    parts = [Tokens(devices[0], heads, 0, cut), Tokens(devices[1], heads, cut, tokens)]
    whole = Tokens.joined(parts)
    first, second = ([part.group(i, groups) for i in range(groups)] for part in parts)
    run_both(first, second)
    whole.prefill()
    errors = [
        relative(parts[0].output, whole.output[:cut]),
        relative(parts[1].output, whole.output[cut:]),
        relative(parts[1].pool, whole.pool[cut // PAGE_SIZE :]),
    ]
    one = timed(whole.prefill)
    name = f"{heads[0]}/{heads[1]} in {groups}, {cut} + {tokens - cut} tokens"
    print(f"{name}: one GPU {one:.0f}; differs by " + " ".join(f"{x:.1e}" for x in errors))
    if devices[1] > 0:
        two = wall(lambda: run_both(first, second))
        print(f"  two GPUs {two:.0f}: {two / one:.3f}", flush=True)
        return
    times = steps_of(first[0], second[0])
    print("  " + ", ".join(f"{step} {time:.0f}" for step, time in times.items()))
    two = predicted(times, groups, heads[1] // groups)
    print(f"  prediction for two GPUs {two:.0f}: {two / one:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", nargs="*", default=["16/64", "2/8"])
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--share", type=float, nargs="*", default=[0.5])
    parser.add_argument("--groups", type=int, nargs="*", default=[1])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU")
    for heads, share, groups in itertools.product(options.heads, options.share, options.groups):
        measure(tuple(map(int, heads.split("/"))), options.tokens, share, groups)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

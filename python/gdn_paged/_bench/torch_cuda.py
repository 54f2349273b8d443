"""A GPU by way of torch: arrays, captured graphs, device events, measured limits."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .machine import Machine, Step


class Gpu(Machine):
    """Tensors of one CUDA device."""

    chunked = True

    def __init__(self, device: str) -> None:
        index = torch.device(device).index
        torch.cuda.set_device(torch.cuda.current_device() if index is None else index)
        self.device = f"cuda:{torch.cuda.current_device()}"
        self.name = torch.cuda.get_device_name()
        self._random = torch.Generator(device=self.device).manual_seed(0)

    def normal(self, *shape: int) -> Any:
        return torch.randn(*shape, device=self.device, generator=self._random)

    def unit(self, x: Any) -> Any:
        return torch.nn.functional.normalize(x, dim=-1)

    def sigmoid(self, x: Any) -> Any:
        return x.sigmoid()

    def cast(self, x: Any, dtype: str) -> Any:
        return x.to(getattr(torch, dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return torch.zeros(shape, device=self.device, dtype=getattr(torch, dtype))

    def table(self, values: Any) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def times_us(self, contenders: dict[str, Step], repeats: int, rounds: int) -> dict[str, float]:
        return graph_us(contenders, repeats, rounds)

    def host_us(self, step: Step, calls: int) -> float | None:
        return host_us(step, calls)

    def burst_us(self, step: Step) -> float | None:
        return burst_us(step)

    def copy_rate(self) -> float:
        return copy_bandwidth()

    def flop_rate(self) -> float:
        n = 8192
        a = self.normal(n, n).bfloat16()
        out = a @ a
        us = min(elapsed_us(lambda: torch.mm(a, a, out=out), 5) for _ in range(5))
        return 5 * 2 * n**3 / us * 1e6

    def release(self) -> None:
        torch.cuda.empty_cache()


def capture(step: Step, repeats: int) -> Any:
    """A graph of step(0) .. step(repeats - 1), replayed once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            step(i)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def elapsed_us(work: Callable[[], object], times: int) -> float:
    """Device time of what `times` calls of `work` enqueue, in microseconds."""
    event: Any = torch.cuda.Event  # untyped in torch
    start, stop = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(times):
        work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def graph_us(
    contenders: dict[str, Step], repeats: int, rounds: int = 5, round_ms: float = 20.0
) -> dict[str, float]:
    """Microseconds per step of each contender: median of rounds that take the contenders in turn.

    Every step(i) is one call on data set i; `repeats` disjoint sets keep the caches cold. A round
    replays each graph for at least `round_ms`, so that the gap before the first replay is small.
    """
    graphs = {name: capture(step, repeats) for name, step in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    replays = dict.fromkeys(graphs, 2)
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            count = replays[name]
            us = elapsed_us(graph.replay, count)
            if turn == 0:  # warm-up: how many replays make a round
                replays[name] = max(2, math.ceil(round_ms * 1e3 * count / us))
            else:
                times[name].append(us / (count * repeats))
    return {name: statistics.median(values) for name, values in times.items()}


def burst_us(step: Step, rounds: int = 7, pause_s: float = 0.25) -> float:
    """Microseconds per step of two replays on a card that has rested: median of the rounds.

    A saturated H200 is limited by power: the same launch differs by up to 17 % between a card
    that has rested and one under load, such as `graph_us` sees.
    """
    graph = capture(step, repeats=1)
    times = []
    for _ in range(rounds):
        time.sleep(pause_s)
        graph.replay()  # wakes the card
        times.append(elapsed_us(graph.replay, 2) / 2)
    return statistics.median(times)


def host_us(step: Step, calls: int = 50, rounds: int = 9) -> float:
    """Host microseconds of one eager call, without waiting for the device: median of the rounds.

    The device is idle before a round, so that none waits for a place in the queue."""
    step(0)
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step(0)
        times.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def copy_bandwidth(gib: int = 2) -> float:
    """Bytes read plus written per second of a device-to-device copy, the best of five."""
    source = torch.empty(gib * 1024**3, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    us = min(elapsed_us(lambda: target.copy_(source), 5) for _ in range(5))
    return 5 * 2 * source.numel() / us * 1e6

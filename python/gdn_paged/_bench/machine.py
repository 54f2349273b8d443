"""Where a benchmark runs: arrays, timing and the measured limits of the CPU.

:mod:`gdn_paged._bench.torch_cuda` has the same for a GPU.
"""

from __future__ import annotations

import abc
import math
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gdn_paged.dispatch import has_cuda

Step = Callable[[int], None]


class Machine(abc.ABC):
    """Arrays and a clock of one device."""

    name: str
    device: str
    chunked: bool  # rows compute in chunks on matrix units

    @abc.abstractmethod
    def normal(self, *shape: int) -> Any:
        """fp32 values ~ N(0, 1), a fixed seed."""

    @abc.abstractmethod
    def unit(self, x: Any) -> Any:
        """x with rows of length 1."""

    @abc.abstractmethod
    def sigmoid(self, x: Any) -> Any: ...

    @abc.abstractmethod
    def cast(self, x: Any, dtype: str) -> Any:
        """x as "float32", "bfloat16" or "float16"."""

    @abc.abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any: ...

    @abc.abstractmethod
    def table(self, values: Any) -> Any:
        """An int32 table."""

    @abc.abstractmethod
    def times_us(self, contenders: dict[str, Step], repeats: int, rounds: int) -> dict[str, float]:
        """Microseconds per step of each contender, median of rounds that take them in turn.

        Every step(i) is one call on data set i of ``repeats`` disjoint ones.
        """

    @abc.abstractmethod
    def host_us(self, step: Step, calls: int) -> float | None:
        """Host microseconds of one call; None where the host does the work itself."""

    def burst_us(self, step: Step) -> float | None:
        """Microseconds of one step on a device that has rested; None where rest does not matter."""
        return None

    @abc.abstractmethod
    def copy_rate(self) -> float:
        """Bytes read plus written per second by a large copy."""

    @abc.abstractmethod
    def flop_rate(self) -> float:
        """FLOP per second of a large matrix product of the operands' kind."""

    def release(self) -> None:  # noqa: B027
        """Gives memory of dropped arrays back."""

    def permutation(self, n: int) -> Any:
        return np.random.default_rng(0).permutation(n)


class Cpu(Machine):
    """NumPy arrays; timed by the wall clock, as the calls do their work before they return."""

    device = "cpu"
    chunked = False

    def __init__(self) -> None:
        self.name = _processor()
        self._random = np.random.default_rng(0)
        try:
            import ml_dtypes
        except ImportError:  # NumPy has no bf16 of its own
            self._dtypes = {}
        else:
            self._dtypes = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}

    def _dtype(self, name: str) -> np.dtype[Any]:
        if name == "bfloat16" and not self._dtypes:
            raise ValueError("bfloat16: NumPy needs ml_dtypes for it; pip install ml_dtypes")
        return self._dtypes.get(name) or np.dtype(name)

    def normal(self, *shape: int) -> Any:
        return self._random.standard_normal(shape, np.float32)

    def unit(self, x: Any) -> Any:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def sigmoid(self, x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    def cast(self, x: Any, dtype: str) -> Any:
        target = self.zeros(x.shape, dtype)
        target[...] = x
        return target

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """On a cache line, as engines allocate; NumPy's own arrays lie 16 bytes past one."""
        size = math.prod(shape)
        block = np.zeros(size + 64, self._dtype(dtype))
        start = -block.ctypes.data % 64 // block.itemsize
        return block[start : start + size].reshape(shape)

    def table(self, values: Any) -> Any:
        return np.asarray(values, np.int32)

    def times_us(self, contenders: dict[str, Step], repeats: int, rounds: int) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in contenders}
        counts = dict.fromkeys(contenders, 1)
        for turn in range(rounds + 1):
            for name, step in contenders.items():
                seconds = _seconds(step, counts[name], repeats)
                if turn == 0:  # warm-up: how many calls make 20 ms
                    counts[name] = max(1, math.ceil(20e-3 * counts[name] / seconds))
                else:
                    times[name].append(seconds / (counts[name] * repeats) * 1e6)
        return {name: statistics.median(values) for name, values in times.items()}

    def host_us(self, step: Step, calls: int) -> float | None:
        return None

    def copy_rate(self) -> float:
        source = np.zeros(64 * 1024**2, np.uint8)
        target = np.ones_like(source)
        seconds = _best_seconds(lambda _: np.copyto(target, source))
        return 2 * source.nbytes / seconds

    def flop_rate(self) -> float:
        n = 1024
        a, b = self.normal(n, n), self.normal(n, n)
        out = np.empty_like(a)
        seconds = _best_seconds(lambda _: np.matmul(a, b, out=out))
        return 2 * n**3 / seconds


def _seconds(step: Step, times: int, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        for i in range(repeats):
            step(i)
    return time.perf_counter() - start


def _best_seconds(step: Step) -> float:
    """Of one call, the best of a quarter of a second of calls: others share the machine."""
    seconds: list[float] = []
    while sum(seconds) < 0.25:
        seconds.append(_seconds(step, 1, 1))
    return min(seconds)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def cuda_reason() -> str | None:
    """Why no GPU can be used through torch; None: one can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    return None


def open_machine(device: str | None) -> Machine:
    """The machine of "cpu", "cuda" or "cuda:1"; None: a GPU if torch sees one, else the CPU.

    Raises:
        ValueError: no such device, or none that can be used here.
    """
    if device == "cpu" or (device is None and (not has_cuda() or cuda_reason())):
        return Cpu()
    device = device or "cuda"
    if device.partition(":")[0] != "cuda":
        raise ValueError(f'device: {device!r}; expected "cpu", "cuda" or "cuda:1"')
    if not has_cuda():
        raise ValueError(f"device: {device!r} given, but this build has no CUDA kernels")
    reason = cuda_reason()
    if reason:
        raise ValueError(f"device: {device!r} given, but {reason}; expected cpu")
    from .torch_cuda import Gpu

    return Gpu(device)

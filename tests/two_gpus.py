"""Arrays of torch and CuPy on a named GPU, which one is current, and work for each."""

from __future__ import annotations

import importlib.util
import threading
import time

import pytest

import gdn_paged
from arrays import CupyArrays, TorchArrays


def count_devices() -> int:
    if importlib.util.find_spec("torch"):
        import torch

        return torch.cuda.device_count()
    if importlib.util.find_spec("cupy"):
        import cupy

        return cupy.cuda.runtime.getDeviceCount() if cupy.cuda.is_available() else 0
    return 0


COUNT = count_devices()
needs_two = pytest.mark.skipif(COUNT < 2, reason=f"{COUNT} GPUs, two needed")
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


class TorchFrame(TorchArrays):
    def __init__(self, device: int):
        super().__init__(f"cuda:{device}")

    def use(self, device: int):
        return self.torch.cuda.device(device)

    def current(self) -> int:
        return self.torch.cuda.current_device()

    def device_of(self, x) -> int:
        return x.device.index

    def stream(self, device: int):
        return self.torch.cuda.Stream(device)

    def sleep(self, stream) -> None:
        with self.torch.cuda.stream(stream):
            self.torch.cuda._sleep(50_000_000)


class CupyFrame(CupyArrays):
    def __init__(self, device: int):
        super().__init__()
        self.number = device

    def array(self, x):
        with self.use(self.number):
            return super().array(x)

    def numpy(self, x):
        with self.use(self.device_of(x)):
            return super().numpy(x)

    def use(self, device: int):
        return self.cupy.cuda.Device(device)

    def current(self) -> int:
        return self.cupy.cuda.runtime.getDevice()

    def device_of(self, x) -> int:
        return x.device.id


FRAMES = {"torch": TorchFrame, "cupy": CupyFrame}


class Load:
    """One call on one device, as often as wanted, timed to the end of the last."""

    def __init__(self, device: int, operation: str, batch: int, length: int, heads=(8, 16)):
        """`length` new tokens for each of `batch` sequences; `heads` is (Hq, Hv)."""
        import torch

        self.torch, self.device = torch, device
        generator = torch.Generator(device).manual_seed(780)
        tokens, state_heads, dim, page_size = batch * length, max(heads), 128, 1024
        pages = -(-length // page_size)

        def normal(*shape: int):
            like = {"device": device, "dtype": torch.bfloat16}
            return torch.randn(shape, generator=generator, **like)

        def int32(*values: int):
            return torch.tensor(values, dtype=torch.int32, device=device)

        operands = {x: normal(tokens, heads[x == "v"], dim) for x in ("q", "k", "v")}
        arguments = {
            "state_pool": torch.zeros(batch * pages, state_heads, dim, dim, device=device),
            "page_indices": int32(*range(batch * pages)),
            "page_indptr": int32(*range(0, batch * pages + 1, pages)),
        }
        if operation == "prefill":
            self.function = gdn_paged.chunk_gated_delta_rule_paged
            arguments |= {
                "page_size": page_size, "cu_seqlens": int32(*range(0, tokens + 1, length)),
                "last_page_len": int32(*[length - (pages - 1) * page_size] * batch),
                "g": torch.full((tokens, state_heads), 0.98, device=device),
                "use_qk_l2norm_in_kernel": True,
            }  # fmt: skip
        else:
            self.function = gdn_paged.gated_delta_rule_decode_paged
            operands = {x: y.unsqueeze(1) for x, y in operands.items()}
            arguments |= {x: normal(tokens, 1, state_heads) for x in ("a", "b")}
            arguments |= {x: torch.zeros(state_heads, device=device) for x in ("A_log", "dt_bias")}
            arguments["last_page_len"] = int32(*[2] * batch)
        output = operands["v"].new_zeros((*operands["q"].shape[:-2], state_heads, dim))
        self.arguments = operands | arguments | {"output": output}

    def run(self, calls: int) -> float:
        """Seconds per call."""
        self.torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            self.function(**self.arguments)
        self.torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) / calls


def run_together(loads: list[Load], calls: int) -> float:
    """Seconds per call of the slowest, each in a thread of its own."""
    times, gate = [0.0] * len(loads), threading.Barrier(len(loads))

    def work(i: int) -> None:
        gate.wait()
        times[i] = loads[i].run(calls)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(loads))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(times)

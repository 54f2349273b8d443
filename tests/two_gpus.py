"""Arrays of torch and CuPy on a named GPU, and which one is current."""

from __future__ import annotations

import importlib.util

import pytest

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

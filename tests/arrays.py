"""Arrays of NumPy, torch and CuPy behind one interface: `array` in, `numpy` out."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

NATIVE = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}


def native(x: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values in the stored dtype; `calls.rounded` made them exact before."""
    x = np.asarray(x)
    if dtype == "bf16":
        x = x.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(NATIVE[dtype])


def bits_of(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


class NumpyArrays:
    name = "numpy"
    device = "cpu"

    def array(self, x: np.ndarray) -> Any:
        return x.copy()

    def numpy(self, x: Any) -> np.ndarray:
        return x


class TorchArrays:
    name = "torch"

    def __init__(self, device: str):
        import torch

        self.torch, self.device = torch, device

    def array(self, x: np.ndarray) -> Any:
        if x.dtype == NATIVE["bf16"]:
            tensor = self.torch.from_numpy(x.view(np.int16).copy()).view(self.torch.bfloat16)
        else:
            tensor = self.torch.from_numpy(x.copy())
        return tensor.to(self.device)

    def numpy(self, x: Any) -> np.ndarray:
        x = x.detach().cpu()
        if x.dtype == self.torch.bfloat16:
            return x.contiguous().view(self.torch.int16).numpy().view(NATIVE["bf16"])
        return x.numpy()


class CupyArrays:
    name = "cupy"
    device = "cuda"

    def __init__(self):
        import cupy

        self.cupy = cupy

    def array(self, x: np.ndarray) -> Any:
        return self.cupy.asarray(bits_of(x)).view(x.dtype).reshape(x.shape)

    def numpy(self, x: Any) -> np.ndarray:
        bits = self.cupy.ascontiguousarray(x.view(f"u{x.dtype.itemsize}"))
        return self.cupy.asnumpy(bits).view(x.dtype)

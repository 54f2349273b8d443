"""Types of arguments."""

from __future__ import annotations

from typing import Any, Protocol, SupportsIndex, TypeVar


class DLPackArray(Protocol):
    """Any array that shares its memory by DLPack: PyTorch, NumPy, CuPy and others."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


class CudaStream(Protocol):
    """A stream object of CuPy, PyTorch, cuda.core or Numba."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


A = TypeVar("A", bound=DLPackArray)
Stream = int | CudaStream
Index = SupportsIndex

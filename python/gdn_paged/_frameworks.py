"""Memory of the framework that came in. Frameworks are found, never imported first."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def name_of(array: object) -> str:
    """ "torch", "numpy", "cupy", or the name of any other type."""
    for base in type(array).__mro__:
        module = base.__module__.partition(".")[0]
        if (module, base.__name__) in (
            ("torch", "Tensor"),
            ("numpy", "ndarray"),
            ("cupy", "ndarray"),
        ):
            return module
    return type(array).__name__


def _on_stream(array: Any, framework: str, stream: int | None) -> Any:
    """A context in which `framework` allocates for `stream`, so that its cache hands the memory
    out again in that stream's order alone."""
    module = sys.modules[framework]
    if framework == "torch" and stream is not None:
        return module.cuda.stream(module.cuda.ExternalStream(stream, device=array.device))
    if framework == "cupy":
        stack = contextlib.ExitStack()
        stack.enter_context(array.device)
        if stream is not None:
            stack.enter_context(module.cuda.ExternalStream(stream))
        return stack
    return contextlib.nullcontext()


def empty(like: Any, shape: tuple[int, ...], dtype: str | None, stream: int | None) -> Any:
    """An array like `like` (its dtype if `dtype` is None), for use on `stream` (None: current)."""
    framework = name_of(like)
    if framework not in ("torch", "numpy", "cupy"):
        raise ValueError(
            f"output, workspace: no memory of {framework} can be allocated; expected arrays of "
            "PyTorch, NumPy or CuPy, or every result given"
        )
    module = sys.modules[framework]
    with _on_stream(like, framework, stream):
        if framework == "torch":
            return like.new_empty(shape, dtype=getattr(module, dtype) if dtype else None)
        return module.empty(shape, dtype or like.dtype)


def _of_framework(framework: str, array: Any) -> Any:
    """`array` as one of `framework`, by way of fp32: DLPack of NumPy has no bf16."""
    given = name_of(array)
    if given == "torch":
        array = array.detach()
    if given == framework:
        return array
    if given == "torch":
        array = array.float()
    elif given in ("numpy", "cupy"):
        array = array.astype("float32")
    return sys.modules[framework].from_dlpack(array)


def start_from(state: Any, initial: Any, stream: int | None) -> None:
    """Fills a freshly allocated final state: sequences without new tokens keep their initial state,
    which is zero where there is none."""
    framework = name_of(state)
    with _on_stream(state, framework, stream):
        state[...] = 0 if initial is None else _of_framework(framework, initial)


def to_host(array: Any) -> Any:
    """A copy on the CPU (the array itself if it is there). Waits for the current stream."""
    framework = name_of(array)
    if framework == "torch":
        return array.cpu()
    return array.get() if framework == "cupy" else array


def to_bytes(array: Any) -> bytes:
    """The bytes of a uint8 array. Waits for the current stream."""
    host = to_host(array)
    return bytes(host.tolist()) if name_of(host) == "torch" else bytes(host.tobytes())


def synchronize(array: Any) -> None:
    """Waits for everything on the array's device."""
    framework = name_of(array)
    if framework == "torch":
        sys.modules["torch"].cuda.synchronize(array.device)
    elif framework == "cupy":
        with array.device:
            sys.modules["cupy"].cuda.runtime.deviceSynchronize()

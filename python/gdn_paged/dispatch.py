"""Which kernel row serves a call, and what this build holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from . import _core, decode, prefill, segment, verify

Operation = Literal["prefill_paged", "prefill", "decode_paged", "decode", "verify_paged", "segment"]


class KernelRow(str):
    """Name of a kernel row, as ``backend=`` takes it, with a description."""

    description: str

    def __new__(cls, name: str, description: str) -> KernelRow:
        row = super().__new__(cls, name)
        row.description = description
        return row

    @property
    def name(self) -> str:
        return str(self)


def kernel_rows(operation: Operation) -> list[KernelRow]:
    """Kernel rows of an operation in the order of preference: the first that serves a call runs.

    Args:
        operation: "prefill_paged", "prefill" (slot form), "decode_paged", "decode" (slot form),
            "verify_paged", which serves the commit too, or "segment".
    """
    rows = _core.kernel_rows()
    if operation not in [op for op, _, _ in rows]:
        raise ValueError(
            f'operation: {operation!r}; expected "prefill_paged", "prefill", "decode_paged", '
            '"decode", "verify_paged" or "segment"'
        )
    return [KernelRow(name, description) for op, name, description in rows if op == operation]


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Says which kernel row would serve ``function(*args, **kwargs)`` and why each earlier one
    refuses. Launches nothing.

    Args:
        function: :func:`gdn_paged.chunk_gated_delta_rule_paged`,
            :func:`gdn_paged.chunk_gated_delta_rule`,
            :func:`gdn_paged.gated_delta_rule_decode_paged`,
            :func:`gdn_paged.gated_delta_rule_decode_pretranspose`,
            :func:`gdn_paged.gated_delta_rule_verify_paged` or :func:`gdn_paged.segment_begin`.
        args, kwargs: what it would be called with.

    Raises:
        ValueError: an argument that the call would refuse.
    """
    entry = _EXPLAIN.get(function) if callable(function) else None
    if entry is None:
        raise ValueError(f"function: {function!r}; expected a prefill, decode or verify function")
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    describe, order = entry
    return describe(tuple(bound.arguments.get(name) for name in order))


_EXPLAIN: dict[Callable[..., Any], tuple[Callable[[tuple[Any, ...]], str], tuple[str, ...]]] = {
    prefill.chunk_gated_delta_rule_paged: (_core.explain_prefill_paged, prefill.PAGED_ORDER),
    prefill.chunk_gated_delta_rule: (_core.explain_prefill, prefill.FLAT_ORDER),
    decode.gated_delta_rule_decode_paged: (_core.explain_decode_paged, decode.PAGED_ORDER),
    decode.gated_delta_rule_decode_pretranspose: (_core.explain_decode, decode.PRETRANSPOSE_ORDER),
    verify.gated_delta_rule_verify_paged: (_core.explain_verify_paged, verify.VERIFY_ORDER),
    segment.segment_begin: (_core.explain_segment_begin, prefill.PAGED_ORDER),
}


def preload(device: int = 0) -> None:
    """Loads the kernels of a CUDA device, so that no later call loads anything.

    The first call on a device does the same by itself; inside a graph capture it cannot.

    Raises:
        RuntimeError: no such device, no kernels for it, or a build without CUDA.
    """
    _core.preload(device)


def has_cuda() -> bool:
    """Whether this build holds CUDA kernels."""
    return bool(_core.has_cuda)


def version() -> str:
    """Version of the loaded library, "major.minor.patch"."""
    number = _core.version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def build_info() -> str:
    """One line: version, compiler, backends and architectures of the loaded library."""
    return _core.build_info()

"""Checks of page tables and of the pages behind them."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _core, _frameworks
from ._typing import A, DLPackArray, Index, Stream


def validate_page_table(
    page_indices: DLPackArray,
    page_indptr: DLPackArray,
    last_page_len: DLPackArray,
    *,
    cu_seqlens: DLPackArray | None = None,
    page_size: Index = 0,
    num_pages: int = 0,
    num_tokens: int = 0,
    allow_padding: bool = False,
    mode: str = "host",
    stream: Stream | None = None,
    num_threads: int = 0,
) -> None:
    """Checks every rule of a page table; waits for the device if the tables lie on one.

    A table with ``cu_seqlens`` is checked for prefill, one without for decode. The rules: ids
    within the pool, lengths within the page, ordered ``page_indptr`` and ``cu_seqlens``, no more
    new tokens than the table holds, no page written by two sequences, and none written by one and
    read by another.

    Args:
        page_indices, page_indptr, last_page_len, cu_seqlens: int32 or int64 tables, as in
            :func:`gdn_paged.gdn_paged_prefill_slots`.
        page_size: needed with ``cu_seqlens``; 0 in decode skips the upper bound of
            ``last_page_len``.
        num_pages: rows of the pool; 0 skips that bound.
        num_tokens: rows of q; 0 skips that bound.
        allow_padding: -1 page ids and empty page lists are padding, not errors.
        mode: "host" checks a host copy; "device" checks CUDA tables where they are.

    Raises:
        ValueError: names the rule, the sequence, the entry and its value.
    """
    tables: list[Any] = [cu_seqlens, page_indices, page_indptr, last_page_len]
    if mode not in ("host", "device"):
        raise ValueError(f'validate: {mode!r}; expected None, "host" or "device"')
    if mode == "host":
        tables = [_frameworks.to_host(table) for table in tables]
        stream = None
    cu, indices, indptr, last = tables
    arguments = (cu, indices, indptr, page_size, last, stream, num_threads)
    report = _core.validate_page_table(arguments, num_pages, num_tokens, allow_padding)
    if report is None:
        return
    if stream is not None:
        _frameworks.synchronize(report)
    text = _core.report_text(_frameworks.to_bytes(report))
    if text:
        raise ValueError(text)


def rows_of(array: object) -> int:
    """Rows of an array; 0 (unknown) of anything else, which the call itself refuses."""
    shape: Any = getattr(array, "shape", ())
    return int(shape[0]) if isinstance(shape, tuple) and shape else 0


def check_gate_domain(g: Any, gate_domain: str, tokens: int) -> None:
    """Refuses log gates given as linear ones and the other way round. Reads ``g``."""
    if not hasattr(g, "__dlpack__"):  # None, or what the call itself refuses
        return
    if not hasattr(g, "__getitem__"):
        raise ValueError(
            f"g: {type(g).__name__}; expected an array that can be compared (PyTorch, NumPy or "
            "CuPy), validate looks at its values"
        )
    rows = g[:tokens]
    if gate_domain == "linear" and bool((rows < 0).any()):
        raise ValueError(
            'g: has values below 0; gate_domain="linear" expects alpha in [0, 1] '
            '(pass gate_domain="log" for its logarithm)'
        )
    if gate_domain == "log" and bool((rows > 0).any()):
        raise ValueError(
            'g: has values above 0; gate_domain="log" expects ln(alpha) <= 0 '
            '(pass gate_domain="linear" for alpha)'
        )


class PageStats(NamedTuple):
    """Health of pages, one entry per page; counts of -1 mark an id outside the pool."""

    nan_count: Any
    """NaN values, int64 ``[num_pages]``."""
    inf_count: Any
    """Infinite values, int64 ``[num_pages]``."""
    abs_max: Any
    """Largest finite magnitude, float32 ``[num_pages]``."""


def page_stats(
    state_pool: A,
    page_indices: A | None = None,
    *,
    stream: Stream | None = None,
    num_threads: int = 0,
) -> PageStats:
    """NaN and inf counts and the largest finite magnitude of pages.

    Args:
        state_pool: ``[num_pages, H, V, K]``, fp32, bf16 or fp16, dense rows.
        page_indices: int32 or int64 ids of the pages to look at; None: all of them.
    """
    return PageStats(*_core.page_stats(state_pool, page_indices, stream, num_threads))

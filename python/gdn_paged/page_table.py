"""Checks of page tables and of the pages behind them."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _core, _frameworks
from ._typing import A, DLPackArray, Index, Stream


class PageTableReport:
    """What a check of a page table found, or will have found once its stream is that far.

    On a GPU the check runs behind the work that the stream already has, and nothing waits for it:
    ask for the text when the results of the step are there anyway. A check that a CUDA graph
    captured writes the same report again with every replay.
    """

    __slots__ = ("_stream", "array")

    def __init__(self, array: Any, stream: Stream | None):
        self.array = array
        """The report as bytes, uint8 ``[40]`` where the tables are (C: gdn_page_table_report_t)."""
        self._stream = stream

    def text(self) -> str:
        """The broken rule with its sequence, entry and value; "" for a table without a fault.

        Copies the report to the host and waits for that."""
        if self._stream is not None:
            _frameworks.synchronize(self.array)
        return _core.report_text(_frameworks.to_bytes(self.array))

    def raise_if_broken(self) -> None:
        """ValueError with the text, if there is a fault."""
        text = self.text()
        if text:
            raise ValueError(f"page table: {text}")


def page_table_report(
    page_indices: DLPackArray,
    page_indptr: DLPackArray,
    last_page_len: DLPackArray,
    *,
    cu_seqlens: DLPackArray | None = None,
    page_size: Index = 0,
    num_pages: int = 0,
    num_tokens: int = 0,
    allow_padding: bool = False,
    initial_page_indices: DLPackArray | None = None,
    allow_unaligned_pages: bool = False,
    stream: Stream | None = None,
    num_threads: int = 0,
) -> PageTableReport:
    """Checks a page table where it is, without waiting: the form for a serving loop.

    Arguments and rules of :func:`validate_page_table`. Host tables are checked at once.

    Returns:
        a report to be asked later; keep it alive until then.

    Raises:
        ValueError: an argument is wrong. A broken table raises nothing here.
    """
    arguments = (
        cu_seqlens, page_indices, page_indptr, page_size, last_page_len, stream, num_threads,
        initial_page_indices, allow_unaligned_pages,
    )  # fmt: skip
    counts = (num_pages, num_tokens)
    return PageTableReport(
        _core.validate_page_table(arguments, counts, allow_padding, False), stream
    )


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
    initial_page_indices: DLPackArray | None = None,
    allow_unaligned_pages: bool = False,
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
        initial_page_indices, allow_unaligned_pages: as in the call.
        mode: "host" checks a host copy; "device" checks CUDA tables where they are.

    Raises:
        ValueError: names the rule, the sequence, the entry and its value.
    """
    tables = (cu_seqlens, page_indices, page_indptr, last_page_len, initial_page_indices)
    pages, counts = (page_size, allow_unaligned_pages), (num_pages, num_tokens)
    _check(tables, (pages, counts, allow_padding, False), mode, stream, num_threads)


def _check(
    tables: tuple[Any, ...],
    rules: tuple[tuple[Index, bool], tuple[int, int], bool, bool],
    mode: str,
    stream: Stream | None,
    num_threads: int,
) -> None:
    """`rules`: page size and whether it may be any, rows of pool and q, padding allowed, and
    whether rows of 0 count."""
    if mode not in ("host", "device"):
        raise ValueError(f'validate: {mode!r}; expected None, "host" or "device"')
    if mode == "host":
        tables = tuple(_frameworks.to_host(table) for table in tables)
        stream = None
    cu, indices, indptr, last, initial = tables
    page_size, any_size = rules[0]
    arguments = (
        cu, indices, indptr, page_size, last, stream, num_threads, initial, any_size
    )  # fmt: skip
    PageTableReport(_core.validate_page_table(arguments, *rules[1:]), stream).raise_if_broken()


def check_call(
    tables: tuple[Any, ...],
    pages: tuple[Index, bool],
    pool: object,
    q: object,
    mode: str,
    stream: Stream | None,
    num_threads: int,
) -> None:
    """The check of a call: the bounds are the rows of its arrays, also where these are empty.

    Args:
        tables: cu_seqlens (None in decode), page_indices, page_indptr, last_page_len,
            initial_page_indices.
        pages: page_size and allow_unaligned_pages.
    """
    shapes: list[Any] = [getattr(x, "shape", None) for x in (pool, q)]
    known = all(isinstance(shape, tuple) and shape for shape in shapes)
    counts = (rows_of(pool), rows_of(q))
    _check(tables, (pages, counts, False, known), mode, stream, num_threads)


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

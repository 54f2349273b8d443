"""Pool rows of a page table: computed once per step, shared by the calls of all layers."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _core
from ._typing import A, Index, Stream
from ._unbacked import registered


class GDNPagedPrefillSlots(NamedTuple):
    """Pool rows of a prefill step, int32 ``[num_seqs]`` each.

    A sequence with an empty page list or with a broken table has a ``prefix_lens`` of -1 and stores
    nothing; one without new tokens stores nothing either.
    """

    state_indices: Any
    """Page of the last prefix token; -1 (the zero state) if the prefix is empty."""
    output_state_indices: Any
    """Last page; -1 if the total ends on a page boundary, whose checkpoint is the final state."""
    checkpoint_cu_starts: Any
    """Entry of ``page_indices`` of the first page end that is stored."""
    prefix_lens: Any
    """Tokens before the new ones."""


class GDNPagedDecodeSlots(NamedTuple):
    """Pool rows of a decode step, int32 ``[batch]`` each; (-1, -1) is a padding row."""

    initial_state_indices: Any
    """Page to read: the previous one when the token opens a page, else the last; -1: zero state."""
    output_state_indices: Any
    """Page to write: the last one."""


def gdn_paged_prefill_slots(
    cu_seqlens: A,
    page_indices: A,
    page_indptr: A,
    page_size: Index,
    last_page_len: A,
    *,
    initial_page_indices: A | None = None,
    allow_unaligned_pages: bool = False,
    stream: Stream | None = None,
    num_threads: int = 0,
) -> GDNPagedPrefillSlots:
    """Pool rows of a prefill step, by the page rules of :func:`chunk_gated_delta_rule_paged`.

    Args:
        cu_seqlens: new tokens, packed: sequence b owns rows ``cu_seqlens[b]:cu_seqlens[b + 1]``;
            int32 or int64 ``[num_seqs + 1]``, as all tables here.
        page_indices: page ids of all sequences, ``[num_indices]``.
        page_indptr: sequence b owns ``page_indices[page_indptr[b]:page_indptr[b + 1]]``.
        page_size: tokens of a page, a positive multiple of 64, or see allow_unaligned_pages.
        last_page_len: tokens in each sequence's last page after the call, ``[num_seqs]``.
        initial_page_indices: the page to start from in place of a sequence's own, -1: its own;
            ``[num_seqs]``.
        allow_unaligned_pages: page_size may be any positive number.
        stream: of the launch on CUDA; None: the current stream of the arrays' framework.
        num_threads: of the CPU; 0: all.

    Raises:
        ValueError: an argument of the wrong type, shape or device.
    """
    tables = (cu_seqlens, page_indices, page_indptr, page_size, last_page_len)
    pages = (initial_page_indices, allow_unaligned_pages)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: None; expected an int32 or int64 table [num_seqs + 1]")
    try:
        return GDNPagedPrefillSlots(*_core.slots((*tables, stream, num_threads, *pages)))
    except _core.UnbackedTensorError:
        return registered("prefill_slots")(
            *tables, initial_page_indices=pages[0], allow_unaligned_pages=pages[1], stream=stream,
            num_threads=num_threads,
        )  # fmt: skip


def gdn_paged_decode_slots(
    page_indices: A,
    page_indptr: A,
    last_page_len: A,
    *,
    initial_page_indices: A | None = None,
    stream: Stream | None = None,
    num_threads: int = 0,
) -> GDNPagedDecodeSlots:
    """Pool rows of a decode step, by the page rules of :func:`gated_delta_rule_decode_paged`.

    Args and errors as in :func:`gdn_paged_prefill_slots`; every sequence has one new token.
    """
    tables = (
        None, page_indices, page_indptr, 0, last_page_len, stream, num_threads,
        initial_page_indices, False,
    )  # fmt: skip
    try:
        return GDNPagedDecodeSlots(*_core.slots(tables))
    except _core.UnbackedTensorError:
        return registered("decode_slots")(
            page_indices, page_indptr, last_page_len, initial_page_indices=initial_page_indices,
            stream=stream, num_threads=num_threads,
        )  # fmt: skip

"""Decode: one token per row, on a paged pool or on pool rows.

The rule of :mod:`gdn_paged.prefill` with gates from raw logits, all in fp32::

    alpha = exp(-exp(A_log) * softplus(a + dt_bias)),  beta = sigmoid(b)
"""

from __future__ import annotations

from typing import Any, Literal

from . import _core
from ._typing import A, DLPackArray, Stream
from ._unbacked import registered
from .page_table import check_call
from .slots import GDNPagedDecodeSlots

_COMMON_ORDER = (
    *("q", "k", "v", "A_log", "a", "dt_bias", "b", "scale", "output", "use_qk_l2norm"),
    *("stream", "deterministic", "num_threads", "backend"),
)
PAGED_ORDER = (
    *_COMMON_ORDER,
    *("state_pool", "page_indices", "page_indptr", "last_page_len", "slots"),
    "initial_page_indices",
)
PRETRANSPOSE_ORDER = (
    *_COMMON_ORDER,
    *("state", "initial_state", "initial_state_indices", "output_state_indices"),
)


def gated_delta_rule_decode_paged(
    q: A,
    k: DLPackArray,
    v: DLPackArray,
    A_log: DLPackArray,
    a: DLPackArray,
    dt_bias: DLPackArray | None,
    b: DLPackArray,
    scale: float | None = None,
    output: A | None = None,
    use_qk_l2norm: bool = True,
    *,
    state_pool: DLPackArray,
    page_indices: DLPackArray,
    page_indptr: DLPackArray,
    last_page_len: DLPackArray,
    backend: str = "auto",
    slots: GDNPagedDecodeSlots | None = None,
    initial_page_indices: DLPackArray | None = None,
    stream: Stream | None = None,
    validate: Literal["host", "device"] | None = None,
    deterministic: Literal["batch"] | None = None,
    num_threads: int = 0,
) -> A:
    """Decodes one token per row on a paged state pool, written in place.

    Row b owns the pages ``page_indices[page_indptr[b]:page_indptr[b + 1]]``. When its token opens
    a page (``last_page_len[b] == 1``) the previous page is read (the zero state if there is none)
    and the last one written; otherwise the last page is updated in place. A last page of -1 or an
    empty page list is a padding row: the pool is untouched and its output is zero.

    Args:
        q: ``[B, 1, Hq, K]``, fp32 (CPU only), bf16 or fp16; the last dimension dense, others free.
        k: ``[B, 1, Hk, K]``, the dtype of q.
        v: ``[B, 1, Hv, V]``, the dtype of q.
        A_log: ``[H]``, fp32, bf16 or fp16, as a, dt_bias and b.
        a: decay logits ``[B, 1, H]``.
        dt_bias: ``[H]``; None: 0.
        b: beta logits ``[B, 1, H]``.
        scale: of the output; None: ``1 / sqrt(K)``. A scale of 0 is 0 here.
        output: ``[B, 1, H, V]``, the dtype of q; None: allocated by the framework of q.
        use_qk_l2norm: q and k become ``x * rsqrt(sum(x**2) + 1e-6)`` in fp32, not rounded.
        state_pool: ``[num_pages, H, V, K]``, fp32, bf16 or fp16; rows dense, their stride free.
        page_indices: int32 or int64 ``[num_indices]``.
        page_indptr: int32 or int64 ``[B + 1]``.
        last_page_len: int32 or int64 ``[B]``, tokens in the last page, the new one included.
        backend: "auto", or the name of a row of :func:`kernel_rows`.
        slots: the rows of :func:`gdn_paged_decode_slots`, shared by the layers of a step.
        initial_page_indices: int32 or int64 ``[B]``; a row that is not its sequence's first token
            starts from this page instead of its own (-1: its own). Not with slots, which hold it.
        stream: of the launch on CUDA, an int or an object with ``__cuda_stream__``; None: the
            current stream of q's framework.
        validate: "host" or "device" checks the page table first and waits for the device.
        deterministic: "batch": a row gives the same bytes whatever else is in the batch.
        num_threads: of the CPU; 0: all.

    Returns:
        output.

    Raises:
        ValueError: names the argument, what came and what is expected.
        NotImplementedError: no kernel row serves the call; the text holds every row's reason.
        RuntimeError: the CUDA runtime failed, or this build has no kernels for the device.
    """
    if validate is not None:
        tables = (None, page_indices, page_indptr, last_page_len, initial_page_indices)
        check_call(tables, (0, False), state_pool, q, validate, stream, num_threads)
    arguments = (
        q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm,
        stream, deterministic, num_threads, backend,
        state_pool, page_indices, page_indptr, last_page_len, slots, initial_page_indices,
    )  # fmt: skip
    try:
        return _core.decode_paged(arguments)
    except _core.UnbackedTensorError:
        return registered("decode_paged")(**dict(zip(PAGED_ORDER, arguments, strict=True)))


def gated_delta_rule_decode_pretranspose(
    q: A,
    k: DLPackArray,
    v: DLPackArray,
    state: DLPackArray | None,
    A_log: DLPackArray,
    a: DLPackArray,
    dt_bias: DLPackArray | None,
    b: DLPackArray,
    scale: float | None = None,
    output: A | None = None,
    use_qk_l2norm: bool = True,
    initial_state: DLPackArray | None = None,
    initial_state_indices: DLPackArray | None = None,
    output_state_indices: DLPackArray | None = None,
    *,
    stream: Stream | None = None,
    deterministic: Literal["batch"] | None = None,
    num_threads: int = 0,
    backend: str = "auto",
) -> tuple[A, Any]:
    """Decodes one token per row on state rows, written in place.

    Args:
        q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, stream, deterministic,
        num_threads, backend: as in :func:`gated_delta_rule_decode_paged`.
        state: ``[B, H, V, K]``, row b is updated in place; or None and
        initial_state: a pool ``[rows, H, V, K]``, with
        initial_state_indices: int32 or int64 ``[B]``, the row to read; -1: the zero state.
        output_state_indices: int32 or int64 ``[B]``, the row to write, -1: no store; None: the
            row that was read. A row with both -1 is padding: its output is zero.

    Returns:
        ``(output, state)``, or ``(output, initial_state)``.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as in :func:`gated_delta_rule_decode_paged`.
    """
    arguments = (
        q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm,
        stream, deterministic, num_threads, backend,
        state, initial_state, initial_state_indices, output_state_indices,
    )  # fmt: skip
    try:
        return _core.decode(arguments)
    except _core.UnbackedTensorError:
        return registered("decode")(**dict(zip(PRETRANSPOSE_ORDER, arguments, strict=True)))

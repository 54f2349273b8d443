"""Prefill: the gated delta rule over packed sequences, on a paged pool or on pool rows.

Per state head, with S ``[V, K]`` kept in fp32 inside a call::

    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
    o_t = scale S_t q_t

(Yang, Kautz, Hatamizadeh: "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024, eq. 10.)
State, gate and output heads are ``H = max(Hq, Hv)``: with more v heads than q heads, head h reads q
and k of ``h // (Hv // Hq)``; with more q heads than k and v heads, k and v of ``h // (Hq // Hv)``.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from . import _core
from ._typing import A, DLPackArray, Index, Stream
from ._unbacked import registered
from .page_table import check_call, check_gate_domain, rows_of
from .slots import GDNPagedPrefillSlots

_COMMON_ORDER = (
    *("q", "k", "v", "g", "beta", "scale", "cu_seqlens", "use_qk_l2norm_in_kernel", "output"),
    *("gate_domain", "use_gate_in_kernel", "A_log", "dt_bias", "beta_is_logit"),
    *("stream", "workspace", "plan", "deterministic", "num_threads", "backend"),
)
PAGED_ORDER = (
    *_COMMON_ORDER,
    *("state_pool", "page_indices", "page_indptr", "page_size", "last_page_len", "slots"),
    *("initial_page_indices", "allow_unaligned_pages", "max_seqlen"),
)
FLAT_ORDER = (
    *_COMMON_ORDER,
    *("initial_state", "output_final_state", "output_state", "state_checkpoints"),
    *("checkpoint_cu_starts", "checkpoint_every_n_tokens", "use_cp", "state_indices"),
    *("max_seqlen", "cu_seqlens_cpu", "output_state_indices", "checkpoint_state_indices"),
    *("prefix_lens", "allow_unaligned_pages"),
)
_DTYPES = {"float32": 0x220, "bfloat16": 0x410, "float16": 0x210}


def chunk_gated_delta_rule_paged(
    q: A,
    k: DLPackArray,
    v: DLPackArray,
    g: DLPackArray | None = None,
    beta: DLPackArray | None = None,
    scale: float | None = None,
    *,
    cu_seqlens: DLPackArray,
    state_pool: DLPackArray,
    page_indices: DLPackArray,
    page_indptr: DLPackArray,
    page_size: Index,
    last_page_len: DLPackArray,
    use_qk_l2norm_in_kernel: bool = False,
    output: A | None = None,
    gate_domain: Literal["linear", "log"] = "linear",
    use_gate_in_kernel: bool = False,
    A_log: DLPackArray | None = None,
    dt_bias: DLPackArray | None = None,
    beta_is_logit: bool = False,
    slots: GDNPagedPrefillSlots | None = None,
    initial_page_indices: DLPackArray | None = None,
    allow_unaligned_pages: bool = False,
    max_seqlen: Index | None = None,
    stream: Stream | None = None,
    workspace: DLPackArray | None = None,
    plan: DLPackArray | None = None,
    validate: Literal["host", "device"] | None = None,
    deterministic: Literal["batch"] | None = None,
    num_threads: int = 0,
    backend: str = "auto",
) -> A:
    """Prefill of new tokens on a paged state pool, written in place.

    Sequence b owns the pages ``page_indices[page_indptr[b]:page_indptr[b + 1]]`` and holds
    ``(pages - 1) * page_size + last_page_len[b]`` tokens after the call. Its new tokens are the
    last ones, the tokens before them its prefix. The call reads the page that holds the last
    prefix token (the zero state if there is none), stores the state on every page whose end the new
    tokens reach, and the final state on the last page. A page that ends at or before the prefix is
    never written. A page id of -1 reads zero and is not stored.

    Args:
        q: ``[T, Hq, K]``, fp32 (CPU only), bf16 or fp16; the last dimension dense, others free.
        k, v: ``[T, Hk, K]`` and ``[T, Hv, V]``, the dtype of q.
        g: gates ``[T, H]``, fp32, bf16 or fp16; None: no decay.
        beta: ``[T, H]``, fp32, bf16 or fp16; None: 1.
        scale: of the output; None or 0: ``1 / sqrt(K)``.
        cu_seqlens: int32 or int64 ``[N + 1]``; sequence b has rows
            ``cu_seqlens[b]:cu_seqlens[b + 1]``. Rows past the last entry are neither read nor
            written.
        state_pool: ``[num_pages, H, V, K]``, fp32, bf16 or fp16; rows dense, their stride free.
        page_indices, page_indptr: int32 or int64 ``[num_indices]`` and ``[N + 1]``.
        page_size: tokens of a page, a positive multiple of 64, or see allow_unaligned_pages.
        last_page_len: int32 or int64 ``[N]``, 1 to page_size.
        use_qk_l2norm_in_kernel: ``x * rsqrt(sum(x**2) + 1e-6)`` on q and k, fp32, then rounded.
        output: ``[T, H, V]``, the dtype of q; None: allocated by the framework of q.
        gate_domain: what g holds: "linear" is alpha (0 resets the state exactly), "log" its
            natural logarithm.
        use_gate_in_kernel: g holds raw logits,
            ``ln(alpha) = -exp(A_log) * softplus(g + dt_bias)``.
        A_log, dt_bias: ``[H]``, with use_gate_in_kernel; dt_bias may be None.
        beta_is_logit: beta is ``sigmoid(beta)``, computed and kept in fp32.
        slots: the rows of :func:`gdn_paged_prefill_slots`, shared by the layers of a step.
        initial_page_indices: int32 or int64 ``[N]``: the page that a sequence with a prefix starts
            from, to share a partly filled one without a copy; -1: its own. Part of slots.
        allow_unaligned_pages: page_size may be any positive number.
        max_seqlen: a promised bound of new tokens per sequence; 16 or less is fastest on a GPU.
        stream: of the launch on CUDA, an int or an object with ``__cuda_stream__``; None: the
            current stream of q's framework.
        workspace: 1-D uint8 scratch memory, 256-byte aligned, of
            :func:`prefill_workspace_size` bytes; None: allocated by the framework of q.
        plan: what :func:`prefill_plan` returned for this step.
        validate: "host" or "device" checks page table and range of g first, waits for the device.
        deterministic: "batch": a sequence gives the same bytes whatever else is in the batch.
        num_threads: of the CPU; 0: all.
        backend: "auto", or the name of a row of :func:`kernel_rows`.

    Returns:
        output. A sequence with a broken table stores nothing and its output rows are zero.

    Raises:
        ValueError: names the argument, what came and what is expected.
        NotImplementedError: no kernel row serves the call; the text holds every row's reason.
        RuntimeError: the CUDA runtime failed, or this build has no kernels for the device.
    """
    if validate is not None:
        tables = (cu_seqlens, page_indices, page_indptr, last_page_len, initial_page_indices)
        pages = (page_size, allow_unaligned_pages)
        check_call(tables, pages, state_pool, q, validate, stream, num_threads)
        if not use_gate_in_kernel:
            check_gate_domain(g, gate_domain, rows_of(q))
    arguments = (
        q, k, v, g, beta, scale, cu_seqlens, use_qk_l2norm_in_kernel, output,
        gate_domain, use_gate_in_kernel, A_log, dt_bias, beta_is_logit,
        stream, workspace, plan, deterministic, num_threads, backend,
        state_pool, page_indices, page_indptr, page_size, last_page_len, slots,
        initial_page_indices, allow_unaligned_pages, max_seqlen,
    )  # fmt: skip
    try:
        return _core.prefill_paged(arguments)
    except _core.UnbackedTensorError:
        return registered("prefill_paged")(**dict(zip(PAGED_ORDER, arguments, strict=True)))


def chunk_gated_delta_rule(
    q: A,
    k: DLPackArray,
    v: DLPackArray,
    g: DLPackArray | None = None,
    beta: DLPackArray | None = None,
    scale: float | None = None,
    initial_state: DLPackArray | None = None,
    output_final_state: bool = False,
    cu_seqlens: DLPackArray | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: A | None = None,
    output_state: A | None = None,
    state_checkpoints: DLPackArray | None = None,
    checkpoint_cu_starts: DLPackArray | None = None,
    checkpoint_every_n_tokens: Index = 0,
    use_cp: Literal["auto"] | bool = "auto",
    state_indices: DLPackArray | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: Index | None = None,
    *,
    gate_domain: Literal["linear", "log"] = "linear",
    use_gate_in_kernel: bool = False,
    A_log: DLPackArray | None = None,
    dt_bias: DLPackArray | None = None,
    beta_is_logit: bool = False,
    cu_seqlens_cpu: DLPackArray | None = None,
    output_state_indices: DLPackArray | None = None,
    checkpoint_state_indices: DLPackArray | None = None,
    prefix_lens: DLPackArray | None = None,
    allow_unaligned_pages: bool = False,
    stream: Stream | None = None,
    workspace: DLPackArray | None = None,
    plan: DLPackArray | None = None,
    validate: Literal["host", "device"] | None = None,
    deterministic: Literal["batch"] | None = None,
    num_threads: int = 0,
) -> Any:
    """Prefill by pool rows, or of packed sequences with states in sequence order.

    With ``state_indices`` (slot form) the states are rows of pools: sequence b reads row
    ``state_indices[b]`` of initial_state (-1: zero state) and writes row
    ``output_state_indices[b]`` of output_state (-1: no store). Without (packed form) row b holds
    sequence b's state. Rows that one sequence writes must not be read or written by another.

    Args:
        q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, output, gate_domain, A_log, dt_bias,
        use_gate_in_kernel, beta_is_logit, allow_unaligned_pages, stream, workspace, plan,
        deterministic, num_threads, backend: as in :func:`chunk_gated_delta_rule_paged`.
        cu_seqlens: int32 or int64 ``[N + 1]``; required.
        initial_state: ``[rows, H, V, K]`` (packed: N rows; None: zero states).
        output_final_state: also store and return the final states.
        output_state: ``[rows, H, V, K]``, written only with output_final_state. Slot form:
            required with it, and may be the pool that is read. Packed form: N rows, or None: fp32
            rows are allocated, and a sequence without new tokens keeps its initial state.
        state_checkpoints: ``[rows, H, V, K]``, the states at every
            ``checkpoint_every_n_tokens``-th absolute position that the new tokens reach.
        checkpoint_cu_starts: int32 or int64 ``[N + 1]``, the first checkpoint of each sequence
            (``[N]`` will do with checkpoint_state_indices).
        checkpoint_every_n_tokens: as a page size; 0: no checkpoints.
        use_cp: the context-parallel regime: "auto", False forbids it, True demands it.
        state_indices: int32 or int64 ``[N]``; alone it is the written row as well.
        max_seqlen: a promised bound of the lengths; a longer sequence counts as broken.
        cu_seqlens_cpu: host copy of cu_seqlens, a hint.
        output_state_indices: int32 or int64 ``[N]``; needs state_indices, output_state and
            output_final_state.
        checkpoint_state_indices: pool row of checkpoint ``checkpoint_cu_starts[b] + j``, -1 skips
            it; needs state_indices.
        prefix_lens: int32 or int64 ``[N]``, tokens before this call, from which positions count;
            needs state_indices.
        validate: "host" or "device" checks the range of g.

    Returns:
        output, or ``(output, final_state)`` with output_final_state.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as in :func:`chunk_gated_delta_rule_paged`.
    """
    if validate is not None:
        if validate not in ("host", "device"):
            raise ValueError(f'validate: {validate!r}; expected None, "host" or "device"')
        if not use_gate_in_kernel:
            check_gate_domain(g, gate_domain, rows_of(q))
    arguments = (
        q, k, v, g, beta, scale, cu_seqlens, use_qk_l2norm_in_kernel, output,
        gate_domain, use_gate_in_kernel, A_log, dt_bias, beta_is_logit,
        stream, workspace, plan, deterministic, num_threads, backend,
        initial_state, output_final_state, output_state, state_checkpoints,
        checkpoint_cu_starts, checkpoint_every_n_tokens, use_cp, state_indices,
        max_seqlen, cu_seqlens_cpu, output_state_indices, checkpoint_state_indices, prefix_lens,
        allow_unaligned_pages,
    )  # fmt: skip
    try:
        return _core.prefill(arguments)
    except _core.UnbackedTensorError:
        return registered("prefill")(**dict(zip(FLAT_ORDER, arguments, strict=True)))


def prefill_plan(
    q: A,
    k: DLPackArray,
    v: DLPackArray,
    g: DLPackArray | None = None,
    beta: DLPackArray | None = None,
    scale: float | None = None,
    *,
    cu_seqlens: DLPackArray,
    state_pool: DLPackArray,
    page_indices: DLPackArray,
    page_indptr: DLPackArray,
    page_size: Index,
    last_page_len: DLPackArray,
    use_qk_l2norm_in_kernel: bool = False,
    gate_domain: Literal["linear", "log"] = "linear",
    use_gate_in_kernel: bool = False,
    A_log: DLPackArray | None = None,
    dt_bias: DLPackArray | None = None,
    beta_is_logit: bool = False,
    slots: GDNPagedPrefillSlots | None = None,
    initial_page_indices: DLPackArray | None = None,
    allow_unaligned_pages: bool = False,
    max_seqlen: Index | None = None,
    stream: Stream | None = None,
    plan: A | None = None,
    deterministic: Literal["batch"] | None = None,
    num_threads: int = 0,
    backend: str = "auto",
) -> A:
    """Makes the part of a paged prefill that depends on the batch and not on the layer.

    Make it once per step, with the arguments of any layer's call, and pass it as ``plan`` to every
    layer's. It is valid for calls with the same tables, shapes and dtypes; contents of q, k, v and
    the gates do not matter.

    Args:
        plan: 1-D uint8 memory to write, 256-byte aligned; None: allocated by the framework of q.
        others: as in :func:`chunk_gated_delta_rule_paged`.

    Returns:
        The plan, a uint8 array; of size 0 on the CPU, which needs none.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as in :func:`chunk_gated_delta_rule_paged`.
    """
    return _core.plan_prefill_paged((
        q, k, v, g, beta, scale, cu_seqlens, use_qk_l2norm_in_kernel, None,
        gate_domain, use_gate_in_kernel, A_log, dt_bias, beta_is_logit,
        stream, None, plan, deterministic, num_threads, backend,
        state_pool, page_indices, page_indptr, page_size, last_page_len, slots,
        initial_page_indices, allow_unaligned_pages, max_seqlen,
    ))  # fmt: skip


def prefill_workspace_size(
    num_seqs: int,
    num_tokens: int,
    num_q_heads: int,
    num_k_heads: int,
    num_v_heads: int,
    head_dim_k: int,
    head_dim_v: int | None = None,
    *,
    io_dtype: str = "bfloat16",
    state_dtype: str = "float32",
    page_size: int = 0,
    allow_unaligned_pages: bool = False,
    max_seqlen: int = 0,
    use_qk_l2norm_in_kernel: bool = False,
    use_cp: Literal["auto"] | bool = "auto",
    deterministic: Literal["batch"] | None = None,
    device: str = "cuda",
    backend: str = "auto",
) -> int:
    """Bytes of workspace that a prefill call of these sizes needs, from host integers alone.

    Args:
        num_seqs, num_tokens, num_q_heads, num_k_heads, num_v_heads, head_dim_k, head_dim_v: sizes
            of the call; head_dim_v of None is head_dim_k.
        io_dtype, state_dtype: "float32", "bfloat16" or "float16".
        page_size: of the paged form; 0: the slot form.
        max_seqlen, device: a promised bound of the lengths, 0: none; "cpu", "cuda" or "cuda:1".
    """
    for name, value in (("io_dtype", io_dtype), ("state_dtype", state_dtype)):
        if not isinstance(value, str) or value not in _DTYPES:
            raise ValueError(f"{name}: {value!r}; expected one of {', '.join(_DTYPES)}")
    parts = re.fullmatch("(cpu|cuda)(?::([0-9]+))?", device) if isinstance(device, str) else None
    if parts is None:
        raise ValueError(f'device: {device!r}; expected "cpu", "cuda" or "cuda:1"')
    kind, number = parts.groups()
    if use_cp is not True and use_cp is not False and use_cp != "auto":
        raise ValueError(f'use_cp: {use_cp!r}; expected "auto", True or False')
    if deterministic not in (None, "batch"):
        raise ValueError(f'deterministic: {deterministic!r}; expected None or "batch"')
    sizes = (
        num_seqs, num_tokens, max_seqlen, page_size, num_q_heads, num_k_heads, num_v_heads,
        head_dim_k, head_dim_k if head_dim_v is None else head_dim_v,
        _DTYPES[io_dtype], _DTYPES[state_dtype],
        1 if kind == "cpu" else 2, int(number or 0), {"auto": 0, False: 1, True: 2}[use_cp],
        bool(use_qk_l2norm_in_kernel) + 8 * bool(deterministic) + 64 * bool(allow_unaligned_pages),
    )  # fmt: skip
    return _core.prefill_workspace_size(sizes, backend)

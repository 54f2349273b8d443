# mypy: allow-untyped-calls
"""``import gdn_paged.jax``: paged prefill and decode as JAX functions, on the CPU and on CUDA.

JAX arrays are immutable, so each call takes a pool and returns it as its second result. XLA gives
both the same memory where the pool is donated: put the calls of a step into one ``jax.jit`` with
``donate_argnames="state_pool"`` (or let it be the carry of ``jax.lax.scan``) and nothing is copied.
Without donation, and outside of ``jit``, XLA copies the whole pool first; the result is the same.

The functions work inside ``jit``, ``scan`` and ``shard_map``: with the heads of q, k, v, the gates,
the output and dimension 1 of the pool split over devices and the tables replicated, each device
runs its heads. Page tables are operands, so new ones do not trace again. ``vmap`` and ``grad``
raise NotImplementedError. What is wrong with shapes and dtypes is a ValueError while tracing; what
only the run can tell comes as JaxRuntimeError.
"""

from __future__ import annotations

import operator
from typing import Any, Literal, SupportsIndex

import jax
import jax.numpy as jnp

from . import _jax_ops as ops
from .slots import GDNPagedDecodeSlots, GDNPagedPrefillSlots

__all__ = [
    "GDNPagedDecodeSlots",
    "GDNPagedPrefillSlots",
    "decode_slots",
    "paged_decode",
    "paged_prefill",
    "prefill_plan",
    "prefill_slots",
]

_QK_L2NORM, _BETA_IS_LOGIT, _EXPLICIT_SCALE, _BATCH_INVARIANT = 1, 2, 4, 8
_ALLOW_UNALIGNED_PAGES = 64
_GATES = {"linear": 0, "log": 1}
_GATE_RAW = 2


def _page_size(value: SupportsIndex, any_size: bool) -> int:
    try:
        size = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = 0
    if size <= 0 or size >= 2**31 or (size % 64 and not any_size):
        fix = ", or allow_unaligned_pages" if 0 < size < 2**31 else ""
        raise ValueError(f"page_size: {value!r} given, a positive multiple of 64 expected{fix}")
    return size


def _batch_flag(deterministic: str | None) -> int:
    if deterministic not in (None, "batch"):
        raise ValueError(f'deterministic: {deterministic!r}; expected None or "batch"')
    return _BATCH_INVARIANT if deterministic else 0


def _gate(g: Any, domain: str, in_kernel: bool, A_log: Any, dt_bias: Any) -> int:
    if domain not in _GATES:
        raise ValueError(f'gate_domain: {domain!r}; expected "linear" or "log"')
    if in_kernel:
        for name, x in (("g", g), ("A_log", A_log)):
            if x is None:
                raise ValueError(f"{name}: None; use_gate_in_kernel=True expects an array")
        return _GATE_RAW
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None:
            raise ValueError(f"{name}: given; expected use_gate_in_kernel=True with it")
    return _GATES[domain]


def _optional(name: str, x: Any, shape: tuple[int, ...], meaning: str) -> jax.Array | None:
    return None if x is None else ops.operand(name, x, shape, meaning, ops.FLOATS)


def paged_prefill(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    beta: Any = None,
    scale: float | None = None,
    *,
    cu_seqlens: Any,
    state_pool: Any,
    page_indices: Any,
    page_indptr: Any,
    page_size: SupportsIndex,
    last_page_len: Any,
    use_qk_l2norm_in_kernel: bool = False,
    gate_domain: Literal["linear", "log"] = "linear",
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
    beta_is_logit: bool = False,
    slots: GDNPagedPrefillSlots | None = None,
    initial_page_indices: Any = None,
    allow_unaligned_pages: bool = False,
    plan: Any = None,
    deterministic: Literal["batch"] | None = None,
    num_threads: int = 0,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Prefill of new tokens: :func:`gdn_paged.chunk_gated_delta_rule_paged` on a returned pool.

    Args:
        q, k, v: ``[T, Hq, K]``, ``[T, Hk, K]``, ``[T, Hv, V]``; fp32 (CPU only), bf16 or fp16.
        g, beta: ``[T, H]``, fp32, bf16 or fp16; None: no decay, 1.
        scale: a Python float; None or 0: ``1 / sqrt(K)``.
        cu_seqlens, page_indices, page_indptr, last_page_len: int32 or int64 ``[N + 1]``,
            ``[num_indices]``, ``[N + 1]``, ``[N]``.
        state_pool: ``[num_pages, H, V, K]``, fp32, bf16 or fp16; donate it.
        A_log, dt_bias: ``[H]``, with use_gate_in_kernel.
        slots, plan: of :func:`prefill_slots` and :func:`prefill_plan`, shared by all layers.
        initial_page_indices: int32 or int64 ``[N]`` or None, not with slots.
        page_size and other options: Python values, static under ``jit``; they mean what they mean
            in :func:`gdn_paged.chunk_gated_delta_rule_paged`.

    Returns:
        ``(output, state_pool)``: ``[T, H, V]`` in the dtype of q, and the pool after the call.

    Raises:
        ValueError: names the argument, what came and what is expected.
        NotImplementedError: no kernel row serves the call, or it is mapped or differentiated.
        ImportError: this build holds no XLA FFI handlers.
    """
    backend = ops.row_name(backend)
    x = ops.heads(q, k, v, (None,), "T")
    tokens, h = x.lead[0], x.state
    gate = _gate(g, gate_domain, use_gate_in_kernel, A_log, dt_bias)
    if beta_is_logit and beta is None:
        raise ValueError("beta: None; beta_is_logit=True expects an array")
    ends = ops.sequences(cu_seqlens)
    pool = x.pool(state_pool)
    names = GDNPagedPrefillSlots._fields
    operands = (
        *x[:3],
        _optional("g", g, (tokens, h), "[T, H]"),
        _optional("beta", beta, (tokens, h), "[T, H]"),
        _optional("A_log", A_log, (h,), "[H]"),
        _optional("dt_bias", dt_bias, (h,), "[H]"),
        ends,
        *ops.page_table(page_indices, page_indptr, last_page_len, ends.shape[0] - 1),
        pool,
        *ops.slot_arrays(slots, names, ends.shape[0] - 1),
        None if plan is None else ops.operand("plan", plan, (None,), "[bytes]", {"uint8": 0}),
        ops.initial_pages(initial_page_indices, ends.shape[0] - 1),
    )
    flags = _QK_L2NORM * bool(use_qk_l2norm_in_kernel) | _BETA_IS_LOGIT * bool(beta_is_logit)
    flags |= _batch_flag(deterministic) | _ALLOW_UNALIGNED_PAGES * bool(allow_unaligned_pages)
    size = _page_size(page_size, allow_unaligned_pages)
    workspace, _ = ops.prefill_sizes(_sizes(x, pool, size, flags), ends.shape[0] - 1, backend)
    output, pool, _ = ops.call(
        "paged_prefill",
        "gdn_paged_prefill_paged",
        (
            jax.ShapeDtypeStruct((tokens, h, x.v.shape[-1]), x.q.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            jax.ShapeDtypeStruct((workspace,), jnp.uint8),
        ),
        operands,
        pool=11,
        flags=flags,
        gate=gate,
        page_size=size,
        scale=0.0 if scale is None else float(scale),
        num_threads=ops.thread_count(num_threads),
        backend=backend,
    )
    return output, pool


def _sizes(x: ops.Heads, pool: jax.Array, page_size: int, flags: int) -> tuple[int, ...]:
    counts = (y.shape[-2] for y in (x.q, x.k, x.v))
    dtypes = ops.FLOATS[x.q.dtype.name], ops.FLOATS[pool.dtype.name]
    shape = x.q.shape[-1], x.v.shape[-1]
    return (x.lead[0], pool.shape[0], page_size, *counts, *shape, *dtypes, flags)


def prefill_plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens: Any,
    state_pool: Any,
    page_indices: Any,
    page_indptr: Any,
    page_size: SupportsIndex,
    last_page_len: Any,
    use_qk_l2norm_in_kernel: bool = False,
    slots: GDNPagedPrefillSlots | None = None,
    initial_page_indices: Any = None,
    allow_unaligned_pages: bool = False,
    deterministic: Literal["batch"] | None = None,
    backend: str = "auto",
) -> jax.Array:
    """The part of a paged prefill that depends on the batch and not on the layer.

    Make it once per step and pass it as ``plan`` to the :func:`paged_prefill` of every layer.

    Args:
        q, k, v, state_pool: read for their shapes and dtypes alone.
        others: as in :func:`paged_prefill`.

    Returns:
        uint8 ``[bytes]``; empty on the CPU, which needs none.

    Raises:
        ValueError, NotImplementedError, ImportError: as in :func:`paged_prefill`.
    """
    backend = ops.row_name(backend)
    x = ops.heads(q, k, v, (None,), "T")
    ends = ops.sequences(cu_seqlens)
    num_seqs = ends.shape[0] - 1
    flags = _QK_L2NORM * bool(use_qk_l2norm_in_kernel) | _batch_flag(deterministic)
    flags |= _ALLOW_UNALIGNED_PAGES * bool(allow_unaligned_pages)
    page_size = _page_size(page_size, allow_unaligned_pages)
    sizes = _sizes(x, x.pool(state_pool), page_size, flags)
    _, size = ops.prefill_sizes(sizes, num_seqs, backend)
    operands = (
        *(None,) * 7,
        ends,
        *ops.page_table(page_indices, page_indptr, last_page_len, num_seqs),
        None,
        *ops.slot_arrays(slots, GDNPagedPrefillSlots._fields, num_seqs),
        None,
        ops.initial_pages(initial_page_indices, num_seqs),
    )
    (plan,) = ops.call(
        "prefill_plan",
        "gdn_paged_prefill_plan",
        (jax.ShapeDtypeStruct((size,), jnp.uint8),),
        operands,
        sizes=sizes,
        num_threads=0,
        backend=backend,
    )
    return plan


def paged_decode(
    q: Any,
    k: Any,
    v: Any,
    A_log: Any,
    a: Any,
    dt_bias: Any,
    b: Any,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    *,
    state_pool: Any,
    page_indices: Any,
    page_indptr: Any,
    last_page_len: Any,
    slots: GDNPagedDecodeSlots | None = None,
    initial_page_indices: Any = None,
    deterministic: Literal["batch"] | None = None,
    num_threads: int = 0,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """One token per row: :func:`gdn_paged.gated_delta_rule_decode_paged` on a returned pool.

    Args:
        q, k, v: ``[B, 1, Hq, K]``, ``[B, 1, Hk, K]``, ``[B, 1, Hv, V]``, dtypes as in prefill.
        A_log, dt_bias: ``[H]``, fp32, bf16 or fp16; dt_bias may be None.
        a, b: ``[B, 1, H]``, logits of decay and beta.
        scale: a Python float; None: ``1 / sqrt(K)``.
        state_pool: ``[num_pages, H, V, K]``, fp32, bf16 or fp16; donate it.
        page_indices, page_indptr, last_page_len, initial_page_indices: int32 or int64
            ``[num_indices]``, ``[B + 1]``, ``[B]``, ``[B]`` (or None, not with slots).
        slots: of :func:`decode_slots`, shared by the layers of a step.
        other options: as in :func:`gdn_paged.gated_delta_rule_decode_paged`, static under ``jit``.

    Returns:
        ``(output, state_pool)``: ``[B, 1, H, V]`` in the dtype of q, and the pool after the call.

    Raises:
        ValueError, NotImplementedError, ImportError: as in :func:`paged_prefill`.
    """
    backend = ops.row_name(backend)
    x = ops.heads(q, k, v, (None, 1), "B, 1")
    batch, h = x.lead[0], x.state
    pool = x.pool(state_pool)
    operands = (
        *x[:3],
        ops.operand("A_log", A_log, (h,), "[H]", ops.FLOATS),
        ops.operand("a", a, (batch, 1, h), "[B, 1, H]", ops.FLOATS),
        _optional("dt_bias", dt_bias, (h,), "[H]"),
        ops.operand("b", b, (batch, 1, h), "[B, 1, H]", ops.FLOATS),
        *ops.page_table(page_indices, page_indptr, last_page_len, batch),
        pool,
        *ops.slot_arrays(slots, GDNPagedDecodeSlots._fields, batch),
        ops.initial_pages(initial_page_indices, batch),
    )
    flags = _QK_L2NORM * bool(use_qk_l2norm) | _batch_flag(deterministic)
    output, pool = ops.call(
        "paged_decode",
        "gdn_paged_decode_paged",
        (
            jax.ShapeDtypeStruct((batch, 1, h, x.v.shape[-1]), x.q.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        operands,
        pool=10,
        flags=flags if scale is None else flags | _EXPLICIT_SCALE,
        scale=0.0 if scale is None else float(scale),
        num_threads=ops.thread_count(num_threads),
        backend=backend,
    )
    return output, pool


def _slots(function: str, count: int, tables: tuple[Any, ...], page_size: int, flags: int) -> Any:
    num_seqs = tables[3].shape[0]
    return ops.call(
        function,
        "gdn_paged_slots",
        (jax.ShapeDtypeStruct((num_seqs,), jnp.int32),) * count,
        tables,
        page_size=page_size,
        flags=flags,
        num_threads=0,
        backend="auto",
    )


def prefill_slots(
    cu_seqlens: Any, page_indices: Any, page_indptr: Any, page_size: SupportsIndex,
    last_page_len: Any, *, initial_page_indices: Any = None, allow_unaligned_pages: bool = False,
) -> GDNPagedPrefillSlots:  # fmt: skip
    """Pool rows of a prefill step, as :func:`gdn_paged.gdn_paged_prefill_slots` gives them."""
    ends = ops.sequences(cu_seqlens)
    table = ops.page_table(page_indices, page_indptr, last_page_len, ends.shape[0] - 1)
    initial = ops.initial_pages(initial_page_indices, ends.shape[0] - 1)
    size = _page_size(page_size, allow_unaligned_pages)
    flags = _ALLOW_UNALIGNED_PAGES * bool(allow_unaligned_pages)
    return GDNPagedPrefillSlots(*_slots("prefill_slots", 4, (ends, *table, initial), size, flags))


def decode_slots(
    page_indices: Any, page_indptr: Any, last_page_len: Any, *, initial_page_indices: Any = None
) -> GDNPagedDecodeSlots:
    """Pool rows of a decode step, as :func:`gdn_paged.gdn_paged_decode_slots` gives them."""
    table = ops.page_table(page_indices, page_indptr, last_page_len, None)
    initial = ops.initial_pages(initial_page_indices, table[2].shape[0])
    return GDNPagedDecodeSlots(*_slots("decode_slots", 2, (None, *table, initial), 0, 0))

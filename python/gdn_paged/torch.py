# mypy: allow-untyped-defs, allow-incomplete-defs
"""``import gdn_paged.torch``: the calls of gdn_paged under torch.compile, torch.export and make_fx.

Importing this module registers the operators ``torch.ops.gdn_paged.*``. From then on the functions
of :mod:`gdn_paged`, which this module holds under the same names, reach them when they are traced:
``torch.compile(fullgraph=True)`` works, with pool and output mutated in place. Called in eager mode
with plain tensors the functions are what they were, at the same cost.

What tracing does not take: ``stream`` (a graph runs on the current one) and ``validate`` (it waits
for the device), each a ValueError. ``workspace`` and ``cu_seqlens_cpu`` are hints and are left out.
CUDA graphs of ``mode="reduce-overhead"`` want a pool at a fixed address: make it a buffer of the
module, or call ``torch._dynamo.mark_static_address(pool)``.
"""

from __future__ import annotations

from typing import Any

import torch

import gdn_paged
from gdn_paged import *  # noqa: F403

from . import _unbacked, verify
from ._torch_ops import ops

__all__ = gdn_paged.__all__


def _check(stream: Any, validate: Any, **tensors: torch.Tensor | None) -> None:
    """Refuses what a traced call cannot do."""
    if stream is not None:
        raise ValueError("stream: given; a traced call runs on the current stream, expected None")
    if validate is not None:
        raise ValueError(f"validate: {validate!r}; expected None in a traced call")
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name}: requires grad, and gdn_paged has no backward; expected a tensor "
                    f"without it (call under torch.no_grad() or pass {name}.detach())"
                )


def _constant(x: torch.Tensor | None) -> torch.Tensor | None:
    """A gate parameter, which may require grad and gets none."""
    return x if x is None else x.detach()


def _packed_state(q, v, cu_seqlens, initial_state) -> torch.Tensor:
    """The final state of the packed form when the caller gives none: fp32, in sequence order."""
    if initial_state is not None:
        return initial_state.to(torch.float32, copy=True)
    heads = max(q.shape[1], v.shape[1])
    shape = (cu_seqlens.shape[0] - 1, heads, v.shape[2], q.shape[2])
    return q.new_zeros(shape, dtype=torch.float32)


def _chunk_gated_delta_rule_paged(
    q, k, v, g=None, beta=None, scale=None, *, cu_seqlens, state_pool, page_indices, page_indptr,
    page_size, last_page_len, use_qk_l2norm_in_kernel=False, output=None, gate_domain="linear",
    use_gate_in_kernel=False, A_log=None, dt_bias=None, beta_is_logit=False, slots=None,
    initial_page_indices=None, allow_unaligned_pages=False, max_seqlen=None, stream=None,
    workspace=None, plan=None, validate=None, deterministic=None, num_threads=0, backend="auto",
):  # fmt: skip
    _check(stream, validate, q=q, k=k, v=v, g=g, beta=beta)
    if output is None:
        output = q.new_empty((q.shape[0], max(q.shape[1], v.shape[1]), v.shape[2]))
    ops.prefill_paged.default(
        q, k, v, g, beta, scale, cu_seqlens, use_qk_l2norm_in_kernel, output, gate_domain,
        use_gate_in_kernel, _constant(A_log), _constant(dt_bias), beta_is_logit, plan,
        deterministic, num_threads, backend, state_pool, page_indices, page_indptr, page_size,
        last_page_len, None if slots is None else list(slots), initial_page_indices,
        allow_unaligned_pages, max_seqlen,
    )  # fmt: skip
    return output


def _chunk_gated_delta_rule(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    cu_seqlens=None, use_qk_l2norm_in_kernel=False, output=None, output_state=None,
    state_checkpoints=None, checkpoint_cu_starts=None, checkpoint_every_n_tokens=0, use_cp="auto",
    state_indices=None, _cp_chunk_len=None, backend="auto", max_seqlen=None, *,
    gate_domain="linear", use_gate_in_kernel=False, A_log=None, dt_bias=None, beta_is_logit=False,
    cu_seqlens_cpu=None, output_state_indices=None, checkpoint_state_indices=None,
    prefix_lens=None, allow_unaligned_pages=False, stream=None, workspace=None, plan=None,
    validate=None, deterministic=None, num_threads=0,
):  # fmt: skip
    _check(stream, validate, q=q, k=k, v=v, g=g, beta=beta)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: None; expected an int32 or int64 table [num_seqs + 1]")
    if output is None:
        output = q.new_empty((q.shape[0], max(q.shape[1], v.shape[1]), v.shape[2]))
    if not output_final_state:
        output_state = None
    elif output_state is None and state_indices is None:
        output_state = _packed_state(q, v, cu_seqlens, initial_state)
    ops.prefill.default(
        q, k, v, g, beta, scale, cu_seqlens, use_qk_l2norm_in_kernel, output, gate_domain,
        use_gate_in_kernel, _constant(A_log), _constant(dt_bias), beta_is_logit, plan,
        deterministic, num_threads, backend, initial_state, output_final_state, output_state,
        state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens,
        None if use_cp == "auto" else use_cp, state_indices, max_seqlen, output_state_indices,
        checkpoint_state_indices, prefix_lens, allow_unaligned_pages,
    )  # fmt: skip
    return (output, output_state) if output_final_state else output


def _gated_delta_rule_decode_paged(
    q, k, v, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True, *, state_pool,
    page_indices, page_indptr, last_page_len, backend="auto", slots=None,
    initial_page_indices=None, stream=None, validate=None, deterministic=None, num_threads=0,
):  # fmt: skip
    _check(stream, validate, q=q, k=k, v=v, a=a, b=b)
    if output is None:
        output = q.new_empty((q.shape[0], 1, max(q.shape[2], v.shape[2]), v.shape[3]))
    ops.decode_paged.default(
        q, k, v, _constant(A_log), a, _constant(dt_bias), b, scale, output, use_qk_l2norm,
        deterministic, num_threads, backend, state_pool, page_indices, page_indptr, last_page_len,
        None if slots is None else list(slots), initial_page_indices,
    )  # fmt: skip
    return output


def _gated_delta_rule_decode_pretranspose(
    q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True,
    initial_state=None, initial_state_indices=None, output_state_indices=None, *, stream=None,
    deterministic=None, num_threads=0, backend="auto",
):  # fmt: skip
    _check(stream, None, q=q, k=k, v=v, a=a, b=b)
    if output is None:
        output = q.new_empty((q.shape[0], 1, max(q.shape[2], v.shape[2]), v.shape[3]))
    ops.decode.default(
        q, k, v, _constant(A_log), a, _constant(dt_bias), b, scale, output, use_qk_l2norm,
        deterministic, num_threads, backend, state, initial_state, initial_state_indices,
        output_state_indices,
    )  # fmt: skip
    return output, initial_state if state is None else state


def _gated_delta_rule_verify_paged(
    q, k, v, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True, *, cu_seqlens,
    state_pool, page_indices, page_indptr, page_size, seq_lens, drafts, max_draft, accepted=None,
    draft_indices=None, allow_unaligned_pages=False, backend="auto", stream=None,
    deterministic=None, num_threads=0,
):  # fmt: skip
    _check(stream, None, q=q, k=k, v=v, a=a, b=b)
    if output is None:
        output = q.new_empty((q.shape[0], max(q.shape[1], v.shape[1]), v.shape[2]))
    ops.verify_paged.default(
        q, k, v, _constant(A_log), a, _constant(dt_bias), b, scale, output, use_qk_l2norm,
        deterministic, num_threads, backend, cu_seqlens, state_pool, page_indices, page_indptr,
        page_size, seq_lens, drafts, max_draft, accepted, draft_indices, allow_unaligned_pages,
    )  # fmt: skip
    return output


def _gated_delta_rule_commit_paged(
    state_pool, page_indices, page_indptr, page_size, seq_lens, drafts, max_draft, accepted,
    draft_indices=None, *, dtype, allow_unaligned_pages=False, backend="auto", stream=None,
    num_threads=0,
):  # fmt: skip
    _check(stream, None)
    ops.commit_paged.default(
        state_pool, page_indices, page_indptr, page_size, seq_lens, drafts, max_draft, accepted,
        draft_indices, verify.dtype_code(dtype), num_threads, backend, allow_unaligned_pages,
    )  # fmt: skip


def _gdn_paged_prefill_slots(
    cu_seqlens, page_indices, page_indptr, page_size, last_page_len, *, initial_page_indices=None,
    allow_unaligned_pages=False, stream=None, num_threads=0,
):  # fmt: skip
    _check(stream, None)
    slots = ops.prefill_slots.default(
        cu_seqlens, page_indices, page_indptr, page_size, last_page_len, num_threads,
        initial_page_indices, allow_unaligned_pages,
    )  # fmt: skip
    return gdn_paged.GDNPagedPrefillSlots(*slots)


def _gdn_paged_decode_slots(
    page_indices, page_indptr, last_page_len, *, initial_page_indices=None, stream=None,
    num_threads=0,
):  # fmt: skip
    _check(stream, None)
    return gdn_paged.GDNPagedDecodeSlots(
        *ops.decode_slots.default(
            page_indices, page_indptr, last_page_len, num_threads, initial_page_indices
        )
    )


def _register() -> None:
    """Dynamo puts the traced form where it meets the public function; calls with fake, functional
    or distributed tensors come by way of _unbacked. Both leave the eager call alone."""
    for operation, public, traced in (
        ("prefill_paged", gdn_paged.chunk_gated_delta_rule_paged, _chunk_gated_delta_rule_paged),
        ("prefill", gdn_paged.chunk_gated_delta_rule, _chunk_gated_delta_rule),
        ("decode_paged", gdn_paged.gated_delta_rule_decode_paged, _gated_delta_rule_decode_paged),
        ("decode", gdn_paged.gated_delta_rule_decode_pretranspose,
         _gated_delta_rule_decode_pretranspose),
        ("verify_paged", gdn_paged.gated_delta_rule_verify_paged, _gated_delta_rule_verify_paged),
        ("commit_paged", gdn_paged.gated_delta_rule_commit_paged, _gated_delta_rule_commit_paged),
        ("prefill_slots", gdn_paged.gdn_paged_prefill_slots, _gdn_paged_prefill_slots),
        ("decode_slots", gdn_paged.gdn_paged_decode_slots, _gdn_paged_decode_slots),
    ):  # fmt: skip
        torch.compiler.substitute_in_graph(public)(traced)
        _unbacked.handlers[operation] = traced


_register()

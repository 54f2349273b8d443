# mypy: allow-untyped-calls
"""The calls as torch operators ``torch.ops.gdn_paged.*``, on the CPU and on CUDA.

Arguments are those of the tuples of ``gdn_paged._core``, in that order, without stream and
workspace: an operator runs on the current stream and takes scratch memory from torch's allocator.
Outputs and pools are mutated arguments; only the slots are returned. No argument has a default,
since the dispatcher would leave it out.

``Library.define`` and ``impl``, because ``torch.library.custom_op`` adds some 50 us to a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _core

_PREFILL = (
    "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, float? scale, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel, Tensor(a!) output, str gate_domain, bool use_gate_in_kernel, "
    "Tensor? A_log, Tensor? dt_bias, bool beta_is_logit, Tensor? plan, str? deterministic, "
    "int num_threads, str backend, "
)
_DECODE = (
    "(Tensor q, Tensor k, Tensor v, Tensor A_log, Tensor a, Tensor? dt_bias, Tensor b, "
    "float? scale, Tensor(a!) output, bool use_qk_l2norm, str? deterministic, int num_threads, "
    "str backend, "
)
_SCHEMAS = {
    "prefill_paged": _PREFILL + "Tensor(b!) state_pool, Tensor page_indices, Tensor page_indptr, "
    "int page_size, Tensor last_page_len, Tensor[]? slots, Tensor? initial_page_indices, "
    "bool allow_unaligned_pages, int? max_seqlen) -> ()",
    "prefill": _PREFILL + "Tensor? initial_state, bool output_final_state, "
    "Tensor(b!)? output_state, Tensor(c!)? state_checkpoints, Tensor? checkpoint_cu_starts, "
    "int checkpoint_every_n_tokens, bool? use_cp, Tensor? state_indices, int? max_seqlen, "
    "Tensor? output_state_indices, Tensor? checkpoint_state_indices, Tensor? prefix_lens, "
    "bool allow_unaligned_pages) -> ()",
    "decode_paged": _DECODE + "Tensor(b!) state_pool, Tensor page_indices, Tensor page_indptr, "
    "Tensor last_page_len, Tensor[]? slots, Tensor? initial_page_indices) -> ()",
    "decode": _DECODE + "Tensor(b!)? state, Tensor(c!)? initial_state, "
    "Tensor? initial_state_indices, Tensor? output_state_indices) -> ()",
    "verify_paged": _DECODE + "Tensor cu_seqlens, Tensor(b!) state_pool, Tensor page_indices, "
    "Tensor page_indptr, int page_size, Tensor seq_lens, Tensor(c!) drafts, int max_draft, "
    "Tensor? accepted, Tensor? draft_indices, bool allow_unaligned_pages) -> ()",
    "commit_paged": "(Tensor(a!) state_pool, Tensor page_indices, Tensor page_indptr, "
    "int page_size, Tensor seq_lens, Tensor(b!) drafts, int max_draft, Tensor? accepted, "
    "Tensor? draft_indices, int dtype, int num_threads, str backend, "
    "bool allow_unaligned_pages) -> ()",
    "prefill_slots": "(Tensor cu_seqlens, Tensor page_indices, Tensor page_indptr, int page_size, "
    "Tensor last_page_len, int num_threads, Tensor? initial_page_indices, "
    "bool allow_unaligned_pages) -> (Tensor, Tensor, Tensor, Tensor)",
    "decode_slots": "(Tensor page_indices, Tensor page_indptr, Tensor last_page_len, "
    "int num_threads, Tensor? initial_page_indices) -> (Tensor, Tensor)",
}
_PLAN = 14  # position in _PREFILL
_DETERMINISTIC = 10  # position in _DECODE
_COMMIT_THREADS = 10


def _as_slots(tensors: list[torch.Tensor] | None) -> tuple[torch.Tensor, ...] | None:
    return None if tensors is None else tuple(tensors)


def _prefill_paged(*args: Any) -> None:
    *tail, slots, initial, unaligned, most = args[_PLAN:]
    _core.prefill_paged((
        *args[:_PLAN], None, None, *tail, _as_slots(slots), initial, unaligned, most
    ))  # fmt: skip


def _prefill(*args: Any) -> None:
    *pools, use_cp, state_indices, max_seqlen, writes, checkpoints, lens, unaligned = args[_PLAN:]
    _core.prefill((
        *args[:_PLAN], None, None, *pools, "auto" if use_cp is None else use_cp, state_indices,
        max_seqlen, None, writes, checkpoints, lens, unaligned,
    ))  # fmt: skip


def _decode_paged(*args: Any) -> None:
    *tail, slots, initial = args[_DETERMINISTIC:]
    _core.decode_paged((*args[:_DETERMINISTIC], None, *tail, _as_slots(slots), initial))


def _decode(*args: Any) -> None:
    _core.decode((*args[:_DETERMINISTIC], None, *args[_DETERMINISTIC:]))


def _verify_paged(*args: Any) -> None:
    _core.verify_paged((*args[:_DETERMINISTIC], None, *args[_DETERMINISTIC:]))


def _commit_paged(*args: Any) -> None:
    _core.commit_paged((*args[:_COMMIT_THREADS], None, *args[_COMMIT_THREADS:]))


def _prefill_slots(*args: Any) -> tuple[torch.Tensor, ...]:
    return _core.slots((*args[:5], None, *args[5:]))


def _decode_slots(*args: Any) -> tuple[torch.Tensor, ...]:
    page_indices, page_indptr, last_page_len, num_threads, initial = args
    return _core.slots((
        None, page_indices, page_indptr, 0, last_page_len, None, num_threads, initial, False
    ))  # fmt: skip


def _mutates(*args: Any) -> None:
    """What a tracing run does: nothing is returned, and there is no memory to write."""


def _fake_slots(count: int, last_page_len: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    def fake(*args: Any) -> tuple[torch.Tensor, ...]:
        num_seqs = args[last_page_len].shape[0]
        return tuple(args[0].new_empty((num_seqs,), dtype=torch.int32) for _ in range(count))

    return fake


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "prefill_paged": (_prefill_paged, _mutates),
    "prefill": (_prefill, _mutates),
    "decode_paged": (_decode_paged, _mutates),
    "decode": (_decode, _mutates),
    "verify_paged": (_verify_paged, _mutates),
    "commit_paged": (_commit_paged, _mutates),
    "prefill_slots": (_prefill_slots, _fake_slots(4, last_page_len=4)),
    "decode_slots": (_decode_slots, _fake_slots(2, last_page_len=2)),
}


def _register() -> torch.library.Library:
    library = torch.library.Library("gdn_paged", "DEF")
    # Strides are free and may be the point (columns of one projection): they are kept as they are.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    for name, (implementation, fake) in _IMPLEMENTATIONS.items():
        library.define(name + _SCHEMAS[name], tags=tags)
        for key in ("CPU", "CUDA"):
            library.impl(name, implementation, key)
        torch.library.register_fake(f"gdn_paged::{name}", fake, lib=library)
    return library


library = _register()
"""Keeps the registrations alive."""
ops = torch.ops.gdn_paged

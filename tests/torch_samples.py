"""Calls of every operation with torch tensors, as the tests of `gdn_paged.torch` make them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import gdn_paged
from calls import DecodeSlots, PageTable, Slots, page_table
from cases import make_decode, make_pool, make_prefill
from targets import Target, available_targets, unaligned
from verify_calls import (
    NAMES,
    Verify,
    drafts_of,
    run_verify,
    token_operands,
    verify_arguments,
)

SPANS = (([5, 2], 60, 70), ([1], 0, 9), ([0, 3, 4], 40, 190))
RAW = {"gate": "raw", "A_log": np.zeros(4), "dt_bias": np.zeros(4)}


def torch_targets(wanted: str = "") -> list[Target]:
    """torch on the CPU, and on a GPU the row that calls get by default (of those `wanted`)."""
    found = [t for t in available_targets() if t.arrays.name == "torch" and wanted in str(t)]
    return [next(t for t in found if t.device == d) for d in dict.fromkeys(t.device for t in found)]


def parametrize_places(metafunc: Any) -> None:
    """The fixtures `place` (every device with torch) and `cuda_place`."""
    places = torch_targets(metafunc.config.getoption("--targets"))
    choices = {"place": places, "cuda_place": [t for t in places if t.device == "cuda"]}
    for name, found in choices.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, found, ids=str)


@dataclass(eq=False)
class Sample:
    """A public function and its keyword arguments; those named in `written` change in place."""

    function: Any
    arguments: dict[str, Any]
    written: tuple[str, ...] = ()

    def copy(self) -> Sample:
        """Tensors of its own; what was one tensor stays one."""
        copies: dict[int, Any] = {}

        def clone(x):
            if not hasattr(x, "untyped_storage"):
                return x
            return copies.setdefault(id(x), x.clone())

        return Sample(
            self.function, {name: clone(x) for name, x in self.arguments.items()}, self.written
        )

    def __call__(self) -> Any:
        return self.function(**self.arguments)


def io_of(target: Target) -> str:
    return "fp32" if target.device == "cpu" else "bf16"


def dim_of(target: Target) -> int:
    """A head size that the first row of the place serves."""
    return 64 if target.device == "cpu" else 128


def _forked(table: PageTable, pages: list[int]) -> PageTable:
    return replace(table, initial_pages=np.array(pages))


UNALIGNED = _forked(page_table(80, ([5, 2], 70, 90), ([1], 0, 9), ([0, 3, 4], 40, 170)), [6, -1, 6])


def _prefill_paged(target: Target, table: PageTable | None = None, **options: Any) -> Sample:
    dim, table = dim_of(target), table or page_table(64, *SPANS)
    call = make_prefill(700, table, dim=dim, **options).cast(io_of(target))
    arguments = target.prefill_arguments(call, io_of(target))
    arguments["state_pool"] = target.pool(make_pool(700, 7, 4, dim)).view
    return Sample(gdn_paged.chunk_gated_delta_rule_paged, arguments, ("state_pool",))


def _prefill_by_slots(target: Target) -> Sample:
    slots = Slots(
        np.array([0, 70, 75]), [2, -1], [5, 6], np.array([7, -1, 8]), [0, 2], 64, [63, 60]
    )
    dim = dim_of(target)
    call = make_prefill(701, slots, dim=dim).cast(io_of(target))
    pool = target.pool(make_pool(701, 9, 4, dim)).view
    arguments = target.prefill_arguments(call, io_of(target)) | {"output_final_state": True}
    arguments |= dict.fromkeys(("initial_state", "output_state", "state_checkpoints"), pool)
    return Sample(gdn_paged.chunk_gated_delta_rule, arguments, ("output_state",))


def _prefill_packed(target: Target, initial: bool) -> Sample:
    dim, rows = dim_of(target), Slots(np.array([0, 70, 70, 75]))
    call = make_prefill(702, rows, dim=dim, l2norm=True).cast(io_of(target))
    arguments = target.prefill_arguments(call, io_of(target)) | {"output_final_state": True}
    if initial:
        arguments["initial_state"] = target.pool(make_pool(702, 3, 4, dim)).view
    return Sample(gdn_paged.chunk_gated_delta_rule, arguments)


def _decode_paged(target: Target, fork: bool = False) -> Sample:
    table = page_table(64, ([5, 2], 64, 65), ([1], 8, 9), ([-1], 1, 2), decode=True)
    if fork:
        table = _forked(table, [6, -1, 6])
    arguments = target.decode_arguments(make_decode(703, table, dim=64), io_of(target))
    arguments["state_pool"] = target.pool(make_pool(703, 7, 4)).view
    return Sample(gdn_paged.gated_delta_rule_decode_paged, arguments, ("state_pool",))


def _decode_by_rows(target: Target, pool: bool) -> Sample:
    rows = DecodeSlots(np.array([4, -1, 2]), np.array([4, 0, 1]))
    arguments = target.decode_arguments(make_decode(704, rows, dim=64), io_of(target))
    states = target.pool(make_pool(704, 5 if pool else 3, 4)).view
    if pool:
        arguments |= {"state": None, "initial_state": states}
    else:
        arguments |= {"state": states, "initial_state_indices": None, "output_state_indices": None}
    written = "initial_state" if pool else "state"
    return Sample(gdn_paged.gated_delta_rule_decode_pretranspose, arguments, (written,))


def _verify(target: Target, commit: bool) -> Sample:
    """A step that folds what an earlier one left, or the fold alone."""
    io, dim = io_of(target), 64
    operands = token_operands(np.random.default_rng(705), 5, (2, 4), dim, io)
    pages = {"indices": np.array([5, 2, 1]), "indptr": np.array([0, 2, 3])}
    call = Verify(
        **operands, **pages, cu_seqlens=np.array([0, 3, 5]), seq_lens=np.array([63, 9]), max_draft=4
    )
    pool = target.pool(make_pool(705, 7, 4, dim)).view
    drafts = drafts_of(target, call, io, 2)
    run_verify(target, call, pool, drafts, io)
    call = replace(call, seq_lens=np.array([65, 9]), accepted=np.array([2, 0]))
    arguments = verify_arguments(target, call, io)
    if commit:
        unused = "q k v a b A_log dt_bias scale use_qk_l2norm cu_seqlens".split()
        arguments = {x: y for x, y in arguments.items() if x not in unused} | {"dtype": NAMES[io]}
    arguments |= {"state_pool": pool, "drafts": drafts}
    name = f"gated_delta_rule_{'commit' if commit else 'verify'}_paged"
    return Sample(getattr(gdn_paged, name), arguments, ("state_pool", "drafts"))


def _prefill_slots(target: Target, table: PageTable | None = None) -> Sample:
    table = table or page_table(64, *SPANS)
    arguments = target.page_arguments(table) | {"page_size": table.page_size}
    arguments |= unaligned(table.page_size)
    arguments["cu_seqlens"] = target.table(table.cu_seqlens)
    return Sample(gdn_paged.gdn_paged_prefill_slots, arguments)


def _decode_slots(target: Target) -> Sample:
    table = page_table(64, ([5, 2], 64, 65), ([1], 8, 9), decode=True)
    return Sample(gdn_paged.gdn_paged_decode_slots, target.page_arguments(table, "int64"))


SAMPLES = {
    "prefill_paged": _prefill_paged,
    "prefill_paged raw gate": lambda t: _prefill_paged(t, beta_is_logit=True, **RAW),
    "prefill_paged, forks on pages of 80": lambda t: _prefill_paged(t, UNALIGNED),
    "prefill by slots": _prefill_by_slots,
    "prefill packed": lambda t: _prefill_packed(t, initial=False),
    "prefill packed, initial states": lambda t: _prefill_packed(t, initial=True),
    "decode_paged": _decode_paged,
    "decode_paged, a fork": lambda t: _decode_paged(t, fork=True),
    "decode in a pool": lambda t: _decode_by_rows(t, pool=True),
    "decode of states": lambda t: _decode_by_rows(t, pool=False),
    "verify_paged": lambda t: _verify(t, commit=False),
    "commit_paged": lambda t: _verify(t, commit=True),
    "prefill_slots": _prefill_slots,
    "prefill_slots, forks on pages of 80": lambda t: _prefill_slots(t, UNALIGNED),
    "decode_slots": _decode_slots,
}

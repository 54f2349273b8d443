"""The calls that are timed or explained, on the arrays of a :class:`~.machine.Machine`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import gdn_paged

from .grid import (
    DIM,
    PAGE,
    decode_bytes,
    heads_of,
    lengths_of,
    prefill_bytes,
    prefill_flops,
)
from .machine import Machine

Row = dict[str, Any]
STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Limits:
    """What the machine was measured to do when the benchmark began."""

    copy: float  # bytes per second
    flops: float  # FLOP per second

    def floor_us(self, moved: float, flops: float) -> float:
        """No call can be faster than this."""
        return max(moved / self.copy, flops / self.flops) * 1e6


def prefill_arguments(machine: Machine, lengths: list[int], hq: int, hv: int, io: str) -> Row:
    """One batch of empty prefixes on a pool in fp32 with one page to spare, pages shuffled.

    Unit q and k, v ~ N(0, 1); log gate logsigmoid(N) / 16 for three quarters of the heads and 0
    for the rest, beta sigmoid(N): as in the published tables of such kernels.
    """
    tokens, heads = sum(lengths), max(hq, hv)
    alpha = machine.sigmoid(machine.normal(tokens, heads)) ** (1 / 16)
    alpha[:, 3::4] = 1
    pages = [-(-n // PAGE) for n in lengths]
    starts = [0, *accumulate(pages)]
    last = [n - (count - 1) * PAGE for n, count in zip(lengths, pages, strict=True)]
    hk = min(hq, hv)
    return {
        "q": machine.cast(machine.unit(machine.normal(tokens, hq, DIM)), io),
        "k": machine.cast(machine.unit(machine.normal(tokens, hk, DIM)), io),
        "v": machine.cast(machine.normal(tokens, hv, DIM), io),
        "g": machine.cast(alpha, "float32"),
        "beta": machine.cast(machine.sigmoid(machine.normal(tokens, heads)), "float32"),
        "cu_seqlens": machine.table([0, *accumulate(lengths)]),
        "state_pool": machine.zeros((starts[-1] + 1, heads, DIM, DIM), "float32"),
        "page_indices": machine.table(machine.permutation(starts[-1] + 1)[: starts[-1]]),
        "page_indptr": machine.table(starts),
        "page_size": PAGE,
        "last_page_len": machine.table(last),
    }


def measure_prefill(
    machine: Machine, limits: Limits, heads: str, lens: str, io: str, backend: str, rounds: int
) -> Row:
    """Times the call with slots, plan and output given, and with slots and plan made inside."""
    (hq, hv), lengths = heads_of(heads), lengths_of(lens)
    arguments = prefill_arguments(machine, lengths, hq, hv, io) | {"backend": backend}
    table = ("cu_seqlens", "page_indices", "page_indptr", "page_size", "last_page_len")
    slots = gdn_paged.gdn_paged_prefill_slots(**{name: arguments[name] for name in table})
    plan = gdn_paged.prefill_plan(**arguments, slots=slots)
    arguments["output"] = machine.zeros((sum(lengths), max(hq, hv), DIM), io)

    def given(_: int) -> None:
        gdn_paged.chunk_gated_delta_rule_paged(**arguments, slots=slots, plan=plan)

    def in_call(_: int) -> None:
        gdn_paged.chunk_gated_delta_rule_paged(**arguments)

    given(0)
    us = machine.times_us({"given": given, "in_call": in_call}, 1, rounds)
    flops = prefill_flops(lengths, hq, hv, machine.chunked)
    host = machine.host_us(given, 20)
    served = gdn_paged.explain(gdn_paged.chunk_gated_delta_rule_paged, **arguments, slots=slots)
    return {
        "heads": heads,
        "hq": hq,
        "hv": hv,
        "lens": lens,
        "tokens": sum(lengths),
        "us": us["given"],
        "us_in_call": us["in_call"],
        **({} if host is None else {"host_us": host}),
        "floor_us": limits.floor_us(prefill_bytes(lengths, hq, hv), flops),
        "served": served.splitlines()[0],
    }


def decode_arguments(machine: Machine, batch: int, hq: int, hv: int, io: str) -> Row:
    """Operands of one token per row; the page table is the caller's."""
    heads = max(hq, hv)
    hk = min(hq, hv)
    return {
        "q": machine.cast(machine.normal(batch, 1, hq, DIM), io),
        "k": machine.cast(machine.normal(batch, 1, hk, DIM), io),
        "v": machine.cast(machine.normal(batch, 1, hv, DIM), io),
        "A_log": machine.normal(heads),
        "a": machine.cast(machine.normal(batch, 1, heads), io),
        "dt_bias": machine.normal(heads),
        "b": machine.cast(machine.normal(batch, 1, heads), io),
        "page_indptr": machine.table(range(batch + 1)),
        "last_page_len": machine.table([7] * batch),
        "output": machine.zeros((batch, 1, heads, DIM), io),
    }


def measure_decode(
    machine: Machine, limits: Limits, heads: str, state: str, batch: int, io: str, backend: str,
    rounds: int,
) -> Row:  # fmt: skip
    """Times calls in turn over disjoint page sets of 256 MB or more in all, so that the states come
    from memory; with slots given, and from the page table."""
    hq, hv = heads_of(heads)
    moved = decode_bytes(batch, max(hq, hv), STATE_BYTES[state])
    repeats = max(2, min(64, int(256e6 / (moved / 2)) + 1))
    pages = repeats * batch
    arguments = decode_arguments(machine, batch, hq, hv, io) | {"backend": backend}
    pool = machine.zeros((pages, max(hq, hv), DIM, DIM), state)
    pool += machine.cast(machine.normal(1, max(hq, hv), DIM, DIM) * 0.1, state)
    arguments["state_pool"] = pool
    order = machine.permutation(pages).reshape(repeats, batch)
    sets = [machine.table(ids) for ids in order]
    lengths = {name: arguments[name] for name in ("page_indptr", "last_page_len")}
    slots = [gdn_paged.gdn_paged_decode_slots(page_indices=ids, **lengths) for ids in sets]

    def given(i: int) -> None:
        gdn_paged.gated_delta_rule_decode_paged(**arguments, page_indices=sets[i], slots=slots[i])

    def in_call(i: int) -> None:
        gdn_paged.gated_delta_rule_decode_paged(**arguments, page_indices=sets[i])

    given(0)
    us = machine.times_us({"given": given, "in_call": in_call}, repeats, rounds)
    host = machine.host_us(given, 200)
    function = gdn_paged.gated_delta_rule_decode_paged
    served = gdn_paged.explain(function, **arguments, page_indices=sets[0], slots=slots[0])
    return {
        "heads": heads,
        "hq": hq,
        "hv": hv,
        "state": state,
        "batch": batch,
        "tokens": batch,
        "us": us["given"],
        "us_without_slots": us["in_call"],
        **({} if host is None else {"host_us": host}),
        "bytes": moved,
        "floor_us": limits.floor_us(moved, 0),
        "served": served.splitlines()[0],
    }

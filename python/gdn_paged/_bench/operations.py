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
from .machine import Machine, Step

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
    machine: Machine, limits: Limits, heads: str, lens: str, io: str, backend: str, rounds: int,
    burst: bool = False,
) -> Row:  # fmt: skip
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
    rested = machine.burst_us(given) if burst else None
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
        **({} if rested is None else {"burst_us": rested}),
        **({} if host is None else {"host_us": host}),
        "floor_us": limits.floor_us(prefill_bytes(lengths, hq, hv), flops),
        "served": served.splitlines()[0].partition("; workspace")[0],
    }


class DecodeInputs:
    """One token per row, over disjoint page sets of a shuffled pool: 256 MB or more of states in
    all, so that they come from memory."""

    def __init__(
        self, machine: Machine, batch: int, heads: tuple[int, int], state: str, io: str
    ) -> None:
        hq, hv = heads
        h = max(hq, hv)
        self.bytes = decode_bytes(batch, h, STATE_BYTES[state])
        self.repeats = max(2, min(64, int(256e6 / (self.bytes / 2)) + 1))
        pages = self.repeats * batch
        self.q = machine.cast(machine.normal(batch, 1, hq, DIM), io)
        self.k = machine.cast(machine.normal(batch, 1, min(hq, hv), DIM), io)
        self.v = machine.cast(machine.normal(batch, 1, hv, DIM), io)
        self.A_log, self.dt_bias = machine.normal(h), machine.normal(h)
        self.a = machine.cast(machine.normal(batch, 1, h), io)
        self.b = machine.cast(machine.normal(batch, 1, h), io)
        self.output = machine.zeros((batch, 1, h, DIM), io)
        self.pool = machine.zeros((pages, h, DIM, DIM), state)
        self.pool += machine.cast(machine.normal(1, h, DIM, DIM) * 0.1, state)
        order = machine.permutation(pages).reshape(self.repeats, batch)
        self.page_sets = [machine.table(ids) for ids in order]
        self.indptr = machine.table(range(batch + 1))
        self.last_page_len = machine.table([7] * batch)
        self.slots = [
            gdn_paged.gdn_paged_decode_slots(pages, self.indptr, self.last_page_len)
            for pages in self.page_sets
        ]
        self.backend = "auto"

    def arguments(self, i: int, with_slots: bool = True) -> Row:
        """Of the call on page set i."""
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "A_log": self.A_log,
            "a": self.a,
            "dt_bias": self.dt_bias,
            "b": self.b,
            "output": self.output,
            "state_pool": self.pool,
            "page_indices": self.page_sets[i],
            "page_indptr": self.indptr,
            "last_page_len": self.last_page_len,
            "slots": self.slots[i] if with_slots else None,
            "backend": self.backend,
        }

    def calls(self) -> dict[str, Step]:
        """The call with slots given, and from the page table. What a step does beside the call is
        part of its host time, hence the arguments are packed before."""
        given = [self.arguments(i) for i in range(self.repeats)]
        tables = [self.arguments(i, with_slots=False) for i in range(self.repeats)]
        decode = gdn_paged.gated_delta_rule_decode_paged
        return {"given": lambda i: decode(**given[i]), "in_call": lambda i: decode(**tables[i])}


def measure_decode(
    machine: Machine, limits: Limits, heads: str, state: str, batch: int, io: str, backend: str,
    rounds: int, burst: bool = False,
) -> Row:  # fmt: skip
    """Times calls in turn over disjoint page sets, with slots given and from the page table."""
    hq, hv = heads_of(heads)
    inputs = DecodeInputs(machine, batch, (hq, hv), state, io)
    inputs.backend = backend
    calls = inputs.calls()
    calls["given"](0)
    rested = machine.burst_us(calls["given"]) if burst else None
    us = machine.times_us(calls, inputs.repeats, rounds)
    host = machine.host_us(calls["given"], 50)
    served = gdn_paged.explain(gdn_paged.gated_delta_rule_decode_paged, **inputs.arguments(0))
    return {
        "heads": heads,
        "hq": hq,
        "hv": hv,
        "state": state,
        "batch": batch,
        "tokens": batch,
        "us": us["given"],
        "us_without_slots": us["in_call"],
        **({} if rested is None else {"burst_us": rested}),
        **({} if host is None else {"host_us": host}),
        "bytes": inputs.bytes,
        "floor_us": limits.floor_us(inputs.bytes, 0),
        "served": served.splitlines()[0].partition("; workspace")[0],
    }

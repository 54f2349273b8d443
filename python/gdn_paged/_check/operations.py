"""Runs the cases through every row of every operation and measures the errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import gdn_paged
from gdn_paged.dispatch import Operation

from .cases import (
    PAGE_SIZE,
    VARIANTS,
    Case,
    Variant,
    decode_case,
    dtype_of,
    expected_slots,
    prefill_case,
)

STORED = {"float32": 0.0, "bfloat16": 4e-3, "float16": 5e-4}  # rounding of an output
GPU_PREFILL = {"bfloat16": 2e-2, "float16": 1e-2}  # 16-bit operands of the matrix units
EXACT = 1e-4  # fp32 arithmetic
STORED_PAGE = 1e-3  # a 16-bit page against the rounded reference


class Host:
    """Arrays of NumPy."""

    def send(self, array: np.ndarray) -> Any:
        return array.copy()

    def fetch(self, array: Any) -> np.ndarray:
        return array


class Cuda(Host):
    """Arrays of torch on its current GPU."""

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def send(self, array: np.ndarray) -> Any:
        if array.dtype == dtype_of("bfloat16"):
            bits = self._torch.from_numpy(array.view(np.int16).copy())
            return bits.cuda().view(self._torch.bfloat16)
        return self._torch.from_numpy(array.copy()).cuda()

    def fetch(self, array: Any) -> np.ndarray:
        if array.dtype is self._torch.bfloat16:
            return array.view(self._torch.int16).cpu().numpy().view(dtype_of("bfloat16"))
        return array.cpu().numpy()


def cuda_device() -> Host | None:
    """The GPU of an installed torch, None without one."""
    try:
        import torch
    except ImportError:
        return None
    return Cuda() if torch.cuda.is_available() else None


@dataclass
class Result:
    """Worst errors of one row in one operation."""

    calls: int = 0
    worst: dict[str, tuple[float, float]] = field(default_factory=dict)  # error, tolerance
    faults: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def measure(self, what: str, errors: np.ndarray, tolerance: float) -> None:
        error = float(np.max(errors, initial=0.0))
        old = self.worst.get(what, (-1.0, tolerance))
        if not error / tolerance <= old[0] / old[1]:  # also when it is NaN
            self.worst[what] = (error, tolerance)

    @property
    def ok(self) -> bool:
        return not self.faults and all(e <= t for e, t in self.worst.values())

    def text(self) -> str:
        errors = (f"{w} {e:.1e} of {t:.0e}" for w, (e, t) in self.worst.items())
        refused = [f"{len(self.refusals)} refused"] if self.refusals else []
        return ", ".join([f"{self.calls:2d} calls", *errors, *refused, *self.faults])


def relative_l2(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Per row of the first axis; 0 where both are zero, inf where only `expected` is."""
    rows = (len(expected), -1)
    got, expected = got.astype(np.float64).reshape(rows), expected.reshape(rows)
    error = np.linalg.norm(got - expected, axis=1)
    norm = np.linalg.norm(expected, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, error / norm)


def _prefill_paged(case: Case, a: dict[str, Any], row: str) -> Any:
    table = {name: a[name] for name in case.table}
    inputs = {name: a[name] for name in case.arguments}
    return gdn_paged.chunk_gated_delta_rule_paged(
        **inputs, **table, **case.options, state_pool=a["pool"], page_size=PAGE_SIZE, backend=row
    )


def _prefill(case: Case, a: dict[str, Any], row: str) -> Any:
    table = {name: a[name] for name in case.table}
    slots = gdn_paged.gdn_paged_prefill_slots(**table, page_size=PAGE_SIZE)
    output, _ = gdn_paged.chunk_gated_delta_rule(
        **{name: a[name] for name in case.arguments},
        **case.options,
        cu_seqlens=a["cu_seqlens"],
        initial_state=a["pool"],
        output_state=a["pool"],
        state_checkpoints=a["pool"],
        output_final_state=True,
        state_indices=slots.state_indices,
        output_state_indices=slots.output_state_indices,
        checkpoint_state_indices=a["page_indices"],
        checkpoint_cu_starts=slots.checkpoint_cu_starts,
        prefix_lens=slots.prefix_lens,
        checkpoint_every_n_tokens=PAGE_SIZE,
        backend=row,
    )
    return output


def _decode_paged(case: Case, a: dict[str, Any], row: str) -> Any:
    table = {name: a[name] for name in case.table}
    inputs = {name: a[name] for name in case.arguments}
    return gdn_paged.gated_delta_rule_decode_paged(
        **inputs, **table, **case.options, state_pool=a["pool"], backend=row
    )


def _decode(case: Case, a: dict[str, Any], row: str) -> Any:
    slots = gdn_paged.gdn_paged_decode_slots(**{name: a[name] for name in case.table})
    output, _ = gdn_paged.gated_delta_rule_decode_pretranspose(
        **{name: a[name] for name in case.arguments},
        **case.options,
        state=None,
        initial_state=a["pool"],
        initial_state_indices=slots.initial_state_indices,
        output_state_indices=slots.output_state_indices,
        backend=row,
    )
    return output


CALLS: dict[Operation, Callable[[Case, dict[str, Any], str], Any]] = {
    "prefill_paged": _prefill_paged,
    "prefill": _prefill,
    "decode_paged": _decode_paged,
    "decode": _decode,
}


def _check_call(
    operation: Operation, row: str, device: Host, variant: Variant, seed: int, result: Result
) -> None:
    prefill = operation.startswith("prefill")
    case = (prefill_case if prefill else decode_case)(variant, seed)
    arrays = {
        name: device.send(x)
        for name, x in {**case.arguments, **case.table, "pool": case.pool}.items()
    }
    try:
        output = device.fetch(CALLS[operation](case, arrays, row))
    except NotImplementedError as reason:
        result.refusals.append(str(reason))
        return
    pool = device.fetch(arrays["pool"])
    math = EXACT
    if prefill and row.startswith("cuda"):
        math = GPU_PREFILL[variant.io]
    result.calls += 1
    result.measure("output", relative_l2(output, case.output), max(math, STORED[variant.io]))
    pages = relative_l2(pool[case.stored], case.pages[case.stored])
    result.measure("pages", pages, math if variant.pool == "float32" else max(math, STORED_PAGE))
    kept = ~case.stored
    if pool[kept].tobytes() != case.pool[kept].tobytes():
        result.faults.append(f"{variant} changed a page that it must not touch")


def _check_slots(device: Host, seed: int) -> Result:
    result = Result(calls=2)
    for make, call in (
        (prefill_case, gdn_paged.gdn_paged_prefill_slots),
        (decode_case, gdn_paged.gdn_paged_decode_slots),
    ):
        case = make(VARIANTS[0], seed)
        table = {name: device.send(x) for name, x in case.table.items()}
        if make is prefill_case:
            table["page_size"] = PAGE_SIZE
        slots = call(**table)
        for name, expected in expected_slots(case).items():
            got = device.fetch(getattr(slots, name)).tolist()
            if got != expected:
                result.faults.append(f"{call.__name__}: {name} is {got}, expected {expected}")
    return result


def check_all(seed: int) -> Iterator[tuple[str, Result]]:
    """Yields a title and the result for every row of every operation that can run here."""
    cuda = cuda_device()
    for name, device in (("cpu", Host()), ("cuda", cuda)):
        if device is not None:
            yield f"slots {name}", _check_slots(device, seed)
    for operation in CALLS:
        for row in gdn_paged.kernel_rows(operation):
            device = cuda if row.startswith("cuda") else Host()
            if device is None:
                continue
            result = Result()
            for number, variant in enumerate(VARIANTS):
                _check_call(operation, row, device, variant, seed + number, result)
            yield f"{operation} {row}", result

"""Error measures, tolerances, and the comparison of a case's result with the truth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from calls import Case, Prefill
from oracle import Oracle


@dataclass(frozen=True)
class Bars:
    """Allowed errors: relative L2 of a token's output and of a page, absolute of closed forms."""

    out: float
    rows: float
    absolute: float


def bars(device: str, io: str, state_dtype: str = "fp32", *, tight=False, normed=False) -> Bars:
    """Tolerances of one call; README.md says where the numbers come from.

    `normed` marks a prefill that rounds normalised q and k back to a 16-bit io dtype: one element
    in about ten thousand lies so near a tie that fp32 and float64 round it to different sides.
    """
    base = 1e-4
    if device != "cpu" and not tight:
        base = 1e-2 if io == "fp16" else 2e-2
    base = max(base, 1e-3) if normed and io != "fp32" else base
    stored = {"fp32": 0.0, "bf16": 4e-3, "fp16": 5e-4}[io]
    return Bars(
        out=max(base, stored),
        rows=base if state_dtype == "fp32" else max(base, 1e-3),
        absolute=max(1e-4 if device == "cpu" else 2e-2, stored),
    )


def relative_error(x: np.ndarray, truth: np.ndarray, floor: float = 0.0) -> float:
    """Largest |x - truth| / |truth| over the leading index (L2 norms); inf if NaN or inf differ.

    2^-25 per element is free: fp16 cannot tell it from zero. |truth| counts as no less than `floor`
    times its root mean square: where random data cancel, 16-bit operands leave no digits.
    """
    x, truth = np.asarray(x, np.float64), np.asarray(truth, np.float64)
    if x.shape != truth.shape:
        raise AssertionError(f"shape {x.shape}, expected {truth.shape}")
    if x.size == 0:
        return 0.0
    finite = np.isfinite(truth)
    special_equal = (x == truth) | (np.isnan(x) & np.isnan(truth))
    if not np.all(np.where(finite, np.isfinite(x), special_equal)):
        return np.inf
    x, truth = (np.where(finite, y, 0).reshape(len(y), -1) for y in (x, truth))
    free = x.shape[1] ** 0.5 * 2**-25
    error = np.maximum(np.linalg.norm(x - truth, axis=1) - free, 0)
    norms = np.linalg.norm(truth, axis=1)
    norms = np.maximum(norms, floor * np.sqrt(np.mean(norms**2)))
    return float((error / (norms + 1e-6)).max())


@dataclass
class Result:
    """What a backend made of a case; bits are unsigned integer views of the stored pool."""

    outs: list[np.ndarray]  # float64, one per call
    pool: np.ndarray  # float64
    bits_before: np.ndarray
    bits_after: np.ndarray
    gap_intact: bool = True


@dataclass(frozen=True, eq=False)
class Truth:
    outs: list[np.ndarray]
    pool: np.ndarray
    untouched: np.ndarray  # row numbers


def untouched_rows(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    return np.flatnonzero(same.reshape(len(before), -1).all(axis=1))


def run_oracle(oracle: Oracle, case: Case, io: str) -> Result:
    """A case by the oracle or one of its broken variants."""
    pool = case.pool.copy()
    outs = []
    for call in case.calls:
        if isinstance(call, Prefill):
            outs.append(oracle.prefill(call.cast(io), pool, io, case.state_dtype))
        else:
            outs.append(oracle.decode(call.cast(io), pool, case.state_dtype))
    bits = (x.view(np.uint64) for x in (case.pool, pool))
    return Result(outs, pool, *bits)


@lru_cache(maxsize=256)
def truth_of(case: Case, io: str) -> Truth:
    result = run_oracle(Oracle(), case, io)
    return Truth(result.outs, result.pool, untouched_rows(case.pool, result.pool))


def case_bars(case: Case, device: str, io: str) -> Bars:
    normed = any(isinstance(call, Prefill) and call.l2norm for call in case.calls)
    return bars(device, io, case.state_dtype, tight=case.tight, normed=normed)


def problems(case: Case, result: Result, truth: Truth, allowed: Bars) -> list[str]:
    """Everything that is wrong with a result; empty if nothing is."""
    found = []

    def expect(what: str, error: float, bound: float) -> None:
        if not error <= bound:
            found.append(f"{case}: {what} off by {error:.3g}, allowed {bound:.3g}")

    last = len(case.calls) - 1
    for i, (out, expected) in enumerate(zip(result.outs, truth.outs, strict=True)):
        keep = np.full(len(expected), True)
        if i == last:
            keep[list(case.ignored_tokens)] = False
        expect(f"output of call {i}", relative_error(out[keep], expected[keep]), allowed.out)
    if case.closed_out is not None:
        expect("closed output", np.abs(result.outs[-1] - case.closed_out).max(), allowed.absolute)
    for row, closed in case.closed_rows.items():
        expect(f"closed row {row}", relative_error(result.pool[[row]], closed[None]), allowed.rows)
    ignored = set(case.ignored_rows)
    for row in range(len(case.pool)):
        if row in ignored:
            continue
        if row in truth.untouched:
            if not np.array_equal(result.bits_before[row], result.bits_after[row]):
                found.append(f"{case}: row {row} changed, nothing may write it")
        else:
            error = relative_error(result.pool[[row]], truth.pool[[row]])
            expect(f"row {row}", error, allowed.rows)
    if not result.gap_intact:
        found.append(f"{case}: bytes between the pool rows changed")
    return found

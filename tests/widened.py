"""Cases of head size 64 in the corner of head size 128, for rows that serve 128 alone.

Further elements of q, k, v and of the states are zero and stay zero, so the truth is the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from calls import Case
from compare import Result

NARROW, WIDE = 64, 128


def can_widen(case: Case) -> bool:
    """Padded layouts have rows that are no multiple of 16 bytes."""
    return case.pool.shape[-2:] == (NARROW, NARROW) and case.layout != "padded"


def _wide(x: np.ndarray, dims: int) -> np.ndarray:
    """`x` with zeros behind its last `dims` dimensions."""
    behind = [(0, 0)] * (x.ndim - dims) + [(0, WIDE - NARROW)] * dims
    return np.pad(x, behind)


def widened(case: Case) -> Case:
    calls = tuple(
        replace(
            call,
            scale=NARROW**-0.5 if call.scale is None else call.scale,
            **{name: _wide(getattr(call, name), 1) for name in ("q", "k", "v")},
        )
        for call in case.calls
    )
    return replace(case, calls=calls, pool=_wide(case.pool, 2))


def narrowed(result: Result) -> Result:
    """The corner of a widened case's result. Rows are compared whole: bits stay wide."""
    return replace(
        result,
        outs=[out[..., :NARROW] for out in result.outs],
        pool=result.pool[..., :NARROW, :NARROW],
    )

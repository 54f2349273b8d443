"""The gated delta rule on pages, token by token in float64: what ``check`` compares with.

Written from the definition, not from the kernels: no chunks, no rounding inside a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Span:
    """A sequence of one call: its pages, and its length before and after the call."""

    pages: tuple[int, ...]
    before: int
    after: int

    @property
    def new(self) -> int:
        return self.after - self.before


def page_table(spans: tuple[Span, ...], page_size: int) -> dict[str, np.ndarray]:
    """The int32 arrays ``page_indices``, ``page_indptr``, ``last_page_len`` of the spans."""
    return {
        "page_indices": np.array([p for s in spans for p in s.pages], np.int32),
        "page_indptr": np.cumsum([0, *(len(s.pages) for s in spans)], dtype=np.int32),
        "last_page_len": np.array(
            [s.after - (len(s.pages) - 1) * page_size for s in spans], np.int32
        ),
    }


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-softplus(-x))


def raw_alpha(a: np.ndarray, A_log: np.ndarray, dt_bias: np.ndarray) -> np.ndarray:
    """``exp(-exp(A_log) softplus(a + dt_bias))``."""
    return np.exp(-np.exp(A_log) * softplus(a + dt_bias))


def l2norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True) + 1e-6)


def run(
    spans: tuple[Span, ...],
    page_size: int,
    pool: np.ndarray,
    operands: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs the new tokens of all spans.

    Args:
        pool: float64 ``[num_pages, H, V, K]``, not changed.
        operands: float64 ``q``, ``k``, ``v`` ``[tokens, heads, dim]``, ``alpha``, ``beta``
            ``[tokens, H]`` and the number ``scale``.

    Returns:
        Output ``[tokens, H, V]``, the pool after the call, and which of its pages were stored.
    """
    num_heads = pool.shape[1]

    def spread(x: np.ndarray) -> np.ndarray:
        return np.repeat(x, num_heads // x.shape[1], axis=1)

    q, k, v = (spread(operands[name]) for name in "qkv")
    alpha, beta = operands["alpha"], operands["beta"]
    output = np.zeros((len(q), num_heads, pool.shape[2]))
    after = pool.copy()
    stored = np.zeros(len(pool), bool)
    t = 0
    for span in spans:
        read = span.pages[(span.before - 1) // page_size] if span.before else -1
        state = pool[read].copy() if read >= 0 else np.zeros(pool.shape[1:])
        for position in range(span.before + 1, span.after + 1):
            # Decay first, then the delta on the decayed state; alpha = 0 forgets even a NaN.
            state = np.where(alpha[t, :, None, None] == 0, 0, alpha[t, :, None, None] * state)
            delta = beta[t, :, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
            state = state + delta[:, :, None] * k[t][:, None, :]
            output[t] = operands["scale"] * np.einsum("hvk,hk->hv", state, q[t])
            page = span.pages[(position - 1) // page_size]
            if page >= 0 and (position % page_size == 0 or position == span.after):
                after[page] = state
                stored[page] = True
            t += 1
    return output, after, stored

"""The calls that ``check`` makes: types, gate forms, heads, and page tables with every rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from . import reference
from .reference import Span

PAGE_SIZE = 64
NUM_PAGES = 14

PREFILL_SPANS = (
    Span((4, 1), 0, 70),  # from nothing, across a page end
    Span((7, 3, 12), 128, 180),  # continues a prefix of full pages
    Span((7, 3, 9), 128, 192),  # shares it, and ends on a page end
    Span((0, 5), 40, 100),  # starts inside a page
    Span((2,), 30, 30),  # no new token: nothing is stored
    Span((6, -1, 10), 0, 150),  # the store of the middle page is skipped
    Span((-1, 11), 64, 80),  # -1 is read as the zero state
)
DECODE_SPANS = (
    Span((4,), 0, 1),  # the first token of a sequence
    Span((7, 3), 64, 65),  # opens a page
    Span((0, 5), 99, 100),  # updates a page in place
    Span((9, 2), 127, 128),  # fills a page
    Span((-1, 11), 64, 65),  # -1 is read as the zero state
    Span((6, -1), 70, 71),  # padding: output zero, nothing stored
)


@dataclass(frozen=True)
class Variant:
    """Types, gate form (prefill) and heads of one call."""

    io: str
    pool: str
    gate: str = "linear"
    heads: tuple[int, int, int] = (2, 2, 4)  # q, k, v
    dims: tuple[int, int] = (64, 64)  # K, V


VARIANTS = (
    Variant("float32", "float32"),
    Variant("float32", "float32", "raw", dims=(40, 24)),
    Variant("float32", "bfloat16", "log", heads=(4, 2, 2)),
    Variant("bfloat16", "float32", "raw", dims=(128, 128)),
    Variant("bfloat16", "float32", "log", heads=(4, 2, 2)),
    Variant("bfloat16", "bfloat16"),
    Variant("float16", "float32", "raw"),
    Variant("float16", "float16", dims=(128, 128)),
)


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclass
class Case:
    """One call: its page table, its arguments, and what has to come out."""

    spans: tuple[Span, ...]
    table: dict[str, np.ndarray]
    pool: np.ndarray
    arguments: dict[str, np.ndarray]
    options: dict[str, Any]
    output: np.ndarray  # float64
    pages: np.ndarray  # float64, rounded to the pool's type
    stored: np.ndarray  # bool [num_pages]


class _Inputs:
    """Random operands of a variant, as stored and as the reference reads them."""

    def __init__(self, variant: Variant, num_tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        io, num_heads = dtype_of(variant.io), max(variant.heads)
        dims = (variant.dims[0], variant.dims[0], variant.dims[1])
        self.qkv = {
            name: (rng.standard_normal((num_tokens, heads, dim)) / dim**0.5).astype(io)
            for name, heads, dim in zip("qkv", variant.heads, dims, strict=True)
        }
        # Logits of decay and beta; the decay per token lies mostly between 0.5 and 1.
        self.a = rng.standard_normal((num_tokens, num_heads)).astype(np.float32)
        self.b = rng.standard_normal((num_tokens, num_heads)).astype(np.float32)
        self.A_log = np.log(rng.uniform(0.2, 2, num_heads)).astype(np.float32)
        self.dt_bias = rng.uniform(-3, -1, num_heads).astype(np.float32)
        shape = (NUM_PAGES, num_heads, variant.dims[1], variant.dims[0])
        self.pool = (0.3 * rng.standard_normal(shape)).astype(dtype_of(variant.pool))

    def alpha(self) -> np.ndarray:
        parts = (x.astype(np.float64) for x in (self.a, self.A_log, self.dt_bias))
        return reference.raw_alpha(*parts)

    def operands(self, alpha: np.ndarray, beta: np.ndarray, scale: float) -> dict[str, Any]:
        exact = {name: x.astype(np.float64) for name, x in self.qkv.items()}
        return {**exact, "alpha": alpha, "beta": beta, "scale": scale}


def _expect(
    spans: tuple[Span, ...], inputs: _Inputs, operands: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    exact = inputs.pool.astype(np.float64)
    output, pages, stored = reference.run(spans, PAGE_SIZE, exact, operands)
    return output, pages.astype(inputs.pool.dtype).astype(np.float64), stored


def prefill_case(variant: Variant, seed: int) -> Case:
    inputs = _Inputs(variant, sum(s.new for s in PREFILL_SPANS), seed)
    options: dict[str, Any] = {}
    alpha, beta = inputs.alpha(), reference.sigmoid(inputs.b.astype(np.float64))
    arguments = dict(inputs.qkv)
    if variant.gate == "raw":
        arguments |= {"g": inputs.a, "beta": inputs.b}
        arguments |= {"A_log": inputs.A_log, "dt_bias": inputs.dt_bias}
        options |= {"use_gate_in_kernel": True, "beta_is_logit": True}
    else:
        alpha[5] = 0  # an exact reset
        with np.errstate(divide="ignore"):
            g = (alpha if variant.gate == "linear" else np.log(alpha)).astype(np.float32)
        alpha = g.astype(np.float64) if variant.gate == "linear" else np.exp(g.astype(np.float64))
        arguments |= {"g": g, "beta": beta.astype(np.float32)}
        beta = arguments["beta"].astype(np.float64)
        options["gate_domain"] = variant.gate
    operands = inputs.operands(alpha, beta, variant.dims[0] ** -0.5)
    if variant.gate == "raw":
        options["use_qk_l2norm_in_kernel"] = True
        io = dtype_of(variant.io)
        for name in "qk":  # prefill rounds the normalised q and k to the io type
            operands[name] = reference.l2norm(operands[name]).astype(io).astype(np.float64)
    lengths = [s.new for s in PREFILL_SPANS]
    table = reference.page_table(PREFILL_SPANS, PAGE_SIZE)
    table["cu_seqlens"] = np.cumsum([0, *lengths], dtype=np.int32)
    expected = _expect(PREFILL_SPANS, inputs, operands)
    return Case(PREFILL_SPANS, table, inputs.pool, arguments, options, *expected)


def decode_case(variant: Variant, seed: int) -> Case:
    inputs = _Inputs(variant, len(DECODE_SPANS), seed)
    beta = reference.sigmoid(inputs.b.astype(np.float64))
    operands = inputs.operands(inputs.alpha(), beta, 0.25)
    for name in "qk":
        operands[name] = reference.l2norm(operands[name])
    arguments = {name: x[:, None] for name, x in inputs.qkv.items()}
    arguments |= {"a": inputs.a[:, None], "b": inputs.b[:, None]}
    arguments |= {"A_log": inputs.A_log, "dt_bias": inputs.dt_bias}
    output, pages, stored = _expect(DECODE_SPANS, inputs, operands)
    output[[s.pages[-1] == -1 for s in DECODE_SPANS]] = 0
    return Case(
        spans=DECODE_SPANS,
        table=reference.page_table(DECODE_SPANS, PAGE_SIZE),
        pool=inputs.pool,
        arguments=arguments,
        options={"scale": 0.25},
        output=output[:, None],
        pages=pages,
        stored=stored,
    )


def expected_slots(case: Case) -> dict[str, list[int]]:
    """The slots of the case's page table, from the rules of the page table."""
    rows: dict[str, list[int]] = {}
    first = 0
    for span in case.spans:
        read = span.pages[(span.before - 1) // PAGE_SIZE] if span.before else -1
        if "cu_seqlens" in case.table:
            on_end = span.after % PAGE_SIZE == 0
            slots = {
                "state_indices": read,
                "output_state_indices": -1 if on_end or not span.new else span.pages[-1],
                "checkpoint_cu_starts": first + span.before // PAGE_SIZE,
                "prefix_lens": span.before,
            }
        else:
            padding = span.pages[-1] == -1
            slots = {
                "initial_state_indices": -1 if padding else read,
                "output_state_indices": span.pages[-1],
            }
        first += len(span.pages)
        for name, value in slots.items():
            rows.setdefault(name, []).append(value)
    return rows

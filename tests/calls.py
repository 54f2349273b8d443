"""Calls as data: one prefill or decode step, free of framework, device and kernel row.

Floating-point fields are float64 arrays whose values the io dtype can hold, so every framework
loads them without a rounding of its own. T tokens, N sequences, B decode rows, H state heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np

DTYPES = ("fp32", "bf16", "fp16")


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """`x` rounded to nearest even in `dtype`, returned as float64."""
    x = np.asarray(x, np.float64)
    if dtype == "fp64":
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "fp16":
            return x.astype(np.float16).astype(np.float64)
        single = x.astype(np.float32)
        if dtype == "fp32":
            return single.astype(np.float64)
        bits = single.view(np.uint32)
        bits = bits + ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
        bits = (bits >> np.uint32(16)) << np.uint32(16)
        return np.where(np.isnan(single), np.nan, bits.view(np.float32).astype(np.float64))


@dataclass(frozen=True, eq=False)
class PageTable:
    """CSR page table. `cu_seqlens` is absent in decode, where every sequence has one new token."""

    indices: np.ndarray  # [num_indices]
    indptr: np.ndarray  # [N + 1]
    last_page_len: np.ndarray  # [N]
    page_size: int = 64
    cu_seqlens: np.ndarray | None = None  # [N + 1]
    initial_pages: np.ndarray | None = None  # [N], -1: the own page

    @property
    def num_seqs(self) -> int:
        return len(self.last_page_len)


def page_table(page_size: int, *spans: tuple[list[int], int, int], decode=False) -> PageTable:
    """One (page ids, tokens before, tokens after) per sequence."""
    lists = [list(ids) for ids, _, _ in spans]
    last = [after - (len(ids) - 1) * page_size if ids else 0 for ids, _, after in spans]
    lengths = [after - before for _, before, after in spans]
    return PageTable(
        indices=np.array([page for ids in lists for page in ids], np.int64),
        indptr=np.cumsum([0] + [len(ids) for ids in lists]),
        last_page_len=np.array(last, np.int64),
        page_size=page_size,
        cu_seqlens=None if decode else np.cumsum([0, *lengths]),
    )


@dataclass(frozen=True, eq=False)
class Slots:
    """Slot and packed form: explicit rows of up to three pools.

    `state_indices=None` is the packed form: row b of the initial and of the output states.
    """

    cu_seqlens: np.ndarray  # [N + 1]
    state_indices: np.ndarray | None = None  # [N], -1: zero state
    output_state_indices: np.ndarray | None = None  # [N], -1: not stored
    checkpoint_state_indices: np.ndarray | None = None  # rows, -1: not stored
    checkpoint_cu_starts: np.ndarray | None = None  # [N] or [N + 1]
    checkpoint_every: int = 0
    prefix_lens: np.ndarray | None = None  # [N]

    @property
    def num_seqs(self) -> int:
        return len(self.cu_seqlens) - 1


def _cast(call, io: str, names: tuple[str, ...]):
    return replace(call, **{name: rounded(getattr(call, name), io) for name in names})


@dataclass(frozen=True, eq=False)
class Prefill:
    """New tokens of N packed sequences and the rows they read and write."""

    q: np.ndarray  # [T, Hq, K]
    k: np.ndarray  # [T, Hk, K]
    v: np.ndarray  # [T, Hv, V]
    rows: PageTable | Slots
    g: np.ndarray | None = None  # [T, H]
    beta: np.ndarray | None = None  # [T, H]
    scale: float | None = None
    gate: str = "linear"  # linear, log or raw
    A_log: np.ndarray | None = None  # [H]
    dt_bias: np.ndarray | None = None  # [H]
    l2norm: bool = False
    beta_is_logit: bool = False

    @property
    def heads(self) -> int:
        return max(self.q.shape[1], self.v.shape[1])

    def cast(self, io: str) -> Prefill:
        """The same call with q, k and v rounded to `io`."""
        return _cast(self, io, ("q", "k", "v"))

    def part(self, begin: int, end: int, rows: PageTable | Slots) -> Prefill:
        """Tokens [begin, end) as a call of their own."""
        tokens = {
            f.name: getattr(self, f.name)[begin:end]
            for f in fields(self)
            if f.name in ("q", "k", "v", "g", "beta") and getattr(self, f.name) is not None
        }
        return replace(self, rows=rows, **tokens)


@dataclass(frozen=True, eq=False)
class DecodeSlots:
    """Slot form of decode; -1 reads zero or stores nothing, both mark a padding row."""

    initial: np.ndarray  # [B]
    output: np.ndarray | None = None  # [B]; absent: the rows that were read


@dataclass(frozen=True, eq=False)
class Decode:
    """One token for each of B rows."""

    q: np.ndarray  # [B, Hq, K]
    k: np.ndarray  # [B, Hk, K]
    v: np.ndarray  # [B, Hv, V]
    A_log: np.ndarray  # [H]
    a: np.ndarray  # [B, H]
    dt_bias: np.ndarray  # [H]
    b: np.ndarray  # [B, H]
    rows: PageTable | DecodeSlots
    scale: float | None = None
    l2norm: bool = True

    @property
    def heads(self) -> int:
        return max(self.q.shape[1], self.v.shape[1])

    def cast(self, io: str) -> Decode:
        """The same call with q, k and v rounded to `io`."""
        return _cast(self, io, ("q", "k", "v"))


def as_prefill(call: Decode, rows: PageTable | Slots, norm=lambda x: x) -> Prefill:
    """The rows of a decode call as the tokens of a prefill; `norm` stands for its q/k norm."""
    return Prefill(
        norm(call.q),
        norm(call.k),
        call.v,
        rows,
        call.a,
        call.b,
        call.scale,
        gate="raw",
        A_log=call.A_log,
        dt_bias=call.dt_bias,
        beta_is_logit=True,
    )


@dataclass(frozen=True, eq=False)
class Case:
    """Calls that run one after the other on one pool, and how their results are compared.

    Rows that the truth leaves alone must keep their bytes; all others are held to the tolerance.
    """

    name: str
    calls: tuple[Prefill | Decode, ...]
    pool: np.ndarray  # [rows, H, V, K]
    state_dtype: str = "fp32"
    tight: bool = False  # scalar gate maths: 1e-4 on every row
    layout: str = "dense"  # of the operands: dense, padded, swapped or fused (targets.py)
    row_padding: int = 0  # elements between pool rows
    index_dtype: str = "int32"
    closed_out: np.ndarray | None = None  # last call's output in closed form, absolute 1e-4 scale
    closed_rows: dict[int, np.ndarray] = field(default_factory=dict)  # row -> [H, V, K]
    ignored_tokens: tuple[int, ...] = ()  # of the last call
    ignored_rows: tuple[int, ...] = ()
    cpu_only: bool = False  # head sizes that CUDA rows refuse

    def __str__(self) -> str:
        return self.name

"""Speculative decoding as data, its truth, and random engines that run it.

The truth keeps, per slot of the draft buffer, what the rule says each draft token would add to a
state: (k, u, alpha) in float64. A step folds the accepted ones and runs the new ones from there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

import gdn_paged
from calls import DTYPES, rounded
from oracle import Oracle
from random_calls import CPU_DIMS, HEADS, LAYOUTS, _operands
from targets import Target, unaligned

NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MAX_DRAFT = 8


@dataclass(frozen=True, eq=False)
class Verify:
    """One step. N sequences, T new tokens in all, H state heads."""

    q: np.ndarray  # [T, Hq, K]
    k: np.ndarray  # [T, Hk, K]
    v: np.ndarray  # [T, Hv, V]
    A_log: np.ndarray  # [H]
    a: np.ndarray  # [T, H]
    dt_bias: np.ndarray  # [H]
    b: np.ndarray  # [T, H]
    cu_seqlens: np.ndarray  # [N + 1]
    indices: np.ndarray
    indptr: np.ndarray  # [N + 1]
    seq_lens: np.ndarray  # [N]
    accepted: np.ndarray | None = None  # [N]
    draft_indices: np.ndarray | None = None  # [N]
    page_size: int = 64
    max_draft: int = MAX_DRAFT
    scale: float | None = None
    l2norm: bool = True

    @property
    def heads(self) -> int:
        return max(self.q.shape[1], self.v.shape[1])

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    def cast(self, io: str) -> Verify:
        return replace(self, **{x: rounded(getattr(self, x), io) for x in ("q", "k", "v")})

    def __repr__(self) -> str:
        small = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in "qkvab"}
        return f"Verify(q {self.q.shape}, v {self.v.shape}, {small})"


class VerifyOracle(Oracle):
    """The rules of a step; `drafts` maps slots to lists of (k, u, alpha), heads expanded."""

    def fold_rows(self, call: Verify, b: int, accepted: int, num_rows: int):
        """(row to read, [(accepted tokens so far, row)]) or None if the table is broken."""
        first, end = int(call.indptr[b]), int(call.indptr[b + 1])
        size, total = call.page_size, int(call.seq_lens[b])
        pages, prefix = end - first, total - accepted
        if first < 0 or pages <= 0 or end > len(call.indices) or prefix < 0:
            return None
        if -(-total // size) > pages:
            return None
        row = lambda entry: int(call.indices[first + entry])  # noqa: E731
        read = row((prefix - 1) // size) if prefix > 0 else -1
        stores = []
        if accepted:
            end_of_page = total // size * size
            if end_of_page > prefix:
                stores.append((end_of_page - prefix, row(end_of_page // size - 1)))
            if end_of_page < total:
                stores.append((accepted, row(total // size)))
        rows = [read, *(r for _, r in stores)]
        return (read, stores) if all(-1 <= r < num_rows for r in rows) else None

    def resolve(self, call: Verify, b: int, drafts: dict, slots: int, num_rows: int):
        """(begin, new tokens, slot, accepted, read, stores); begin, length alone if it is dead."""
        T, begin, end = len(call.q), int(call.cu_seqlens[b]), int(call.cu_seqlens[b + 1])
        if not 0 <= begin <= T or end < begin:
            return 0, 0
        length = min(end, T) - begin
        accepted = 0 if call.accepted is None else int(call.accepted[b])
        slot = b if call.draft_indices is None else int(call.draft_indices[b])
        broken = end > T or length > call.max_draft or not 0 <= accepted <= call.max_draft
        if broken or not -1 <= slot < slots or accepted > len(drafts.get(slot, ())):
            return begin, length
        rows = self.fold_rows(call, b, accepted, num_rows)
        return (begin, length) if rows is None else (begin, length, slot, accepted, *rows)

    def verify(self, call: Verify, pool, drafts: dict, slots: int, state_dtype="fp32"):
        """Output [T, H, V], zero where nothing writes; updates `pool` and `drafts`."""
        q, k = (self.l2norm(call.q), self.l2norm(call.k)) if call.l2norm else (call.q, call.k)
        q, k, v = (self.expand(x, call.heads) for x in (q, k, call.v))
        alpha = self.raw_alpha(call.a, call.A_log, call.dt_bias)
        beta, scale = self.sigmoid(call.b), self.default_scale(call)
        out = np.zeros((len(q), call.heads, v.shape[2]))
        before = {slot: list(tokens) for slot, tokens in drafts.items()}
        start = pool.copy()
        for b in range(call.num_seqs):
            found = self.resolve(call, b, before, slots, len(pool))
            if len(found) == 2:
                continue
            begin, length, slot, accepted, read, stores = found
            S = self.load(start, read, pool.shape[1:])
            for n, (kt, u, alpha_t) in enumerate(before.get(slot, ())[:accepted], 1):
                S = self.decay(S, alpha_t) + u[:, :, None] * kt[:, None, :]
                for tokens, row in stores:
                    if tokens == n:
                        self.store(pool, row, S, state_dtype)
            fresh = []
            for t in range(begin, begin + length):
                error = v[t] - np.einsum("hvk,hk->hv", self.decay(S, alpha[t]), k[t])
                fresh.append((k[t], beta[t][:, None] * error, alpha[t]))
                S, out[t] = self.step(S, q[t], k[t], v[t], alpha[t], beta[t], scale)
            if slot >= 0:
                drafts[slot] = fresh
        return out


# ---- calls on a target --------------------------------------------------------------------------
def drafts_of(target: Target, call: Verify, io: str, slots: int) -> Any:
    """A fresh draft buffer, whose content must not matter."""
    size = gdn_paged.verify_draft_size(
        call.max_draft, call.heads, call.k.shape[2], call.v.shape[2], NAMES[io]
    )
    return target.arrays.array(np.full((slots, size), 0xFF, np.uint8))


def verify_arguments(
    target: Target, call: Verify, io: str, *, layout="dense", index_dtype="int32", gate_dtype="fp32"
) -> dict[str, Any]:
    """Keyword arguments without pool, drafts and output."""
    arguments = {x: target.array(getattr(call, x), io, layout) for x in ("q", "k", "v")}
    arguments |= {x: target.array(getattr(call, x), gate_dtype, layout) for x in ("a", "b")}
    arguments |= {x: target.array(getattr(call, x), "fp32") for x in ("A_log", "dt_bias")}
    return arguments | tables_of(target, call, index_dtype) | {
        "scale": call.scale, "use_qk_l2norm": call.l2norm, "page_size": call.page_size,
        "max_draft": call.max_draft, "backend": target.decode_row,
    } | unaligned(call.page_size)  # fmt: skip


def tables_of(target: Target, call: Verify, index_dtype="int32") -> dict[str, Any]:
    names = {"page_indices": "indices", "page_indptr": "indptr"}
    names |= {x: x for x in ("cu_seqlens", "seq_lens", "accepted", "draft_indices")}
    return {x: target.table(getattr(call, y), index_dtype) for x, y in names.items()}


def run_verify(target: Target, call: Verify, pool, drafts, io="fp32", options=None, **forms):
    arguments = verify_arguments(target, call.cast(io), io, **forms) | (options or {})
    return gdn_paged.gated_delta_rule_verify_paged(**arguments, state_pool=pool, drafts=drafts)


def run_commit(target: Target, call: Verify, pool, drafts, io="fp32", index_dtype="int32"):
    tables = tables_of(target, call, index_dtype)
    del tables["cu_seqlens"]
    gdn_paged.gated_delta_rule_commit_paged(
        pool, **tables, page_size=call.page_size, drafts=drafts, max_draft=call.max_draft,
        dtype=NAMES[io], backend=target.decode_row, **unaligned(call.page_size),
    )  # fmt: skip


# ---- random engines -----------------------------------------------------------------------------
def token_operands(rng, tokens: int, heads, dims, io: str, gate_dtype="fp32") -> dict[str, Any]:
    H = max(heads)
    return _operands(rng, tokens, heads, dims, io) | {
        "A_log": rounded(rng.uniform(-3, 1, H), "fp32"),
        "dt_bias": rounded(rng.uniform(-1, 1, H), "fp32"),
        "a": rounded(rng.uniform(-6, 2, (tokens, H)), gate_dtype),
        "b": rounded(rng.uniform(-3, 3, (tokens, H)), gate_dtype),
    }


@dataclass(frozen=True, eq=False)
class RandomEngine:
    """Steps of one batch: sequence i starts with starts[i] tokens and owns pages[i]."""

    steps: list[Verify]
    pool: np.ndarray
    slots: int
    io: str
    state_dtype: str
    gap: int
    forms: dict[str, str]

    def __repr__(self) -> str:
        return f"{self.steps}, slots={self.slots}, {self.io}, {self.state_dtype}, {self.forms}"


@st.composite
def engines(draw, device: str = "cpu") -> RandomEngine:
    cpu = device == "cpu"
    io = draw(st.sampled_from(DTYPES if cpu else ("bf16", "fp16")))
    state_dtype, gate_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    dims = draw(st.sampled_from(CPU_DIMS if cpu else [64, 128]))
    heads = draw(st.sampled_from(HEADS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    page_size = draw(st.sampled_from([64, 64, 40, 100]))
    N, max_draft = draw(st.integers(1, 4)), draw(st.integers(1, MAX_DRAFT))
    near = st.sampled_from([0, 1, 55, 60, 63, 64, 65, 120, 127, 128]) | st.integers(0, 140)
    lens = np.array(draw(st.lists(near, min_size=N, max_size=N)))
    pages = [list(x) for x in np.split(rng.permutation(5 * N), N)]
    if draw(st.booleans()):  # some pages are skipped
        pages = [[-1 if rng.random() < 0.2 else p for p in ids] for ids in pages]
    slots = N + draw(st.integers(0, 2))
    named = draw(st.booleans())
    slot_ids = rng.permutation(slots)[:N] if named else None
    K, V = dims if isinstance(dims, tuple) else (dims, dims)
    pool = np.full((5 * N + 1, max(heads), V, K), np.nan)
    for ids, n in zip(pages, lens, strict=True):
        if n and (page := ids[(n - 1) // page_size]) >= 0:
            pool[page] = rounded(0.2 * rng.standard_normal(pool.shape[1:]), state_dtype)
    common = {"scale": draw(st.sampled_from([None, 0.5])), "l2norm": draw(st.booleans())}
    table = {"indices": np.concatenate(pages), "indptr": 5 * np.arange(N + 1)}
    steps, previous = [], np.zeros(N, np.int64)
    for _ in range(draw(st.integers(1, 4))):
        lengths = rng.integers(0, max_draft + 1, N)
        accepted = rng.integers(0, previous + 1) if steps else previous
        lens = lens + accepted
        operands = token_operands(rng, int(lengths.sum()), heads, dims, io, gate_dtype)
        steps.append(
            Verify(
                **operands, **table, **common, cu_seqlens=np.cumsum([0, *lengths]), seq_lens=lens,
                accepted=accepted if steps or draw(st.booleans()) else None,
                draft_indices=slot_ids, max_draft=max_draft, page_size=page_size,
            )
        )  # fmt: skip
        previous = lengths
    forms = {
        "layout": draw(st.sampled_from(LAYOUTS)),
        "index_dtype": draw(st.sampled_from(["int32", "int64"])),
        "gate_dtype": gate_dtype,
    }
    return RandomEngine(
        steps, pool, slots, io, state_dtype, draw(st.sampled_from([0, 8, 96])), forms
    )

"""The truth: float64, one token at a time, written from the specification and nothing else.

    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,   o_t = scale S_t q_t

Every rule is a method of its own, so that `mutants.py` can break one at a time. States are
[H, V, K]; pools are float64 arrays [rows, H, V, K] that hold values of the state dtype and are
updated in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from calls import Decode, DecodeSlots, PageTable, Prefill, Slots, rounded


@dataclass
class Sequence:
    """What one sequence of a prefill call reads and writes."""

    begin: int
    length: int
    live: bool = False  # else: outputs zero, nothing stored
    prefix: int = 0
    read_row: int = -1
    checkpoints: list[tuple[int, int]] = field(default_factory=list)  # (tokens so far, row)
    write_row: int = -1


@dataclass
class Tokens:
    """Operands in canonical form: every tensor has H heads, one alpha and one beta per token."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray
    scale: float


class Oracle:
    """Prefill and decode of the gated delta rule on paged states."""

    # ---- scalar rules -----------------------------------------------------------------------
    def softplus(self, x):
        return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))

    def sigmoid(self, x):
        return 1.0 / (1.0 + np.exp(-x))

    def raw_alpha(self, x, A_log, dt_bias):
        """exp(-exp(A_log) softplus(x + dt_bias)), where inf times 0 is alpha = 1."""
        with np.errstate(over="ignore", invalid="ignore"):
            s = self.softplus(x + dt_bias)
            return np.where(s == 0, 1.0, np.exp(-np.exp(A_log) * s))

    def l2norm(self, x):
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    def source_head(self, h: int, count: int, heads: int) -> int:
        return h // (heads // count)

    def decay(self, S, alpha):
        """alpha = 0 is a reset even of NaN and inf: select, never multiply."""
        alpha = alpha[:, None, None]
        return np.where(alpha == 0, 0.0, alpha * S)

    def step(self, S, q, k, v, alpha, beta, scale):
        """One token; S [H, V, K], q and k [H, K], v [H, V], alpha and beta [H]."""
        S = self.decay(S, alpha)
        error = v - np.einsum("hvk,hk->hv", S, k)
        S = S + (beta[:, None] * error)[:, :, None] * k[:, None, :]
        return S, scale * np.einsum("hvk,hk->hv", S, q)

    def carry(self, S, state_dtype):
        """The state from token to token: not rounded."""
        return S

    # ---- operands ---------------------------------------------------------------------------
    def expand(self, x, heads):
        return x[:, [self.source_head(h, x.shape[1], heads) for h in range(heads)]]

    def default_scale(self, call):
        return call.q.shape[2] ** -0.5 if call.scale is None else call.scale

    def tokens(self, call: Prefill, io: str) -> Tokens:
        q, k, ones = call.q, call.k, np.ones((call.q.shape[0], call.heads))
        if call.l2norm:
            q, k = rounded(self.l2norm(q), io), rounded(self.l2norm(k), io)
        if call.gate == "raw":
            dt_bias = 0.0 if call.dt_bias is None else call.dt_bias
            alpha = self.raw_alpha(call.g, call.A_log, dt_bias)
        elif call.g is None:
            alpha = ones
        else:
            alpha = np.exp(call.g) if call.gate == "log" else call.g
        beta = ones if call.beta is None else call.beta
        if call.beta_is_logit:
            beta = self.sigmoid(beta)
        q, k, v = (self.expand(x, call.heads) for x in (q, k, call.v))
        return Tokens(q, k, v, alpha, beta, self.default_scale(call))

    # ---- page rules -------------------------------------------------------------------------
    def page(self, table: PageTable, b: int, entry: int) -> int:
        return int(table.indices[table.indptr[b] + entry])

    def last_page_len(self, table: PageTable, b: int) -> int:
        return int(table.last_page_len[b])

    def read_entry(self, prefix: int, page_size: int, pages: int) -> int:
        """Entry of the page that holds the last prefix token, -1 if the prefix is empty."""
        return (prefix - 1) // page_size if prefix > 0 else -1

    def initial_page(self, table: PageTable, b: int, own: int) -> int:
        """The page that a sequence with a prefix starts from, unless it is its own."""
        given = -1 if table.initial_pages is None else int(table.initial_pages[b])
        return own if given == -1 else given

    def page_ends(self, prefix: int, length: int, page_size: int) -> list[tuple[int, int]]:
        """(new tokens so far, entry) of every page end in (prefix, prefix + length]."""
        first, last = prefix // page_size, (prefix + length) // page_size
        return [(page_size * (j + 1) - prefix, j) for j in range(first, last)]

    def stores_final(self, total: int, page_size: int) -> bool:
        return total % page_size != 0

    def paged_sequence(self, table: PageTable, b: int, s: Sequence, num_rows: int) -> None:
        first, end = int(table.indptr[b]), int(table.indptr[b + 1])
        size, pages = table.page_size, end - first
        if first < 0 or pages <= 0 or end > len(table.indices):
            return
        last = self.last_page_len(table, b)
        total = (pages - 1) * size + last
        s.prefix = total - s.length
        if not 1 <= last <= size or s.prefix < 0:
            return
        read = self.read_entry(s.prefix, size, pages)
        touched = [self.page(table, b, j) for j in range(s.prefix // size, pages)]
        s.read_row = -1
        if read >= 0:
            s.read_row = self.initial_page(table, b, self.page(table, b, read))
        s.live = all(-1 <= row < num_rows for row in [*touched, s.read_row])
        if s.live:
            ends = self.page_ends(s.prefix, s.length, size)
            s.checkpoints = [(n, self.page(table, b, j)) for n, j in ends]
            s.write_row = self.page(table, b, pages - 1) if self.stores_final(total, size) else -1

    # ---- slot rules -------------------------------------------------------------------------
    def slot_sequence(self, slots: Slots, b: int, s: Sequence, pools) -> None:
        initial, output, checkpoints = pools
        read, write, rows = slots.state_indices, slots.output_state_indices, None
        s.prefix = 0 if slots.prefix_lens is None else int(slots.prefix_lens[b])
        s.read_row = b if read is None else int(read[b])
        s.write_row = s.read_row if write is None else int(write[b])
        every, rows = slots.checkpoint_every, slots.checkpoint_state_indices
        if checkpoints is not None and every > 0 and s.prefix >= 0:
            start = int(slots.checkpoint_cu_starts[b])
            for n, j in self.page_ends(s.prefix, s.length, every):
                at = start + j - s.prefix // every
                if not 0 <= at < len(checkpoints if rows is None else rows):
                    return
                s.checkpoints.append((n, at if rows is None else int(rows[at])))
        used = [(initial, s.read_row), (output, s.write_row)]
        used += [(checkpoints, row) for _, row in s.checkpoints]
        s.live = s.prefix >= 0 and all(-1 <= row < len(p) for p, row in used if p is not None)

    def sequences(self, call: Prefill, pools) -> list[Sequence]:
        """Sequences that have tokens; a broken cu_seqlens is clipped to the token buffer."""
        found, T, cu = [], call.q.shape[0], call.rows.cu_seqlens
        for b in range(call.rows.num_seqs):
            begin, end = int(cu[b]), int(cu[b + 1])
            if not 0 <= begin <= T or end <= begin:
                continue
            s = Sequence(begin, min(end, T) - begin)
            if end <= T and isinstance(call.rows, PageTable):
                self.paged_sequence(call.rows, b, s, len(pools[0]))
            elif end <= T:
                self.slot_sequence(call.rows, b, s, pools)
            found.append(s)
        return found

    # ---- pools ------------------------------------------------------------------------------
    def load(self, pool, row: int, shape):
        return np.zeros(shape) if pool is None or row == -1 else pool[row].copy()

    def store(self, pool, row: int, S, state_dtype) -> None:
        if pool is not None and row != -1:
            pool[row] = rounded(S, state_dtype)

    # ---- entry points -----------------------------------------------------------------------
    def scan(self, x: Tokens, s: Sequence, S, wanted, out, state_dtype):
        """Runs a sequence, writes its outputs and returns {tokens so far: state}."""
        states = {}
        for n in range(1, s.length + 1):
            t = s.begin + n - 1
            S, out[t] = self.step(S, x.q[t], x.k[t], x.v[t], x.alpha[t], x.beta[t], x.scale)
            S = self.carry(S, state_dtype)
            if n in wanted:
                states[n] = S
        return states

    def prefill(self, call: Prefill, pools, io="fp32", state_dtype="fp32"):
        """Output [T, H, V], NaN where no sequence owns the token. `pools` is one pool (paged form)
        or (initial, output, checkpoints), which may be the same array or None."""
        pools = pools if isinstance(pools, tuple) else (pools,) * 3
        x = self.tokens(call, io)
        out = np.full((call.q.shape[0], call.heads, call.v.shape[2]), np.nan)
        for s in self.sequences(call, pools):
            out[s.begin : s.begin + s.length] = 0
            if not s.live:
                continue
            S = self.load(pools[0], s.read_row, (call.heads, call.v.shape[2], call.k.shape[2]))
            wanted = {n for n, _ in s.checkpoints} | {s.length}
            states = self.scan(x, s, S, wanted, out, state_dtype)
            for n, row in s.checkpoints:
                self.store(pools[2], row, states[n], state_dtype)
            self.store(pools[1], s.write_row, states[s.length], state_dtype)
        return out

    def decode_rows(self, table: PageTable, b: int, num_rows: int) -> tuple[int, int]:
        """(row to read, row to write); -1 reads zero, (-1, -1) is padding."""
        first, end = int(table.indptr[b]), int(table.indptr[b + 1])
        last = self.last_page_len(table, b)
        if first < 0 or end <= first or end > len(table.indices) or last < 1:
            return -1, -1
        pages = end - first
        write = self.page(table, b, pages - 1)
        read = write
        if last == 1:
            read = self.page(table, b, pages - 2) if pages > 1 else -1
        if last > 1 or pages > 1:
            read = self.initial_page(table, b, read)
        in_range = 0 <= write < num_rows and -1 <= read < num_rows
        return (read, write) if in_range else (-1, -1)

    def slot_rows(self, slots: DecodeSlots, b: int, pools) -> tuple[int, int]:
        read = int(slots.initial[b])
        write = read if slots.output is None else int(slots.output[b])
        in_range = -1 <= read < len(pools[0]) and -1 <= write < len(pools[1])
        return (read, write) if in_range else (-1, -1)

    def decode(self, call: Decode, pools, state_dtype="fp32"):
        """Output [B, H, V]. `pools` is one pool or (initial, output)."""
        pools = pools if isinstance(pools, tuple) else (pools, pools)
        q, k = (self.l2norm(call.q), self.l2norm(call.k)) if call.l2norm else (call.q, call.k)
        q, k, v = (self.expand(x, call.heads) for x in (q, k, call.v))
        alpha = self.raw_alpha(call.a, call.A_log, call.dt_bias)
        beta, scale = self.sigmoid(call.b), self.default_scale(call)
        paged, B = isinstance(call.rows, PageTable), q.shape[0]
        rows = [
            self.decode_rows(call.rows, i, len(pools[0]))
            if paged
            else self.slot_rows(call.rows, i, pools)
            for i in range(B)
        ]
        # Every row is read before any is written.
        states = [self.load(pools[0], read, pools[0].shape[1:]) for read, _ in rows]
        out = np.zeros((B, call.heads, v.shape[2]))
        for i, (read, write) in enumerate(rows):
            if (read, write) != (-1, -1):
                S, out[i] = self.step(states[i], q[i], k[i], v[i], alpha[i], beta[i], scale)
                self.store(pools[1], write, S, state_dtype)
        return out

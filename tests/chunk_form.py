"""The chunk-wise formula in fp32, sound or with one known weakness.

Chunks lie on absolute multiples of 64. "good" is sound; "factored" splits the decay between two
tokens into exp(G_i) exp(-G_j), "log_cumsum" subtracts cumulative logs (inf - inf at alpha = 0),
"powers16" and "powers32" invert the unit triangle by a power series in fp16 or fp32.
"""

from __future__ import annotations

import numpy as np

from oracle import Oracle, Sequence, Tokens


def kept(decay, x):
    return np.where(decay == 0, 0, decay * x)


class ChunkForm(Oracle):
    """Oracle whose token loop is the chunk-wise formula; `weakness` as above."""

    def __init__(self, weakness: str):
        self.weakness = weakness

    def scan(self, x: Tokens, s: Sequence, S, wanted, out, state_dtype):
        states, n = {}, 0
        while n < s.length:
            count = min(64 - (s.prefix + n) % 64, s.length - n)
            rows = slice(s.begin + n, s.begin + n + count)
            S = S.astype(np.float64)
            with np.errstate(all="ignore"):
                for h in range(S.shape[0]):
                    S[h], out[rows, h] = self.chunk(x, rows, h, S[h].astype(np.float32))
            n += count
            states[n] = S
        return states

    def decays(self, alpha):
        """Products of alpha over (j, i], and from the chunk's start through i."""
        count = len(alpha)
        if self.weakness in ("log_cumsum", "factored"):
            G = np.cumsum(np.log(alpha).astype(np.float32), dtype=np.float32)
            between = G[:, None] - G[None, :]
            if self.weakness == "factored":
                return np.tril(np.exp(G)[:, None] * np.exp(-G)[None, :]), np.exp(G)
            return np.tril(np.exp(between)), np.exp(G)
        P, row = np.zeros((count, count), np.float32), np.zeros(count)
        for i in range(count):
            row[:i] *= alpha[i]
            row[i] = 1
            P[i, : i + 1] = row[: i + 1]
        return P, np.cumprod(alpha).astype(np.float32)

    def inverse(self, L):
        """(I + L)^-1 for strictly lower L."""
        count, eye = len(L), np.eye(len(L))
        if not self.weakness.startswith("powers"):
            return np.linalg.solve(eye + L, eye).astype(np.float32) if np.isfinite(L).all() else L
        kind = np.float16 if self.weakness.endswith("16") else np.float32
        X, M, n = (eye - L).astype(kind), (L @ L).astype(kind), 2
        while n < count:
            X = (X.astype(np.float32) + X.astype(np.float32) @ M.astype(np.float32)).astype(kind)
            M = (M.astype(np.float32) @ M.astype(np.float32)).astype(kind)
            n *= 2
        return X.astype(np.float32)

    def chunk(self, x: Tokens, rows: slice, h: int, S):
        q, k, v = (y[rows, h].astype(np.float32) for y in (x.q, x.k, x.v))
        beta = x.beta[rows, h].astype(np.float32)[:, None]
        P, start = self.decays(x.alpha[rows, h])
        start = start[:, None]
        inverse = self.inverse(np.tril((k @ k.T) * P * beta, -1))
        new = inverse @ (beta * (v - kept(start, k @ S.T)))
        out = x.scale * (kept(start, q @ S.T) + np.tril((q @ k.T) * P) @ new)
        return kept(start[-1], S) + (new * P[-1][:, None]).T @ k, out


WEAK_FORMS = ("factored", "log_cumsum", "powers16", "powers32")

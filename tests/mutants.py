"""Deliberately wrong numbers: variants of the oracle, which `test_strength.py` must catch.

A mutant overrides one rule of `Oracle`; its docstring is the fault.
"""

from __future__ import annotations

import numpy as np

from calls import rounded
from oracle import Oracle, Sequence

NUMBER_MUTANTS: list[type[Oracle]] = []


def mutant(cls: type[Oracle]) -> type[Oracle]:
    NUMBER_MUTANTS.append(cls)
    return cls


@mutant
class NaiveSoftplus(Oracle):
    """fp32 log(1 + exp(x)) overflows above 88."""

    def softplus(self, x):
        with np.errstate(over="ignore"):
            return np.log1p(np.exp(np.asarray(x, np.float32))).astype(np.float64)


@mutant
class InfTimesZero(Oracle):
    """exp(A_log) = inf times softplus = 0 is NaN."""

    def raw_alpha(self, x, A_log, dt_bias):
        with np.errstate(over="ignore", invalid="ignore"):
            s = np.where(x + dt_bias < -20, 0.0, self.softplus(x + dt_bias))
            return np.exp(-np.exp(np.asarray(A_log, np.float32)).astype(np.float64) * s)


@mutant
class NormWithoutEps(Oracle):
    """x / |x|."""

    def l2norm(self, x):
        with np.errstate(invalid="ignore", divide="ignore"):
            return x / np.sqrt((x * x).sum(-1, keepdims=True))


@mutant
class NormWithMax(Oracle):
    """x / max(|x|, 1e-6): eps where another convention puts it."""

    def l2norm(self, x):
        return x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 1e-6)


@mutant
class ModuloHeads(Oracle):
    """State head h reads head h % count."""

    def source_head(self, h, count, heads):
        return h % count


@mutant
class ForgetAfter(Oracle):
    """The error is taken before the decay."""

    def step(self, S, q, k, v, alpha, beta, scale):
        error = v - np.einsum("hvk,hk->hv", S, k)
        S = alpha[:, None, None] * S + (beta[:, None] * error)[:, :, None] * k[:, None, :]
        return S, scale * np.einsum("hvk,hk->hv", S, q)


@mutant
class ZeroByMultiplication(Oracle):
    """alpha = 0 multiplies, so NaN and inf survive a reset."""

    def decay(self, S, alpha):
        with np.errstate(invalid="ignore"):
            return alpha[:, None, None] * S


@mutant
class NoScale(Oracle):
    """The read-out scale is forgotten."""

    def default_scale(self, call):
        return 1.0


@mutant
class RoundedBeta(Oracle):
    """beta passes through bf16."""

    def sigmoid(self, x):
        return rounded(super().sigmoid(x), "bf16")

    def tokens(self, call, io):
        x = super().tokens(call, io)
        x.beta = rounded(x.beta, "bf16")
        return x


@mutant
class RoundedPerToken(Oracle):
    """The state is rounded to the pool dtype after every token, not once at the store."""

    def carry(self, S, state_dtype):
        return rounded(S, state_dtype)


@mutant
class HalfCarry(Oracle):
    """The state is kept in fp16 inside a call."""

    def carry(self, S, state_dtype):
        return rounded(S, "fp16")


@mutant
class MixedTail(Oracle):
    """The tail chunk multiplies its neighbour's rows by zero instead of not reading them."""

    def scan(self, x, s, S, wanted, out, state_dtype):
        end, states = s.begin + s.length, {}
        for n in range(1, s.length + 1):
            chunk = s.begin + (n - 1) // 64 * 64
            beside = x.v[max(chunk, end) : chunk + 64]
            part = Sequence(s.begin + n - 1, 1)
            S = super().scan(x, part, S, {1}, out, state_dtype)[1]
            S = S + 0.0 * beside.sum(0)[:, :, None] if len(beside) else S
            states[n] = S
        return states

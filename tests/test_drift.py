"""Drift: 4096 decode steps after a prefill against one long prefill of the same tokens.

A state that is stored after every step in 16 bits is rounded 4096 times, so its error is that of a
random walk which the gates damp; an fp32 pool has no such walk. README.md has the measured numbers.
"""

import numpy as np
import pytest

import gdn_paged
from calls import page_table
from compare import relative_error

PREFIX, STEPS, PAGE, HEADS = 200, 4096, 256, 2
TOTAL = PREFIX + STEPS
PAGES = -(-TOTAL // PAGE)
BARS = {
    ("cpu", "fp32"): 1e-4,
    ("cpu", "bf16"): 2e-2,
    ("cpu", "fp16"): 3e-3,
    ("cuda", "fp32"): 5e-3,
    ("cuda", "bf16"): 2e-2,
    ("cuda", "fp16"): 5e-3,
}


def operands(target):
    """Unit keys and queries; decays from 0.88 to 1, so that a state remembers 10 to 3000 tokens."""
    rng = np.random.default_rng(20260101)
    dim = 128 if target.prefill_row == "cuda_sm90" else 64
    io = "fp32" if target.device == "cpu" else "bf16"
    q, k = rng.standard_normal((2, TOTAL, 1, dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((TOTAL, HEADS, dim))
    a, b = rng.uniform(-8, -2, (TOTAL, HEADS)), rng.uniform(-2, 2, (TOTAL, HEADS))
    gates = [target.array(x, "fp32") for x in (a, b, np.zeros(HEADS), np.zeros(HEADS))]
    return [target.array(x, io) for x in (q, k, v)] + gates


def prefill(target, arrays, pool, tokens):
    q, k, v, a, b, A_log, dt_bias = arrays
    table = page_table(PAGE, (list(range(-(-tokens // PAGE))), 0, tokens))
    return gdn_paged.chunk_gated_delta_rule_paged(
        q[:tokens], k[:tokens], v[:tokens], a[:tokens], b[:tokens], state_pool=pool,
        cu_seqlens=target.table(table.cu_seqlens), page_size=PAGE, use_gate_in_kernel=True,
        A_log=A_log, dt_bias=dt_bias, beta_is_logit=True, backend=target.prefill_row,
        **target.page_arguments(table),
    )  # fmt: skip


def decode(target, arrays, pool, token):
    q, k, v, a, b, A_log, dt_bias = arrays
    one = slice(token, token + 1)
    table = page_table(PAGE, (list(range(token // PAGE + 1)), token, token + 1), decode=True)
    return gdn_paged.gated_delta_rule_decode_paged(
        q[one, None], k[one, None], v[one, None], A_log, a[one, None], dt_bias, b[one, None],
        use_qk_l2norm=False, state_pool=pool, **target.page_arguments(table),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_drift(target, dtype, record_property):
    arrays = operands(target)
    dim = arrays[2].shape[2]
    pools = [
        target.pool(np.full((PAGES, HEADS, dim, dim), np.nan), x).view for x in (dtype, "fp32")
    ]
    prefill(target, arrays, pools[0], PREFIX)
    outs = [target.values(decode(target, arrays, pools[0], PREFIX + t)) for t in range(STEPS)]
    whole = target.values(prefill(target, arrays, pools[1], TOTAL))
    stepped, truth = (target.values(p)[PREFIX // PAGE :] for p in pools)
    pages = relative_error(stepped, truth)
    # The last quarter, where a walk has gone furthest.
    last = STEPS // 4
    end = np.concatenate(outs[-last:])[:, 0], whole[-last:]
    out = np.linalg.norm(end[0] - end[1]) / np.linalg.norm(end[1])
    record_property("drift", f"{target} {dtype}: pages {pages:.3g}, outputs {out:.3g}")
    print(f"drift {target} {dtype}: pages {pages:.3g}, outputs {out:.3g}")
    assert max(pages, out) <= BARS[target.device, dtype]

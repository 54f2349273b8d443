"""Any object in the place of any argument: a call runs, or it raises an error of its contract.

No crash, no other exception, and a call that raises has left the pool as it was.
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdn_paged
from calls import DecodeSlots, Slots, page_table
from cases import make_decode, make_pool, make_prefill

REFUSED = (ValueError, NotImplementedError, TypeError, OverflowError)
SPANS = ([5, 2], 60, 70), ([0, 7], 30, 95), ([1], 0, 1)
DECODE_SPANS = ([5, 2], 64, 65), ([0], 30, 31), ([1], 0, 1)
DTYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "?", "c8", "O", "U3", "M8[s]")
SHAPES = ((), (0,), (1,), (3,), (4,), (65,), (3, 0), (2, 3), (76, 2, 64), (76, 4), (3, 1, 2, 64))
INTEGERS = (
    -1,
    0,
    1,
    2,
    3,
    64,
    96,
    -64,
    2**31 - 1,
    2**31,
    -(2**31),
    2**63 - 1,
    2**63,
    2**64,
    -(2**70),
)


def odd_array(dtype: str, shape: tuple[int, ...], layout: str) -> np.ndarray:
    x = np.zeros(shape, dtype)
    if layout == "reversed" and x.ndim:
        return x[::-1]
    if layout == "strided" and x.ndim:
        return np.zeros((*shape[:-1], shape[-1] * 2), dtype)[..., ::2]
    if layout == "read-only":
        x.setflags(write=False)
    if layout == "big-endian" and dtype not in ("O", "U3"):
        return x.astype(x.dtype.newbyteorder(">"))
    return np.asfortranarray(x) if layout == "fortran" else x


arrays = st.builds(
    odd_array,
    st.sampled_from(DTYPES),
    st.sampled_from(SHAPES),
    st.sampled_from(("dense", "reversed", "strided", "read-only", "big-endian", "fortran")),
)
others = st.sampled_from(
    [None, True, False, "", "auto", "cpu", "linear", "host", b"x", 1.5, float("nan"), -0.0, 1e400,
     object(), [], [0, 1, 2], (0, 1), {}, range(3), 1j, np.int32(3), np.float32(2), Ellipsis,
     np.zeros((76, 2, 64), ml_dtypes.bfloat16)]
)  # fmt: skip
odd = arrays | others | st.sampled_from(INTEGERS)


@cache
def calls_of(target):
    """name: (function, arguments without the pool, names of pools)."""
    paged = make_prefill(600, page_table(64, *SPANS))
    decode = make_decode(601, page_table(64, *DECODE_SPANS, decode=True), dim=64)
    packed = make_prefill(602, Slots(np.array([0, 70, 75]), state_indices=[0, 1]))
    rows = make_decode(603, DecodeSlots(np.array([0, 1]), np.array([2, 3])), dim=64)
    table = target.page_arguments(paged.rows) | {
        "cu_seqlens": target.table(paged.rows.cu_seqlens), "page_size": 64
    }  # fmt: skip
    return {
        "prefill": (gdn_paged.chunk_gated_delta_rule_paged,
                    target.prefill_arguments(paged.cast("bf16"), "bf16"), ["state_pool"]),
        "decode": (gdn_paged.gated_delta_rule_decode_paged,
                   target.decode_arguments(decode.cast("bf16"), "bf16"), ["state_pool"]),
        "flat": (gdn_paged.chunk_gated_delta_rule,
                 target.prefill_arguments(packed.cast("bf16"), "bf16")
                 | {"output_final_state": True}, ["initial_state", "output_state"]),
        "rows": (gdn_paged.gated_delta_rule_decode_pretranspose,
                 target.decode_arguments(rows.cast("bf16"), "bf16") | {"state": None},
                 ["initial_state"]),
        "slots": (gdn_paged.gdn_paged_prefill_slots, table, []),
        "check": (gdn_paged.validate_page_table, table | {"mode": "host"}, []),
        "report": (gdn_paged.page_table_report, table, []),
        "stats": (gdn_paged.page_stats, {"page_indices": table["page_indices"]}, ["state_pool"]),
    }  # fmt: skip


MORE = ("output", "slots", "stream", "workspace", "plan", "validate", "deterministic", "backend",
        "num_threads", "scale", "gate_domain", "A_log", "max_seqlen", "use_cp")  # fmt: skip


@pytest.mark.parametrize(
    "name", ["prefill", "decode", "flat", "rows", "slots", "check", "report", "stats"]
)
@given(data=st.data())
def test_any_argument(cpu_target, name, data):
    function, arguments, pools = calls_of(cpu_target)[name]
    pool = cpu_target.pool(make_pool(600, 9, 4))
    arguments = arguments | dict.fromkeys(pools, pool.view)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from([*arguments, *MORE]))
        value = data.draw(odd)
        if data.draw(st.booleans()):
            value = arguments[data.draw(st.sampled_from([*arguments]))]
        elif isinstance(value, np.ndarray) and data.draw(st.booleans()):
            try:
                value = cpu_target.arrays.array(value)
            except (TypeError, ValueError):
                pass  # not a dtype or layout of this framework
        arguments[key] = value
    try:
        function(**arguments)
    except REFUSED as error:
        assert str(error)
        assert np.array_equal(cpu_target.bits(pool.base), pool.start_bits)

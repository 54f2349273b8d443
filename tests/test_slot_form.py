"""The slot and the packed form of prefill: rows by number instead of by page table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calls import Slots
from cases import SHARED, paged_case
from cases_slots import SLOT_CASES, SlotCase, call, pool
from compare import bars, relative_error, untouched_rows
from oracle import Oracle
from random_calls import slot_prefills

ROLES = ("initial_state", "output_state", "state_checkpoints")


def truth_of(case: SlotCase, io: str):
    given = (case.initial, case.output, case.checkpoints)
    copies = {id(p): p.copy() for p in given if p is not None}
    pools = tuple(None if p is None else copies[id(p)] for p in given)
    out = Oracle().prefill(case.call.cast(io), pools, io, case.state_dtype)
    return out, pools


def framework_pools(target, case: SlotCase) -> dict:
    given = dict(zip(ROLES, (case.initial, case.output, case.checkpoints), strict=True))
    made = {
        id(p): target.pool(p, case.state_dtype, 64).view for p in given.values() if p is not None
    }
    return {role: None if p is None else made[id(p)] for role, p in given.items()}


def check(target, case: SlotCase, io: str, floor: float = 0.0) -> None:
    pools = framework_pools(target, case)
    start = {role: target.bits(p).copy() for role, p in pools.items() if p is not None}
    options = pools | {"output_final_state": case.output is not None}
    got = target.slot_prefill(case.call, io, options=options, index_dtype=case.index_dtype)
    out, expected = truth_of(case, io)
    if case.output is not None:
        assert got[1] is pools["output_state"]
        got = got[0]
    allowed = bars(target.device, target.arithmetic(io), case.state_dtype, normed=case.call.l2norm)
    assert relative_error(target.values(got), out, floor) <= allowed.out
    for role, before, after in zip(
        ROLES, (case.initial, case.output, case.checkpoints), expected, strict=True
    ):
        if before is None:
            continue
        still = untouched_rows(before, after)
        assert np.array_equal(target.bits(pools[role])[still], start[role][still]), role
        error = relative_error(target.values(pools[role]), after)
        assert error <= allowed.rows, f"{role} off by {error:.3g}"


@pytest.mark.parametrize("io", ["fp32", "bf16"])
@pytest.mark.parametrize("case", SLOT_CASES, ids=str)
def test_slot_case(target, case, io):
    if io == "fp32" and target.device != "cpu":
        pytest.skip("CUDA rows take 16-bit operands")
    check(target, case, io)


@given(data=st.data())
def test_any_slots(target, data):
    """Random rows; whatever a call may not read holds NaN."""
    case = data.draw(slot_prefills(target.device))
    check(target, case, case.name, 0.0 if target.device == "cpu" else 0.1)


def test_allocated_final_state(target):
    """Packed, without output_state: fp32 states of every sequence come back."""
    packed = call(350, lengths=(70, 5, 64))
    out, final = target.slot_prefill(packed, "bf16", options={"output_final_state": True})
    pools = (None, np.zeros((3, 4, 64, 64)), None)
    expected = Oracle().prefill(packed, pools, "bf16")
    allowed = bars(target.device, "bf16")
    assert tuple(final.shape) == (3, 4, 64, 64) and str(final.dtype).endswith("float32")
    assert relative_error(target.values(out), expected) <= allowed.out
    assert relative_error(target.values(final), pools[1]) <= allowed.rows


def test_output_state_is_written_only_on_request(target):
    """output_final_state=False leaves output_state alone."""
    state = target.pool(pool(351, 4)).view
    before = target.bits(state).copy()
    out = target.slot_prefill(call(351), "bf16", options={"output_state": state})
    assert tuple(out.shape) == (167, 4, 64)
    assert np.array_equal(target.bits(state), before)


def test_slot_form_equals_paged_form(target):
    """The slots of a page table, given by hand, give the bytes of the paged call."""
    case = paged_case("", 102, 16, 64, *SHARED)
    paged = target.pool(case.pool).view
    by_table = target.prefill(case.calls[0], paged, "bf16")
    table = case.calls[0].rows
    slots = Slots(table.cu_seqlens, [3, 3], [12, 14], table.indices, [2, 5], 64, [128, 128])
    state = target.pool(case.pool).view
    options = dict.fromkeys(ROLES, state) | {"output_final_state": True}
    by_slots, _ = target.slot_prefill(replace(case.calls[0], rows=slots), "bf16", options=options)
    assert np.array_equal(target.bits(by_slots), target.bits(by_table))
    assert np.array_equal(target.bits(state), target.bits(paged))


# (what is missing or wrong, options to change, words of the message)
NEEDS = {
    "output indices need state_indices": (
        {"state_indices": None}, ["output_state_indices", "state_indices"]),
    "output indices need output_state": ({"output_state": None}, ["output_state"]),
    "output indices need output_final_state": (
        {"output_final_state": False}, ["output_state_indices", "output_final_state"]),
    "checkpoint rows need every > 0": (
        {"checkpoint_every_n_tokens": 0, "prefix_lens": None},
        ["checkpoint_state_indices", "checkpoint_every_n_tokens"]),
    "prefix_lens need every > 0": (
        {"checkpoint_every_n_tokens": 0, "checkpoint_state_indices": None,
         "checkpoint_cu_starts": None, "state_checkpoints": None},
        ["prefix_lens", "checkpoint_every_n_tokens"]),
    "checkpoint rows need state_indices": (
        {"state_indices": None, "output_state_indices": None},
        ["checkpoint_state_indices", "state_indices"]),
    "checkpoint rows need starts": ({"checkpoint_cu_starts": None}, ["checkpoint_cu_starts"]),
    "checkpoint rows need state_checkpoints": (
        {"state_checkpoints": None}, ["state_checkpoints"]),
    "state_indices need initial_state": (
        {"initial_state": None}, ["initial_state", "state_indices"]),
    "every must be a multiple of 64": (
        {"checkpoint_every_n_tokens": 96}, ["checkpoint_every_n_tokens", "96", "64"]),
    "cu_seqlens is required": ({"cu_seqlens": None}, ["cu_seqlens"]),
}  # fmt: skip
WRONG_TABLES = (
    "state_indices",
    "output_state_indices",
    "checkpoint_state_indices",
    "prefix_lens",
    "checkpoint_cu_starts",
)


def full_arguments(target):
    slots = {
        "state_indices": [0, 1],
        "output_state_indices": [2, 3],
        "checkpoint_state_indices": [4, 5],
        "checkpoint_cu_starts": [0, 1, 2],
        "checkpoint_every": 64,
        "prefix_lens": [0, 0],
    }
    made = call(360, lengths=(70, 64), **slots)
    state = target.pool(pool(360, 6)).view
    arguments = target.prefill_arguments(made, "bf16") | dict.fromkeys(ROLES, state)
    return arguments | {"output_final_state": True}, state


def assert_refused(target, arguments, state, words):
    import gdn_paged

    before = target.bits(state).copy()
    with pytest.raises(ValueError) as error:
        gdn_paged.chunk_gated_delta_rule(**arguments)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"
    assert np.array_equal(target.bits(state), before)


@pytest.mark.parametrize("rule", NEEDS)
def test_needs(target, rule):
    changes, words = NEEDS[rule]
    arguments, state = full_arguments(target)
    assert_refused(target, arguments | changes, state, words)


@pytest.mark.parametrize("name", WRONG_TABLES)
@pytest.mark.parametrize("fault", ["fp32", "strided", "rank"])
def test_wrong_table(target, name, fault):
    """Tables are contiguous int32 or int64 of rank 1."""
    arguments, state = full_arguments(target)
    table = arguments[name]
    if fault == "fp32":
        wrong = target.array(target.values(table), "fp32")
    elif fault == "strided":
        wrong = target.table(np.repeat(target.values(table), 2))[::2]
    else:
        wrong = table[None]
    assert_refused(target, arguments | {name: wrong}, state, [name])


def test_full_arguments_are_fine(target):
    """The base that the tests above spoil is itself accepted."""
    import gdn_paged

    arguments, state = full_arguments(target)
    before = target.bits(state).copy()
    gdn_paged.chunk_gated_delta_rule(**arguments)
    changed = (target.bits(state) != before).reshape(6, -1).any(axis=1)
    assert changed.tolist() == [False, False, True, True, True, True]

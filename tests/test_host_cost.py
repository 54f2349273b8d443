"""A guard on the cost of a call: generous, so that a slow machine passes and a regression fails.

The bars proper are measured by tests/bench on a quiet machine.
"""

import time

import numpy as np

import gdn_paged
from calls import page_table
from cases import make_decode, make_pool

BUDGET_US = {"numpy": 40.0, "torch": 30.0}  # bars: 6 and 4


def best_of(function, repeats=7, calls=300) -> float:
    """Seconds per call, best of `repeats`."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def test_decode_call(cpu_target):
    """One 64x64 head, output and slots given, one thread: nearly all of it is host cost."""
    table = page_table(64, ([0], 5, 6), decode=True)
    call = make_decode(560, table, (1, 1), 64)
    arguments = cpu_target.decode_arguments(call, "bf16")
    arguments |= {
        "output": cpu_target.array(np.zeros((1, 1, 1, 64)), "bf16"),
        "slots": gdn_paged.gdn_paged_decode_slots(**cpu_target.page_arguments(table)),
        "state_pool": cpu_target.pool(make_pool(560, 1, 1)).view,
        "num_threads": 1,
    }
    cost = best_of(lambda: gdn_paged.gated_delta_rule_decode_paged(**arguments)) * 1e6
    budget = BUDGET_US[cpu_target.arrays.name]
    assert cost < budget, f"{cost:.1f} us per call, budget {budget}"

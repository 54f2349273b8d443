"""A guard on the cost of a call: generous, so that a slow machine passes and a regression fails.

The bars proper are measured by tests/bench on a quiet machine.
"""

import subprocess
import sys
import time
from pathlib import Path

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


FIRST_CALLS = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
torch.ones(8, device="cuda").sum().item()  # the context exists
import gdn_paged
from arrays import TorchArrays
from calls import page_table
from cases import make_decode, make_pool, make_prefill
from targets import Target

target = Target(TorchArrays("cuda"), {row!r}, "cuda")
prefill = make_prefill(561, page_table(64, ([2, 0], 10, 75)), (2, 4), 128)
decode = make_decode(562, page_table(64, ([2], 5, 6), decode=True), (2, 4), 128)
pools = [target.pool(make_pool(561, 4, 4, 128)).view for _ in "ab"]
arguments = target.decode_arguments(decode, "bf16"), target.prefill_arguments(prefill, "bf16")
torch.cuda.synchronize()
times = [time.perf_counter()]
gdn_paged.gated_delta_rule_decode_paged(**arguments[0], state_pool=pools[0])
torch.cuda.synchronize()
times.append(time.perf_counter())
gdn_paged.chunk_gated_delta_rule_paged(**arguments[1], state_pool=pools[1])
torch.cuda.synchronize()
times.append(time.perf_counter())
print(*(f"{{1e3 * (b - a):.1f}}" for a, b in zip(times, times[1:])))
"""


def test_first_calls_of_a_process(torch_cuda):
    """With a CUDA context in place, the first decode and the first prefill take 0.5 s at most."""
    script = FIRST_CALLS.format(tests=str(Path(__file__).parent), row=torch_cuda.prefill_row)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    decode, prefill = map(float, done.stdout.split())
    print(f"first decode {decode} ms, first prefill {prefill} ms")
    assert decode < 500 and prefill < 500

"""A host thread for each of two GPUs: the speed of one alone, and the same bytes."""

from __future__ import annotations

import pytest

from two_gpus import Load, needs_torch, needs_two, run_together

pytestmark = [needs_two, needs_torch]

CALLS = {"prefill": 40, "decode": 200}
SIZES = {"prefill": (4, 4096), "decode": (256, 1)}


@pytest.mark.parametrize("operation", ["prefill", "decode"])
def test_two_threads_at_full_speed(operation):
    loads = [Load(device, operation, *SIZES[operation]) for device in (0, 1)]
    run_together(loads, CALLS[operation])
    alone, together = [], []
    for _ in range(7):
        alone.append(max([load.run(CALLS[operation]) for load in loads]))
        together.append(run_together(loads, CALLS[operation]))
    print(f"{operation}: alone {min(alone):.6f} s, two threads {min(together):.6f} s")
    assert min(together) <= 1.05 * min(alone)
    for name in ("output", "state_pool"):
        first, second = (load.arguments[name].cpu() for load in loads)
        assert bool(first.any()) and loads[0].torch.equal(first, second)

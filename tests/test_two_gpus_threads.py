"""A host thread for each of two GPUs: the speed of one alone, and the same bytes."""

from __future__ import annotations

import threading
import time

import pytest

import gdn_paged
from two_gpus import needs_torch, needs_two

pytestmark = [needs_two, needs_torch]


class Load:
    """Calls on one device, timed from the launch of the first to the end of the last."""

    def __init__(self, device: int, operation: str):
        import torch

        self.torch, self.device = torch, device
        generator = torch.Generator().manual_seed(780)
        batch, length = (4, 4096) if operation == "prefill" else (256, 1)
        tokens, heads, dim = batch * length, 16, 128

        def normal(*shape: int, dtype=torch.bfloat16):
            return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

        def int32(*values: int):
            return torch.tensor(values, dtype=torch.int32, device=device)

        shapes = {"q": 8, "k": 8, "v": heads}
        operands = {x: normal(tokens, n, dim) for x, n in shapes.items()}
        arguments = {
            "state_pool": torch.zeros(batch, heads, dim, dim, device=device),
            "page_indices": int32(*range(batch)), "page_indptr": int32(*range(batch + 1)),
            "last_page_len": int32(*[length + 1] * batch),
        }  # fmt: skip
        if operation == "prefill":
            self.function, self.calls = gdn_paged.chunk_gated_delta_rule_paged, 40
            arguments |= {
                "page_size": 8192, "cu_seqlens": int32(*range(0, tokens + 1, length)),
                "last_page_len": int32(*[length] * batch), "use_qk_l2norm_in_kernel": True,
                "g": torch.full((tokens, heads), 0.98, device=device),
            }  # fmt: skip
        else:
            self.function, self.calls = gdn_paged.gated_delta_rule_decode_paged, 200
            operands = {x: y.unsqueeze(1) for x, y in operands.items()}
            gates = {x: normal(tokens, 1, heads) for x in ("a", "b")}
            arguments |= gates | {
                x: torch.zeros(heads, device=device) for x in ("A_log", "dt_bias")
            }
        self.arguments = operands | arguments | {"output": torch.zeros_like(operands["v"])}

    def run(self) -> float:
        """Seconds."""
        self.torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(self.calls):
            self.function(**self.arguments)
        self.torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def run_together(loads: list[Load]) -> float:
    """Seconds of the slower one, each in a thread of its own."""
    times, gate = [0.0] * len(loads), threading.Barrier(len(loads))

    def work(i: int) -> None:
        gate.wait()
        times[i] = loads[i].run()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(loads))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(times)


@pytest.mark.parametrize("operation", ["prefill", "decode"])
def test_two_threads_at_full_speed(operation):
    loads = [Load(device, operation) for device in (0, 1)]
    run_together(loads)
    alone, together = [], []
    for _ in range(7):
        alone.append(max([load.run() for load in loads]))
        together.append(run_together(loads))
    print(f"{operation}: alone {min(alone):.6f} s, two threads {min(together):.6f} s")
    assert min(together) <= 1.05 * min(alone)
    for name in ("output", "state_pool"):
        first, second = (load.arguments[name].cpu() for load in loads)
        assert bool(first.any()) and loads[0].torch.equal(first, second)

"""CUDA graphs: calls captured once and replayed with other tables, lengths and pages; no memory."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gdn_paged
from calls import page_table
from cases import BATCH, make_decode, make_pool, make_prefill
from compare import bars, relative_error
from oracle import Oracle

ROWS, H = 12, 4
STEPS = (([2, 7], 64, 65), ([0], 63, 64), ([5], 8, 9), ([4], 0, 1))
NEXT = (([9, 3], 64, 65), ([1], 30, 31), ([6], 9, 10), ([8, 10], 100, 101))
PADDED = (*NEXT[:3], ([-1], 1, 2)), (NEXT[0], ([-1], 1, 2), ([-1], 1, 2), ([-1], 1, 2))


def decode_truth(call, rows):
    pool = rows.copy()
    return Oracle().decode(call, pool), pool


def copy_tables(target, arguments, table):
    """New numbers in the tables that a graph reads."""
    for name, fresh in target.page_arguments(table).items():
        arguments[name].copy_(fresh)
    if table.cu_seqlens is not None:
        arguments["cu_seqlens"].copy_(target.table(table.cu_seqlens))


def captured(target, function, arguments):
    """A graph of one call, after a call outside the capture."""
    torch = target.arrays.torch
    function(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        function(**arguments)
    return graph


def decode_arguments(target, call, rows):
    arguments = target.decode_arguments(call, "bf16")
    return arguments | {
        "output": target.array(np.zeros((len(call.q), 1, *call.v.shape[1:])), "bf16"),
        "state_pool": target.pool(rows).view,
        "backend": target.decode_row,
    }


@pytest.mark.parametrize("spans", [NEXT, *PADDED], ids=["next", "one padded", "three padded"])
def test_decode_graph_with_new_tables(torch_cuda, spans):
    """A replay reads the tables as they are then, padding rows included."""
    target, rows = torch_cuda, make_pool(600, ROWS, H)
    call = make_decode(600, page_table(64, *STEPS, decode=True), dim=None)
    arguments = decode_arguments(target, call, rows)
    graph = captured(target, gdn_paged.gated_delta_rule_decode_paged, arguments)
    table = page_table(64, *spans, decode=True)
    assert len(table.indices) <= len(call.rows.indices) + 1
    wide = np.zeros(len(call.rows.indices), np.int64)
    wide[: len(table.indices)] = table.indices[: len(wide)]
    table = replace(table, indices=wide, indptr=np.minimum(table.indptr, len(wide)))
    copy_tables(target, arguments, table)
    arguments["state_pool"].copy_(target.pool(rows).view)
    graph.replay()
    expected, pool = decode_truth(replace(call, rows=table), rows)
    allowed = bars("cuda", "bf16")
    assert relative_error(target.values(arguments["output"])[:, 0], expected) <= allowed.out
    assert relative_error(target.values(arguments["state_pool"]), pool) <= allowed.rows


@pytest.mark.parametrize(
    "at_capture", [BATCH, tuple((s[0], s[2], s[2]) for s in BATCH)], ids=["real", "all empty"]
)
def test_prefill_graph_with_new_lengths(torch_cuda, at_capture):
    """Captured with one set of lengths (or none), replayed with another."""
    target, rows = torch_cuda, make_pool(601, ROWS, H)
    call = make_prefill(601, page_table(64, *BATCH))
    arguments = target.prefill_arguments(call, "bf16") | {
        "output": target.array(np.zeros(call.v.shape), "bf16"),
        "state_pool": target.pool(rows).view,
    }
    copy_tables(target, arguments, page_table(64, *at_capture))
    graph = captured(target, gdn_paged.chunk_gated_delta_rule_paged, arguments)
    for spans in (BATCH, (([2], 20, 60), ([0, 4, 7], 64, 130), ([5, 1], 70, 100))):
        table = page_table(64, *spans)
        copy_tables(target, arguments, table)
        arguments["state_pool"].copy_(target.pool(rows).view)
        graph.replay()
        tokens, pool = int(table.cu_seqlens[-1]), rows.copy()
        expected = Oracle().prefill(replace(call, rows=table), pool, "bf16")
        allowed = bars("cuda", "bf16")
        out = target.values(arguments["output"])
        assert relative_error(out[:tokens], expected[:tokens]) <= allowed.out
        assert relative_error(target.values(arguments["state_pool"]), pool) <= allowed.rows


def test_graph_of_a_whole_step(torch_cuda):
    """48 layers of decode that share `slots` in one graph; each layer has its own pool."""
    target, torch = torch_cuda, torch_cuda.arrays.torch
    call = make_decode(602, page_table(64, *STEPS, decode=True), dim=None)
    starts = [make_pool(602 + i, ROWS, H) for i in range(48)]
    layers = [decode_arguments(target, call, rows) for rows in starts]
    slots = gdn_paged.gdn_paged_decode_slots(**target.page_arguments(call.rows))
    for arguments in layers:
        arguments["slots"] = slots

    def step():
        for arguments in layers:
            gdn_paged.gated_delta_rule_decode_paged(**arguments)

    step()
    for arguments, rows in zip(layers, starts, strict=True):
        arguments["state_pool"].copy_(target.pool(rows).view)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        step()
    graph.replay()
    for arguments, rows in zip(layers, starts, strict=True):
        expected, pool = decode_truth(call, rows)
        assert relative_error(target.values(arguments["output"])[:, 0], expected) <= 2e-2
        assert relative_error(target.values(arguments["state_pool"]), pool) <= 2e-2


def test_calls_allocate_nothing(torch_cuda):
    """With output, workspace, plan and slots given, neither torch nor the driver gives memory."""
    target, torch = torch_cuda, torch_cuda.arrays.torch
    call = make_prefill(603, page_table(64, *BATCH))
    pool = target.pool(make_pool(603, ROWS, H)).view
    arguments = target.prefill_arguments(call, "bf16") | {"state_pool": pool}
    table = target.page_arguments(call.rows) | {"cu_seqlens": arguments["cu_seqlens"]}
    slots = gdn_paged.gdn_paged_prefill_slots(**table, page_size=64)
    plan = gdn_paged.prefill_plan(**arguments, slots=slots)
    size = gdn_paged.prefill_workspace_size(
        3, 199, 2, 2, H, target.head_size, page_size=64, device="cuda", backend=target.prefill_row
    )
    scratch = torch.empty(size + 256, dtype=torch.uint8, device="cuda")
    arguments |= {
        "output": target.array(np.zeros(call.v.shape), "bf16"),
        "slots": slots,
        "plan": plan,
        "workspace": scratch[-scratch.data_ptr() % 256 :][:size],
    }
    gdn_paged.chunk_gated_delta_rule_paged(**arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.mem_get_info()[0]
    for _ in range(20):
        gdn_paged.chunk_gated_delta_rule_paged(**arguments)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.mem_get_info()[0]
    assert after == before


FIRST_USE = """
import sys
sys.path.insert(0, {tests!r})
import torch
import gdn_paged
from calls import page_table
from cases import make_decode, make_pool
from targets import Target
from two_gpus import TorchFrame

device, other = {device}, {other}
target = Target(TorchFrame(device), "auto", "cuda")
step = page_table(64, ([2, 7], 64, 65), ([0], 63, 64), decode=True)
arguments = target.decode_arguments(make_decode(775, step, dim=128), "bf16")
arguments["state_pool"] = target.pool(make_pool(775, 8, 4, 128)).view
arguments["output"] = torch.zeros_like(arguments["v"])
plain = {{x: y.clone() if isinstance(y, torch.Tensor) else y for x, y in arguments.items()}}
gdn_paged.preload(other) if other is not None else None

def capture():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
        try:
            gdn_paged.gated_delta_rule_decode_paged(**arguments)
        except RuntimeError as error:
            return str(error)
    return graph

with torch.cuda.device(device):
    torch.cuda.synchronize()
    print("first:", capture())
    torch.cuda.synchronize()
gdn_paged.preload(device)
assert torch.cuda.current_device() == 0
with torch.cuda.device(device):
    graph = capture()
graph.replay()
gdn_paged.gated_delta_rule_decode_paged(**plain)
torch.cuda.synchronize(device)
for name in ("output", "state_pool"):
    assert torch.equal(arguments[name], plain[name]) and plain[name].any(), name
print("same")
"""


def check_first_use(device: int, other: int | None = None) -> None:
    """In a fresh process: the first call on `device` within a capture says so (`other` is loaded
    before), and after preload it is captured."""
    tests = str(Path(__file__).parent)
    script = FIRST_USE.format(tests=tests, device=device, other=other)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    expected = f"first use of CUDA device {device} inside a graph capture"
    assert expected in done.stdout, done.stdout + done.stderr
    assert done.stdout.strip().endswith("same"), done.stdout + done.stderr


def test_first_use_inside_a_capture(torch_cuda):
    check_first_use(0)

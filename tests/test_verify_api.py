"""Speculative decoding as a call: errors, explain, CUDA graphs, host cost."""

import numpy as np
import pytest

import gdn_paged
from cases import make_pool
from compare import relative_error
from test_host_cost import BUDGET_US, best_of
from test_verify import DIM, HEADS, ROWS, TOKENS, allowed, io_of, step_of
from verify_calls import VerifyOracle, drafts_of, token_operands, verify_arguments


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_draft": 9}, r"max_draft: 9 given, 1 to 8"),
        ({"max_draft": 0}, r"max_draft: 0 given"),
        ({"page_size": 96}, r"page_size: 96 given, a positive multiple of 64"),
        ({"page_size": 8, "allow_unaligned_pages": True}, r"page_size: 8 given, more than 8"),
        ({"accepted": np.zeros(2, np.int32)}, r"accepted: int32 \[2\].*expected shape \[1\]"),
        ({"drafts": np.zeros((1, 128), np.uint8)}, r"drafts: uint8 \[1, 128\].*verify_draft_size"),
        ({"cu_seqlens": np.zeros(3, np.int32)}, r"cu_seqlens: int32 \[3\]"),
        ({"seq_lens": np.zeros(1, np.float32)}, r"seq_lens: float32 \[1\]"),
        ({"A_log": None}, r"A_log: None; expected an array"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_errors_name_the_argument(changes, message, cpu_target):
    if cpu_target.arrays.name != "numpy":
        pytest.skip("arrays of the test are NumPy's")
    operands = token_operands(np.random.default_rng(707), 3, HEADS, DIM, "fp32")
    call = step_of(operands, [3], [62])
    pool = cpu_target.pool(make_pool(707, ROWS, 2, DIM)).view
    arguments = verify_arguments(cpu_target, call, "fp32")
    arguments |= {"state_pool": pool, "drafts": drafts_of(cpu_target, call, "fp32", 1)} | changes
    before = pool.copy()
    with pytest.raises(ValueError, match=message):
        gdn_paged.gated_delta_rule_verify_paged(**arguments)
    assert np.array_equal(pool, before)


def test_explain(target):
    operands = token_operands(np.random.default_rng(708), 3, HEADS, DIM, io_of(target))
    call = step_of(operands, [3], [62])
    arguments = verify_arguments(target, call, io_of(target)) | {
        "state_pool": target.pool(make_pool(708, ROWS, 2, DIM)).view,
        "drafts": drafts_of(target, call, io_of(target), 1),
    }
    text = gdn_paged.explain(gdn_paged.gated_delta_rule_verify_paged, **arguments)
    assert f"verify: served by {target.decode_row}" in text


def test_a_graph_serves_every_step(torch_cuda):
    """One captured call; tokens, accepted counts and lengths change on the device."""
    target, torch = torch_cuda, torch_cuda.arrays.torch
    rng = np.random.default_rng(709)
    lists, lens = [[5, 2, 8], [0, 7, 1]], np.array([60, 126])
    calls, previous = [], None
    for _ in range(6):
        accepted = np.zeros(2, int) if previous is None else rng.integers(0, previous + 1)
        lens, previous = lens + accepted, rng.integers(0, 6, 2)
        operands = token_operands(rng, 10, HEADS, DIM, "bf16")
        operands |= {"A_log": np.zeros(2), "dt_bias": np.zeros(2)}
        calls.append(step_of(operands, previous, lens, accepted, lists, max_draft=5))
    rows = make_pool(709, ROWS, 2, DIM)
    pool, truth, waiting = target.pool(rows).view, rows.copy(), {}
    arguments = verify_arguments(target, calls[0].cast("bf16"), "bf16")
    arguments |= {
        "state_pool": pool,
        "drafts": drafts_of(target, calls[0], "bf16", 2),
        "output": target.array(np.zeros((10, 2, DIM)), "bf16"),
    }
    gdn_paged.gated_delta_rule_verify_paged(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        gdn_paged.gated_delta_rule_verify_paged(**arguments)
    out_bar, row_bar = allowed(target, "bf16")
    for call in calls:
        fresh = verify_arguments(target, call.cast("bf16"), "bf16")
        for name in (*TOKENS, "cu_seqlens", "seq_lens", "accepted"):
            arguments[name].copy_(fresh[name])
        graph.replay()
        expected = VerifyOracle().verify(call.cast("bf16"), truth, waiting, 2)
        tokens = call.cu_seqlens[-1]
        out = target.values(arguments["output"])
        assert relative_error(out[:tokens], expected[:tokens], 0.02) <= out_bar
        assert relative_error(target.values(pool), truth) <= row_bar


def test_host_cost(cpu_target):
    """One 64x64 head, one token, one thread: nearly all of it is host cost."""
    call = step_of(token_operands(np.random.default_rng(710), 1, (1, 1), 64, "bf16"), [1], [5])
    arguments = verify_arguments(cpu_target, call, "bf16") | {
        "state_pool": cpu_target.pool(make_pool(710, ROWS, 1)).view,
        "drafts": drafts_of(cpu_target, call, "bf16", 1),
        "output": cpu_target.array(np.zeros((1, 1, 64)), "bf16"),
        "num_threads": 1,
    }
    cost = best_of(lambda: gdn_paged.gated_delta_rule_verify_paged(**arguments)) * 1e6
    budget = BUDGET_US[cpu_target.arrays.name]
    assert cost < budget, f"{cost:.1f} us per call, budget {budget}"

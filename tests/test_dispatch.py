"""Kernel rows: listed in order, forced by name, and refused with every row's reason."""

import numpy as np
import pytest

import gdn_paged
from calls import page_table
from cases import make_decode, make_pool, make_prefill

HEAD_SIZE = 64

OPERATIONS = ("prefill_paged", "prefill", "decode_paged", "decode", "verify_paged", "segment")
TABLE = page_table(64, ([5, 2], 60, 70))


def arguments_of(target, call, io="bf16", **changes):
    arguments = target.prefill_arguments(call, io) | {"backend": "auto"}
    pool = target.pool(make_pool(550, 6, call.heads, (call.k.shape[2], call.v.shape[2]))).view
    return arguments | {"state_pool": pool} | changes


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_are_listed(operation):
    rows = gdn_paged.kernel_rows(operation)
    names = [row.name for row in rows]
    assert names[-1] == "cpu" and len(set(names)) == len(names)
    chunks = "prefill" in operation or operation == "segment"
    known = ["cuda_sm90", "cuda_portable", "cpu"] if chunks else ["cuda", "cpu"]
    assert names == [name for name in known if name in names]
    assert all(row.description for row in rows)
    assert gdn_paged.has_cuda() == any(name.startswith("cuda") for name in names)


def test_unknown_operation():
    with pytest.raises(ValueError, match=r"operation.*encode.*prefill"):
        gdn_paged.kernel_rows("encode")


def test_explain_names_the_row(target):
    text = gdn_paged.explain(
        gdn_paged.chunk_gated_delta_rule_paged, **arguments_of(target, make_prefill(550, TABLE))
    )
    rows = [row.name for row in gdn_paged.kernel_rows("prefill_paged")]
    assert target.prefill_row in text or any(row in text for row in rows if row != "cpu")
    if target.device == "cpu":
        assert "cpu" in text


def test_explain_launches_nothing(target):
    arguments = arguments_of(target, make_prefill(550, TABLE))
    output = target.array(np.full((10, 4, HEAD_SIZE), 7.0), "bf16")
    before = target.bits(arguments["state_pool"]).copy()
    gdn_paged.explain(gdn_paged.chunk_gated_delta_rule_paged, **arguments, output=output)
    assert np.all(target.values(output) == 7)
    assert np.array_equal(target.bits(arguments["state_pool"]), before)


def test_explain_serves_every_function(target):
    call = make_decode(551, page_table(64, ([5, 2], 64, 65), decode=True), dim=64)
    decode = target.decode_arguments(call, "bf16")
    pool = target.pool(make_pool(551, 6, 4)).view
    text = gdn_paged.explain(gdn_paged.gated_delta_rule_decode_paged, **decode, state_pool=pool)
    assert target.decode_row in text
    with pytest.raises(ValueError, match="function"):
        gdn_paged.explain(print)


def test_explain_refuses_what_the_call_refuses(target):
    with pytest.raises(ValueError, match=r"page_size.*63.*64"):
        gdn_paged.explain(
            gdn_paged.chunk_gated_delta_rule_paged,
            **arguments_of(target, make_prefill(550, TABLE), page_size=63),
        )


def test_auto_and_forced_rows_agree(target):
    """backend="auto" on the CPU, and "flashinfer", which means auto."""
    if target.device != "cpu":
        pytest.skip("auto may prefer another row")
    call, outs = make_prefill(550, TABLE), []
    for backend in ("auto", "flashinfer", "cpu"):
        arguments = arguments_of(target, call, backend=backend)
        outs.append(target.bits(gdn_paged.chunk_gated_delta_rule_paged(**arguments)))
    assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])


def cuda_rows():
    return [r.name for r in gdn_paged.kernel_rows("prefill_paged") if r.name.startswith("cuda")]


@pytest.mark.skipif(not cuda_rows(), reason="built without CUDA")
def test_cuda_rows_refuse_cpu_arrays(cpu_target):
    for row in cuda_rows():
        with pytest.raises(NotImplementedError, match=rf"{row}.*CPU|{row}.*device"):
            gdn_paged.chunk_gated_delta_rule_paged(
                **arguments_of(cpu_target, make_prefill(550, TABLE), backend=row)
            )


@pytest.mark.parametrize("dim", [80, 256])
def test_head_sizes_by_device(target, dim):
    """D = 80 and 256 run on the CPU and are refused on CUDA with the sizes it serves."""
    call = make_prefill(552, TABLE, (1, 2), dim)
    arguments = arguments_of(target, call)
    if target.device == "cpu":
        out = gdn_paged.chunk_gated_delta_rule_paged(**arguments)
        assert tuple(out.shape) == (10, 2, dim)
        return
    with pytest.raises(NotImplementedError, match=rf"{dim}|64.*128"):
        gdn_paged.chunk_gated_delta_rule_paged(**arguments)


def test_odd_head_size_is_refused(cpu_target):
    call = make_prefill(552, TABLE, (1, 2), 20)
    with pytest.raises((ValueError, NotImplementedError), match=r"20.*8|8.*20"):
        gdn_paged.chunk_gated_delta_rule_paged(**arguments_of(cpu_target, call))


def test_context_parallel_on_the_cpu(cpu_target):
    """use_cp=False is fine; True has no row on the CPU and says so."""
    from calls import Slots

    call = make_prefill(553, Slots(np.array([0, 70])))
    pool = cpu_target.pool(make_pool(553, 1, 4)).view
    outs = []
    for use_cp in ("auto", False):
        options = {"initial_state": pool, "use_cp": use_cp}
        outs.append(cpu_target.bits(cpu_target.slot_prefill(call, "bf16", options=options)))
    assert np.array_equal(*outs)
    with pytest.raises(NotImplementedError, match=r"cpu.*context-parallel|use_cp"):
        cpu_target.slot_prefill(call, "bf16", options={"initial_state": pool, "use_cp": True})
    with pytest.raises(ValueError, match=r"use_cp.*maybe.*auto"):
        cpu_target.slot_prefill(call, "bf16", options={"initial_state": pool, "use_cp": "maybe"})


def test_workspace_size_does_not_depend_on_tokens():
    """The CPU row asks for none, whatever the length."""
    sizes = [
        gdn_paged.prefill_workspace_size(1, tokens, 16, 16, 32, 128, page_size=64, device="cpu")
        for tokens in (32768, 131072)
    ]
    assert sizes == [0, 0]

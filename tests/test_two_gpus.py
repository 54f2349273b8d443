"""Two GPUs of one process: every call for a device that is not the current one."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import gdn_paged
from calls import page_table
from cases import BATCH, make_decode, make_pool, make_prefill
from compare import bars, relative_error
from oracle import Oracle
from targets import Target
from test_capture import check_first_use
from two_gpus import FRAMES, TorchFrame, needs_torch, needs_two

ROWS, H, D = 12, 4, 128
STEPS = (([2, 7], 64, 65), ([0], 63, 64), ([5], 8, 9), ([4], 0, 1))
pytestmark = needs_two


@pytest.fixture(params=FRAMES)
def frames(request):
    """A target on each device."""
    pytest.importorskip(request.param)
    return [Target(FRAMES[request.param](device), "auto", "cuda") for device in (0, 1)]


def all_calls(target: Target, dim: int = D) -> dict[str, object]:
    """Every call of the package with one framework's arrays of one device: bytes by name."""
    results, rows = {}, make_pool(770, ROWS, H, dim)
    prompt, step = page_table(64, *BATCH), page_table(64, *STEPS, decode=True)
    call = make_prefill(770, prompt, dim=dim)
    arguments, pool = target.prefill_arguments(call, "bf16"), target.pool(rows).view
    table = target.page_arguments(prompt) | {
        "cu_seqlens": arguments["cu_seqlens"], "page_size": 64,
    }  # fmt: skip
    slots = gdn_paged.gdn_paged_prefill_slots(**table)
    plan = gdn_paged.prefill_plan(**arguments, state_pool=pool, slots=slots)
    for name, more in {
        "prefill": {},
        "prefill with a plan": {"slots": slots, "plan": plan},
        "prefill, checked on the device": {"validate": "device"},
        "prefill, checked on the host": {"validate": "host"},
    }.items():
        pool = target.pool(rows).view
        results[name] = gdn_paged.chunk_gated_delta_rule_paged(**arguments, state_pool=pool, **more)
        results[f"{name}: pool"] = pool
    packed = {x: arguments[x] for x in ("q", "k", "v", "g", "beta", "cu_seqlens")}
    results["packed"], results["packed: states"] = gdn_paged.chunk_gated_delta_rule(
        **packed, output_final_state=True
    )
    arguments = target.decode_arguments(make_decode(771, step, dim=dim), "bf16")
    pool = target.pool(rows).view
    results["decode"] = gdn_paged.gated_delta_rule_decode_paged(**arguments, state_pool=pool)
    results["decode: pool"] = pool
    slots = gdn_paged.gdn_paged_decode_slots(**target.page_arguments(step))
    results |= {f"decode slots {i}": x for i, x in enumerate(slots)}
    stats = gdn_paged.page_stats(pool)
    return results | {f"statistics {i}": x for i, x in enumerate(stats)}


@pytest.mark.parametrize("dim", [64, 128])
def test_calls_for_any_device(frames, dim):
    """Both orders of devices: results on the right one, the same bytes, the current one kept."""
    expected = None
    for target in frames:
        number = frames.index(target)
        gdn_paged.preload(number)
        for current in (0, 1):
            with target.arrays.use(current):
                results = all_calls(target, dim)
                assert target.arrays.current() == current
            assert {target.arrays.device_of(x) for x in results.values()} == {number}
            found = {name: target.bits(x).copy() for name, x in results.items()}
            expected = expected or found
            for name, bits in found.items():
                assert np.array_equal(bits, expected[name]), (name, number, current)


def test_results_are_right(frames):
    """The second device, while the first is current, against float64."""
    target, allowed = frames[1], bars("cuda", "bf16")
    rows = make_pool(770, ROWS, H, D)
    with target.arrays.use(0):
        results = all_calls(target)
    for name, call in (
        ("prefill", make_prefill(770, page_table(64, *BATCH), dim=D)),
        ("decode", make_decode(771, page_table(64, *STEPS, decode=True), dim=D)),
    ):
        truth = rows.copy()
        if name == "prefill":
            expected = Oracle().prefill(call, truth, "bf16")
        else:
            expected = Oracle().decode(call, truth)[:, None]
        assert relative_error(target.values(results[name]), expected) <= allowed.out
        assert relative_error(target.values(results[f"{name}: pool"]), truth) <= allowed.rows


def test_mixed_devices_are_refused(frames):
    """An operand on the other device is named, whatever is current."""
    here, there = frames
    step = page_table(64, *STEPS, decode=True)
    arguments = here.decode_arguments(make_decode(772, step, dim=D), "bf16")
    pool = here.pool(make_pool(772, ROWS, H, D)).view
    before = here.bits(pool).copy()
    for name in ("k", "a", "page_indices", "state_pool"):
        moved = arguments | {"state_pool": pool}
        moved[name] = there.arrays.array(here.arrays.numpy(moved[name]))
        with pytest.raises(ValueError, match=rf"^{name}: .* on cuda:1; expected the device of q"):
            gdn_paged.gated_delta_rule_decode_paged(**moved)
    assert np.array_equal(here.bits(pool), before)


@needs_torch
@pytest.mark.parametrize("how", ["current", "object", "int"])
@pytest.mark.parametrize("device", [0, 1])
def test_stream_of_the_right_device(device, how):
    """Inputs written on a side stream after a delay while the other device is current: the call is
    ordered behind them, by the stream that is current on the tensors' device or the one given."""
    target = Target(TorchFrame(device), "auto", "cuda")
    torch = target.arrays.torch
    call, rows = make_prefill(773, page_table(64, *BATCH), dim=D), make_pool(773, ROWS, H, D)
    arguments, pool = target.prefill_arguments(call, "bf16"), target.pool(rows).view
    good, output = arguments["v"].clone(), torch.zeros_like(arguments["v"])
    arguments["v"].fill_(float("nan"))
    torch.cuda.synchronize(device)
    stream = target.arrays.stream(device)
    target.arrays.sleep(stream)
    with torch.cuda.stream(stream):
        arguments["v"].copy_(good)
    given = {"object": {"stream": stream}, "int": {"stream": stream.cuda_stream}}.get(how, {})
    with torch.cuda.stream(stream) if how == "current" else contextlib.nullcontext():
        with torch.cuda.device(1 - device):
            gdn_paged.chunk_gated_delta_rule_paged(
                **arguments, state_pool=pool, output=output, **given
            )
            assert torch.cuda.current_device() == 1 - device
    stream.synchronize()
    truth = rows.copy()
    expected = Oracle().prefill(call, truth, "bf16")
    assert relative_error(target.values(output), expected) <= bars("cuda", "bf16").out
    assert relative_error(target.values(pool), truth) <= bars("cuda", "bf16").rows


@needs_torch
def test_stream_of_another_device_is_refused():
    target = Target(TorchFrame(1), "auto", "cuda")
    stream = target.arrays.stream(0)
    step = page_table(64, *STEPS, decode=True)
    arguments = target.decode_arguments(make_decode(774, step, dim=D), "bf16")
    pool = target.pool(make_pool(774, ROWS, H, D)).view
    before = target.bits(pool).copy()
    with pytest.raises(ValueError, match=r"^stream: .*device of this call"):
        gdn_paged.gated_delta_rule_decode_paged(**arguments, state_pool=pool, stream=stream)
    assert np.array_equal(target.bits(pool), before)


@needs_torch
def test_preload_is_per_device():
    """Loading device 0 does not load device 1, whose first call in a capture says so."""
    check_first_use(1, other=0)


@needs_torch
def test_compiled_for_the_other_device():
    """torch.compile of a call on cuda:1 while cuda:0 is current."""
    import torch

    import gdn_paged.torch

    target = Target(TorchFrame(1), "auto", "cuda")
    step = page_table(64, *STEPS, decode=True)
    arguments = target.decode_arguments(make_decode(777, step, dim=D), "bf16")
    pools = [target.pool(make_pool(777, ROWS, H, D)).view for _ in range(2)]

    def layer(pool):
        return gdn_paged.gated_delta_rule_decode_paged(**arguments, state_pool=pool) * 2

    got, expected = torch.compile(layer, fullgraph=True)(pools[0]), layer(pools[1])
    assert got.device.index == 1 and torch.cuda.current_device() == 0
    assert torch.equal(got, expected) and torch.equal(*pools)

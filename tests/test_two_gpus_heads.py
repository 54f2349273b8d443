"""Heads of a layer, and tokens of a prompt, over two devices: the examples, on GPUs or the CPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gdn_paged
from two_gpus import Load

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=EXAMPLES,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def gpus() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def need(place: str) -> dict[str, str]:
    """The environment that hides GPUs on the CPU; skips if there are too few for them."""
    if place == "cpu":
        return {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    if gpus() < 2:
        pytest.skip(f"{gpus()} GPUs, two needed")
    return {}


@pytest.fixture(params=["cpu", "cuda"])
def place(request):
    return request.param


SPLITS = [("decode", 1, 1), ("decode", 16, 1), ("prefill", 1, 1500), ("prefill", 5, 300)]
LARGE_SPLITS = [("decode", 256, 1), ("prefill", 1, 8192), ("prefill", 64, 256)]


@pytest.mark.parametrize("operation, batch, length", SPLITS + LARGE_SPLITS)
def test_halves_on_one_device(place, operation, batch, length):
    """Half the heads give the bytes they have among all, however a launch is cut for them."""
    torch = pytest.importorskip("torch")
    if place == "cuda" and gpus() == 0:
        pytest.skip("no GPU that torch sees")
    if place == "cpu" and (operation, batch, length) in LARGE_SPLITS:
        pytest.skip("for a GPU")
    load = Load(place, operation, batch, length, heads=(8, 16))
    whole = load.arguments | {"deterministic": "batch"}
    halves = [dict(whole) for _ in range(2)]
    for name, x in whole.items():
        if name in ("q", "k", "v", "output"):
            dim = x.ndim - 2
        elif name in ("g", "a", "b", "A_log", "dt_bias"):
            dim = x.ndim - 1
        elif name == "state_pool":
            dim = 1
        else:
            continue
        for half, part in zip(halves, x.chunk(2, dim), strict=True):
            half[name] = part.contiguous()
    for arguments in (whole, *halves):
        load.function(**arguments)
    for name, dim in (("output", whole["output"].ndim - 2), ("state_pool", 1)):
        together = torch.cat([half[name] for half in halves], dim)
        assert bool(together.any()) and torch.equal(together, whole[name])


def torchrun(processes: int) -> list[str]:
    module = ["-m", "torch.distributed.run", "--standalone"]
    return [sys.executable, *module, "--nproc-per-node", str(processes)]


@pytest.mark.parametrize("how", ["python", "torchrun"])
def test_torch(place, how):
    pytest.importorskip("torch")
    starter = torchrun(2) if how == "torchrun" else [sys.executable]
    out = run([*starter, "torch_tensor_parallel.py"], **need(place))
    backend = "nccl" if place == "cuda" else "gloo"
    assert f"2 processes on {place} ({backend}): 3 sequences" in out
    assert "bytes of one device with all heads" in out


def test_torch_four_processes():
    """One q head each, so no GPU group of two would do."""
    pytest.importorskip("torch")
    out = run([*torchrun(4), "torch_tensor_parallel.py"], **need("cpu"))
    assert "4 processes on cpu (gloo)" in out and "2 in each process" in out


@pytest.mark.parametrize("processes", [2, 4])
def test_tokens_over_devices(place, processes):
    """The state before each process's tokens comes from the maps of the processes before."""
    pytest.importorskip("torch")
    environment = need(place)
    if place == "cuda" and gpus() < processes:
        pytest.skip(f"{gpus()} GPUs, {processes} needed")
    out = run([*torchrun(processes), "torch_context_parallel.py"], **environment)
    assert f"{processes} processes on {place}" in out
    assert out.count("differ from those of one device by") == 2


@pytest.mark.parametrize("size", [2, 5])
def test_maps_of_segments(place, size, monkeypatch):
    """The same on one device, segment after segment: the state, outputs and page ends."""
    torch = pytest.importorskip("torch")
    if place == "cuda" and gpus() == 0:
        pytest.skip("no GPU that torch sees")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import torch_context_parallel as example

    device, dtype = torch.device(place), torch.float32 if place == "cpu" else torch.bfloat16
    tolerance = 1e-5 if place == "cpu" else 2e-2
    operands, each = example.prompt(size, device, dtype), example.PAGES_EACH
    whole = example.new_pool(size * each, device)
    expected = example.prefill(operands, whole)
    states, segments, pools = [], [], []
    for i in range(size):
        begin, end = (n * each * example.PAGE_SIZE for n in (i, i + 1))
        mine = {name: x[begin:end] for name, x in operands.items()}
        states.append(torch.zeros(whole.shape[1:], device=device))
        pools.append(example.new_pool(each, device))
        given = {"initial_state": states[i]} if i else {}
        segments.append(example.begin(mine, i * each, pools[i], **given))
    state = segments[0].offset
    for i in range(1, size):
        states[i].copy_(state)
        maps = segments[i].transition[None], segments[i].offset[None]
        state = gdn_paged.segment_combine(*maps, initial_state=state)
    assert example.relative(state, whole[-1]) <= tolerance
    for i, segment in enumerate(segments):
        begin, end = (n * each * example.PAGE_SIZE for n in (i, i + 1))
        assert example.relative(segment.finish(), expected[begin:end]) <= tolerance
        assert example.relative(pools[i], whole[i * each : (i + 1) * each]) <= tolerance


def test_jax(place):
    pytest.importorskip("jax")
    pytest.importorskip("gdn_paged._jax_ffi", reason="this build holds no XLA FFI handlers")
    out = run([sys.executable, "jax_tensor_parallel.py"], **need(place))
    assert f"2 {place} devices" in out
    assert "bytes of one device with all heads" in out

"""Heads of a layer, and tokens of a prompt, over two devices: the examples, on GPUs or the CPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_jax(place):
    pytest.importorskip("jax")
    out = run([sys.executable, "jax_tensor_parallel.py"], **need(place))
    assert f"2 {place} devices" in out
    assert "bytes of one device with all heads" in out

"""The examples of single files run as a user runs them, each in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gdn_paged

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, tmp_path: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=300,
        cwd=tmp_path, env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def on_cuda(framework: str) -> bool:
    """Whether the framework is here and sees a GPU that this build has kernels for."""
    if not gdn_paged.has_cuda() or not importlib.util.find_spec(framework):
        return False
    if framework == "cupy":
        import cupy

        return cupy.cuda.is_available()
    import jax

    return jax.default_backend() == "gpu"


def test_numpy(tmp_path):
    printed = run("numpy_cpu.py", tmp_path)
    assert "reused 128 of 158 prompt tokens, same result" in printed
    assert "in bfloat16 the prompt's output differs by" in printed


def test_jax(tmp_path):
    pytest.importorskip("jax")
    pytest.importorskip("gdn_paged._jax_ffi", reason="this build holds no XLA FFI handlers")
    printed = run("jax_layer.py", tmp_path, JAX_PLATFORMS="cpu")
    assert printed.count("decode and prefill differ by") == 2
    assert "the pool stayed in place on the cpu" in printed


def test_jax_on_a_gpu(tmp_path):
    pytest.importorskip("gdn_paged._jax_ffi", reason="this build holds no XLA FFI handlers")
    if not on_cuda("jax"):
        pytest.skip("needs JAX with CUDA, and a build with CUDA")
    assert "the pool stayed in place on the gpu" in run("jax_layer.py", tmp_path)


def test_cupy(tmp_path):
    if not on_cuda("cupy"):
        pytest.skip("needs CuPy with a GPU, and a build with CUDA")
    assert run("cupy_stream.py", tmp_path).count("GPU and CPU differ by") == 4


def test_cupy_without_a_gpu(tmp_path):
    """It says what it needs and is no failure of `tests/run.sh`."""
    if on_cuda("cupy"):
        pytest.skip("there is a GPU")
    assert "this example needs" in run("cupy_stream.py", tmp_path)

"""Speed of the CPU backend beside what the machine can do in the same run.

    python tests/bench/cpu.py [--threads 1 2] [--rounds 7] [--json FILE]

Prints microseconds per token and head of prefill, GB/s of decode and the host cost of a call;
beside them the measured FMA peak and memcpy bandwidth (cpu_peak.cpp, compiled here with $CXX), a
batched NumPy token loop and, if transformers is installed, its chunked torch reference.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the NumPy loop is measured on one thread

import ml_dtypes
import numpy as np

import gdn_paged

BF16 = np.dtype(ml_dtypes.bfloat16)
HEADS, DIM, PAGE = 32, 128, 1024
FLOPS = 6 * DIM * DIM  # of one token and head, token by token: 98 K


def peak(threads: list[int]) -> dict[str, dict[str, float]]:
    """GFLOP/s of every instruction set and memcpy GB/s, per thread count."""
    source = Path(__file__).with_name("cpu_peak.cpp")
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "cpu_peak"
        compiler = os.environ.get("CXX", "c++")
        flags = ["-O3", "-std=c++20", "-pthread", "-Wno-psabi"]
        subprocess.run([compiler, *flags, str(source), "-o", str(binary)], check=True)
        text = subprocess.run([binary, *map(str, threads)], check=True, capture_output=True).stdout
    return json.loads(text)


def best(function: Callable[[], Any], rounds: int) -> float:
    """Seconds of one call, the best of `rounds` after one warm-up."""
    function()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def zeros(shape: tuple[int, ...], dtype: np.dtype | type = np.float32) -> np.ndarray:
    """Zeros on a cache line, as torch and engines allocate; NumPy's own lie 16 bytes past one."""
    size = int(np.prod(shape))
    block = np.zeros(size + 64, dtype)
    start = -block.ctypes.data % 64 // block.itemsize
    return block[start : start + size].reshape(shape)


def prefill_arguments(num_seqs: int, length: int, heads: int = HEADS) -> dict[str, Any]:
    """num_seqs sequences of `length` new tokens, one page each, gates as trained models have."""
    rng = np.random.default_rng(0)
    tokens = num_seqs * length

    def draw() -> np.ndarray:
        return rng.standard_normal((tokens, heads, DIM), np.float32)

    gates = rng.standard_normal((tokens, heads))
    return {
        "q": unit(draw()).astype(BF16),
        "k": unit(draw()).astype(BF16),
        "v": draw().astype(BF16),
        "g": np.exp(-np.logaddexp(0, -gates) / 16).astype(np.float32),
        "beta": rng.random((tokens, heads), np.float32),
        "cu_seqlens": np.arange(0, tokens + 1, length, dtype=np.int32),
        "state_pool": zeros((num_seqs, heads, DIM, DIM)),
        "page_indices": np.arange(num_seqs, dtype=np.int32),
        "page_indptr": np.arange(num_seqs + 1, dtype=np.int32),
        "page_size": PAGE,
        "last_page_len": np.full(num_seqs, length, np.int32),
        "output": np.zeros((tokens, heads, DIM), BF16),
    }


def prefill_us(num_seqs: int, length: int, threads: int, rounds: int) -> float:
    """Microseconds per token and head."""
    arguments = prefill_arguments(num_seqs, length) | {"num_threads": threads}
    seconds = best(lambda: gdn_paged.chunk_gated_delta_rule_paged(**arguments), rounds)
    return seconds * 1e6 / (num_seqs * length * HEADS)


def decode_arguments(batch: int, heads: int, dim: int) -> dict[str, Any]:
    """One page per row, updated in place, state in fp32."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    tables = {
        "page_indices": np.arange(batch, dtype=np.int32),
        "page_indptr": np.arange(batch + 1, dtype=np.int32),
        "last_page_len": np.full(batch, 5, np.int32),
    }
    return tables | {
        "q": draw(batch, 1, heads, dim).astype(BF16),
        "k": draw(batch, 1, heads, dim).astype(BF16),
        "v": draw(batch, 1, heads, dim).astype(BF16),
        "A_log": draw(heads),
        "a": draw(batch, 1, heads),
        "dt_bias": draw(heads),
        "b": draw(batch, 1, heads),
        "state_pool": draw(batch, heads, dim, dim),
        "output": np.zeros((batch, 1, heads, dim), BF16),
        "slots": gdn_paged.gdn_paged_decode_slots(**tables),
    }


def decode_gb_per_s(threads: int, rounds: int, batch: int = 64) -> float:
    """State bytes read plus written per second."""
    arguments = decode_arguments(batch, HEADS, DIM) | {"num_threads": threads}
    seconds = best(lambda: gdn_paged.gated_delta_rule_decode_paged(**arguments), rounds)
    return 2 * arguments["state_pool"].nbytes / seconds / 1e9


def host_us() -> dict[str, float]:
    """One 64x64 head with output and slots given: nearly all of the call is host cost."""
    arguments = decode_arguments(1, 1, 64) | {"num_threads": 1}
    variants = {"numpy": arguments}
    try:
        import torch
    except ImportError:
        pass
    else:

        def tensor(x: np.ndarray) -> torch.Tensor:
            if x.dtype == BF16:
                return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
            return torch.from_numpy(x)

        variants["torch"] = {
            name: tensor(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()
        }
        variants["torch"]["slots"] = type(arguments["slots"])(*map(tensor, arguments["slots"]))

    def many(call: dict[str, Any]) -> None:
        for _ in range(1000):
            gdn_paged.gated_delta_rule_decode_paged(**call)

    return {name: best(lambda call=call: many(call), 9) * 1e3 for name, call in variants.items()}


def numpy_us(tokens: int = 24) -> float:
    """A token loop in fp32, batched over the heads: microseconds per token and head."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((tokens, HEADS, DIM), np.float32) for _ in range(3))
    alpha, beta = rng.random((2, tokens, HEADS), np.float32)
    output = np.empty_like(v)

    def loop() -> None:
        state = np.zeros((HEADS, DIM, DIM), np.float32)
        for t in range(tokens):
            state *= alpha[t, :, None, None]
            error = v[t] - (state @ k[t, :, :, None])[..., 0]
            state += (beta[t, :, None] * error)[:, :, None] * k[t, :, None, :]
            output[t] = (state @ q[t, :, :, None])[..., 0]

    return best(loop, 5) * 1e6 / (tokens * HEADS)


def transformers_us(threads: int, tokens: int = 1024) -> float | None:
    """The chunked torch reference of qwen3_next: microseconds per token and head."""
    try:
        import torch
        from transformers.models.qwen3_next import modeling_qwen3_next as model
    except ImportError:
        return None
    torch.set_num_threads(threads)
    q, k, v = (torch.randn(1, tokens, HEADS, DIM) for _ in range(3))
    gates = {"g": -torch.rand(1, tokens, HEADS), "beta": torch.rand(1, tokens, HEADS)}
    with torch.inference_mode():
        reference = model.torch_chunk_gated_delta_rule
        seconds = best(lambda: reference(q, k, v, **gates, use_qk_l2norm_in_kernel=True), 3)
    return seconds * 1e6 / (tokens * HEADS)


def measure(threads: list[int], rounds: int) -> dict[str, Any]:
    isa = next(row.description for row in gdn_paged.kernel_rows("prefill") if row == "cpu")
    before, results = peak(threads), {}
    for count in threads:
        results[str(count)] = {
            "prefill us": prefill_us(1, 1024, count, rounds),
            "prefill short us": prefill_us(64, 16, count, rounds),
            "decode GB/s": decode_gb_per_s(count, rounds),
            "transformers us": transformers_us(count),
        }
    after = peak(threads)  # the better of two: a neighbour's burst must not flatter the kernels
    for count, result in results.items():
        machine = {key: max(x, after[count][key]) for key, x in before[count].items()}
        flops = machine.get(f"{isa} GFLOP/s", machine["baseline GFLOP/s"])
        result |= {
            "FMA peak GFLOP/s": flops,
            "memcpy GB/s": machine["memcpy GB/s"],
            "prefill share of FMA peak": FLOPS / 1e3 / result["prefill us"] / flops,
            "short over long": result["prefill short us"] / result["prefill us"],
            "decode share of memcpy": result["decode GB/s"] / machine["memcpy GB/s"],
        }
    if "1" in results:
        for result in results.values():
            speedup = results["1"]["prefill us"] / result["prefill us"]
            of_fma = result["FMA peak GFLOP/s"] / results["1"]["FMA peak GFLOP/s"]
            result["scaling over FMA scaling"] = speedup / of_fma
    return {
        "version": gdn_paged.__version__,
        "isa": isa,
        "machine": platform.processor() or platform.machine(),
        "threads": results,
        "numpy us": numpy_us(),
        "host us": host_us(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    results = measure(arguments.threads, arguments.rounds)
    text = json.dumps(results, indent=2)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()

"""Heads, lengths and floors of the benchmark.

The head layouts are those of the Qwen3-Next and Qwen3.5 families, whole or split by tensor
parallelism, as (Hq = Hk, Hv); the batches are those of the tables that other kernels publish.
"""

from __future__ import annotations

DIM = 128
PAGE = 1024
HEADS = {
    "TP8": (2, 8),
    "TP4": (4, 16),
    "TP2": (8, 32),
    "TP1": (16, 64),
    "35B": (16, 32),
    "27B2": (8, 24),
    "27B1": (16, 48),
    "2B": (16, 16),
    "sym32": (32, 32),
}
LENGTHS = (
    *("1x32768", "1x16384", "1x8192", "1x4096", "1x2048", "28672+4096", "24576+8192", "16384x2"),
    *("12288+4096", "6144+2048", "4096x2", "1024+7168", "8192x4", "4096x8", "2048x4", "1024x8"),
    *("256x64", "1x512"),
)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# What a CPU does in seconds.
CPU_LENGTHS = ("1x4096", "1x2048", "1x1024", "1x512", "1024x4", "64x16")
CPU_BATCHES = (1, 4, 16, 64)

_CHUNK_FLOPS = 10.5e6  # of the chunked form: 64 tokens of one head, K = V = 128
_TOKEN_FLOPS = 6 * DIM * DIM  # of the recurrence as written: one token of one head


def heads_of(name: str) -> tuple[int, int]:
    """(Hq, Hv) of a layout's name or of "16/32".

    Raises:
        ValueError: neither.
    """
    if name in HEADS:
        return HEADS[name]
    parts = name.split("/")
    if len(parts) == 2 and all(part.isdigit() and int(part) for part in parts):
        return int(parts[0]), int(parts[1])
    raise ValueError(f"heads: {name!r}; expected Hq/Hv such as 16/32, or one of {', '.join(HEADS)}")


def lengths_of(name: str) -> list[int]:
    """Of "1x512": one sequence of 512; of "512x4": four; of "512+64": these two.

    Raises:
        ValueError: none of these forms.
    """
    parts = name.split("+") if "+" in name else name.split("x")
    if not all(part.isdigit() and int(part) for part in parts) or (
        "+" not in name and len(parts) != 2
    ):
        raise ValueError(f"lens: {name!r}; expected 1x512, 512x4 or 512+64")
    numbers = [int(part) for part in parts]
    if "+" in name:
        return numbers
    first, second = numbers
    return [second] if first == 1 else [first] * second


def prefill_bytes(lengths: list[int], hq: int, hv: int) -> int:
    """Bytes that every prefill must move: q, k, v and output in bf16, gates and beta and one state
    per page in fp32."""
    tokens = sum(lengths)
    pages = sum(-(-n // PAGE) for n in lengths)
    heads = max(hq, hv)
    operands = 2 * DIM * (hq + min(hq, hv) + hv + heads) + 2 * 4 * heads
    return tokens * operands + 4 * pages * heads * DIM * DIM


def prefill_flops(lengths: list[int], hq: int, hv: int, chunked: bool) -> float:
    """Arithmetic of a prefill in the chunked form of GPU rows, or token by token."""
    if chunked:
        return sum(-(-n // 64) for n in lengths) * max(hq, hv) * _CHUNK_FLOPS
    return float(sum(lengths) * max(hq, hv) * _TOKEN_FLOPS)


def decode_bytes(batch: int, heads: int, state_bytes: int) -> int:
    """Bytes of the states read and written by one decode call."""
    return 2 * batch * heads * DIM * DIM * state_bytes

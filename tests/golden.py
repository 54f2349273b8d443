"""Writes the case list and its float64 truth as flat files for the C++ golden test.

    python golden.py DIRECTORY

One file per case and io dtype: records of a text line `name type rank dims...` followed by the
raw little-endian values. Types: f32, f64, i32, i64, u16 (bits of bf16 or fp16).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np

from calls import Case, PageTable, Prefill
from cases import CASES
from compare import case_bars, truth_of

IO_DTYPES = ("fp32", "bf16")
CODES = {"fp32": 0x220, "bf16": 0x410, "fp16": 0x210}
GATES = {"linear": 0, "log": 1, "raw": 2}
QK_L2NORM, BETA_IS_LOGIT, EXPLICIT_SCALE = 1, 2, 4


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """Values in their stored dtype; 16-bit floats as their bits."""
    if dtype == "fp32":
        return x.astype(np.float32)
    if dtype == "fp16":
        return x.astype(np.float16).view(np.uint16)
    return (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def write(file: BinaryIO, name: str, x) -> None:
    x = np.ascontiguousarray(x)
    kind = f"{x.dtype.kind}{x.dtype.itemsize * 8}"
    dims = " ".join(str(n) for n in x.shape)
    file.write(f"{name} {kind} {x.ndim} {dims}\n".encode())
    file.write(x.astype(x.dtype.newbyteorder("<")).tobytes())


def write_call(file: BinaryIO, prefix: str, case: Case, call, io: str) -> None:
    is_prefill = isinstance(call, Prefill)
    flags = QK_L2NORM * call.l2norm + EXPLICIT_SCALE * (call.scale is not None)
    gate = 0
    if is_prefill:
        flags += BETA_IS_LOGIT * call.beta_is_logit
        gate = GATES[call.gate]
    sizes = [int(is_prefill), flags, gate, call.rows.page_size, CODES[io]]
    write(file, prefix + "sizes", np.array(sizes, np.int64))
    write(file, prefix + "scale", np.array([call.scale or 0.0], np.float64))
    for name in ("q", "k", "v"):
        write(file, prefix + name, stored(getattr(call.cast(io), name), io))
    for name in ("g", "beta") if is_prefill else ("a", "b"):
        if getattr(call, name) is not None:
            write(file, prefix + name, stored(getattr(call, name), "fp32"))
    for name in ("A_log", "dt_bias"):
        if getattr(call, name) is not None:
            write(file, prefix + name, stored(getattr(call, name), "fp32"))
    tables = ("indices", "indptr", "last_page_len") + ("cu_seqlens",) * is_prefill
    for name in tables:
        write(file, prefix + name, getattr(call.rows, name).astype(case.index_dtype))


def write_case(path: Path, case: Case, io: str) -> None:
    truth, bars = truth_of(case, io), case_bars(case, "cpu", io)
    written = np.setdiff1d(np.arange(len(case.pool), dtype=np.int64), truth.untouched)
    with path.open("wb") as file:
        write(file, "calls", np.array([len(case.calls)], np.int64))
        write(file, "bars", np.array([bars.out, bars.rows], np.float64))
        write(file, "state_dtype", np.array([CODES[case.state_dtype]], np.int64))
        write(file, "row_padding", np.array([case.row_padding], np.int64))
        write(file, "pool", stored(case.pool, case.state_dtype))
        write(file, "written", written)
        write(file, "true_rows", truth.pool[written])
        write(file, "ignored_rows", np.array(case.ignored_rows, np.int64))
        write(file, "ignored_tokens", np.array(case.ignored_tokens, np.int64))
        for i, call in enumerate(case.calls):
            write_call(file, f"{i}.", case, call, io)
            write(file, f"{i}.true_out", truth.outs[i])


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    names = []
    for case in CASES:
        if not all(isinstance(call.rows, PageTable) for call in case.calls):
            continue
        for io in IO_DTYPES:
            names.append(f"{case.name}-{io}.golden")
            write_case(directory / names[-1], case, io)
    (directory / "index.txt").write_text("".join(f"{name}\n" for name in names))
    print(f"{len(names)} golden files in {directory}")


if __name__ == "__main__":
    main()

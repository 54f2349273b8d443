"""``python -m gdn_paged bench``: times of prefill and decode over head layouts and batches.

Every row stands beside its floor: what the bytes and the arithmetic of the call take at the copy
and matrix-product rates that are measured when the run begins.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ._progress import progress_bar

Row = dict[str, Any]


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise argparse.ArgumentTypeError("got nothing, expected names with commas between them")
    return names


def _numbers(text: str) -> list[int]:
    numbers = [int(name) for name in _names(text)]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"got {min(numbers)}, expected at least 1")
    return numbers


def _rounds(text: str) -> int:
    return max(1, int(text))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the benchmark to `parser`."""
    add = parser.add_argument
    add("operation", choices=("prefill", "decode"), help="what is timed")
    add(
        "--device",
        help="cpu (NumPy), or a torch device such as cuda:0; default: a GPU if there is one",
    )
    add(
        "--heads",
        type=_names,
        help="head layouts as Hq/Hv or by name, with commas (default: on a GPU TP8,TP4,TP2,TP1,"
        "35B,27B2,27B1,2B,sym32 for prefill and 35B,TP8 for decode; on the CPU TP8)",
    )
    add(
        "--lens",
        type=_names,
        help="prefill: lengths of the batch, such as 1x4096,512x8,28672+4096 (default: 18 batches "
        "on a GPU, 6 small ones on the CPU)",
    )
    add(
        "--batches",
        type=_numbers,
        help="decode: rows of a call (default: 1 to 512 on a GPU, 1 to 64 on the CPU)",
    )
    add(
        "--states",
        type=_names,
        default=["float32", "bfloat16"],
        help="decode: dtypes of the pool (default: float32,bfloat16)",
    )
    add("--io", default="bfloat16", help="dtype of q, k, v and output (default: bfloat16)")
    add("--backend", default="auto", help="a kernel row by name (default: auto)")
    add("--rounds", type=_rounds, default=5, help="the median of so many counts (default: 5)")
    add(
        "--burst",
        action="store_true",
        help="also time a GPU that has rested: power limits a busy one",
    )
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    add("--plot", type=Path, metavar="FILE", help="draw time over tokens as .png or .svg")
    add(
        "--compare",
        type=Path,
        metavar="FILE",
        help="put recorded times beside ours: a JSON of an earlier run, or of another kernel",
    )
    add(
        "--require",
        action="store_true",
        help="exit 1 if a row is slower than the fastest time of --compare",
    )


def run(args: argparse.Namespace) -> int:
    """Prints a line per row.

    Returns:
        0; 1 with --require if a row is slower than a recorded one; 2 for bad input or a missing
        package.
    """
    try:
        from ._bench.machine import open_machine
        from ._bench.plot import check_plot
        from ._bench.report import read_recorded
    except ImportError as error:
        print(f"gdn_paged bench: {error}; pip install numpy ml_dtypes", file=sys.stderr)
        return 2
    try:
        recorded = read_recorded(args.compare) if args.compare else None
        if args.require and recorded is None:
            raise ValueError("require: given without --compare FILE")
        if args.plot:
            check_plot(args.plot)
        if args.json and not args.json.parent.is_dir():
            raise ValueError(f"json: {args.json.parent} is no directory")
        return _measure(args, open_machine(args.device), recorded)
    except (NotImplementedError, OSError, RuntimeError, ValueError) as error:
        print(f"gdn_paged bench: {error}", file=sys.stderr)
        return 2


def _problems(args: argparse.Namespace, on_gpu: bool) -> list[Row]:
    """Keyword arguments of every measurement, checked."""
    from ._bench import grid
    from ._bench.operations import STATE_BYTES

    whole = list(grid.HEADS) if args.operation == "prefill" else ["35B", "TP8"]
    heads = args.heads or (whole if on_gpu else ["TP8"])
    for name in heads:
        grid.heads_of(name)
    if args.operation == "prefill":
        lens = args.lens or list(grid.LENGTHS if on_gpu else grid.CPU_LENGTHS)
        for name in lens:
            grid.lengths_of(name)
        return [{"heads": name, "lens": length} for name in heads for length in lens]
    unknown = [state for state in args.states if state not in STATE_BYTES]
    if unknown:
        raise ValueError(f"states: {unknown[0]!r}; expected one of {', '.join(STATE_BYTES)}")
    batches = args.batches or list(grid.BATCHES if on_gpu else grid.CPU_BATCHES)
    return [
        {"heads": name, "state": state, "batch": batch}
        for name in heads
        for state in args.states
        for batch in batches
    ]


def _measure(args: argparse.Namespace, machine: Any, recorded: Any) -> int:
    from . import __version__
    from ._bench import plot, report
    from ._bench.operations import Limits, measure_decode, measure_prefill

    problems = _problems(args, machine.device != "cpu")
    limits = Limits(machine.copy_rate(), machine.flop_rate())
    title = f"gdn_paged {__version__} {args.operation} on {machine.name}"
    print(f"{title}, {args.io}, K = V = 128")
    print(
        f"floor: {limits.copy / 1e9:.0f} GB/s copied, {limits.flops / 1e12:.3g} TFLOP/s multiplied"
    )
    if recorded and recorded.device not in ("", machine.name):
        print(f"note: {recorded.source} was recorded on {recorded.device}")
    measure = measure_prefill if args.operation == "prefill" else measure_decode
    common = {"io": args.io, "backend": args.backend, "rounds": args.rounds}
    common["burst"] = args.burst
    rows: list[Row] = []
    served = ""
    with progress_bar(len(problems), args.operation, "row") as progress:
        for problem in problems:
            row = measure(machine, limits, **problem, **common)
            rows.append(row | {"device": machine.name, "version": __version__})
            if row["served"] != served:
                served = row["served"]
                progress.say(served)
            progress.say(report.text_of(row, recorded))
            progress.advance(1)
            machine.release()
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot:
        plot.draw(args.plot, rows, recorded, title)
    slower = 0
    if recorded:
        lines, slower = report.summary(rows, recorded)
        print("\n".join(lines))
    return 1 if args.require and slower else 0

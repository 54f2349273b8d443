"""Two GPUs of one host: a thread for each against one alone, and the heads of a layer split.

    python tests/bench/two_gpus.py [--out FILE.json]

Wall time of runs of calls, launch of the first to the end of the last; the best of several runs
that take the contenders in turn. Of two GPUs the slower one counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from two_gpus import COUNT, Load, run_together

# (operation, sequences, new tokens of each, heads, calls of a run)
WORK = [
    ("prefill", 8, 2048, (16, 64), 20),
    ("prefill", 4, 8192, (16, 64), 8),
    ("prefill", 1, 32768, (16, 64), 8),
    ("prefill", 1, 131072, (16, 64), 3),
    ("decode", 256, 1, (16, 64), 100),
    ("decode", 16, 1, (16, 64), 1000),
    ("decode", 1, 1, (16, 64), 2000),
]
ROUNDS = 5


def measure(operation: str, batch: int, length: int, heads: tuple[int, int], calls: int) -> dict:
    """Microseconds per call."""
    whole = [Load(device, operation, batch, length, heads) for device in (0, 1)]
    halves = [
        Load(device, operation, batch, length, (heads[0] // 2, heads[1] // 2)) for device in (0, 1)
    ]
    seconds: dict[str, list[float]] = {"alone": [], "two threads": [], "half the heads each": []}
    for turn in range(ROUNDS + 1):
        times = (
            max([load.run(calls) for load in whole]),
            run_together(whole, calls),
            run_together(halves, calls),
        )
        if turn == 0:  # warm-up
            continue
        for values, time in zip(seconds.values(), times, strict=True):
            values.append(time)
    best = {name: min(values) * 1e6 for name, values in seconds.items()}
    return {
        "operation": operation, "batch": batch, "length": length, "heads": heads, **best,
        "threads / alone": best["two threads"] / best["alone"],
        "half / whole": best["half the heads each"] / best["alone"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if COUNT < 2:
        raise SystemExit(f"{COUNT} GPUs, two needed")
    rows = []
    print("us per call                       alone  two threads         half the heads each")
    for work in WORK:
        row = measure(*work)
        rows.append(row)
        heads = "{} / {}".format(*row["heads"])
        name = f"{row['operation']} {row['length']}x{row['batch']}, {heads}"
        threads = f"{row['two threads']:11.1f} ({row['threads / alone']:.3f})"
        halves = f"{row['half the heads each']:11.1f} ({row['half / whole']:.3f})"
        print(f"{name:<28}{row['alone']:11.1f}{threads}{halves}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

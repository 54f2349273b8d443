"""Rows in words, and beside the rows of others."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .operations import Row

# Times of a recorded row that are no contender's.
_NO_CONTENDER = ("floor_us", "host_us", "burst_us", "us_in_call", "us_without_slots")


def key_of(row: Row) -> tuple[Any, ...]:
    """What makes two rows comparable."""
    if "lens" in row:
        return row["hq"], row["hv"], row["lens"]
    return row["hq"], row["hv"], row["state"], row["batch"]


@dataclass(frozen=True)
class Recorded:
    """Times of the same problems that others took, or an earlier run of ours."""

    source: str
    device: str  # "" if the file does not say
    times: dict[tuple[Any, ...], dict[str, float]]

    def of(self, row: Row) -> dict[str, float]:
        """Microseconds of each contender for the problem of `row`."""
        return self.times.get(key_of(row), {})


def read_recorded(path: Path) -> Recorded:
    """Reads a list of rows, or an object with ``rows``. A contender is "us" or ends in "_us".

    Raises:
        OSError, ValueError: no such file, or not of this form.
    """
    data = json.loads(path.read_text())
    rows = data.get("rows") if isinstance(data, dict) else data
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"compare: {path} holds no rows; expected a list, or an object with rows")
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        try:
            key = key_of(row)
        except KeyError as error:
            raise ValueError(f"compare: a row of {path} has no {error}: {row}") from None
        times[key] = {
            "recorded" if name == "us" else name.removesuffix("_us"): float(value)
            for name, value in row.items()
            if (name == "us" or name.endswith("_us")) and name not in _NO_CONTENDER
        }
    device = data.get("gpu", "") if isinstance(data, dict) else (rows or [{}])[0].get("device", "")
    return Recorded(path.name, str(device), times)


def text_of(row: Row, recorded: Recorded | None) -> str:
    """A line for one row."""
    name = f"{row['heads']:<6} {row['hq']:>2}/{row['hv']:<2}"
    if "lens" in row:
        problem, other = f"{row['lens']:<11}", f"{row['us_in_call']:8.1f} with slots and plan made"
    else:
        problem = f"{row['state']:<8} B={row['batch']:<4}"
        other = f"{row['us_without_slots']:8.2f} with slots made"
    line = f"{name} {problem} {row['us']:9.2f} us, {other}, floor {row['floor_us']:7.2f}"
    if "burst_us" in row:
        line += f", rested {row['burst_us']:.2f}"
    if "host_us" in row:
        line += f", host {row['host_us']:5.1f}"
    for contender, us in (recorded.of(row) if recorded else {}).items():
        line += f", {contender} {us:.1f} ({us / row['us']:.2f}x)"
    return line


def summary(rows: list[Row], recorded: Recorded) -> tuple[list[str], int]:
    """A line per contender, and how many rows are slower than the fastest of theirs."""
    ratios: dict[str, list[float]] = {}
    slower = 0
    for row in rows:
        times = recorded.of(row)
        for contender, us in times.items():
            ratios.setdefault(contender, []).append(us / row["us"])
        slower += bool(times) and min(times.values()) < row["us"]
    lines = [
        f"{contender}: {len(values)} rows, {sum(x < 1 for x in values)} of them faster than here; "
        f"geometric mean {math.exp(sum(map(math.log, values)) / len(values)):.2f}x, "
        f"worst {min(values):.2f}x"
        for contender, values in ratios.items()
    ]
    return lines or [f"{recorded.source} has none of these rows"], slower

"""``python -m gdn_paged check``: every kernel row that this machine can run, against float64."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the check to `parser`."""
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    parser.add_argument(
        "--verbose", action="store_true", help="also print why rows refuse some of the calls"
    )


def run(args: argparse.Namespace) -> int:
    """Prints a line for each operation and row: calls made and worst errors of their tolerances.

    Returns:
        0; 1 if a result is out of tolerance or a page was touched that must not be; 2 if a
        package that the check needs is missing.
    """
    try:
        from ._check.operations import check_all, cuda_device
    except ImportError as error:
        print(f"gdn_paged check: {error}; pip install numpy ml_dtypes", file=sys.stderr)
        return 2
    failed = checked = 0
    for title, result in check_all(args.seed):
        idle = not result.calls
        print(f"{'-' if idle else 'ok' if result.ok else 'FAILED':<7}{title:<28}{result.text()}")
        if args.verbose:
            for reason in dict.fromkeys(result.refusals):
                print(f"       refused: {reason}")
        failed += not result.ok
        checked += not idle
    if cuda_device() is None:
        print("no GPU that an installed torch can use: rows of CUDA were not run")
    print(f"{checked - failed} passed, {failed} failed")
    return 1 if failed else 0

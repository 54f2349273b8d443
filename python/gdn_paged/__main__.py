"""``python -m gdn_paged``: what is installed, a self-test, a demonstration, a benchmark."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from .info import root

COMMANDS = {
    "info": (".info", "build, driver and devices, kernel rows, optional parts"),
    "check": (".check", "numeric self-test of every kernel row"),
    "demo": (".demo", "an engine on real text: pages, prefix tree, continuous batching"),
    "bench": (".bench", "times of prefill or decode, beside a floor and recorded times"),
    "explain": ("._bench.explain", "which kernel row serves a problem, and why not an earlier one"),
}
PATHS = {
    "cmake-dir": ("lib/cmake/gdn_paged", "directory of the CMake package, for gdn_paged_DIR"),
    "include-dir": ("include", "directory of gdn_paged/gdn_paged.h"),
    "lib-dir": ("lib", "directory of libgdn_paged.so"),
}


def _parser() -> argparse.ArgumentParser:
    about = "What is installed, a self-test, a demonstration and a benchmark of gdn_paged."
    parser = argparse.ArgumentParser(prog="python -m gdn_paged", description=about)
    for name, (path, text) in PATHS.items():
        parser.add_argument(
            f"--{name}", dest="path", action="store_const", const=path, help=f"print the {text}"
        )
    commands = parser.add_subparsers(dest="command", metavar="command")
    wanted = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    for name, (module_name, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name == wanted:
            command.set_defaults(run=_load(command, module_name))
    return parser


def _load(command: argparse.ArgumentParser, module_name: str) -> object:
    """The run function of a command. Imported when asked for: some need NumPy, the package none."""
    try:
        module = importlib.import_module(module_name, __package__)
    except ImportError as error:
        print(f"gdn_paged: {error}; pip install numpy ml_dtypes", file=sys.stderr)
        sys.exit(2)
    module.add_arguments(command)
    return module.run


def main() -> int:
    """Runs the command line and returns its exit status."""
    parser = _parser()
    args = parser.parse_args()
    if args.path:
        print(root() / args.path)
        return 0
    if not args.command:
        parser.print_help()
        return 2
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader, `head` for one, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)

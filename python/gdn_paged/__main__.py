"""``python -m gdn_paged``: what is installed, a self-test, a demonstration."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import __version__ as library_version
from . import _core, build_info, has_cuda, kernel_rows


def _root() -> Path:
    """Where the library is installed; not the source tree of an editable install."""
    return Path(_core.__file__).resolve().parent


def _devices() -> list[str]:
    """The GPUs that an installed framework can see."""
    try:
        if importlib.util.find_spec("torch"):
            import torch

            if torch.cuda.is_available():
                count = torch.cuda.device_count()
                gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
                return [f"cuda:{i} {p.name}, sm_{p.major}{p.minor}" for i, p in enumerate(gpus)]
        elif importlib.util.find_spec("cupy"):
            import cupy

            count = cupy.cuda.runtime.getDeviceCount()
            names = [cupy.cuda.runtime.getDeviceProperties(i) for i in range(count)]
            return [f"cuda:{i} {p['name'].decode()}" for i, p in enumerate(names)]
    except Exception as error:
        return [f"none that a framework can use: {error}"]
    return []


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return "no NVIDIA driver"


def _info(_: argparse.Namespace) -> int:
    print(f"gdn_paged {library_version} in {_root()}")
    print(build_info())
    if has_cuda():
        print(f"driver: {_driver()} (CUDA 13 needs R580 or newer)")
        for device in _devices() or ["no GPU that an installed torch or cupy can see"]:
            print(f"device: {device}")
    else:
        print("CPU only: built without nvcc (or with GDN_PAGED_NO_CUDA=1); CUDA arrays are refused")
    print("\nkernel rows, first that serves a call runs")
    for operation in ("prefill_paged", "prefill", "decode_paged", "decode"):
        for row in kernel_rows(operation):
            print(f"  {operation:<14} {row.name:<14} {row.description}")
    print("\nframeworks")
    for package in ("numpy", "ml_dtypes", "torch", "cupy", "jax"):
        try:
            found = version("cupy-cuda13x" if package == "cupy" else package)
        except PackageNotFoundError:
            found = "present" if importlib.util.find_spec(package) else "not installed"
        print(f"  {package:<10} {found}")
    return 0


def _parser() -> argparse.ArgumentParser:
    about = "What is installed, a self-test, and a demonstration of gdn_paged."
    parser = argparse.ArgumentParser(prog="python -m gdn_paged", description=about)
    paths = {
        "cmake-dir": ("lib/cmake/gdn_paged", "directory of the CMake package, for gdn_paged_DIR"),
        "include-dir": ("include", "directory of gdn_paged/gdn_paged.h"),
        "lib-dir": ("lib", "directory of libgdn_paged.so"),
    }
    for name, (path, text) in paths.items():
        parser.add_argument(
            f"--{name}", dest="path", action="store_const", const=path, help=f"print the {text}"
        )
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("info", help="build, devices, kernel rows, frameworks").set_defaults(
        run=_info
    )
    # Imported when asked for: they need NumPy, the package does not.
    wanted = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    for name, text in (
        ("check", "numeric self-test of every kernel row"),
        ("demo", "an engine on real text: pages, prefix tree, continuous batching"),
    ):
        command = commands.add_parser(name, help=text)
        if name == wanted:
            module = importlib.import_module(f".{name}", __package__)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def main() -> int:
    """Runs the command line and returns its exit status."""
    parser = _parser()
    args = parser.parse_args()
    if args.path:
        print(_root() / args.path)
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

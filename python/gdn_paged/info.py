"""``python -m gdn_paged info``: the library, the driver and its GPUs, the dispatch table, and which
optional parts work here."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

from . import __version__ as library_version
from . import _core, build_info, has_cuda, kernel_rows
from .dispatch import Operation

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
CUDA_13 = 13000  # cuDriverGetVersion of the first driver that runs it, R580

# A part, the packages it needs, and modules that show it working.
PARTS = (
    ("numpy", ("numpy",), ()),
    ("bf16", ("numpy", "ml_dtypes"), ()),  # NumPy has none of its own
    ("torch", ("torch",), ("gdn_paged.torch",)),
    ("jax", ("jax",), ("gdn_paged.jax", "gdn_paged._jax_ffi")),
    ("cupy", ("cupy",), ()),
    ("plot", ("numpy", "matplotlib"), ()),
    ("bars", ("tqdm",), ()),
)
_DISTRIBUTIONS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy")}


def root() -> Path:
    """Where the library is installed; not the source tree of an editable install."""
    return Path(_core.__file__).resolve().parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to `parser`."""
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints what :func:`gather` found and returns 0."""
    facts = gather()
    print(json.dumps(facts, indent=1) if args.json else text_of(facts))
    return 0


def gather() -> dict[str, Any]:
    """Everything that the command prints. Imports the frameworks that are installed."""
    return {
        "version": library_version,
        "location": str(root()),
        "build": build_info(),
        "has_cuda": has_cuda(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "driver": _driver(),
        "rows": [
            {"operation": operation, "name": row.name, "description": row.description}
            for operation in OPERATIONS
            for row in kernel_rows(operation)
        ],
        "parts": [_part(*part) for part in PARTS],
    }


def text_of(facts: dict[str, Any]) -> str:
    """The facts in lines."""
    driver = facts["driver"]
    lines = [
        f"gdn_paged {facts['version']} in {facts['location']}",
        facts["build"],
        f"Python {facts['python']}, {facts['machine']}",
        f"driver: {driver['text']}",
        *(f"device: {device}" for device in driver["devices"]),
    ]
    if not facts["has_cuda"]:
        lines.append(
            "CPU only: built without nvcc (or with GDN_PAGED_NO_CUDA=1); CUDA arrays are refused"
        )
    lines += ["", "kernel rows, first that serves a call runs (explain says which and why)"]
    lines += [
        f"  {row['operation']:<14} {row['name']:<14} {row['description']}" for row in facts["rows"]
    ]
    lines += ["", "optional parts"]
    lines += [
        f"  {part['name']:<6} {'works' if part['works'] else '-':<6} {part['text']}"
        for part in facts["parts"]
    ]
    return "\n".join(lines)


def _part(name: str, packages: tuple[str, ...], modules: tuple[str, ...]) -> dict[str, Any]:
    """Whether an optional part can be used, with versions or the reason why not."""
    found: list[str] = []
    missing: list[str] = []
    for package in packages:
        number = _version(package)
        (found if number else missing).append(f"{package} {number}" if number else package)
    reason = f"not installed: {', '.join(missing)}" if missing else _broken(*packages, *modules)
    text = "; ".join(filter(None, (", ".join(found), reason)))
    return {"name": name, "works": not reason, "text": text if reason else text + _more(name)}


def _broken(*modules: str) -> str:
    """Why a module cannot be imported; "" if all can."""
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # whatever a broken installation raises is the answer
        if isinstance(error, ModuleNotFoundError) and error.name == "gdn_paged._jax_ffi":
            return "this build holds no XLA FFI handlers (build it with GDN_PAGED_JAX=1)"
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def _more(name: str) -> str:
    """What a framework says of this machine."""
    if name != "torch":
        return ""
    torch = sys.modules["torch"]
    fast = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    text = "" if fast else "; tensors by __dlpack__, slower calls (torch 2.10 has a faster way)"
    return text + (f", CUDA {torch.version.cuda}" if torch.cuda.is_available() else ", no GPU")


def _version(package: str) -> str | None:
    for distribution in _DISTRIBUTIONS.get(package, (package,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "(version unknown)" if importlib.util.find_spec(package) else None


def _driver() -> dict[str, Any]:
    """The NVIDIA driver and its GPUs, asked without a framework and without a CUDA context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"text": "no NVIDIA driver", "devices": []}
    number = ctypes.c_int()
    status = cuda.cuInit(0)
    if status or cuda.cuDriverGetVersion(ctypes.byref(number)):
        return {"text": f"libcuda.so.1 is there but does not start (error {status})", "devices": []}
    text = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    try:
        release = Path("/sys/module/nvidia/version").read_text().strip()
        text = f"{release}, {text}"
    except OSError:
        pass
    if has_cuda() and number.value < CUDA_13:
        text += "; too old: the kernels here need CUDA 13, driver R580 or newer"
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return {"text": text, "devices": [_device(cuda, i) for i in range(count.value)]}


def _device(cuda: Any, ordinal: int) -> str:
    """Name, compute capability, multiprocessors and memory."""
    handle, memory = ctypes.c_int(), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(handle), ordinal)
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGetName(name, len(name), handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), which, handle)
        return value.value

    major, minor, multiprocessors = attribute(75), attribute(76), attribute(16)
    return (
        f"cuda:{ordinal} {name.value.decode()}, sm_{major}{minor}, {multiprocessors} SMs, "
        f"{memory.value / 2**30:.0f} GiB"
    )

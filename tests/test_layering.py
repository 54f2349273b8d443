"""The shape of the source tree: which layer may include which, and how long things may get."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
C_FAMILY = (".h", ".hpp", ".c", ".cpp", ".cu", ".cuh")

# A layer and the include prefixes it may use beside its own folder; the longest match counts.
# Arrows go one way: backends know core, core knows no backend, everyone knows the public header.
ARROWS = {
    "cpp/include": ("gdn_paged/",),
    "cpp/core": ("gdn_paged/", "core/"),
    "cpp/cpu": ("gdn_paged/", "core/", "cpu/"),
    "cpp/cuda": ("gdn_paged/", "core/", "cuda/common/", "cuda/page_table.h"),
    "cpp/cuda/common": ("gdn_paged/", "core/", "cuda/common/"),
    "cpp/cuda/decode": ("gdn_paged/", "core/", "cuda/common/", "cuda/decode/"),
    "cpp/cuda/verify": ("gdn_paged/", "core/", "cuda/common/", "cuda/verify/"),
    "cpp/cuda/short": ("gdn_paged/", "core/", "cuda/common/", "cuda/short/"),
    "cpp/cuda/sm80": ("gdn_paged/", "core/", "cuda/common/", "cuda/short/short.h", "cuda/sm80/"),
    "cpp/cuda/sm90": (
        *("gdn_paged/", "core/", "cuda/common/", "cuda/short/short.h"),
        *("cuda/sm80/", "cuda/sm90/"),
    ),
    "bindings": ("gdn_paged/",),
    "examples": ("gdn_paged/",),
    "tests": (
        "gdn_paged/",
        "core/chunks.h",
        "core/slots.h",
        "core/workspace.h",
        "cpu/kernels.h",
        "cpu/recurrence.h",
        "cuda/common/",
    ),
}
FRAMEWORK_HEADERS = re.compile(r"^(Python\.h|nanobind/|torch/|ATen/|c10/|xla/|dlpack/)")

# Ceilings, in lines. A kernel file aims at 450.
FILE_LINES = {
    "cpp/include": 720,
    "cpp/core": 210,
    "cpp/cpu": 300,
    "cpp/cuda": 600,
    "bindings": 450,
    "python": 350,
    "tests": 350,
    "examples": 350,
}
FUNCTION_LINES = 60
COLUMNS = 100


def sources(*suffixes: str) -> list[Path]:
    folders = (ROOT / name for name in ("cpp", "bindings", "python", "tests", "examples"))
    return sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in suffixes)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer_of(path: Path, layers) -> str:
    return max((x for x in layers if name_of(path).startswith(x + "/")), key=len)


def includes(path: Path) -> list[tuple[str, str]]:
    """(delimiter, target) of every include line."""
    return re.findall(r'^\s*#\s*include\s*(["<])([^">]+)', path.read_text(), re.M)


def include_faults(path: Path) -> list[str]:
    layer = layer_of(path, ARROWS)
    faults = []
    for delimiter, target in includes(path):
        framework = FRAMEWORK_HEADERS.match(target) and layer != "bindings"
        cuda = target.startswith("cuda") and layer in (
            "cpp/include",
            "cpp/core",
            "cpp/cpu",
            "bindings",
        )
        outside = delimiter == '"' and not (path.parent / target).exists()
        if framework or (delimiter == "<" and cuda):
            faults.append(f"{name_of(path)} includes <{target}>")
        if outside and not target.startswith(ARROWS[layer]):
            faults.append(f"{name_of(path)} of {layer} may not include {target}")
    return faults


def test_includes_go_one_way():
    faults = [fault for path in sources(*C_FAMILY) for fault in include_faults(path)]
    assert not faults, "\n".join(faults)


def test_public_header_stands_alone():
    header = ROOT / "cpp/include/gdn_paged/gdn_paged.h"
    assert [target for _, target in includes(header)] == ["stddef.h", "stdint.h"]


def test_frameworks_are_imported_by_their_own_module_only():
    for path in sorted((ROOT / "python/gdn_paged").rglob("*.py")):
        if path.stem.lstrip("_").split("_")[0] in ("torch", "jax"):
            continue
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            found = {name.split(".")[0] for name in names} & {"torch", "jax", "cupy"}
            assert not found, f"{name_of(path)} imports {found} when it is imported"


def test_files_keep_their_budget():
    faults = []
    for path in sources(*C_FAMILY, ".py"):
        lines = path.read_text().splitlines()
        if len(lines) > FILE_LINES[layer_of(path, FILE_LINES)]:
            faults.append(f"{name_of(path)} has {len(lines)} lines")
        wide = [n for n, line in enumerate(lines, 1) if len(line) > COLUMNS]
        faults += [f"{name_of(path)}:{n} is wider than {COLUMNS} columns" for n in wide]
    assert not faults, "\n".join(faults)


def c_functions(text: str) -> list[tuple[str, int]]:
    """(first line, length) of functions at column 0, where clang-format puts them."""
    found, start = [], None
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if re.match(r"[A-Za-z\[~].*\(", line):
            start = i
        if line == "}" and start is not None:
            found.append((lines[start], i - start + 1))
            start = None
    return found


def python_functions(text: str) -> list[tuple[str, int]]:
    """(name, length) of functions, without their docstrings."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            found.append((node.name, node.end_lineno - body[0].lineno + 1 if body else 0))
    return found


def test_host_functions_are_short():
    faults = []
    for path in sources(".c", ".cpp", ".h", ".hpp", ".py"):
        functions = python_functions if path.suffix == ".py" else c_functions
        for name, length in functions(path.read_text()):
            if length > FUNCTION_LINES:
                faults.append(f"{name_of(path)}: {name} has {length} lines")
    assert not faults, "\n".join(faults)

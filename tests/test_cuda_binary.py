"""The CUDA code in the built library: no kernel spills registers or keeps a stack."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

FIELD = re.compile(r"\b(STACK|LOCAL):(\d+)")


def library() -> Path:
    spec = importlib.util.find_spec("gdn_paged")
    assert spec is not None and spec.origin is not None
    return next((Path(spec.origin).parent / "lib").glob("libgdn_paged.so*"))


def cuobjdump() -> str | None:
    """That of the CUDA toolkit in PATH, else of the package nvidia-cuda-cuobjdump."""
    found = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec and not found else ():
        found = next((str(tool) for tool in Path(place).glob("*/bin/cuobjdump")), None)
    return found


def test_no_stack_no_local_memory():
    tool = cuobjdump()
    if tool is None:
        pytest.skip("there is no cuobjdump, neither in PATH nor as a package")
    command = [tool, "-res-usage", str(library())]
    report = subprocess.run(command, capture_output=True, text=True)
    if "does not contain device code" in report.stdout + report.stderr:
        pytest.skip("this build holds no CUDA code")
    assert report.returncode == 0, report.stderr
    kernel, kernels, spilling = "", 0, []
    for line in report.stdout.splitlines():
        if "Function " in line:
            kernel = line.strip()
            continue
        fields = FIELD.findall(line)
        if fields:
            kernels += 1
            if any(int(size) > 0 for _, size in fields):
                spilling.append(f"{kernel} {line.strip()}")
    assert kernels > 0
    assert not spilling, "\n".join(spilling)

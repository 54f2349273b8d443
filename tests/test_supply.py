"""What an installed package loads and what a build takes from outside, as SECURITY.md lists it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import gdn_paged

ROOT = Path(__file__).resolve().parent.parent
LOADED = re.compile(
    r"lib(gdn_paged|stdc\+\+|gcc_s|gomp|m|c|dl|pthread|rt)\.so(\.\d+)*|ld-linux-\S+\.so\.\d"
)


def listed(heading: str) -> set[str]:
    """The names in the first column of the table under a heading of SECURITY.md."""
    section = (ROOT / "SECURITY.md").read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    return set(re.findall(r"^\| `([^`]+)`", section, re.MULTILINE))


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_libraries_that_are_loaded():
    package = Path(gdn_paged.__file__).parent
    for library in [*package.glob("*.so"), *package.glob("lib*/libgdn_paged.so*")]:
        dump = subprocess.run(
            ["readelf", "-d", library], capture_output=True, text=True, check=True
        )
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dump.stdout)
        assert needed and all(LOADED.fullmatch(name) for name in needed), f"{library}: {needed}"
        paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]", dump.stdout)
        assert all(path.startswith("$ORIGIN") for path in paths), f"{library}: {paths}"


def test_requirements_of_a_build():
    requires = re.search(r"^requires = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    names = set(re.findall(r'"([\w-]+)', requires[1]))
    assert names == listed("To build") - {"cmake", "nvcc"}


def test_nothing_is_fetched_by_cmake():
    for path in [*ROOT.glob("CMakeLists.txt"), *ROOT.glob("*/**/CMakeLists.txt")]:
        if path.relative_to(ROOT).parts[0] in ("cpp", "bindings", "tests", "CMakeLists.txt"):
            text = path.read_text()
            assert not re.search(r"FetchContent|ExternalProject|file\(DOWNLOAD", text), path


def test_switches_of_a_build_add_up():
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    defining = [one for one in settings["overrides"] if "define" in one.get("cmake", {})]
    assert len(defining) >= 2
    for override in defining:  # without it a second switch takes the place of the first
        assert override["inherit"]["cmake"]["define"] == "append", override["if"]

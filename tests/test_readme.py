"""The README's code runs as it stands and prints what the README says it prints."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMPILERS = {"c": ("cc", "-std=c99", ".c"), "cpp": ("c++", "-std=c++17", ".cpp")}


def examples() -> list[tuple[str, str, str]]:
    """Language, code and expected output of every code block that an output block follows."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    return [
        (language, code, following[1])
        for (language, code), following in itertools.pairwise(blocks)
        if language in ("python", *COMPILERS) and following[0] == "text"
    ]


def package_path(option: str) -> str:
    return subprocess.check_output([sys.executable, "-m", "gdn_paged", option], text=True).strip()


def build(language: str, code: str, folder: Path) -> list[str]:
    compiler, standard, suffix = COMPILERS[language]
    source, program = folder / f"quick{suffix}", folder / "quick"
    source.write_text(code)
    library = package_path("--lib-dir")
    warnings = ["-Wall", "-Wextra", "-Werror"]
    paths = [f"-I{package_path('--include-dir')}", f"-L{library}", f"-Wl,-rpath,{library}"]
    subprocess.check_call(
        [compiler, standard, *warnings, source, *paths, "-lgdn_paged", "-o", program]
    )
    return [str(program)]


def test_every_language_is_shown():
    shown = [language for language, _, _ in examples()]
    assert shown == [*["python"] * 3, "c", "cpp", "python"]


@pytest.mark.parametrize(("language", "code", "expected"), examples())
def test_example(language, code, expected, tmp_path):
    for framework in ("jax", "torch"):
        if f"import {framework}" in code:
            pytest.importorskip(framework)
    if "import gdn_paged.jax" in code:
        pytest.importorskip("gdn_paged._jax_ffi", reason="this build holds no XLA FFI handlers")
    python = [sys.executable, "-c", code]
    command = build(language, code, tmp_path) if language in COMPILERS else python
    assert subprocess.check_output(command, text=True, cwd=tmp_path) == expected


def test_links_lead_somewhere():
    for readme in [*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", readme.read_text()):
            assert (readme.parent / target).exists(), f"{readme} links to {target}"

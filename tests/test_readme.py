"""The README's code runs as it stands and prints what the README says it prints."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str, str]]:
    """Language, code and expected output of every code block that an output block follows."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    return [
        (language, code, following[1])
        for (language, code), following in itertools.pairwise(blocks)
        if language in ("python", "c") and following[0] == "text"
    ]


def package_path(option: str) -> str:
    return subprocess.check_output([sys.executable, "-m", "gdn_paged", option], text=True).strip()


def build_c(code: str, folder: Path) -> list[str]:
    source, program = folder / "quick.c", folder / "quick"
    source.write_text(code)
    library = package_path("--lib-dir")
    subprocess.check_call(
        [
            "cc",
            "-std=c99",
            "-Wall",
            "-Wextra",
            "-Werror",
            source,
            f"-I{package_path('--include-dir')}",
            f"-L{library}",
            f"-Wl,-rpath,{library}",
            "-lgdn_paged",
            "-o",
            program,
        ]
    )
    return [str(program)]


def test_both_languages_are_shown():
    assert [language for language, _, _ in examples()] == ["python", "python", "c", "python"]


@pytest.mark.parametrize(("language", "code", "expected"), examples())
def test_example(language, code, expected, tmp_path):
    if "import jax" in code:
        pytest.importorskip("jax")
    command = build_c(code, tmp_path) if language == "c" else [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, cwd=tmp_path) == expected


def test_links_lead_somewhere():
    for readme in [*ROOT.glob("*.md"), *ROOT.glob("*/README.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", readme.read_text()):
            assert (readme.parent / target).exists(), f"{readme.name} links to {target}"

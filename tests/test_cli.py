"""`python -m gdn_paged`: exit codes, and what is printed."""

import subprocess
import sys
from pathlib import Path

import pytest

import gdn_paged


def command(*arguments: str, timeout=300) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "gdn_paged", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_info():
    done = command("info")
    assert done.returncode == 0, done.stderr
    assert gdn_paged.__version__ in done.stdout
    for operation in ("prefill_paged", "decode_paged"):
        for row in gdn_paged.kernel_rows(operation):
            assert row.name in done.stdout and row.description in done.stdout
    if not gdn_paged.has_cuda():
        assert "CPU only" in done.stdout


def test_check_passes():
    done = command("check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cpu" in done.stdout and "FAILED" not in done.stdout
    assert " 0 failed" in done.stdout


def test_demo_reuses_the_prefix(tmp_path):
    text = tmp_path / "requests.txt"
    text.write_text("You are a helper. " * 30 + "\n---\n" + "First one.\n\nSecond one.\n\nThird.\n")
    done = command(
        "demo", "--text", str(text), "--device", "cpu", "--layers", "2", "--new-tokens", "4"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cpu" in done.stdout


def test_demo_needs_its_file():
    done = command("demo", "--text", "/no/such/file")
    assert done.returncode != 0
    assert "/no/such/file" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "option, inside",
    [
        ("--cmake-dir", "gdn_pagedConfig.cmake"),
        ("--include-dir", "gdn_paged/gdn_paged.h"),
        ("--lib-dir", "libgdn_paged.so"),
    ],
)
def test_directories(option, inside):
    done = command(option)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.is_absolute() and (path / inside).exists()


def test_unknown_command():
    done = command("fly")
    assert done.returncode == 2
    assert "fly" in done.stderr


def test_no_command_prints_help():
    done = command()
    assert done.returncode == 2
    for word in ("info", "check", "demo", "--cmake-dir"):
        assert word in done.stdout + done.stderr

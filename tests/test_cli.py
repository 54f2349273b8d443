"""`python -m gdn_paged`: exit codes, and what is printed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gdn_paged
from gdn_paged._bench.machine import cuda_reason


def command(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess:
    """Runs the command line; `path` is searched for modules first."""
    environment = dict(os.environ)
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(path), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    return subprocess.run(
        [sys.executable, "-m", "gdn_paged", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
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


def test_info_says_what_works():
    done = command("info", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["version"] == gdn_paged.__version__ and facts["build"] == gdn_paged.build_info()
    parts = {part["name"]: part for part in facts["parts"]}
    assert parts["numpy"]["works"] and f"numpy {np.__version__}" in parts["numpy"]["text"]
    for name in ("torch", "cupy", "jax"):
        present = importlib.util.find_spec(name) is not None
        assert present or (not parts[name]["works"] and "not installed" in parts[name]["text"])
    assert parts["torch"]["works"] == (importlib.util.find_spec("torch") is not None)
    rows = [(row["operation"], row["name"]) for row in facts["rows"]]
    assert rows[0] == ("prefill_paged", gdn_paged.kernel_rows("prefill_paged")[0])
    if not facts["driver"]["devices"]:
        assert not facts["driver"]["text"].startswith("CUDA 0")


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (("prefill", "--lens", "64+128"), 0, "served by cpu"),
        (("prefill", "--slots", "--prefix", "70", "--state", "bfloat16"), 0, "state bf16"),
        (("decode", "--heads", "4/2", "--head-dim", "64"), 0, "head_dim_k = 64"),
        (("decode", "--slots", "--head-dim-v", "32"), 0, "head_dim_v = 32"),
        (("verify", "--drafts", "3", "--head-dim", "64"), 0, "served by cpu"),
        (("verify", "--drafts", "9"), 2, "max_draft: 9"),
        (("prefill", "--head-dim", "60"), 1, "multiples of 8"),
        (("prefill", "--slots", "--use-cp", "on"), 1, "use_cp"),
        (("prefill", "--page-size", "96"), 2, "page_size: 96"),
        (("decode", "--heads", "3/4"), 2, "v: 4 heads"),
        (("prefill", "--lens", "64*2"), 2, "expected 1x512"),
    ],
)
def test_explain(arguments, status, words):
    done = command("explain", *arguments, "--device", "cpu")
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert words in (done.stdout if status < 2 else done.stderr)


BENCH = ("--device", "cpu", "--rounds", "1", "--heads", "1/2")


def test_bench_prefill_against_an_earlier_run(tmp_path):
    rows, recorded = tmp_path / "rows.json", tmp_path / "recorded.json"
    done = command("bench", "prefill", *BENCH, "--lens", "1x64,16x2", "--json", str(rows))
    assert done.returncode == 0, done.stderr
    assert "served by cpu" in done.stdout and "floor" in done.stdout
    found = json.loads(rows.read_text())
    assert [row["lens"] for row in found] == ["1x64", "16x2"]
    assert [row["tokens"] for row in found] == [64, 32]
    assert all(row["us"] > 0 and row["floor_us"] > 0 and row["hq"] == 1 for row in found)

    # A peer that no machine reaches: --require says so, and the summary counts it.
    peers = {"gpu": "another", "rows": [{"hq": 1, "hv": 2, "lens": "1x64", "peer_us": 1e-6}]}
    recorded.write_text(json.dumps(peers))
    done = command(
        *("bench", "prefill", *BENCH, "--lens", "1x64", "--compare", str(recorded), "--require")
    )
    assert done.returncode == 1, done.stderr
    assert "recorded on another" in done.stdout
    assert "peer: 1 rows, 1 of them faster than here" in done.stdout


def test_bench_decode():
    done = command("bench", "decode", *BENCH, "--batches", "1,2", "--states", "float32")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("with slots made") == 2


NO_GPU = "no CUDA kernels in this build" if not gdn_paged.has_cuda() else cuda_reason()


@pytest.mark.skipif(bool(NO_GPU), reason=str(NO_GPU))
def test_bench_and_explain_on_a_gpu(tmp_path):
    rows = tmp_path / "rows.json"
    few = ("--rounds", "1", "--heads", "2/8")
    done = command("bench", "prefill", *few, "--lens", "1x256", "--json", str(rows))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(rows.read_text())
    assert "served by cuda" in row["served"] and row["us"] >= row["floor_us"] > 0
    done = command("bench", "decode", *few, "--batches", "4", "--compare", str(rows))
    assert done.returncode == 0, done.stderr
    assert "served by cuda" in done.stdout and "none of these rows" in done.stdout
    for operation in ("prefill", "decode", "verify"):
        done = command("explain", operation, "--head-dim", "64")
        assert "served by" in done.stdout and "on CUDA" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is missing")
def test_bench_plot(tmp_path):
    for name, start in (("p.png", b"\x89PNG"), ("p.svg", b"<?xml")):
        done = command(
            *("bench", "prefill", *BENCH, "--lens", "1x64,1x128", "--plot", str(tmp_path / name))
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / name).read_bytes().startswith(start)
    text = (tmp_path / "p.svg").read_text()
    assert "floor" in text and "gdn_paged" in text


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("prefill", "--plot", "picture.gif"), "ends in .png or .svg"),
        (("prefill", "--heads", "two"), "expected Hq/Hv"),
        (("prefill", "--require"), "without --compare"),
        (("prefill", "--compare", "/no/such/file"), "/no/such/file"),
        (("decode", "--states", "int8"), "'int8'"),
        (("prefill", "--backend", "fast"), "'fast'"),
    ],
)
def test_bench_refuses(arguments, words):
    done = command("bench", *arguments, "--device", "cpu")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert words in done.stderr


def test_plot_without_matplotlib_is_refused_before_measuring(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('hidden')")
    done = command("bench", "prefill", "--plot", "p.png", path=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert "pip install matplotlib" in done.stderr


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
    for word in ("info", "check", "demo", "bench", "explain", "--cmake-dir"):
        assert word in done.stdout + done.stderr

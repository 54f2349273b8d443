"""The manual is complete: every public symbol stands in its page, and the pages' code runs."""

import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gdn_paged

ROOT = Path(__file__).resolve().parents[1]
HEADERS = ROOT / "cpp/include/gdn_paged"
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def words(page: str) -> set[str]:
    """Identifiers in a page's headings, between its backticks and in its code blocks."""
    text = (ROOT / page).read_text()
    rest = BLOCK.sub("", text)
    code = [code for _, code in BLOCK.findall(text)]
    code += re.findall(r"`([^`]+)`", rest) + re.findall(r"^#+ (.*)", rest, re.MULTILINE)
    return set(re.findall(r"\w+", " ".join(code)))


def header() -> str:
    return COMMENT.sub(" ", (HEADERS / "gdn_paged.h").read_text())


def structs() -> dict[str, list[str]]:
    """Fields of every struct."""
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", header(), re.DOTALL):
        declarations = [line.strip() for line in body.split(";") if line.strip()]
        found[name] = [re.search(r"(\w+)$", line)[1] for line in declarations]
    return found


def test_header_is_read_whole():
    """The patterns of this file see what they are meant to see."""
    assert structs()["gdn_pool_t"] == [
        *("struct_size", "data", "dtype", "reserved", "num_rows", "row_stride")
    ]
    assert len(structs()) == header().count("typedef struct")


def test_c_symbols():
    functions = set(re.findall(r"\b(gdn_\w+)\(", header())) - {"gdn_init_"}
    types = set(re.findall(r"typedef int32_t (gdn_\w+_t);", header()))
    constants = set(re.findall(r"\b(GDN_\w+)\b", header()))
    private = {"GDN_PAGED_GDN_PAGED_H_", "GDN_PAGED_BUILD", "GDN_API", "GDN_INIT_"}
    assert len(functions) > 20 and len(types) >= 6 and len(constants) > 50
    page = words("cpp/include/README.md")
    missing = (functions | types | (constants - private) | structs().keys()) - page
    assert not missing, f"cpp/include/README.md lacks {sorted(missing)}"


def test_c_fields():
    page = words("cpp/include/README.md")
    missing = {f"{name}.{field}" for name, fields in structs().items() for field in fields
               if field not in page}  # fmt: skip
    assert not missing, f"cpp/include/README.md lacks {sorted(missing)}"


def test_cpp_symbols():
    text = COMMENT.sub(" ", (HEADERS / "gdn_paged.hpp").read_text())
    names = set(re.findall(r"^(?:inline [\w:<>]+|void) (\w+)\(", text, re.MULTILINE))
    names |= set(re.findall(r"^(?:struct|class) (\w+)\b", text, re.MULTILINE))
    assert {"prefill_paged", "explain", "Error", "HeadShape", "dtype_of"} <= names
    missing = names - words("cpp/include/README.md")
    assert not missing, f"cpp/include/README.md lacks {sorted(missing)}"


def parameters(function) -> set[str]:
    return set(inspect.signature(function).parameters) - {"args", "kwargs"}


def test_python_symbols():
    page = words("python/README.md")
    missing = set(gdn_paged.__all__) - page
    for name in gdn_paged.__all__:
        thing = getattr(gdn_paged, name)
        if inspect.isfunction(thing):
            missing |= {f"{name}({x})" for x in parameters(thing) if x not in page}
        elif hasattr(thing, "_fields"):
            missing |= {f"{name}.{field}" for field in thing._fields if field not in page}
    assert not missing, f"python/README.md lacks {sorted(missing)}"


def test_torch_operators():
    pytest.importorskip("torch")
    import torch

    import gdn_paged.torch  # noqa: F401

    page = words("python/torch.md")
    operators = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("gdn_paged::")
    }
    assert len(operators) >= 6
    assert not operators - page, f"python/torch.md lacks {sorted(operators - page)}"


def test_jax_symbols():
    pytest.importorskip("jax")
    import gdn_paged.jax as module

    page = words("python/jax.md")
    missing = set(module.__all__) - page
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isfunction(thing):
            missing |= {f"{name}({x})" for x in parameters(thing) if x not in page}
    assert not missing, f"python/jax.md lacks {sorted(missing)}"


def test_flashinfer_arguments():
    """The page that maps FlashInfer's arguments names each of them."""
    page = words("python/flashinfer.md")
    for name in ("chunk_gated_delta_rule_paged", "gated_delta_rule_decode_paged"):
        missing = parameters(getattr(gdn_paged, name)) - page
        assert not missing, f"python/flashinfer.md lacks {sorted(missing)}"


def test_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "gdn_paged", "--help"], capture_output=True, text=True, check=True
    )
    commands = re.findall(r"^    (\w+) ", done.stdout, re.MULTILINE)
    assert {"info", "check", "demo", "bench", "explain"} <= set(commands)
    options = re.findall(r"--([a-z-]+-dir)", done.stdout)
    text = (ROOT / "python/README.md").read_text()
    for name in (*commands, *options):
        assert re.search(rf"`(--)?{name}\b", text), f"python/README.md lacks {name}"


@pytest.mark.parametrize("page", ["python/torch.md", "python/jax.md"])
def test_examples_of_pages_run(page, tmp_path):
    pytest.importorskip(Path(page).stem)
    if "jax" in page:
        pytest.importorskip("gdn_paged._jax_ffi", reason="this build holds no XLA FFI handlers")
    blocks = BLOCK.findall((ROOT / page).read_text())
    ran = 0
    for (language, code), (following, text) in itertools.pairwise(blocks):
        if (language, following) == ("python", "text"):
            out = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=tmp_path)
            assert out == text
            ran += 1
    assert ran

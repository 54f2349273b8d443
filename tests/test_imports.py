"""Importing the package imports no framework, and the package says what it is."""

import json
import subprocess
import sys
from pathlib import Path

import gdn_paged

FRAMEWORKS = ("torch", "jax", "cupy", "numpy", "tensorflow", "ml_dtypes")


def in_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_brings_no_framework():
    code = (
        "import sys, json, gdn_paged;"
        f"print(json.dumps([m for m in {FRAMEWORKS!r} if m in sys.modules]))"
    )
    assert json.loads(in_fresh_process(code)) == []


def test_numpy_call_brings_no_other_framework():
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
import gdn_paged
z = np.zeros((3, 1, 8), np.float32)
pool = np.zeros((1, 1, 8, 8), np.float32)
table = lambda *x: np.array(x, np.int32)
gdn_paged.chunk_gated_delta_rule_paged(
    z, z, z, cu_seqlens=table(0, 3), state_pool=pool, page_indices=table(0),
    page_indptr=table(0, 1), page_size=64, last_page_len=table(3))
print([m for m in ("torch", "jax", "cupy") if m in sys.modules])
"""
    assert in_fresh_process(code) == "[]"


def test_environment_is_not_read():
    """Nothing named GDN_* in the environment changes which row runs."""
    code = (
        "import os; os.environ.update(GDN_PAGED_BACKEND='cuda', GDN_BACKEND='none');"
        "import gdn_paged; print([r.name for r in gdn_paged.kernel_rows('prefill_paged')])"
    )
    names = [row.name for row in gdn_paged.kernel_rows("prefill_paged")]
    assert in_fresh_process(code) == str(names)


def test_public_names():
    expected = {
        "chunk_gated_delta_rule_paged",
        "gated_delta_rule_decode_paged",
        "chunk_gated_delta_rule",
        "gated_delta_rule_decode_pretranspose",
        "gated_delta_rule_verify_paged",
        "gated_delta_rule_commit_paged",
        "verify_draft_size",
        "gdn_paged_prefill_slots",
        "gdn_paged_decode_slots",
        "GDNPagedPrefillSlots",
        "GDNPagedDecodeSlots",
        "prefill_plan",
        "prefill_workspace_size",
        "explain",
        "validate_page_table",
        "page_stats",
        "preload",
        "kernel_rows",
    }
    assert expected <= set(gdn_paged.__all__)
    for name in gdn_paged.__all__:
        assert hasattr(gdn_paged, name)
        thing = getattr(gdn_paged, name)
        assert not callable(thing) or (thing.__doc__ or "").strip(), name


def test_slots_are_the_specified_tuples():
    assert gdn_paged.GDNPagedPrefillSlots._fields == (
        "state_indices",
        "output_state_indices",
        "checkpoint_cu_starts",
        "prefix_lens",
    )
    assert gdn_paged.GDNPagedDecodeSlots._fields == (
        "initial_state_indices",
        "output_state_indices",
    )


def test_typed():
    assert (Path(gdn_paged.__file__).parent / "py.typed").exists()

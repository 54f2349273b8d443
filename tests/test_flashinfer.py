"""A user of FlashInfer's gdn_paged swaps one import line: names, arguments, the example itself."""

import inspect
import itertools
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import gdn_paged

torch = pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[1] / "examples" / "from_flashinfer.py"
SWAPPED = "import gdn_paged as flashinfer  # was: import flashinfer"
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() and gdn_paged.has_cuda() else [])]
BARS = {"cpu": (4e-3, 1e-4), "cuda": (2e-2, 2e-2)}  # of an output stored in bf16, of a page

# FlashInfer's arguments in order; those after "*" by keyword.
ARGUMENTS = {
    "chunk_gated_delta_rule_paged": "q k v g beta scale * cu_seqlens state_pool page_indices "
    "page_indptr page_size last_page_len use_qk_l2norm_in_kernel output gate_domain "
    "use_gate_in_kernel A_log dt_bias beta_is_logit slots",
    "gated_delta_rule_decode_paged": "q k v A_log a dt_bias b scale output use_qk_l2norm * "
    "state_pool page_indices page_indptr last_page_len backend slots",
    "gated_delta_rule_decode_pretranspose": "q k v state A_log a dt_bias b scale output "
    "use_qk_l2norm initial_state initial_state_indices output_state_indices",
    "gdn_paged_prefill_slots": "cu_seqlens page_indices page_indptr page_size last_page_len",
    "gdn_paged_decode_slots": "page_indices page_indptr last_page_len",
    "chunk_gated_delta_rule": "q k v g beta scale initial_state output_final_state cu_seqlens "
    "use_qk_l2norm_in_kernel output output_state state_checkpoints checkpoint_cu_starts "
    "checkpoint_every_n_tokens use_cp state_indices _cp_chunk_len backend max_seqlen * "
    "gate_domain use_gate_in_kernel A_log dt_bias beta_is_logit cu_seqlens_cpu "
    "output_state_indices checkpoint_state_indices prefix_lens",
}
OURS = set(
    "stream workspace plan validate deterministic num_threads backend initial_page_indices "
    "allow_unaligned_pages max_seqlen".split()
)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_those_of_flashinfer(name):
    parameters = inspect.signature(getattr(gdn_paged, name)).parameters.values()
    positional, _, by_keyword = ARGUMENTS[name].partition("*")
    order = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert order == positional.split()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert keywords >= set(by_keyword.split())
    own = keywords - set(by_keyword.split())
    assert own <= OURS
    # Ours are optional: no call that was complete for FlashInfer misses something here.
    assert all(p.default is not p.empty for p in parameters if p.name in own)


def test_one_line_is_swapped():
    lines = EXAMPLE.read_text().splitlines()
    assert [line for line in lines if line.startswith("import gdn_paged")] == [SWAPPED]
    body = lines[lines.index(SWAPPED) + 1 :]
    calls = [line for line in body if "flashinfer." in line]
    assert len(calls) == 3 and not any("gdn_paged." in line for line in body)


def recurrence(prompt: dict, state: np.ndarray) -> np.ndarray:
    """Float64, one token at a time; state [H, V, K] is advanced in place."""
    q, k, v, g, beta = (x.cpu().double().numpy() for x in prompt.values())
    shared = v.shape[1] // q.shape[1]
    out = np.empty_like(v)
    for t in range(len(v)):
        key, query = (np.repeat(x[t], shared, axis=0)[..., None] for x in (k, q))
        state *= g[t, :, None, None]
        error = v[t] - (state @ key)[..., 0]
        state += (beta[t, :, None] * error)[..., None] * key.transpose(0, 2, 1)
        out[t] = (state @ query)[..., 0] / np.sqrt(q.shape[-1])
    return out


def distance(x, truth: np.ndarray) -> float:
    """Worst relative L2 error of the rows."""
    error = np.linalg.norm((np.asarray(x) - truth).reshape(len(x), -1), axis=1)
    return float((error / np.linalg.norm(truth.reshape(len(x), -1), axis=1)).max())


@pytest.mark.parametrize("device", DEVICES)
def test_example_of_flashinfer_runs(device, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), device])
    ran = runpy.run_path(str(EXAMPLE))
    assert capsys.readouterr().out.splitlines() == [
        "prefill wrote pages [12]",
        f"decoded (1, 1, 4, 128) on {ran['decoded'].device}",
    ]
    assert ran["decoded"].device.type == device

    state = np.zeros((4, 128, 128))
    cuts, pages = [0, 1024, 2048, 2500], []
    for begin, end in itertools.pairwise(cuts):
        out = recurrence({n: x[begin:end] for n, x in ran["prompt"].items()}, state)
        pages.append(state.copy())
    allowed_out, allowed_page = BARS[device]
    assert tuple(ran["out"].shape) == (452, 4, 128)
    assert distance(ran["out"].double().cpu(), out) <= allowed_out
    assert (
        distance(ran["after_prefill"][[7, 3, 12]].double().cpu(), np.stack(pages)) <= allowed_page
    )
    assert torch.isfinite(ran["decoded"]).all() and ran["decoded"].abs().max() > 0


def test_names_of_the_module():
    from gdn_paged import (  # was: from flashinfer.gdn_paged import (...)
        GDNPagedDecodeSlots,
        GDNPagedPrefillSlots,
        gdn_paged_decode_slots,
        gdn_paged_prefill_slots,
    )

    table = {
        "page_indices": torch.tensor([7, 3, 12], dtype=torch.int32),
        "page_indptr": torch.tensor([0, 3], dtype=torch.int32),
        "last_page_len": torch.tensor([452], dtype=torch.int32),
    }
    cu_seqlens = torch.tensor([0, 452], dtype=torch.int32)
    prefill = gdn_paged_prefill_slots(cu_seqlens, page_size=1024, **table)
    assert isinstance(prefill, GDNPagedPrefillSlots)
    assert [x.tolist() for x in prefill] == [[3], [12], [2], [2048]]
    decode = gdn_paged_decode_slots(**table)
    assert isinstance(decode, GDNPagedDecodeSlots)
    assert [x.tolist() for x in decode] == [[12], [12]]

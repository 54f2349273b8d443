"""The cases catch every known fault, at the bars of the CPU and of the GPU rows."""

import pytest

from cases import CASES
from cases_more import MORE_CASES
from chunk_form import WEAK_FORMS, ChunkForm
from compare import case_bars, problems, run_oracle, truth_of
from mutants import NUMBER_MUTANTS
from mutants_pages import PAGE_MUTANTS
from oracle import Oracle

# B05 carries a 75 MB pool and tests 64-bit page arithmetic, which no mutant breaks.
ALL_CASES = [case for case in CASES + MORE_CASES if case.name != "B05-far"]
MUTANTS = NUMBER_MUTANTS + PAGE_MUTANTS
DEVICES = ("cpu", "cuda")


def failures(oracle: Oracle, device: str, cases=ALL_CASES, first_only=True) -> list[str]:
    found = []
    for case in cases:
        if device != "cpu" and case.cpu_only:
            continue
        io = "fp32" if device == "cpu" else "bf16"
        result = run_oracle(oracle, case, io)
        found += problems(case, result, truth_of(case, io), case_bars(case, device, io))
        if found and first_only:
            break
    return found


def test_truth_passes_its_own_cases():
    assert failures(Oracle(), "cpu") == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_mutant_is_caught(mutant, device):
    assert failures(mutant(), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weakness", WEAK_FORMS)
def test_weak_chunk_form_is_caught(weakness, device):
    assert failures(ChunkForm(weakness), device)


def test_good_chunk_form_passes():
    """What is caught above is the weakness, not the chunk form: the sound one passes."""
    cases = [case for case in ALL_CASES if not case.name.startswith("B56")]
    assert failures(ChunkForm("good"), "cuda", cases, first_only=False) == []


def passes(oracle: Oracle, case) -> bool:
    result = run_oracle(oracle, case, "fp32")
    return not problems(case, result, truth_of(case, "fp32"), case_bars(case, "cpu", "fp32"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_mutant_breaks_one_rule_only(mutant):
    """Catching a variant that is wrong everywhere would prove little: each passes some case."""
    assert any(passes(mutant(), case) for case in ALL_CASES)

"""Every case of the list on every target, with each io dtype, against the float64 truth."""

import pytest

from calls import DTYPES
from cases import CASES
from cases_more import MORE_CASES
from compare import case_bars, problems, truth_of
from widened import can_widen, narrowed, widened

ALL_CASES = CASES + MORE_CASES


@pytest.mark.parametrize("io", DTYPES)
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_case(target, case, io):
    if target.device != "cpu" and (io == "fp32" or case.cpu_only):
        pytest.skip("CUDA rows take 16-bit operands and head sizes 64 and 128")
    result = target.run(case, io)
    assert not problems(case, result, truth_of(case, io), case_bars(case, target.device, io))


@pytest.mark.parametrize("io", DTYPES)
@pytest.mark.parametrize("case", [case for case in ALL_CASES if can_widen(case)], ids=str)
def test_widened_case(target, case, io):
    if target.device != "cpu" and (io == "fp32" or case.cpu_only):
        pytest.skip("CUDA rows take 16-bit operands")
    result = narrowed(target.run(widened(case), io))
    assert not problems(case, result, truth_of(case, io), case_bars(case, target.device, io))

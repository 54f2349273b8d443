"""Every case of the list on every target, with each io dtype, against the float64 truth."""

import pytest

from calls import DTYPES
from cases import CASES
from cases_more import MORE_CASES
from compare import case_bars, problems, truth_of


@pytest.mark.parametrize("io", DTYPES)
@pytest.mark.parametrize("case", CASES + MORE_CASES, ids=str)
def test_case(target, case, io):
    if target.device != "cpu" and (io == "fp32" or case.cpu_only):
        pytest.skip("CUDA rows take 16-bit operands and head sizes 64 and 128")
    result = target.run(case, io)
    assert not problems(case, result, truth_of(case, io), case_bars(case, target.device, io))

"""The record of the ABI is complete: every field and function of the header stands in it."""

import re

from test_manual import ROOT, header, structs


def test_record_is_complete():
    record = (ROOT / "tests/cpp/abi_0_1.inc").read_text()
    fields = re.findall(r"^FIELD\((\w+), (\w+), \d+\)$", record, re.MULTILINE)
    functions = re.findall(r"^FUNCTION\((\w+)\)$", record, re.MULTILINE)
    expected = [(name, field) for name, names in structs().items() for field in names]
    assert fields == expected, "append the offsets of new fields to tests/cpp/abi_0_1.inc"
    declared = sorted(set(re.findall(r"\b(gdn_\w+)\(", header())) - {"gdn_init_"})
    assert sorted(functions) == declared, "append new functions to tests/cpp/abi_0_1.inc"

"""Every bad argument raises, names itself, its value and what is expected, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gdn_paged
from calls import page_table
from cases import make_decode, make_pool, make_prefill

HEAD_SIZE = 64

ROWS, H, D, T, B = 8, 4, HEAD_SIZE, 10, 3


@dataclass(frozen=True)
class Bad:
    """`change(target, arguments)` returns the arguments to replace; `words` are in the message."""

    name: str
    change: Callable[[Any, dict], dict]
    words: tuple[str, ...]
    error: type[Exception] = ValueError
    frameworks: tuple[str, ...] = ("numpy", "torch", "cupy")

    def __str__(self) -> str:
        return self.name


def value(name: str, given: Any, *words: str, label="", **fields) -> Bad:
    """Another value for one argument."""
    return Bad(label or f"{name}={given!r}", lambda t, a: {name: given}, (name, *words), **fields)


def zeros(name: str, shape, dtype: str, *words: str, label: str, **fields) -> Bad:
    """An array of another shape or dtype for one argument."""
    return Bad(
        label, lambda t, a: {name: t.array(np.zeros(shape), dtype)}, (name, *words), **fields
    )


def edit(name: str, how: Callable[[Any], Any], *words: str, label: str, **fields) -> Bad:
    """The argument itself, changed by `how`."""
    return Bad(label, lambda t, a: {name: how(a[name])}, (name, *words), **fields)


def strided_table(name: str) -> Bad:
    def change(target, arguments):
        doubled = np.repeat(target.values(arguments[name]), 2)
        return {name: target.table(doubled)[::2]}

    return Bad(f"{name} strided", change, (name, "stride 2", "contiguous"))


def strided_pool(target, arguments):
    wide = target.array(np.zeros((ROWS, H, D, 2 * D)), "fp32")
    return {"state_pool": wide[..., ::2]}


def overlapping_output(target, arguments):
    return {"output": arguments["v"]}


TABLES = ("page_indices", "page_indptr", "last_page_len")

COMMON = [
    zeros("state_pool", (ROWS, H * D, D), "fp32", "[8, 256, 64]", "H, V, K", label="pool rank 3"),
    zeros("state_pool", (1, ROWS, H, D, D), "fp32", "[1, 8, 4, 64, 64]", "H, V, K",
          label="pool rank 5"),
    zeros("state_pool", (ROWS, H - 1, D, D), "fp32", "[8, 3, 64, 64]", "4", label="pool H"),
    zeros("state_pool", (ROWS, H, D, 32), "fp32", "[8, 4, 64, 32]", "64", label="pool K"),
    zeros("state_pool", (ROWS, H, D, D), "int32", "int32", "float32", label="pool int32"),
    Bad("pool inner dims strided", strided_pool, ("state_pool", "strides", "dense")),
    value("state_pool", None, "None"),
    *(zeros(name, (2,), "fp32", name, "float32", "int32", label=f"{name} float")
      for name in ("page_indices",)),
    edit("page_indptr", lambda x: x[:-1], "[3]", "[4]", label="page_indptr of N"),
    edit("page_indptr", lambda x: x[None], "[1, 4]", "1-D", label="page_indptr 2-D"),
    *(strided_table(name) for name in TABLES),
    *(value(name, None, "None") for name in TABLES),
    value("q", "text", "str", "array"),
    zeros("k", (1,), "bf16", "[1]", "num_k_heads", label="k rank 1"),
    value("backend", "quantum", "quantum", "cpu"),
    *(value("backend", name, name) for name in ("cudnn", "cake_gdn", "rubin")),
    value("backend", 3, "int", "str"),
    value("validate", "always", "always", "host"),
    value("deterministic", "yes", "yes", "batch"),
    value("num_threads", -1, "-1", "0"),
    value("num_threads", 1.5, "1.5", "int"),
    value("scale", "big", "str", "float"),
    zeros("output", (1, 1), "bf16", "[1, 1]", label="output shape"),
    edit("state_pool", lambda x: np.broadcast_to(x[:1], x.shape), "read-only", "writable",
         label="pool read-only", frameworks=("numpy",)),
]  # fmt: skip

PREFILL = [
    *(value("page_size", size, str(size), "multiple of 64") for size in (0, -64, 63, 96, 528)),
    *(value("page_size", size, "allow_unaligned_pages") for size in (1, 96, 528)),
    value("page_size", 64.0, "64.0", "int"),
    value("page_size", True, "True", "int"),
    edit("last_page_len", lambda x: x.repeat(2)[:4], "[4]", "[3]", label="last_page_len of N+1",
         frameworks=("numpy", "torch", "cupy")),
    edit("cu_seqlens", lambda x: x[None], "[1, 4]", "1-D", label="cu_seqlens 2-D"),
    value("cu_seqlens", None, "None"),
    strided_table("cu_seqlens"),
    zeros("q", (T, 2, D), "fp32", "k", "bfloat16", "float32", label="q fp32, k bf16"),
    zeros("q", (T, 2, D), "int32", "int32", "float32", label="q int32"),
    zeros("q", (T, 2, 32), "bf16", "k", "32", label="q and k of other K"),
    zeros("v", (T, 3, D), "bf16", "3", "2", "multiple", label="3 v heads of 2 q heads"),
    zeros("v", (T - 1, H, D), "bf16", "[9, 4, 64]", "10", label="v tokens"),
    zeros("g", (T, 1, H), "fp32", "[10, 1, 4]", "[tokens, H]", label="g rank 3"),
    zeros("g", (T, H - 1), "fp32", "[10, 3]", "[10, 4]", label="g heads"),
    zeros("g", (T, H), "int32", "int32", "float32", label="g int32"),
    zeros("beta", (T, H + 1), "fp32", "[10, 5]", "[10, 4]", label="beta heads"),
    value("gate_domain", "ln", "ln", "linear", "log"),
    value("use_gate_in_kernel", True, "A_log", "None", label="raw gate without A_log"),
    Bad("A_log without raw gate", lambda t, a: {"A_log": t.array(np.zeros(H), "fp32")},
        ("A_log", "use_gate_in_kernel")),
    Bad("A_log shape", lambda t, a: {"A_log": t.array(np.zeros(H + 1), "fp32"),
                                     "use_gate_in_kernel": True}, ("A_log", "[5]", "[4]")),
    zeros("output", (T, H, D), "fp32", "float32", "bfloat16", label="output dtype"),
    Bad("output is v", overlapping_output, ("output", "v", "overlap")),
    Bad("q strided inside", lambda t, a: {"q": t.array(np.zeros((T, 2, 2 * D)), "bf16")[..., ::2]},
        ("q", "stride 2", "1")),
    zeros("workspace", (4096,), "fp32", "float32", "uint8", label="workspace dtype"),
    Bad("slots int64", lambda t, a: {"slots": (t.table(np.zeros(3), "int64"),) * 4},
        ("slots", "int64", "int32")),
    Bad("slots length", lambda t, a: {"slots": (t.table(np.zeros(4)),) * 4},
        ("slots", "[4]", "[3]")),
    Bad("slots of decode", lambda t, a: {"slots": (t.table(np.zeros(3)),) * 2},
        ("slots", "GDNPagedPrefillSlots")),
]  # fmt: skip

DECODE = [
    edit("last_page_len", lambda x: x.repeat(2)[:4], "[4]", "[3]", label="last_page_len of N+1"),
    *(Bad(f"T={n}", lambda t, a, n=n: {"q": t.array(np.zeros((B, n, 2, D)), "bf16")},
          ("q", f"T = {n}", "T = 1")) for n in (2, 5)),
    zeros("q", (B, 1, 2, D), "fp32", "k", "bfloat16", "float32", label="q fp32, k bf16"),
    zeros("q", (B, 2, D), "bf16", "[3, 2, 64]", "[batch, 1", label="q rank 3"),
    zeros("v", (B, 1, 3, D), "bf16", "3", "2", "multiple", label="3 v heads of 2 q heads"),
    zeros("a", (B, H), "fp32", "[3, 4]", "[batch, 1, H]", label="a rank 2"),
    zeros("b", (B, 1, H - 1), "fp32", "[3, 1, 3]", "4", label="b heads"),
    *(value(name, None, "None") for name in ("a", "b", "A_log")),
    zeros("A_log", (H + 1,), "fp32", "[5]", "[4]", label="A_log shape"),
    zeros("dt_bias", (H, 1), "fp32", "[4, 1]", "[4]", label="dt_bias rank"),
    zeros("output", (B, 1, H, D), "fp32", "float32", "bfloat16", label="output dtype"),
    Bad("slots int64", lambda t, a: {"slots": (t.table(np.zeros(3), "int64"),) * 2},
        ("slots", "int64", "int32")),
    Bad("slots length", lambda t, a: {"slots": (t.table(np.zeros(2)),) * 2},
        ("slots", "[2]", "[3]")),
    Bad("slots of prefill", lambda t, a: {"slots": (t.table(np.zeros(3)),) * 4},
        ("slots", "GDNPagedDecodeSlots")),
]  # fmt: skip


@dataclass
class Base:
    """Good arguments, with a pool and an output whose bytes are watched."""

    target: Any
    function: Callable
    arguments: dict

    def refused(self, bad: Bad) -> None:
        watched = [self.arguments["state_pool"], self.arguments["output"]]
        before = [self.target.bits(x).copy() for x in watched]
        if self.target.arrays.name not in bad.frameworks:
            pytest.skip(f"not for {self.target.arrays.name}")
        changed = self.arguments | bad.change(self.target, self.arguments)
        with pytest.raises(bad.error) as error:
            self.function(**changed)
        missing = [word for word in bad.words if word not in str(error.value)]
        assert not missing, f"{missing} not in: {error.value}"
        for array, bits in zip(watched, before, strict=True):
            assert np.array_equal(self.target.bits(array), bits)


def prefill_base(target) -> Base:
    call = make_prefill(401, page_table(64, ([5, 2], 64, 70), ([0], 3, 3), ([1], 0, 4)))
    arguments = target.prefill_arguments(call, "bf16") | {
        "state_pool": target.pool(make_pool(401, ROWS, H)).view,
        "output": target.array(np.full((T, H, D), 7.0), "bf16"),
    }
    return Base(target, gdn_paged.chunk_gated_delta_rule_paged, arguments)


def decode_base(target) -> Base:
    spans = ([5, 2], 64, 65), ([0], 3, 4), ([1], 9, 10)
    call = make_decode(402, page_table(64, *spans, decode=True), dim=D)
    arguments = target.decode_arguments(call, "bf16") | {
        "state_pool": target.pool(make_pool(402, ROWS, H)).view,
        "output": target.array(np.full((B, 1, H, D), 7.0), "bf16"),
        "backend": target.decode_row,
    }
    return Base(target, gdn_paged.gated_delta_rule_decode_paged, arguments)


@pytest.mark.parametrize("base", [prefill_base, decode_base], ids=lambda f: f.__name__)
def test_base_is_accepted(target, base):
    """What the tests below spoil is good: it runs and writes."""
    made = base(target)
    made.function(**made.arguments)
    assert not np.all(target.values(made.arguments["output"]) == 7)


@pytest.mark.parametrize("bad", COMMON + PREFILL, ids=str)
def test_prefill_refuses(target, bad):
    prefill_base(target).refused(bad)


@pytest.mark.parametrize("bad", COMMON + DECODE, ids=str)
def test_decode_refuses(target, bad):
    decode_base(target).refused(bad)


@pytest.mark.parametrize("name", [*TABLES, "cu_seqlens"])
def test_tables_of_other_dtypes(target, name):
    base = prefill_base(target)
    for dtype, word in ((np.int16, "int16"), (np.uint8, "uint8"), (np.float64, "float64")):
        table = target.arrays.numpy(base.arguments[name]).astype(dtype)
        base.refused(edit(name, lambda _, x=table: target.arrays.array(x), word, "int32", label=""))


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_operands_that_require_grad(target, name):
    if target.arrays.name != "torch":
        pytest.skip("torch alone has gradients")
    grad = lambda x: x.float().to(x.dtype).requires_grad_()  # noqa: E731
    prefill_base(target).refused(edit(name, grad, "grad", label=""))


def test_parameters_and_no_grad_are_fine(target):
    if target.arrays.name != "torch":
        pytest.skip("torch alone has gradients")
    torch, base = target.arrays.torch, decode_base(target)
    for name in ("A_log", "dt_bias"):
        base.arguments[name] = torch.nn.Parameter(base.arguments[name])
    base.function(**base.arguments)
    base.arguments["q"] = base.arguments["q"].clone().requires_grad_()
    with torch.no_grad():
        out = base.function(**base.arguments)
    assert out is base.arguments["output"]


def test_fp8_pools_are_refused_by_name(target):
    if target.arrays.name != "torch":
        pytest.skip("torch alone has fp8")
    fp8 = target.arrays.torch.float8_e4m3fn
    prefill_base(target).refused(edit("state_pool", lambda x: x.to(fp8), "8-bit float", label=""))
    decode_base(target).refused(edit("state_pool", lambda x: x.to(fp8), "8-bit float", label=""))


def test_device_of_tables(target):
    if target.device == "cpu":
        pytest.skip("one device")
    table = np.array([0, 2, 3, 4], np.int32)
    prefill_base(target).refused(value("page_indptr", table, "on cpu", label="host table"))


@pytest.mark.parametrize("change", [
    {"use_cp": "on"}, {"use_cp": []}, {"deterministic": "row"}, {"device": None},
    {"device": "cuda:"}, {"io_dtype": []}, {"head_dim_v": 0}, {"page_size": 2**64 - 64},
], ids=str)  # fmt: skip
def test_workspace_size_refuses(change):
    sizes = {"io_dtype": "float32", "device": "cpu"} | change
    ((name, given),) = change.items()
    with pytest.raises(ValueError, match=name) as error:
        gdn_paged.prefill_workspace_size(2, 100, 2, 2, 2, 16, **sizes)
    assert str(given) in str(error.value)


@pytest.mark.parametrize("change", [{"num_pages": "4"}, {"num_tokens": 2**64}], ids=str)
def test_page_table_check_names_its_argument(change):
    table = [np.array(x, np.int32) for x in ([0], [0, 1], [5])]
    with pytest.raises(ValueError, match=next(iter(change))):
        gdn_paged.validate_page_table(*table, **change)

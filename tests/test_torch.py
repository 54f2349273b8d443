"""The operators of `gdn_paged.torch`: registration, tracing without memory, errors, cost."""

import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")

import gdn_paged  # noqa: E402
import gdn_paged.torch  # noqa: E402
from torch_samples import SAMPLES, parametrize_places, torch_targets  # noqa: E402

pytest_generate_tests = parametrize_places
each_sample = pytest.mark.parametrize("name", SAMPLES)


def leaves(result):
    return [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


def assert_same(got, expected):
    """The same bytes, shapes and dtypes; a call that only writes returns None."""
    if expected is None:
        assert got is None
        return
    got, expected = leaves(got), leaves(expected)
    assert len(got) == len(expected) > 0
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.device == y.device
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def through_op(sample):
    """The call by way of its operator, as a traced call makes it."""
    handler = getattr(gdn_paged.torch, f"_{sample.function.__name__}")
    return handler(**sample.arguments)


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the operators of gdn_paged that run, with copies of their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "gdn_paged":
            copies = {}
            clone = lambda x: copies.setdefault(id(x), x.clone())  # noqa: E731
            self.calls.append((func, torch.utils._pytree.tree_map_only(torch.Tensor, clone, args)))
        return func(*args, **(kwargs or {}))


def test_names():
    """`import gdn_paged.torch as gdn_paged` gives the same functions."""
    assert gdn_paged.torch.__all__ == gdn_paged.__all__
    for name in gdn_paged.__all__:
        assert getattr(gdn_paged.torch, name) is getattr(gdn_paged, name)


@each_sample
def test_operator_equals_call(place, name):
    direct, by_op = SAMPLES[name](place), SAMPLES[name](place)
    assert_same(through_op(by_op), direct())
    for written in direct.written:
        assert_same(by_op.arguments[written], direct.arguments[written])


@each_sample
def test_opcheck(place, name):
    """Schema, fake implementation and functionalisation are what torch expects of them."""
    with Recorder() as recorder:
        through_op(SAMPLES[name](place))
    ((func, args),) = recorder.calls
    results = torch.library.opcheck(func, args)
    assert len(results) == 4 and set(results.values()) == {"SUCCESS"}


@each_sample
def test_fake_tensors(place, name):
    """Shapes, strides and dtypes without memory; a view of a fake tensor has no address either."""
    sample = SAMPLES[name](place)
    expected = SAMPLES[name](place)()
    with torch._subclasses.FakeTensorMode() as mode:
        arguments = {x: mode.from_tensor(y) if isinstance(y, torch.Tensor) else y
                     for x, y in sample.arguments.items()}  # fmt: skip
        views = {x: torch.cat((y, y))[len(y):] if isinstance(y, torch.Tensor) else y
                 for x, y in arguments.items()}  # fmt: skip
        for results in (sample.function(**arguments), sample.function(**views)):
            for fake, real in zip(leaves(results), leaves(expected), strict=True):
                assert isinstance(fake, torch._subclasses.FakeTensor)
                assert (fake.shape, fake.dtype, fake.device, fake.stride()) == (
                    real.shape, real.dtype, real.device, real.stride(),
                )  # fmt: skip


def test_mixed_fake_and_real_is_refused():
    """A gate without memory is not taken for an absent one."""
    sample = SAMPLES["prefill_paged"](torch_targets()[0])
    with torch._subclasses.FakeTensorMode() as mode:
        g = mode.from_tensor(sample.arguments["g"])
    with pytest.raises((ValueError, AssertionError), match="FakeTensor"):
        sample.function(**sample.arguments | {"g": g})


def test_fake_tensors_without_the_operators():
    code = """
import torch, gdn_paged
with torch._subclasses.FakeTensorMode():
    table = torch.zeros(4, dtype=torch.int32)[1:]
    try:
        gdn_paged.gdn_paged_decode_slots(table, table, table[1:])
    except ValueError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "page_indices: FakeTensor without memory" in done.stdout, done.stderr
    assert "import gdn_paged.torch" in done.stdout


@pytest.mark.parametrize("name", ["prefill_paged", "decode_paged"])
def test_make_fx_and_export(place, name):
    """The operator is in the graph of make_fx and of torch.export, pool and output mutated."""
    sample = SAMPLES[name](place)
    pool = sample.arguments["state_pool"]

    class Step(torch.nn.Module):
        def forward(self, q, pool):
            return sample.function(**sample.arguments | {"q": q, "state_pool": pool}) * 2

    graph = torch.fx.experimental.proxy_tensor.make_fx(
        Step(), tracing_mode="symbolic", _allow_non_fake_inputs=True
    )(sample.arguments["q"], pool)
    assert f"torch.ops.gdn_paged.{name}.default(" in graph.code
    program = torch.export.export(Step(), (sample.arguments["q"], pool), strict=False)
    expected = sample.copy()
    output = expected() * 2
    given = pool.clone()
    assert_same(program.module()(sample.arguments["q"], given), output)
    assert_same(given, expected.arguments["state_pool"])


@pytest.mark.parametrize("name", ["prefill_paged raw gate", "decode_paged"])
def test_grad(place, name):
    """Operands that require grad are refused in grad mode; gate parameters are taken."""
    operands = ("q", "k", "v", "g", "beta") if "prefill" in name else ("q", "k", "v", "a", "b")
    for call in (lambda s: s(), through_op):
        for operand in operands:
            sample = SAMPLES[name](place)
            sample.arguments[operand].requires_grad_()
            with pytest.raises(ValueError, match=f"^{operand}: requires grad.*detach"):
                call(sample)
            with torch.no_grad():
                call(sample)
        sample, plain = SAMPLES[name](place), SAMPLES[name](place)
        for parameter in ("A_log", "dt_bias"):
            value = torch.nn.Parameter(sample.arguments[parameter])
            sample.arguments[parameter] = value
        output = call(sample)
        assert not output.requires_grad
        assert_same(output, plain())


def test_operator_itself_refuses_grad():
    with Recorder() as recorder:
        through_op(SAMPLES["decode_paged"](torch_targets()[0]))
    ((func, (q, *others)),) = recorder.calls
    with pytest.raises(ValueError, match=r"^q: requires grad"):
        func(q.requires_grad_(), *others)


@pytest.mark.parametrize("option", [{"stream": 0}, {"validate": "host"}], ids=str)
def test_what_tracing_refuses(option):
    sample = SAMPLES["prefill_paged"](torch_targets()[0])
    sample.arguments |= option
    with pytest.raises(ValueError, match=f"^{next(iter(option))}: .*traced call"):
        through_op(sample)


def test_errors_come_through_the_operator():
    sample = SAMPLES["prefill_paged"](torch_targets()[0])
    sample.arguments["page_size"] = 96
    with pytest.raises(ValueError, match="page_size: 96"):
        through_op(sample)
    sample.arguments |= {"page_size": 64, "backend": "cudnn"}
    with pytest.raises(ValueError, match="backend: 'cudnn'"):
        through_op(sample)


def test_cost(place):
    """Generous guards: importing the operators leaves the eager call alone, and they are cheap."""
    sample = SAMPLES["decode_paged"](place)
    sample.arguments |= {"num_threads": 1, "output": sample()}
    microseconds = {}
    for name, call in (("direct", sample), ("operator", lambda: through_op(sample))):
        best = float("inf")
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(200):
                call()
            best = min(best, (time.perf_counter() - start) / 200)
        microseconds[name] = best * 1e6
    assert microseconds["direct"] < 60, microseconds
    assert microseconds["operator"] < 120, microseconds

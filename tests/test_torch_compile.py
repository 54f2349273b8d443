"""The calls under `torch.compile(fullgraph=True)`: same bytes, pools in place, one graph."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo.testing")

import gdn_paged  # noqa: E402
import gdn_paged.torch  # noqa: E402
from calls import page_table  # noqa: E402
from cases import make_decode, make_pool, make_prefill  # noqa: E402
from test_torch import assert_same, each_sample  # noqa: E402
from torch_samples import SAMPLES, dim_of, io_of, parametrize_places  # noqa: E402

EXAMPLE = Path(__file__).parent.parent / "examples/torch_layer.py"
pytest_generate_tests = parametrize_places


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, **options)


@each_sample
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_call(place, name, backend):
    """Bytes of the outputs, and of the pools, which are written where they lie."""
    sample, expected = SAMPLES[name](place), SAMPLES[name](place)
    addresses = [sample.arguments[x].data_ptr() for x in sample.written]
    got = compiled(lambda **arguments: sample.function(**arguments), backend=backend)(
        **sample.arguments
    )
    results = expected()
    assert type(got) is type(results)
    assert_same(got, results)
    for written, address in zip(sample.written, addresses, strict=True):
        assert_same(sample.arguments[written], expected.arguments[written])
        assert sample.arguments[written].data_ptr() == address


@pytest.mark.parametrize("name", ["prefill_paged", "prefill by slots", "decode_paged"])
def test_pool_is_not_copied(place, name):
    """No buffer of the pool's size in the generated code, also where it is given three times."""
    sample = SAMPLES[name](place)
    _, code = torch._inductor.utils.run_and_get_code(compiled(lambda a: sample.function(**a)),
                                                     sample.arguments)  # fmt: skip
    operator = "gdn_paged.prefill" if "prefill" in name else "gdn_paged.decode"
    shape = ", ".join(map(str, sample.arguments[sample.written[0]].shape))
    assert operator in code[0]
    assert not re.search(rf"empty_strided_\w+\(\({shape}\)", code[0])


def layers(x, weights, pools, table):
    """Two layers: slots made once, columns of one projection as operands, pools in place."""
    slots = gdn_paged.gdn_paged_decode_slots(**table)
    for weight, pool in zip(weights, pools, strict=True):
        q, k, v, a, b = (x @ weight).split([128, 128, 256, 4, 4], dim=-1)
        heads = [t.unflatten(-1, (-1, 64)).unsqueeze(1) for t in (q, k, v)]
        y = gdn_paged.gated_delta_rule_decode_paged(
            *heads, torch.zeros_like(a[0]), a.unsqueeze(1), None, b.unsqueeze(1), state_pool=pool,
            slots=slots, **table,
        )  # fmt: skip
        x = x + y.flatten(1)[:, : x.shape[1]]
    return x


def layer_arguments(place, batch):
    spans = [([i], 5 + i, 6 + i) for i in range(batch)]
    table = place.page_arguments(page_table(64, *spans, decode=True))
    io = io_of(place)
    values = np.random.default_rng(batch)
    weights = [place.array(values.standard_normal((96, 520)) / 10, io) for _ in range(2)]
    pools = [place.pool(make_pool(710 + i, 16, 4)).view for i in range(2)]
    return place.array(values.standard_normal((batch, 96)), io), weights, pools, table


def test_dynamic_batch(place):
    """One graph serves every batch size; operands are strided columns."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    step = compiled(layers, backend=counter, dynamic=True)
    for batch in (5, 7, 12):  # none a size that something else has
        got, expected = layer_arguments(place, batch), layer_arguments(place, batch)
        outputs = step(*got), layers(*expected)
        torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
        for pools in zip(got[2], expected[2], strict=True):
            torch.testing.assert_close(*pools, rtol=2e-2, atol=2e-2)
    assert counter.frame_count == 1


def test_dynamic_tokens(place):
    """mark_dynamic on the tokens of a prefill: the same graph for other lengths."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = compiled(lambda q, a: gdn_paged.chunk_gated_delta_rule_paged(q, **a), backend=counter)
    for tokens in (70, 100, 128):
        table, dim = page_table(64, ([3, 1, 0], 5, 5 + tokens)), dim_of(place)
        call = make_prefill(720, table, dim=dim).cast(io_of(place))
        runs = []
        for function in (step, lambda q, a: gdn_paged.chunk_gated_delta_rule_paged(q, **a)):
            arguments = place.prefill_arguments(call, io_of(place))
            arguments["state_pool"] = place.pool(make_pool(720, 4, 4, dim)).view
            for x in ("q", "k", "v", "g", "beta"):
                torch._dynamo.mark_dynamic(arguments[x], 0)
            runs.append((function(arguments.pop("q"), arguments), arguments["state_pool"]))
        assert_same(*runs)
    assert counter.frame_count == 1


def test_pool_is_a_slice_of_a_cache(place):
    """A layer's pool as a view of one cache that the graph mutates."""
    sample = SAMPLES["decode_paged"](place)
    rows = sample.arguments["state_pool"]

    def step(cache):
        return [sample.function(**sample.arguments | {"state_pool": cache[:, i]}) for i in (0, 2)]

    caches = [torch.stack([rows, rows + 1, rows * 2], dim=1) for _ in range(2)]
    assert_same(compiled(step)(caches[0]), step(caches[1]))
    assert_same(*caches)
    assert torch.equal(caches[0][:, 1], rows + 1)


def test_grad_under_compile(place):
    """Refused at compile time with the argument's name; gate parameters are taken in grad mode."""
    sample = SAMPLES["decode_paged"](place)
    step = compiled(lambda **arguments: sample.function(**arguments), backend="aot_eager")
    parameter = torch.nn.Parameter(sample.arguments["A_log"])
    assert not step(**sample.arguments | {"A_log": parameter}).requires_grad
    q = sample.arguments["q"].clone().requires_grad_()
    with pytest.raises(Exception, match="q: requires grad, and gdn_paged has no backward"):
        step(**sample.arguments | {"q": q})
    with torch.no_grad():
        step(**sample.arguments | {"q": q})


def test_example_layer_compiles(place):
    """The layer of examples/torch_layer.py, prefill and decode, in one graph each."""
    spec = importlib.util.spec_from_file_location("torch_layer", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    dtype, device = (torch.float32, "cpu") if place.device == "cpu" else (torch.bfloat16, "cuda")
    torch.manual_seed(0)
    layer = example.PagedGatedDeltaNet(96, 2, 4, dtype).to(device)
    x = torch.randn(71, 96, device=device, dtype=dtype)

    def run(forward):
        pool = torch.zeros(4, 4, 64, 64, device=device)
        tables = [place.table(np.array(t)) for t in ([2, 0], [0, 2], [6], [7], [0, 70])]
        prompt = example.Batch(*tables[:3], cu_seqlens=tables[4])
        following = example.Batch(*tables[:2], tables[3])
        return forward(x[:70], pool, prompt), forward(x[70:], pool, following), pool

    with torch.no_grad():
        for got, expected in zip(run(compiled(layer)), run(layer), strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_reduce_overhead_replays(cuda_place):
    """mode="reduce-overhead": CUDA graphs that update a module's pool at its fixed address."""

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("pool", cuda_place.pool(make_pool(730, 8, 4)).view)

        def forward(self, operands, table):
            slots = gdn_paged.gdn_paged_decode_slots(**table)
            return gdn_paged.gated_delta_rule_decode_paged(
                **operands, state_pool=self.pool, slots=slots, **table
            )

    captured, plain = Step(), Step()
    step = compiled(captured, mode="reduce-overhead")
    for n in range(6):  # the third token opens a page
        pages = [2] if n < 2 else [2, 7]
        table = page_table(64, (pages, 62 + n, 63 + n), ([5], 8 + n, 9 + n), decode=True)
        call = make_decode(730 + n, table, dim=64)
        arguments = cuda_place.decode_arguments(call, "bf16")
        names = ("page_indices", "page_indptr", "last_page_len")
        table = {x: arguments.pop(x) for x in names}
        padding = table["page_indices"].new_zeros(3 - len(table["page_indices"]))
        table["page_indices"] = torch.cat((table["page_indices"], padding))
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(step(arguments, table), plain(arguments, table))
        assert_same(captured.pool, plain.pool)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

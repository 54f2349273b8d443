"""What examples/hf_qwen3_next.py claims, on the CPU in fp32 and on a GPU in bf16."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import hf_paged_states as paged  # noqa: E402
import hf_qwen3_next as example  # noqa: E402

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


@pytest.fixture(autouse=True)
def one_thread():
    """Small products: threads of several test workers would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", example.FAMILIES)
@pytest.mark.parametrize("device", DEVICES)
def test_claims(family, device):
    results, prompts = example.run(family, device), example.requests()
    tolerance = example.TOLERANCE[device]
    expected = results["Hugging Face"][0]
    assert len(expected.tokens.unique()) > 20  # the model does not repeat itself
    for answer, comparison in results.values():
        assert answer.logits.isfinite().all()
        assert comparison.error <= tolerance
        assert comparison.gap <= tolerance
        if device == "cpu":
            assert torch.equal(answer.tokens, expected.tokens)
        assert answer.seconds["prefill"] > 0 and answer.seconds["decode"] > 0
    total = sum(map(len, prompts))
    reused = example.SYSTEM_TOKENS // example.PAGE_SIZE * example.PAGE_SIZE * len(prompts)
    assert [answer.prefilled for answer, _ in results.values()] == [total, total, total - reused]


@pytest.fixture(scope="module", params=DEVICES)
def served(request):
    """An engine with a prefix, its prompts, and the answer without reuse."""
    with torch.inference_mode():
        model, prompts = example.small_model("qwen3_next", request.param), example.requests()
        states = example.PagedStates(model, num_pages=64, page_size=example.PAGE_SIZE)
        engine = example.Engine(model, states)
        return engine, prompts, engine.generate(prompts, 20), example.TOLERANCE[request.param]


@torch.inference_mode()
def test_shared_pages_are_only_read(served):
    engine, prompts, first, _ = served
    pages = engine.prefix.pages
    before = [layer.states[pages].clone() for layer in engine.states.layers]
    engine.generate(prompts, 20, forced=first.tokens)
    for layer, states in zip(engine.states.layers, before, strict=True):
        assert torch.equal(layer.states[pages], states)
    holders = engine.states.allocator.holders
    assert {page for page, count in holders.items() if count} == set(pages)
    assert len(engine.states.allocator.free) == 64 - len(pages)


@pytest.mark.parametrize("pool", ["states", "conv_inputs"])
@torch.inference_mode()
def test_a_wrong_page_is_noticed(served, pool):
    """The comparison would see it if reuse read the wrong recurrent or convolution state."""
    engine, prompts, first, tolerance = served
    last, layer = engine.prefix.pages[-1], engine.states.layers[0]
    good = getattr(layer, pool)[last].clone()
    same = example.Comparison.of(engine.generate(prompts, 20, first.tokens), first)
    getattr(layer, pool)[last] = getattr(layer, pool)[engine.prefix.pages[0]]
    wrong = example.Comparison.of(engine.generate(prompts, 20, first.tokens), first)
    getattr(layer, pool)[last] = good
    assert same.error <= tolerance < wrong.error / 2


@pytest.mark.parametrize("family", example.FAMILIES)
@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_bf16_is_as_close_to_fp32_as_hugging_face(family, device):
    """Logits of the same bf16 weights: the error of pages in bf16 against that of bf16 itself."""
    model, prompts = example.small_model(family, device).bfloat16().float(), example.requests()
    truth = example.Engine(model).generate(prompts, 20)
    theirs = example.Engine(model.bfloat16()).generate(prompts, 20, truth.tokens)
    engine = example.Engine(model, example.PagedStates(model, 64, example.PAGE_SIZE))
    allowed = (theirs.logits - truth.logits).norm() * 1.2
    for _ in ("without reuse", "with reuse"):
        ours = engine.generate(prompts, 20, truth.tokens)
        assert (ours.logits - truth.logits).norm() <= allowed
    assert example.Comparison.of(ours, theirs).error <= example.TOLERANCE["cuda"]


def test_page_allocator():
    allocator = paged.PageAllocator(3)
    one, two = paged.Sequence(), paged.Sequence()
    allocator.extend(one, 65, 64)
    two.pages = allocator.share(one.pages[:1])
    allocator.extend(two, 128, 64)
    assert len({*one.pages, *two.pages}) == 3
    with pytest.raises(RuntimeError, match="1 pages needed, 0 are free"):
        allocator.extend(one, 129, 64)
    allocator.release(one)
    assert len(allocator.free) == 1
    allocator.release(two)
    assert sorted(allocator.free) == [0, 1, 2]

"""One prompt over several devices: maps of segments, their composition, and the calls finished from
the states that come of it. The devices are pools of one machine, or two of its GPUs."""

import re
from itertools import pairwise

import numpy as np
import pytest

import gdn_paged
from calls import page_table, rounded
from cases import U, make_pool, make_prefill
from compare import bars, relative_error
from oracle import Oracle
from test_capture import captured

SERVES = ("cpu", "cuda_sm90")  # the rows that form maps


@pytest.fixture
def maps_target(target):
    if target.prefill_row not in SERVES:
        pytest.skip("this row forms no maps of segments")
    return target


def io_of(target):
    return "fp32" if target.device == "cpu" else "bf16"


def part_table(page_size, before, after):
    """Tokens [before, after) on a device that holds no page that ends before them: -1."""
    own, pages = before // page_size, -(-after // page_size)
    ids = [-1] * own + [1 + i for i in range(pages - own)]
    return page_table(page_size, (ids, before, after))


class Part:
    """Tokens [begin, end) of a call that has `prefix` tokens before it, with a pool of their own;
    row 0 of a first part holds the state of the prefix."""

    def __init__(self, target, call, prefix, begin, end, page_size, state_dtype="fp32"):
        self.target, self.first = target, begin == 0
        before, after = prefix + begin, prefix + end
        self.table = part_table(page_size, before, after)
        if self.first and prefix > 0:
            # The page of the last prefix token is row 0 if it ends there, else the first own page.
            index = (prefix - 1) // page_size
            self.table.indices[index] = 0 if prefix % page_size == 0 else 1
        self.call = call.part(begin, end, self.table)
        K, V = call.q.shape[2], call.v.shape[2]
        self.rows = make_pool(9, 2 + len(self.table.indices), call.heads, (K, V), state_dtype)
        self.pool = target.pool(self.rows, state_dtype).view
        self.pages = range(before // page_size, -(-after // page_size))

    def begin(self, io, last, **options):
        heads, V, K = self.rows.shape[1:]
        self.state = None
        if not self.first:
            self.state = self.target.array(np.full((heads, V, K), np.nan), "fp32")
        arguments = self.target.prefill_arguments(self.call.cast(io), io) | options
        self.segment = gdn_paged.segment_begin(
            **arguments, state_pool=self.pool, initial_state=self.state, last=last
        )
        return self.segment


def copy_into(target, destination, source):
    """The bytes of a state, as a transfer between devices brings them."""
    destination[...] = target.array(target.values(source), "fp32")


def run_parts(target, call, prefix, cuts, page_size, io, state_dtype="fp32", start=None, **options):
    """Outputs of all parts, and the pages that they stored: {page of the prompt: state}."""
    ends = [0, *cuts, len(call.q)]
    parts = [
        Part(target, call, prefix, begin, end, page_size, state_dtype)
        for begin, end in pairwise(ends)
    ]
    if start is not None:
        row = 0 if prefix % page_size == 0 else 1
        parts[0].pool[row] = target.array(start, state_dtype)
    segments = [part.begin(io, part is parts[-1], **options) for part in parts]
    state = segments[0].offset
    for part, segment in zip(parts[1:], segments[1:], strict=True):
        copy_into(target, part.state, state)
        if segment.transition is not None:
            state = gdn_paged.segment_combine(
                segment.transition[None], segment.offset[None], initial_state=state
            )
    outputs = [segment.finish() for segment in segments]
    stored = {}
    for part in parts:
        for i, page in enumerate(part.pages):
            stored[page] = target.values(part.pool[1 + i])
    return np.concatenate([target.values(x) for x in outputs]), stored


def check(target, call, prefix, cuts, page_size, io=None, state_dtype="fp32", **options):
    io = io or io_of(target)
    heads, K, V = call.heads, call.q.shape[2], call.v.shape[2]
    start = rounded(make_pool(5, 1, heads, (K, V))[0], state_dtype) if prefix else None
    pages = -(-(prefix + len(call.q)) // page_size)
    whole = np.zeros((pages, heads, V, K))
    if prefix:
        whole[(prefix - 1) // page_size] = start
    table = page_table(page_size, (list(range(pages)), prefix, prefix + len(call.q)))
    expected = Oracle().prefill(call.part(0, len(call.q), table).cast(io), whole, io, state_dtype)
    out, stored = run_parts(
        target, call, prefix, cuts, page_size, io, state_dtype, start, **options
    )
    allowed = bars(target.device, io, state_dtype, normed=call.l2norm)
    assert relative_error(out, expected) <= allowed.out
    for page, state in stored.items():
        assert relative_error(state[None], whole[page][None]) <= allowed.rows, page


def make_call(tokens, heads=(2, 4), dim=None, seed=820, **options):
    return make_prefill(seed, page_table(64, (list(range(-(-tokens // 64))), 0, tokens)), heads,
                        dim, **options)  # fmt: skip


@pytest.mark.parametrize("cuts", [(256,), (128, 512), (100,), (63, 64, 65), (1, 700)], ids=str)
@pytest.mark.parametrize("prefix", [0, 64, 70])
def test_parts_against_the_truth(maps_target, prefix, cuts):
    check(maps_target, make_call(777), prefix, cuts, 128)


@pytest.mark.parametrize("page_size", [64, 192, 4096])
def test_page_sizes(maps_target, page_size):
    check(maps_target, make_call(900), 70, (333, 600), page_size)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2, 2), (1, 6)], ids=str)
def test_heads(maps_target, heads):
    check(maps_target, make_call(500, heads), 0, (192, 320), 64)


@pytest.mark.parametrize("heads", [(4, 16), (8, 24), (16, 64)], ids=str)
def test_many_heads_and_pieces(maps_target, heads):
    """Both ways of the composition, and parts of many pieces."""
    tokens = (4800 if maps_target.device != "cpu" else 1600) // heads[1] * 10
    check(maps_target, make_call(tokens, heads), 0, (tokens // 3, 2 * tokens // 3 + 5), 1024)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("io", ["bf16", "fp16"])
def test_dtypes(maps_target, io, state_dtype):
    check(maps_target, make_call(400), 70, (130, 260), 64, io, state_dtype)


def test_l2norm_and_raw_gates(maps_target):
    gates = {
        name: rounded(U(seed, shape), "fp32")
        for name, seed, shape in (("g", 77, (400, 4)), ("A_log", 78, (4,)), ("dt_bias", 79, (4,)))
    }
    call = make_call(400, l2norm=True, gate="raw", **gates)
    check(maps_target, call, 0, (200,), 64)


@pytest.mark.parametrize("dim", [(24, 40), (128, 64), (16, 16)], ids=str)
def test_head_sizes_of_the_cpu(maps_target, dim):
    if maps_target.device != "cpu":
        pytest.skip("CUDA rows serve K = V alone")
    check(maps_target, make_call(300, dim=dim), 70, (64, 200), 64)


def test_a_reset_ends_what_is_not_finite(maps_target):
    """alpha = 0 in the middle part: neither its map nor what follows sees the state before."""
    call = make_call(600)
    call.g[300] = 0.0
    call.v[:64] = np.nan
    ends = [0, 200, 400, 600]
    parts = [Part(maps_target, call, 0, begin, end, 64) for begin, end in pairwise(ends)]
    segments = [part.begin(io_of(maps_target), part is parts[-1]) for part in parts]
    assert np.isnan(maps_target.values(segments[0].offset)).any()
    assert not maps_target.values(segments[1].transition).any()
    state = gdn_paged.segment_combine(
        segments[1].transition[None], segments[1].offset[None], initial_state=segments[0].offset
    )
    assert np.isfinite(maps_target.values(state)).all()
    copy_into(maps_target, parts[2].state, state)
    assert np.isfinite(maps_target.values(segments[2].finish())).all()


def test_the_map_is_that_of_the_rule(maps_target):
    """M and N against float64, one token after the other."""
    io = io_of(maps_target)
    call = make_call(330, heads=(1, 2)).cast(io)
    segment = Part(maps_target, make_call(400, heads=(1, 2)), 0, 70, 400, 64)
    segment.call = call.part(0, 330, segment.table)
    done = segment.begin(io, last=False)
    K = call.q.shape[2]
    M, N = np.tile(np.eye(K), (2, 1, 1)), np.zeros((2, K, K))
    for t in range(330):
        k = call.k[t, 0]
        for h in range(2):
            g, beta = call.g[t, h], call.beta[t, h]
            M[h] = g * (M[h] - beta * np.outer(M[h] @ k, k))
            N[h] = g * (N[h] - beta * np.outer(N[h] @ k, k)) + beta * np.outer(call.v[t, h], k)
    allowed = bars(maps_target.device, io).rows
    assert relative_error(maps_target.values(done.offset), N) <= allowed
    assert relative_error(maps_target.values(done.transition), M, floor=1.0) <= 2 * allowed


@pytest.mark.parametrize("maps", [0, 1, 2, 5])
@pytest.mark.parametrize("from_zero", [True, False])
def test_combine(target, maps, from_zero):
    H, V, K = 3, 64, 128
    M, N = 0.1 * U(1, (maps, H, K, K)), U(2, (maps, H, V, K))
    start = U(3, (H, V, K))
    if maps == 5:  # a reset drops what is not finite
        start[:, 3] = np.inf
        M[2, 1] = 0.0
    expected = np.zeros((H, V, K)) if from_zero else start
    for m, n in zip(M, N, strict=True):
        product = np.zeros_like(n)
        for h in range(H):
            for j in range(K):
                used = m[h, j] != 0.0
                with np.errstate(invalid="ignore"):
                    product[h][:, used] += np.outer(expected[h][:, j], m[h, j][used])
        expected = product + n
    state = None if from_zero else target.array(start, "fp32")
    got = gdn_paged.segment_combine(
        target.array(M, "fp32"), target.array(N, "fp32"), initial_state=state
    )
    finite = np.isfinite(expected)
    assert np.array_equal(np.isfinite(target.values(got)), finite)
    error = np.abs(target.values(got) - expected)[finite]
    assert error.max(initial=0.0) <= 1e-5 * np.abs(expected[finite]).max(initial=1.0)
    if state is not None:  # in place, and maps that lie in one array
        both = target.array(np.stack([M, 0 * M], 1), "fp32")
        again = gdn_paged.segment_combine(
            both[:, 0], target.array(N, "fp32"), initial_state=state, state=state
        )
        assert again is state
        assert np.array_equal(target.bits(state), target.bits(got))


def test_broken_tables(maps_target):
    """The map of no token; finish stores nothing and zeroes the outputs."""
    io, call = io_of(maps_target), make_call(400)
    part = Part(maps_target, call, 0, 200, 400, 64)
    part.table.indices[-1] = 99
    before = maps_target.bits(part.pool).copy()
    segment = part.begin(io, last=False)
    identity = np.broadcast_to(np.eye(call.q.shape[2]), segment.transition.shape)
    assert np.array_equal(maps_target.values(segment.transition), identity)
    assert not maps_target.values(segment.offset).any()
    copy_into(maps_target, part.state, segment.offset)
    assert not maps_target.values(segment.finish()).any()
    assert np.array_equal(maps_target.bits(part.pool), before)


def test_same_bytes_again(maps_target):
    io, call = io_of(maps_target), make_call(1000)
    first = None
    for _ in range(3):
        out, stored = run_parts(maps_target, call, 0, (300, 640), 128, io)
        got = (out, *stored.values())
        first = first or got
        assert all(np.array_equal(x, y) for x, y in zip(first, got, strict=True))


def test_errors(maps_target):
    io, call = io_of(maps_target), make_call(400)
    part = Part(maps_target, call, 0, 200, 400, 64)
    heads, V, K = part.rows.shape[1:]
    arguments = maps_target.prefill_arguments(part.call.cast(io), io) | {"state_pool": part.pool}
    state = maps_target.array(np.zeros((heads, V, K)), "fp32")

    def refused(message, **options):
        given = arguments | {"initial_state": state} | options
        with pytest.raises(ValueError, match=message):
            gdn_paged.segment_begin(**given)

    refused("last: True with a transition or an offset", last=True, offset=state)
    refused("initial_state: .*; expected shape", initial_state=state[:1])
    wide = maps_target.array(np.zeros((heads, V, 2 * K)), "fp32")
    refused("initial_state: .*; expected a dense float32", initial_state=wide[:, :, ::2])
    half = maps_target.array(np.zeros((heads, V, K)), "fp16")
    refused("offset: .*; expected a dense float32", offset=half)
    two = {
        "cu_seqlens": maps_target.table(np.array([0, 100, 200])),
        "page_indptr": maps_target.table(np.array([0, 1, 2])),
        "last_page_len": maps_target.table(np.array([64, 64])),
    }
    refused("num_seqs: 2 given, 1 expected", **two)
    with pytest.raises(ValueError, match=r"transition: given without initial_state"):
        gdn_paged.segment_begin(**arguments, transition=state, offset=state)
    segment = gdn_paged.segment_begin(**arguments, initial_state=state)
    segment.finish()
    with pytest.raises(ValueError, match="finish: called before"):
        segment.finish()
    with pytest.raises(ValueError, match=re.escape("offsets:")):
        gdn_paged.segment_combine(state, state)


def test_explain(maps_target):
    io, call = io_of(maps_target), make_call(400)
    part = Part(maps_target, call, 0, 200, 400, 64)
    arguments = maps_target.prefill_arguments(part.call.cast(io), io)
    text = gdn_paged.explain(gdn_paged.segment_begin, **arguments, state_pool=part.pool)
    assert f"segment: served by {maps_target.prefill_row}" in text
    assert maps_target.prefill_row in gdn_paged.kernel_rows("segment")


def test_rows_without_maps_refuse(target):
    if target.prefill_row in SERVES:
        pytest.skip("this row forms maps of segments")
    part = Part(target, make_call(400), 0, 200, 400, 64)
    with pytest.raises(NotImplementedError, match="forms no maps of segments"):
        part.begin("bf16", last=True)


def test_both_halves_in_a_graph(torch_cuda):
    """Captured once, replayed with other tokens and another state."""
    target = torch_cuda
    if target.prefill_row not in SERVES:
        pytest.skip("this row forms no maps of segments")
    torch = target.arrays.torch
    call = make_call(1000, dim=128)
    part = Part(target, call, 0, 320, 1000, 64)
    arguments = target.prefill_arguments(part.call.cast("bf16"), "bf16")
    state = target.array(0.1 * U(4, part.rows.shape[1:]), "fp32")

    square = np.zeros((4, 128, 128))
    results = [target.array(square, "fp32"), target.array(square, "fp32")]
    results.append(target.array(np.zeros(call.v[320:].shape), "bf16"))
    names = ("transition", "offset", "output")

    def both(**options):
        segment = gdn_paged.segment_begin(
            **arguments, state_pool=part.pool, initial_state=state, **options
        )
        return segment.transition, segment.offset, segment.finish()

    graph = captured(target, both, dict(zip(names, results, strict=True)))
    for seed in (5, 6):
        arguments["k"].copy_(arguments["k"].flip(0))
        state.copy_(target.array(0.1 * U(seed, part.rows.shape[1:]), "fp32"))
        graph.replay()
        torch.cuda.synchronize()
        got = [target.bits(x).copy() for x in (*results, part.pool)]
        expected = both()
        assert all(
            np.array_equal(x, target.bits(y))
            for x, y in zip(got, (*expected, part.pool), strict=True)
        )

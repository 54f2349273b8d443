"""The oracle itself: closed forms, checksums of the handed cases, and the chunk identity."""

import numpy as np
import pytest

from calls import Decode, Prefill, as_prefill, page_table, rounded
from cases import CASES, U, chain, make_decode, make_pool, make_prefill, single_key
from chunk_form import ChunkForm
from compare import relative_error, truth_of
from oracle import Oracle

BY_NAME = {case.name: case for case in CASES}

# Sums of |output| and of |written rows| from an independent float64 implementation.
CHECKSUMS = {
    "D01": (22.88322480344121, [2], 1533.4428687446052),
    "D02": (219.87379317441656, [12, 1, 14], 4661.743153492123),
    "D04": (630.149196206452, [4, 9, 2, 6], 6694.1954771587225),
    "D06": (199.50094693096813, [1, 5, 6], 4064.896063380978),
    "D08": (113.11733139495134, [1, 0, 4], 1435.4025750911555),
    "D11": (240.6407203726265, [1], 9572.407640125726),
    "D15": (3.7238353732065277, [6, 1, 5], 6183.484365029362),
    "D19": (5.2889847853612295, [8, 1, 0, 5], 2731.1521177711647),
}


@pytest.mark.parametrize("name", CHECKSUMS)
def test_checksums(name):
    out_sum, rows, rows_sum = CHECKSUMS[name]
    truth = truth_of(BY_NAME[name], "fp32")
    assert np.abs(truth.outs[-1]).sum() == pytest.approx(out_sum, rel=1e-12)
    assert np.abs(truth.pool[rows]).sum() == pytest.approx(rows_sum, rel=1e-12)


def test_single_values():
    row = truth_of(BY_NAME["D01"], "fp32").pool[2, 0, 0, :3]
    assert row == pytest.approx([-0.074256, 0.096003, -0.249894], abs=1e-6)
    out = truth_of(BY_NAME["D15"], "fp32").outs[0][:, 0, 0]
    assert out == pytest.approx([-0.00213217, -0.00243558, -0.00365908], abs=1e-8)


def test_generator_matches_splitmix64():
    def reference(state: int) -> float:
        mask = 2**64 - 1
        x = (state + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return ((x ^ (x >> 31)) >> 40) / 2**23 - 1

    assert U(7, (3, 2)).ravel().tolist() == [reference((7 << 32) + i) for i in range(6)]


@pytest.mark.parametrize("dtype, kept", [("bf16", 1 + 2**-7), ("fp16", 1 + 2**-10)])
def test_rounding_is_to_nearest_even(dtype, kept):
    ulp = kept - 1
    ties = np.array([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 1e-7, np.inf, np.nan])
    expected = [1, 1 + 2 * ulp, kept, np.inf, np.nan]
    assert np.array_equal(rounded(ties, dtype), expected, equal_nan=True)


def test_first_token():
    """S = beta v k^T and o = scale beta (q . k) v."""
    call, pool = (make_prefill(1, page_table(64, ([0], 0, 1))), np.full((1, 4, 64, 64), np.nan))
    out = Oracle().prefill(call, pool)
    q, k, v = (np.repeat(x[0], 4 // x.shape[1], axis=0) for x in (call.q, call.k, call.v))
    assert pool[0] == pytest.approx(call.beta[0][:, None, None] * v[:, :, None] * k[:, None, :])
    dots = (q * k).sum(-1) * call.beta[0] * 64**-0.5
    assert out[0] == pytest.approx(dots[:, None] * v)


def test_orthogonal_keys_are_a_memory():
    """alpha = beta = 1 with orthonormal keys: S k_i = v_i for every token seen."""
    keys = np.linalg.qr(U(2, (64, 64)))[0][:, None]
    v, ones = U(3, (64, 1, 64)), np.ones((64, 1))
    pool = np.zeros((1, 1, 64, 64))
    call = Prefill(keys, keys, v, page_table(64, ([0], 0, 64)), ones, ones)
    Oracle().prefill(call, pool, state_dtype="fp64")
    assert np.einsum("vk,tk->tv", pool[0, 0], keys[:, 0]) == pytest.approx(v[:, 0], abs=1e-12)


def test_pure_decay():
    e0, pool = single_key(40, 1, 64), np.ones((1, 1, 64, 64))
    gates = np.full((40, 1), 0.9), np.zeros((40, 1))
    Oracle().prefill(Prefill(e0, e0, 0 * e0, page_table(64, ([0], 5, 45)), *gates), pool)
    assert pool == pytest.approx(0.9**40)


def test_decode_equals_a_prefill_of_one_token():
    oracle, table = Oracle(), page_table(64, ([0, 1], 64, 65), ([2], 7, 8), decode=True)
    call = make_decode(31, table, dim=64)
    prefill = as_prefill(call, page_table(64, ([0, 1], 64, 65), ([2], 7, 8)), oracle.l2norm)
    pools = [make_pool(31, 3, 4) for _ in range(2)]
    assert np.array_equal(oracle.decode(call, pools[0]), oracle.prefill(prefill, pools[1]))
    assert np.array_equal(*pools)


def test_scalar_gates():
    oracle = Oracle()
    assert oracle.raw_alpha(np.array(100.0), np.log(0.01), 0.0) == pytest.approx(np.exp(-1))
    assert oracle.raw_alpha(np.array(-800.0), 800.0, 0.0) == 1
    assert oracle.sigmoid(0.5) == pytest.approx(0.62245933, abs=1e-8)
    assert oracle.l2norm(np.array([1e-4, 0.0]))[0] == pytest.approx(0.09950372, abs=1e-8)


@pytest.mark.parametrize("io", ["fp32", "bf16"])
def test_chunk_identity(io):
    """The chunk-wise formula and the token loop are the same map."""
    call = make_prefill(41, page_table(64, ([1, 0, 3], 30, 180))).cast(io)
    pools = [make_pool(41, 4, 4) for _ in range(2)]
    outs = [o.prefill(call, p) for o, p in zip((Oracle(), ChunkForm("good")), pools, strict=True)]
    assert relative_error(outs[1], outs[0]) < 1e-5
    assert relative_error(pools[1], pools[0]) < 1e-5


def test_cutting_a_call_changes_nothing():
    """Token loops have no chunk grid: any cut gives the same float64 values."""
    whole = make_prefill(103, page_table(64, ([3, 0, 5], 0, 150)))
    pools = [make_pool(103, 6, 4) for _ in range(2)]
    out = Oracle().prefill(whole, pools[0], state_dtype="fp64")
    calls = chain(whole, 64, [3, 0, 5], 1, 63, 64, 65, 150)
    parts = [Oracle().prefill(call, pools[1], state_dtype="fp64") for call in calls]
    assert np.array_equal(np.concatenate(parts), out)
    assert np.array_equal(*pools)


def test_decode_padding_keeps_the_pool():
    table = page_table(64, ([0, -1], 64, 70), ([], 0, 0), decode=True)
    call, pool = make_decode(51, table, dim=64), np.full((2, 4, 64, 64), np.nan)
    assert isinstance(call, Decode)
    assert not Oracle().decode(call, pool).any()
    assert np.isnan(pool).all()

"""Same input, same bytes: alone or in a batch, cut or whole, with any number of threads."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from calls import page_table
from cases import BATCH, make_decode, make_pool, make_prefill

SEED, ROWS = 145, 9
IDS, ENDS = [[2], [0, 4, 7], [5, 1]], [0, 5, 135, 199]


def run(target, call, rows, **options):
    pool = target.pool(rows).view
    out = target.prefill(call, pool, "bf16", options=options)
    return target.bits(out).copy(), target.bits(pool).copy()


def invariant(target) -> dict:
    """Rows on a GPU need the switch for bytes that do not depend on the batch."""
    return {} if target.device == "cpu" else {"deterministic": "batch"}


def skip_without_switch(target, call, rows):
    try:
        return run(target, call, rows, **invariant(target))
    except NotImplementedError as error:
        pytest.skip(str(error))


def test_alone_equals_batched(target):
    """D20: each sequence of the batch by itself."""
    call, rows = make_prefill(SEED, page_table(64, *BATCH)), make_pool(SEED, ROWS, 4)
    out, pool = skip_without_switch(target, call, rows)
    for i, span in enumerate(BATCH):
        alone = call.part(ENDS[i], ENDS[i + 1], page_table(64, span))
        alone_out, alone_pool = run(target, alone, rows, **invariant(target))
        assert np.array_equal(alone_out, out[ENDS[i] : ENDS[i + 1]])
        assert np.array_equal(alone_pool[IDS[i]], pool[IDS[i]])


@pytest.mark.parametrize("cuts", [(64, 130), (128, 130), (64, 128, 130)], ids=str)
def test_cut_at_a_page_end(target, cuts):
    """D20: a prompt cut at page ends gives the bytes of one call (fp32 pool)."""
    ids = IDS[1]
    call, rows = make_prefill(SEED, page_table(64, (ids, 0, 130))), make_pool(SEED, ROWS, 4)
    out, pool = skip_without_switch(target, call, rows)
    view, pieces, done = target.pool(rows).view, [], 0
    for end in cuts:
        table = page_table(64, (ids[: -(-end // 64)], done, end))
        part = call.part(done, end, table)
        pieces.append(target.bits(target.prefill(part, view, "bf16", options=invariant(target))))
        done = end
    assert np.array_equal(np.concatenate(pieces), out)
    assert np.array_equal(target.bits(view)[ids], pool[ids])


def test_order_in_the_batch(target):
    call, rows = make_prefill(SEED, page_table(64, *BATCH)), make_pool(SEED, ROWS, 4)
    out, pool = skip_without_switch(target, call, rows)
    order = [2, 0, 1]
    tokens = np.concatenate([np.arange(ENDS[i], ENDS[i + 1]) for i in order])
    fields = {x: getattr(call, x)[tokens] for x in ("q", "k", "v", "g", "beta")}
    moved = type(call)(rows=page_table(64, *(BATCH[i] for i in order)), **fields)
    moved_out, moved_pool = run(target, moved, rows, **invariant(target))
    assert np.array_equal(moved_out, out[tokens])
    assert np.array_equal(moved_pool, pool)


@pytest.mark.parametrize(
    "heads, spans", [((2, 4), BATCH), ((1, 1), (([3, 0], 10, 120),))], ids=["batch", "one head"]
)
def test_number_of_threads(cpu_target, heads, spans):
    call, rows = make_prefill(510, page_table(64, *spans), heads), make_pool(510, ROWS, max(heads))
    results = [run(cpu_target, call, rows, num_threads=n) for n in (0, 1, 2, 3, 8)]
    for out, pool in results[1:]:
        assert np.array_equal(out, results[0][0]) and np.array_equal(pool, results[0][1])


def test_number_of_threads_in_decode(cpu_target):
    spans = ([4, 6], 64, 65), ([5], 16, 17), ([1], 0, 1)
    call = make_decode(511, page_table(64, *spans, decode=True))
    results = []
    for n in (0, 1, 2, 3, 8):
        pool = cpu_target.pool(make_pool(511, 8, 4, 128)).view
        out = cpu_target.decode(call, pool, "bf16", options={"num_threads": n})
        results.append((cpu_target.bits(out).copy(), cpu_target.bits(pool).copy()))
    for out, pool in results[1:]:
        assert np.array_equal(out, results[0][0]) and np.array_equal(pool, results[0][1])


def test_decode_rows_alone(target):
    spans = ([4, 6], 64, 65), ([5], 16, 17), ([1], 0, 1)
    call, rows = (
        make_decode(512, page_table(64, *spans, decode=True), dim=None),
        make_pool(512, 8, 4),
    )
    pool = target.pool(rows).view
    out = target.bits(target.decode(call, pool, "bf16")).copy()
    for i, span in enumerate(spans):
        fields = {x: getattr(call, x)[i : i + 1] for x in ("q", "k", "v", "a", "b")}
        alone = type(call)(
            rows=page_table(64, span, decode=True), A_log=call.A_log, dt_bias=call.dt_bias, **fields
        )
        view = target.pool(rows).view
        assert np.array_equal(target.bits(target.decode(alone, view, "bf16"))[0], out[i])
        last = span[0][-1]
        assert np.array_equal(target.bits(view)[last], target.bits(pool)[last])


def test_repeats(target):
    """50 runs on the same input, with other contents in the pages that are only written."""
    call = make_prefill(513, page_table(64, *BATCH))
    expected = None
    for n in range(50):
        rows = make_pool(513, ROWS, 4)
        rows[[0, 4, 7, 1]] = np.nan if n % 2 else n
        out, pool = run(target, call, rows)
        pool = pool[[2, 0, 4, 7, 1]]
        expected = expected or (out, pool)
        assert np.array_equal(out, expected[0]) and np.array_equal(pool, expected[1])


def test_absent_gates_are_gates_of_one(target):
    """g=None, alpha = 1 and ln(alpha) = 0 are the same bytes."""
    rows, table = make_pool(514, 6, 4), page_table(64, ([0, 1, 2, 3, 4], 0, 300))
    forms = {"g": None}, {"g": np.ones((300, 4))}, {"g": np.zeros((300, 4)), "gate": "log"}
    results = [run(target, make_prefill(514, table, beta=None, **form), rows) for form in forms]
    for out, pool in results[1:]:
        assert np.array_equal(out, results[0][0]) and np.array_equal(pool, results[0][1])


FIRST_CALLS = """
import sys, threading
sys.path.insert(0, {tests!r})
import numpy as np
from calls import page_table
from cases import make_pool, make_prefill
from targets import available_targets
target = available_targets()[0]
call = make_prefill(520, page_table(64, ([2], 20, 25), ([0, 4, 7], 0, 130)))
pools = [target.pool(make_pool(520, 9, 4)).view for _ in range(8)]
outs, gate = [None] * 8, threading.Barrier(8)
def work(i):
    gate.wait()
    outs[i] = target.prefill(call, pools[i], "bf16")
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads]
[t.join(60) for t in threads]
assert all(out is not None for out in outs), "a first call did not finish"
same = all(np.array_equal(target.bits(x), target.bits(outs[0])) for x in outs)
same = same and all(np.array_equal(target.bits(p), target.bits(pools[0])) for p in pools)
print("same" if same else "different")
"""


def test_first_call_from_eight_threads():
    """A fresh process whose first call comes from eight threads at once."""
    from pathlib import Path

    script = FIRST_CALLS.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same"


def test_threads_with_their_own_pools(target):
    """Calls from four threads at once do not disturb each other."""
    call, rows = make_prefill(521, page_table(64, *BATCH)), make_pool(521, ROWS, 4)
    expected, results = run(target, call, rows), {}

    def work(i):
        results[i] = [run(target, call, rows) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    for out, pool in (r for runs in results.values() for r in runs):
        assert np.array_equal(out, expected[0]) and np.array_equal(pool, expected[1])

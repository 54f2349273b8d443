"""The long run in small: every kind of call and of page reuse, against the recurrence."""

import pytest

from long_run import Engine, run


@pytest.mark.parametrize("seed", [20260101, 20260102])
def test_engine(seed):
    engine = Engine(seed, "cpu")
    decode = run(engine, "decode", 600, 0, 20)
    prefill = run(engine, "prefill", 200, 0, 10)
    assert decode[-1].calls == 600 and prefill[-1].calls == 200
    assert engine.sampled >= 40 and engine.shared > 0 and engine.reused > len(engine.holders)
    assert engine.worst <= 1e-5


def test_engine_finds_a_spoiled_page():
    engine = Engine(20260103, "cpu")
    run(engine, "decode", 100, 0, 100)
    for sequence in engine.sequences:
        for page in sequence.pages:
            engine.arrays.pool[page] *= 1.01
    with pytest.raises(AssertionError, match="is off by"):
        run(engine, "decode", 1, 0, 1)

"""Cases of the slot and the packed form of prefill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calls import Prefill, Slots, rounded
from cases import U, make_pool, make_prefill, uniform

LENGTHS = (100, 0, 64, 3)
CU = np.cumsum((0, *LENGTHS))


@dataclass(frozen=True, eq=False)
class SlotCase:
    """One call and its pools; the same array in two roles is one pool."""

    name: str
    call: Prefill
    initial: np.ndarray | None = None
    output: np.ndarray | None = None  # None: output_final_state=False
    checkpoints: np.ndarray | None = None
    state_dtype: str = "fp32"
    index_dtype: str = "int32"

    def __str__(self) -> str:
        return self.name


def call(seed: int, heads=(2, 4), lengths=LENGTHS, options=None, **slots) -> Prefill:
    rows = Slots(np.cumsum((0, *lengths)), **slots)
    return make_prefill(seed, rows, heads, 64, **(options or {}))


def pool(seed: int, rows: int, heads=4, dtype="fp32") -> np.ndarray:
    return make_pool(seed, rows, heads, 64, dtype)


def every_checkpoint() -> list[SlotCase]:
    """Checkpoints of four sequences at every 64th absolute token."""
    cases = []
    for prefix in ((0, 0, 0, 0), (1, 1, 1, 1), (63, 63, 63, 63), (65, 5, 128, 61)):
        counts = [(p + n) // 64 - p // 64 for p, n in zip(prefix, LENGTHS, strict=True)]
        starts, total = np.cumsum((0, *counts)), sum(counts)
        common = {
            "state_indices": [2, 4, -1, 0],
            "output_state_indices": [5, 7, 1, -1],
            "checkpoint_cu_starts": starts,
            "checkpoint_every": 64,
            "prefix_lens": prefix,
        }
        name, seed = f"prefix{prefix[0]}", 300 + prefix[0]
        separate = call(seed, **common, checkpoint_state_indices=np.arange(total)[::-1] + 3)
        one = call(seed, **common, checkpoint_state_indices=np.arange(total) + 9)
        selected = np.full(total, -1)
        selected[[int(s) for s, n in zip(starts, counts, strict=False) if n]] = [6, 3, 0][
            : sum(n > 0 for n in counts)
        ]
        single, shared = call(seed, **common, checkpoint_state_indices=selected), pool(seed, 20)
        pools = pool(seed + 1, 6), pool(seed + 2, 9), pool(seed + 3, 12)
        cases += [
            SlotCase(f"{name}-three-pools", separate, *pools),
            SlotCase(f"{name}-one-pool", one, shared, shared, shared),
            SlotCase(f"{name}-one-selected", single, pools[0], pools[1], pools[2]),
            SlotCase(f"{name}-int64", separate, *pools, index_dtype="int64"),
        ]
    return cases


def packed_forms() -> list[SlotCase]:
    starts = np.array([0, 1, 1, 2, 2])
    return [
        SlotCase("packed", call(320), pool(320, 4), pool(321, 4)),
        SlotCase("packed-in-place", call(322), *[pool(322, 4)] * 2),
        SlotCase("packed-from-zero", call(323), None, pool(323, 4)),
        SlotCase("packed-no-final", call(324), pool(324, 4)),
        SlotCase(
            "packed-compact-checkpoints",
            call(325, checkpoint_cu_starts=starts, checkpoint_every=64),
            pool(325, 4),
            pool(326, 4),
            pool(327, 3),
        ),
    ]


def single_features() -> list[SlotCase]:
    both, reads = np.array([3, 1, 0, 5]), {"state_indices": [3, 1, 0, 5]}
    raw = {
        "gate": "raw",
        "A_log": uniform(331, (4,), -2, 1),
        "dt_bias": uniform(332, (4,), -1, 1),
        "g": uniform(333, (167, 4), -4, 4),
        "beta": uniform(334, (167, 4), -3, 3),
        "beta_is_logit": True,
    }
    norm = {
        "l2norm": True,
        "q": rounded(U(335, (167, 2, 64)), "bf16"),
        "k": rounded(U(336, (167, 2, 64)), "bf16"),
    }
    padding = {"state_indices": [-1, 2, -1, 3], "output_state_indices": [-1, 0, 1, -1]}
    starts_n = {"checkpoint_cu_starts": [0, 1, 1, 2], "checkpoint_every": 64}
    return [
        SlotCase("state-indices-alone", call(330, **reads), *[pool(330, 6)] * 2),
        SlotCase("read-and-write-minus-one", call(337, **padding), *[pool(337, 5)] * 2),
        SlotCase("gqa-8-2", call(338, heads=(8, 2), **reads), *[pool(338, 6, 8)] * 2),
        SlotCase("raw-gates-logits", call(339, options=raw, **reads), *[pool(339, 6)] * 2),
        SlotCase("l2norm", call(340, options=norm, **reads), *[pool(340, 6)] * 2),
        SlotCase("no-final", call(341, **reads), pool(341, 6)),
        SlotCase(
            "all-empty", call(342, lengths=(0, 0, 0), state_indices=[0, 1, 2]), *[pool(342, 3)] * 2
        ),
        SlotCase(
            "starts-of-n",
            call(343, **reads, **starts_n, checkpoint_state_indices=[7, 6]),
            *[pool(343, 9)] * 3,
        ),
        *(
            SlotCase(
                f"state-{dtype}",
                call(344, state_indices=both),
                *[pool(344, 6, 4, dtype)] * 2,
                state_dtype=dtype,
            )
            for dtype in ("bf16", "fp16")
        ),
        SlotCase(
            "every-128",
            call(
                345,
                **reads,
                checkpoint_state_indices=[7],
                checkpoint_every=128,
                checkpoint_cu_starts=[0, 1, 1, 1, 1],
                prefix_lens=[30, 0, 5, 0],
            ),
            *[pool(345, 9)] * 3,
        ),
    ]


SLOT_CASES = every_checkpoint() + packed_forms() + single_features()

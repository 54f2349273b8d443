"""Tensor parallelism in JAX: the heads of a gated delta net layer split over devices by shard_map.

    python examples/jax_tensor_parallel.py

q, k, v, the gates and dimension 1 of the pool [pages, H, V, K] are split by heads, the page tables
replicated. Each device runs its heads on its part of the pool, in place, since the pool is donated;
nothing is exchanged but the sum after the output projection. One device with every head gives the
same bytes, which is checked. With fewer than two GPUs it runs on two devices of the CPU.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gdn_paged.jax

try:
    from jax import shard_map
except ImportError:  # before jax 0.7
    from jax.experimental.shard_map import shard_map

NUM_QK_HEADS, NUM_V_HEADS, HEAD_DIM, WIDTH, PAGE_SIZE = 4, 8, 128, 256, 64
PAGES = ([3, 0], [7, 4, 1], [5])  # of three sequences
PROMPTS, DECODE_STEPS = [64, 130, 20], 2

# How each array is split. q, k and v of decode have one more dimension.
HEADS = {
    **dict.fromkeys(("q", "k", "v", "g", "beta"), P(None, "heads")),
    **dict.fromkeys(("A_log", "dt_bias"), P("heads")),
    "state_pool": P(None, "heads"),
    "project_out": P("heads"),
}
DECODE_HEADS = HEADS | dict.fromkeys(("q", "k", "v", "a", "b"), P(None, None, "heads"))


def tables(lengths: list[int], new: list[int]) -> dict[str, jax.Array]:
    """A page table of `lengths` tokens of which the last `new` ones come in this step."""
    pages = [p[: -(-n // PAGE_SIZE)] for p, n in zip(PAGES, lengths, strict=True)]
    table = {
        "page_indices": [page for p in pages for page in p] + [0] * (6 - sum(map(len, pages))),
        "page_indptr": np.cumsum([0] + [len(p) for p in pages]),
        "last_page_len": [(n - 1) % PAGE_SIZE + 1 for n in lengths],
    }
    if max(new) > 1:
        table["cu_seqlens"] = np.cumsum([0, *new])
    return {name: jnp.asarray(x, jnp.int32) for name, x in table.items()}


def prefill(x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The heads in `x` of new tokens: outputs ``[T, H, V]`` and the pool."""
    # However many heads a device has, one head gives the same bytes.
    return gdn_paged.jax.paged_prefill(
        **x, page_size=PAGE_SIZE, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        beta_is_logit=True, deterministic="batch",
    )  # fmt: skip


def decode(x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The heads in `x` of one token each: outputs ``[B, 1, H, V]`` and the pool."""
    return gdn_paged.jax.paged_decode(**x, deterministic="batch")


def layer(step, x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A step and the output projection of its heads, summed over the devices."""
    x = dict(x)
    project_out = x.pop("project_out")
    y, pool = step(x)
    partial_sum = y.reshape(len(y), -1) @ project_out.reshape(-1, WIDTH)
    return jax.lax.psum(partial_sum.astype(jnp.float32), "heads"), y, pool


class Layer:
    """The layer over the devices of `mesh`."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.steps = {
            step: jax.jit(partial(self.split, step), donate_argnames="state_pool")
            for step in (prefill, decode)
        }

    def split(self, step, state_pool: jax.Array, others: dict[str, jax.Array]):
        x = others | {"state_pool": state_pool}
        heads = DECODE_HEADS if step is decode else HEADS
        specs = {name: heads.get(name, P()) for name in x}
        return shard_map(
            partial(layer, step), mesh=self.mesh, in_specs=(specs,),
            out_specs=(P(), heads["q"], heads["state_pool"]),
        )(x)  # fmt: skip

    def place(self, step, x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        heads = DECODE_HEADS if step is decode else HEADS
        return {
            name: jax.device_put(y, NamedSharding(self.mesh, heads.get(name, P())))
            for name, y in x.items()
        }

    def __call__(self, step, pool: jax.Array, x: dict[str, jax.Array]):
        return self.steps[step](pool, self.place(step, x))


def operands(step, seed: int, tokens: int, dtype) -> dict[str, jax.Array]:
    """What the layer's projections would give for `tokens` tokens of all heads."""
    rng, one = np.random.default_rng(seed), (1,) if step is decode else ()
    gates = ("a", "b") if step is decode else ("g", "beta")
    shapes = {x: (NUM_QK_HEADS, HEAD_DIM) for x in ("q", "k")}
    shapes |= {"v": (NUM_V_HEADS, HEAD_DIM)} | dict.fromkeys(gates, (NUM_V_HEADS,))
    return {
        name: jnp.asarray(rng.standard_normal((tokens, *one, *shape)), dtype)
        for name, shape in shapes.items()
    }


def main() -> None:
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        devices = []
    devices = devices[:2] if len(devices) > 1 else jax.devices("cpu")[:2]
    jax.config.update("jax_default_device", devices[0])
    on_gpu = devices[0].platform == "gpu"
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    split, whole = (Layer(Mesh(np.array(d), ("heads",))) for d in (devices, devices[:1]))
    rng = np.random.default_rng(0)
    weights = {
        "A_log": jnp.linspace(0, 2, NUM_V_HEADS),
        "dt_bias": jnp.full(NUM_V_HEADS, -3.0),
        "project_out": jnp.asarray(
            rng.standard_normal((NUM_V_HEADS, HEAD_DIM, WIDTH)) / WIDTH**0.5, dtype
        ),
    }
    zeros = {"state_pool": jnp.zeros((8, NUM_V_HEADS, HEAD_DIM, HEAD_DIM))}
    pools = [one.place(prefill, zeros)["state_pool"] for one in (split, whole)]

    def addresses() -> list[int]:
        return [x.data.unsafe_buffer_pointer() for x in pools[0].addressable_shards]

    lengths, worst, in_place = [0] * len(PAGES), 0.0, []
    for seed, new in enumerate([PROMPTS, *[[1] * len(PAGES)] * DECODE_STEPS]):
        step = prefill if max(new) > 1 else decode
        lengths = [n + m for n, m in zip(lengths, new, strict=True)]
        x = operands(step, seed, sum(new), dtype) | weights | tables(lengths, new)
        out, y, pools[0] = split(step, pools[0], x)
        expected_out, expected, pools[1] = whole(step, pools[1], x)
        in_place.append(addresses())
        assert np.array_equal(np.asarray(y), np.asarray(expected)), "outputs differ"
        difference = jnp.linalg.norm(np.asarray(out) - np.asarray(expected_out))
        worst = max(worst, float(difference / np.linalg.norm(expected_out)))
        assert np.isfinite(expected_out).all() and np.abs(np.asarray(y, np.float32)).max() > 0
    # A pool that NumPy looks at is copied by the call that is given it: so not in the loop.
    assert np.array_equal(np.asarray(pools[0]), np.asarray(pools[1])), "states differ"
    assert all(x == in_place[0] for x in in_place), "the pool was copied"
    assert worst < (1e-2 if on_gpu else 1e-5)
    print(f"2 {'cuda' if on_gpu else 'cpu'} devices: {len(PAGES)} sequences")
    print(f"heads          {NUM_V_HEADS}, {pools[0].addressable_shards[0].data.shape[1]} on each")
    print("states         bytes of one device with all heads, updated in place")
    print(f"layer output   relative difference {worst:.1e} (the sum over heads is cut)")


if __name__ == "__main__":
    main()

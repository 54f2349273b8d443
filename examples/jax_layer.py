"""A gated delta net layer in JAX: states on pages, the pool donated to each step, on CPU or GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import gdn_paged.jax

HEADS_QK, HEADS_V, DIM, WIDTH, PAGE_SIZE = 2, 4, 64, 128, 64
SPLITS = (HEADS_QK * DIM, HEADS_QK * DIM, HEADS_V * DIM, HEADS_V, HEADS_V)  # q, k, v, a, b


def init_layer(key: jax.Array, dtype: Any) -> dict[str, jax.Array]:
    keys = jax.random.split(key, 3)
    return {
        "project_in": jax.random.normal(keys[0], (WIDTH, sum(SPLITS)), dtype) / WIDTH**0.5,
        "project_out": jax.random.normal(keys[1], (HEADS_V * DIM, WIDTH), dtype) / 16,
        # The gate's parameters stay in float32, whatever the layer's type is.
        "A_log": jnp.log(jax.random.uniform(keys[2], (HEADS_V,), minval=1.0, maxval=16.0)),
        "dt_bias": jnp.full((HEADS_V,), -3.0),
    }


def operands(layer: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    """q, k, v ``[..., heads, DIM]`` and the gate logits a, b ``[..., HEADS_V]`` of tokens."""
    ends = [sum(SPLITS[: i + 1]) for i in range(len(SPLITS) - 1)]
    parts = dict(zip("qkvab", jnp.split(x @ layer["project_in"], ends, axis=-1), strict=True))
    return parts | {name: parts[name].reshape(*x.shape[:-1], -1, DIM) for name in "qkv"}


@functools.partial(jax.jit, donate_argnames="pool")
def prefill(layer: dict, x: jax.Array, pool: jax.Array, cu_seqlens: jax.Array, table: dict):
    """``x [tokens, WIDTH]`` to the same shape, and the pool: the memory that came in."""
    y = operands(layer, x)
    output, pool = gdn_paged.jax.paged_prefill(
        y["q"], y["k"], y["v"], y["a"], y["b"], state_pool=pool, cu_seqlens=cu_seqlens,
        page_size=PAGE_SIZE, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        A_log=layer["A_log"], dt_bias=layer["dt_bias"], beta_is_logit=True, **table,
    )  # fmt: skip
    return output.reshape(len(x), -1) @ layer["project_out"], pool


@functools.partial(jax.jit, donate_argnames="pool")
def decode(layer: dict, xs: jax.Array, pool: jax.Array, table: dict):
    """``xs [steps, batch, WIDTH]``, a token per row and step; the pool is the loop's carry."""

    def step(carry, x):
        pool, last_page_len = carry
        y = operands(layer, x[:, None])
        output, pool = gdn_paged.jax.paged_decode(
            *(y[name] for name in "qkv"), layer["A_log"], y["a"], layer["dt_bias"], y["b"],
            state_pool=pool, **table | {"last_page_len": last_page_len},
        )  # fmt: skip
        return (pool, last_page_len + 1), output.reshape(len(x), -1) @ layer["project_out"]

    (pool, _), outputs = jax.lax.scan(step, (pool, table["last_page_len"]), xs)
    return outputs, pool


def main() -> None:
    on_gpu = jax.default_backend() == "gpu"
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    layer_key, token_key = jax.random.split(jax.random.key(0))
    layer = init_layer(layer_key, dtype)
    x = jax.random.normal(token_key, (75, WIDTH), dtype)
    pool = jnp.zeros((8, HEADS_V, DIM, DIM))

    def int32(*values: int) -> jax.Array:
        return jnp.array(values, jnp.int32)

    def table(pages: tuple[int, ...], last: int) -> dict[str, jax.Array]:
        return {
            "page_indices": int32(*pages),
            "page_indptr": int32(0, len(pages)),
            "last_page_len": int32(last),
        }

    # 70 tokens by prefill and five by decode, on pages 5 and 2 ...
    address = pool.unsafe_buffer_pointer()
    _, pool = prefill(layer, x[:70], pool, int32(0, 70), table((5, 2), 6))
    decoded, pool = decode(layer, x[70:, None], pool, table((5, 2), 7))
    # ... and all 75 by prefill, on pages 0 and 1: the same output and the same state.
    whole, pool = prefill(layer, x, pool, int32(0, 75), table((0, 1), 11))
    assert pool.unsafe_buffer_pointer() == address  # one pool, updated where it lies
    tolerance = 2e-2 if on_gpu else 1e-4
    for name, got, expected in (("output", decoded[:, 0], whole[70:]), ("state", pool[2], pool[1])):
        got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
        error = float(jnp.linalg.norm((got - expected).ravel()) / jnp.linalg.norm(expected.ravel()))
        print(f"{name}: decode and prefill differ by {error:.1e} (relative L2)")
        assert error <= tolerance
    print(f"the pool stayed in place on the {jax.default_backend()}")


if __name__ == "__main__":
    main()

"""JAX in the tests: its arrays behind the interface of `arrays.py`, and its calls, whose pool is
returned, behind that of `targets.py`. Imported before JAX has looked for devices."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other frameworks need memory
FLAG = "--xla_force_host_platform_device_count=2"
if FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()

import jax  # noqa: E402

import gdn_paged.jax  # noqa: E402
from calls import Case, Decode, Prefill  # noqa: E402
from compare import Result  # noqa: E402
from targets import Target  # noqa: E402

STATIC = (
    *("scale", "page_size", "use_qk_l2norm_in_kernel", "gate_domain", "use_gate_in_kernel"),
    *("beta_is_logit", "use_qk_l2norm", "deterministic", "num_threads", "backend"),
    "allow_unaligned_pages",
)


class JaxArrays:
    name = "jax"

    def __init__(self, device: str):
        self.device = device

    def array(self, x: np.ndarray) -> jax.Array:
        return jax.device_put(x, jax.devices(self.device)[0])

    def numpy(self, x: jax.Array) -> np.ndarray:
        return np.asarray(x)


def jitted(
    function: Any, arguments: dict[str, Any], donated: bool = True
) -> tuple[Any, dict[str, Any]]:
    """`function` to be compiled with its options fixed and its pool donated, and its arrays."""
    options = {name: x for name, x in arguments.items() if name in STATIC}
    arrays = {name: x for name, x in arguments.items() if name not in STATIC}
    fixed = functools.partial(function, **options)
    return jax.jit(fixed, donate_argnames="state_pool" if donated else ()), arrays


class JaxTarget(Target):
    """Calls compiled by `jax.jit`; each returns its output and the pool."""

    def prefill(self, call: Prefill, pool: Any, io="fp32", *, options=None, **forms) -> Any:
        arguments = self.prefill_arguments(call.cast(io), io, **forms) | (options or {})
        function, arrays = jitted(gdn_paged.jax.paged_prefill, arguments)
        return function(**arrays, state_pool=pool)

    def decode(self, call: Decode, pool: Any, io="fp32", *, options=None, **forms) -> Any:
        arguments = self.decode_arguments(call.cast(io), io, **forms)
        arguments |= {"backend": self.decode_row} | (options or {})
        function, arrays = jitted(gdn_paged.jax.paged_decode, arguments)
        return function(**arrays, state_pool=pool)

    def run(self, case: Case, io: str) -> Result:
        pool = self.pool(case.pool, case.state_dtype).view
        before, outs = self.bits(pool).copy(), []
        for call in case.calls:
            run = self.prefill if isinstance(call, Prefill) else self.decode
            out, pool = run(call, pool, io)
            outs.append(self.values(out).reshape(len(call.q), call.heads, -1))
        return Result(outs, self.values(pool), before, self.bits(pool))


@functools.cache
def has_cuda() -> bool:
    try:
        return gdn_paged.has_cuda() and bool(jax.devices("cuda"))
    except RuntimeError:  # JAX has no such backend
        return False


def jax_targets(wanted: str = "") -> list[JaxTarget]:
    """JAX on the CPU, and on a GPU with the row that calls get by default (of those `wanted`)."""
    found = [JaxTarget(JaxArrays("cpu"), "cpu", "cpu")]
    if has_cuda():
        found.append(JaxTarget(JaxArrays("cuda"), "auto", "cuda"))
    return [t for t in found if wanted in f"jax-{t.device}"]


def io_of(target: Target) -> str:
    return "fp32" if target.device == "cpu" else "bf16"

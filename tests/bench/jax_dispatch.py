"""Host cost of a jitted decode step in JAX, beside an empty FFI call with the same operands.

    python tests/bench/jax_dispatch.py [--platform cpu|cuda] [--out FILE]

Both calls are jitted with the pool donated and take turns; the time of one is the mean over a loop
of calls that does not wait for the device, best of the repeats. The empty call has the operands,
results, aliases and attributes of `gdn_paged.jax.paged_decode` and a handler that returns at once.
It is compiled here with `c++` and the headers of the installed jaxlib.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

import gdn_paged.jax
from gdn_paged import _jax_ops

EMPTY = """
#include <xla/ffi/api/ffi.h>
namespace ffi = xla::ffi;
ffi::Error nothing(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) { return {}; }
ffi::Error nothing_cuda(void*, int, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return {};
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Cpu, nothing,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Cuda, nothing_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs().RemainingRets().Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});
"""


def register_empty(folder: Path) -> None:
    """The targets of gdn_paged under the names `empty_*`."""
    source, library = folder / "empty.cpp", folder / "empty.so"
    source.write_text(EMPTY)
    subprocess.check_call(["c++", "-std=c++17", "-O2", "-shared", "-fPIC", source, "-o", library,
                           f"-I{jax.ffi.include_dir()}"])  # fmt: skip
    handlers = ctypes.CDLL(str(library))
    for name in _jax_ops.extension().targets:
        for symbol, platform in ((handlers.Cpu, "cpu"), (handlers.Cuda, "CUDA")):
            jax.ffi.register_ffi_target(f"empty_{name}", jax.ffi.pycapsule(symbol), platform)


def operands(device: Any, batch: int, heads: tuple[int, int], dim: int) -> dict[str, jax.Array]:
    dtype = jnp.bfloat16 if device.platform != "cpu" else jnp.float32
    keys = iter(jax.random.split(jax.random.key(0), 5))
    wide = {x: (batch, 1, n, dim) for x, n in zip("qkv", (heads[0], *heads), strict=True)}
    arrays = {x: jax.random.normal(next(keys), shape, dtype) for x, shape in wide.items()}
    arrays |= {x: jax.random.normal(next(keys), (batch, 1, heads[1]), dtype) for x in "ab"}
    arrays |= {"A_log": jnp.zeros(heads[1]), "dt_bias": jnp.zeros(heads[1])}
    table = {
        "page_indices": jnp.arange(batch, dtype=jnp.int32),
        "page_indptr": jnp.arange(batch + 1, dtype=jnp.int32),
        "last_page_len": jnp.full(batch, 5, jnp.int32),
    }
    arrays |= table | {"slots": gdn_paged.jax.decode_slots(**table)}
    return jax.device_put(arrays, device)


def step(prefix: str = "") -> Callable[..., Any]:
    """The jitted decode step, traced with the targets of these names."""

    def renamed(name: str, target: str, *rest: Any) -> Any:
        return operator(name, prefix + target, *rest)

    def function(state_pool: Any, x: Any) -> Any:
        _jax_ops._operator = renamed
        try:
            return gdn_paged.jax.paged_decode(**x, state_pool=state_pool)
        finally:
            _jax_ops._operator = operator

    operator = _jax_ops._operator
    return jax.jit(function, donate_argnums=0)


def loop(call: Callable[..., Any], pool: jax.Array, x: Any, calls: int) -> tuple[float, jax.Array]:
    """Microseconds per call, and the pool after the last one."""
    jax.block_until_ready(pool)
    start = time.perf_counter()
    for _ in range(calls):
        output, pool = call(pool, x)
    elapsed = time.perf_counter() - start
    jax.block_until_ready((output, pool))
    return elapsed / calls * 1e6, pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", default=jax.default_backend().replace("gpu", "cuda"))
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = jax.devices(options.platform)[0]
    with tempfile.TemporaryDirectory() as folder:
        register_empty(Path(folder))
    calls = {"gdn_paged": step(), "empty": step("empty_")}
    rows = []
    for batch, heads in ((1, (1, 1)), (1, (16, 32)), (4, (16, 32))):
        x = operands(device, batch, heads, 128)
        best = dict.fromkeys(calls, float("inf"))
        pools = {name: jax.device_put(jnp.zeros((batch, heads[1], 128, 128)), device)
                 for name in calls}  # fmt: skip
        in_place = True
        for _ in range(options.repeats):
            for name, call in calls.items():
                address = pools[name].unsafe_buffer_pointer()
                cost, pools[name] = loop(call, pools[name], x, options.calls)
                in_place = in_place and pools[name].unsafe_buffer_pointer() == address
                best[name] = min(best[name], cost)
        ratio = best["gdn_paged"] / best["empty"]
        rows.append({"batch": batch, "heads": heads, **best, "ratio": ratio, "in_place": in_place})
        print(f"B {batch} heads {heads[0]}/{heads[1]}: decode {best['gdn_paged']:.1f} us, "
              f"empty {best['empty']:.1f} us, ratio {ratio:.2f}, "
              f"pool {'in place' if in_place else 'COPIED'}")  # fmt: skip
    report = {"jax": jax.__version__, "device": str(device), "rows": rows}
    if options.out:
        options.out.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

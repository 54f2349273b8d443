# mypy: allow-untyped-calls
"""XLA FFI calls of :mod:`gdn_paged.jax`: targets, checks while tracing, sizes of scratch memory."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CPU, CUDA = 1, 2
FLOATS = {"float32": 0x220, "bfloat16": 0x410, "float16": 0x210}
TABLES = {"int32": 0x020, "int64": 0x040}


@functools.cache
def extension() -> Any:
    """gdn_paged._jax_ffi with its handlers registered and the kernels of JAX's GPUs loaded."""
    try:
        _jax_ffi = importlib.import_module("gdn_paged._jax_ffi")
    except ImportError as error:
        raise ImportError(
            "gdn_paged.jax: this build of gdn_paged holds no XLA FFI handlers; build it with "
            "GDN_PAGED_JAX=1 pip install 'gdn_paged[jax]', or with jaxlib installed and "
            "--no-build-isolation"
        ) from error
    for name, (cpu, cuda) in _jax_ffi.targets.items():
        jax.ffi.register_ffi_target(name, cpu, platform="cpu")
        jax.ffi.register_ffi_target(name, cuda, platform="CUDA")
    from . import _core

    if _core.has_cuda:  # XLA may run a call for the first time inside a graph capture
        for device in cuda_devices():
            _core.preload(device)
    return _jax_ffi


@functools.cache
def cuda_devices() -> tuple[int, ...]:
    """CUDA device numbers of this process that JAX uses."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # JAX has no such backend
        return ()
    return tuple(device.local_hardware_id for device in devices)


# ---- checks ---------------------------------------------------------------------------------
def describe(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}"


def operand(
    name: str, x: Any, shape: tuple[int | None, ...], meaning: str, dtypes: Mapping[str, int]
) -> jax.Array:
    """`x` as an array of `shape` (None: any size) and of one of `dtypes`, or a ValueError."""
    if x is None:
        raise ValueError(f"{name}: None; expected an array {meaning}")
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: got {type(x).__name__}; expected an array {meaning}") from error
    if array.dtype.name not in dtypes:
        raise ValueError(f"{name}: {describe(array)}; expected {' or '.join(dtypes)}")
    fits = len(shape) == array.ndim and all(
        n in (None, m) for n, m in zip(shape, array.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: {describe(array)}; expected shape [{wanted}], {meaning}")
    return array


def row_name(backend: Any) -> str:
    if not isinstance(backend, str):
        raise ValueError(f'backend: {backend!r}; expected "auto" or the name of a kernel row')
    return "auto" if backend == "flashinfer" else backend


def thread_count(num_threads: Any) -> int:
    """0 to 1024; all of them if 0."""
    try:
        count = -1 if isinstance(num_threads, bool) else operator.index(num_threads)
    except TypeError:
        count = -1
    if not 0 <= count <= 1024:
        raise ValueError(f"num_threads: {num_threads!r}; expected an int of 0 to 1024")
    return count


class Heads(NamedTuple):
    """q, k, v of a call, checked; `lead` is the shape before the heads."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    lead: tuple[int, ...]

    @property
    def state(self) -> int:
        return max(self.q.shape[-2], self.v.shape[-2])

    def pool(self, x: Any) -> jax.Array:
        shape = (None, self.state, self.v.shape[-1], self.q.shape[-1])
        return operand("state_pool", x, shape, "[num_pages, H, V, K]", FLOATS)


def heads(q: Any, k: Any, v: Any, lead: tuple[int | None, ...], words: str) -> Heads:
    q = operand("q", q, (*lead, None, None), f"[{words}, Hq, K]", FLOATS)
    found = tuple(q.shape[:-2])
    same = {q.dtype.name: FLOATS[q.dtype.name]}
    k = operand("k", k, (*found, None, q.shape[-1]), f"[{words}, Hk, K] as in q", same)
    v = operand("v", v, (*found, None, None), f"[{words}, Hv, V] as in q", same)
    n_q, n_k, n_v = (x.shape[-2] for x in (q, k, v))
    gva = n_k == n_q and n_q > 0 and n_v % n_q == 0 and n_v >= n_q
    if not gva and not (n_k == n_v and n_v > 0 and n_q % n_v == 0 and n_q >= n_v):
        raise ValueError(
            f"q, k, v: {n_q}, {n_k} and {n_v} heads; expected Hv a multiple of Hq = Hk, "
            "or Hq a multiple of Hk = Hv"
        )
    return Heads(q, k, v, found)


def page_table(
    page_indices: Any, page_indptr: Any, last_page_len: Any, num_seqs: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    last = operand("last_page_len", last_page_len, (num_seqs,), "[num_seqs]", TABLES)
    ends = (last.shape[0] + 1,)
    return (
        operand("page_indices", page_indices, (None,), "[num_indices]", TABLES),
        operand("page_indptr", page_indptr, ends, "[num_seqs + 1]", TABLES),
        last,
    )


def initial_pages(initial_page_indices: Any, num_seqs: int) -> jax.Array | None:
    if initial_page_indices is None:
        return None
    return operand("initial_page_indices", initial_page_indices, (num_seqs,), "[num_seqs]", TABLES)


def sequences(cu_seqlens: Any) -> jax.Array:
    array = operand("cu_seqlens", cu_seqlens, (None,), "[num_seqs + 1]", TABLES)
    if array.shape[0] < 1:
        raise ValueError("cu_seqlens: 0 entries; expected num_seqs + 1")
    return array


def slot_arrays(slots: Any, names: tuple[str, ...], num_seqs: int) -> tuple[jax.Array | None, ...]:
    """The fields of `slots`, or as many None."""
    if slots is None:
        return (None,) * len(names)
    if not isinstance(slots, tuple) or len(slots) != len(names):
        raise ValueError(
            f"slots: got {type(slots).__name__}; expected the result of prefill_slots or "
            f"decode_slots with the fields {', '.join(names)}"
        )
    int32 = {"int32": TABLES["int32"]}
    return tuple(
        operand(f"slots.{name}", x, (num_seqs,), "[num_seqs]", int32)
        for name, x in zip(names, slots, strict=True)
    )


# ---- calls ----------------------------------------------------------------------------------
def _refusal(function: str, transformation: str, remedy: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"gdn_paged.jax.{function}: {transformation} is not supported; {remedy}"
        )

    return refuse


@functools.cache
def _operator(
    function: str,
    target: str,
    results: tuple[jax.ShapeDtypeStruct, ...],
    aliases: tuple[tuple[int, int], ...],
    attributes: tuple[tuple[str, Any], ...],
) -> Callable[..., Any]:
    call = jax.ffi.ffi_call(target, results, input_output_aliases=dict(aliases))
    values = {name: np.array(x) if isinstance(x, tuple) else x for name, x in attributes}
    batched = jax.custom_batching.custom_vmap(lambda *arrays: call(*arrays, **values))
    batched.def_vmap(
        _refusal(
            function,
            "jax.vmap",
            "a call serves a batch of sequences by itself: concatenate them (cu_seqlens, "
            "page_indptr), and map over heads or devices with jax.shard_map",
        )
    )
    differentiable = jax.custom_jvp(batched)
    differentiable.defjvp(
        _refusal(
            function,
            "differentiation",
            "gdn_paged has no backward: apply jax.lax.stop_gradient to its floating-point "
            "arguments",
        )
    )
    return differentiable


def call(
    function: str,
    target: str,
    results: tuple[jax.ShapeDtypeStruct, ...],
    operands: tuple[jax.Array | None, ...],
    pool: int | None = None,
    **attributes: Any,
) -> Any:
    """Runs an FFI target on the operands that are not None.

    Args:
        function: the public function, for error messages.
        pool: position of the operand that result 1 is, in place.
        attributes: ints, floats, strings, or tuples of ints.

    Returns:
        The results, in a list or tuple.
    """
    extension()
    given = [x for x in operands if x is not None]
    present = sum(1 << i for i, x in enumerate(operands) if x is not None)
    aliases: tuple[tuple[int, int], ...] = ()
    if pool is not None:
        aliases = ((sum(x is not None for x in operands[:pool]), 1),)
    wide = {int: np.int64, float: np.float64}
    attributes = {
        name: wide.get(type(x), lambda x: x)(x)
        for name, x in (attributes | {"present": present}).items()
    }
    run = _operator(function, target, results, aliases, tuple(sorted(attributes.items())))
    return run(*given)


def prefill_sizes(sizes: tuple[int, ...], num_seqs: int, backend: str) -> tuple[int, int]:
    """(bytes of workspace, bytes of plan): the most that the CPU or a GPU of JAX needs.

    Raises what the library says of the call if no platform can serve it.
    """
    found, refused = [], None
    for kind, device in ((CPU, 0), *((CUDA, number) for number in cuda_devices())):
        try:
            found.append(extension().prefill_sizes(sizes, kind, device, num_seqs, backend))
        except (ValueError, NotImplementedError, RuntimeError) as error:
            refused = error
    if not found and refused is not None:
        raise refused
    return max(x[0] for x in found), max(x[1] for x in found)

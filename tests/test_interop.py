"""Arrays of every framework, read-only and strided ones, and what may not be a destination."""

import importlib.util

import ml_dtypes
import numpy as np
import pytest

import gdn_paged
from arrays import native
from calls import page_table
from cases import make_decode, make_pool, make_prefill
from targets import available_targets

TABLE = page_table(64, ([5, 2], 60, 70), ([1], 0, 9))
CPU = {t.arrays.name: t for t in available_targets() if t.device == "cpu"}
needs_torch = pytest.mark.skipif("torch" not in CPU, reason="torch is not installed")
needs_jax = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="jax is not installed")


def prefill(target, io="bf16", pool=None, **options):
    call = make_prefill(540, TABLE)
    pool = target.pool(make_pool(540, 7, 4)).view if pool is None else pool
    return target.prefill(call, pool, io, options=options), pool


@needs_torch
@pytest.mark.parametrize("io", ["fp32", "bf16", "fp16"])
def test_frameworks_agree(io):
    """NumPy and torch give the same bytes."""
    results = [prefill(target, io) for target in CPU.values()]
    bits = [(t.bits(o), t.bits(p)) for t, (o, p) in zip(CPU.values(), results, strict=True)]
    assert np.array_equal(bits[0][0], bits[1][0]) and np.array_equal(bits[0][1], bits[1][1])


@needs_torch
def test_frameworks_mix():
    """NumPy tables beside torch operands on the CPU; the output is the framework of q."""
    torch, numpy = CPU["torch"], CPU["numpy"]
    tables = numpy.page_arguments(TABLE) | {"cu_seqlens": numpy.table(TABLE.cu_seqlens)}
    out, _ = prefill(torch, **tables)
    plain, _ = prefill(torch)
    assert type(out) is type(plain)
    assert np.array_equal(torch.bits(out), torch.bits(plain))


def test_numpy_bf16_is_ml_dtypes(target):
    if target.arrays.name != "numpy":
        pytest.skip("NumPy alone has no bf16 of its own")
    out, _ = prefill(target)
    assert type(out) is np.ndarray and out.dtype == ml_dtypes.bfloat16


def test_read_only_operands(target):
    """Operands and tables may be read-only; what is written may not."""
    if target.arrays.name != "numpy":
        pytest.skip("NumPy alone has read-only arrays")
    call = make_prefill(540, TABLE)
    arguments = target.prefill_arguments(call, "bf16")
    for x in arguments.values():
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    pool = target.pool(make_pool(540, 7, 4)).view
    out = gdn_paged.chunk_gated_delta_rule_paged(**arguments, state_pool=pool)
    assert np.array_equal(target.bits(out), target.bits(prefill(target)[0]))
    for name, array in (("state_pool", pool), ("output", out)):
        before = target.bits(array).copy()
        given = {"state_pool": pool, "output": out} | {name: array.view()}
        given[name].flags.writeable = False
        with pytest.raises(ValueError, match=f"{name}.*read-only.*writable"):
            gdn_paged.chunk_gated_delta_rule_paged(**arguments, **given)
        assert np.array_equal(target.bits(array), before)


def test_torch_views(target):
    """Slices, transposed and expanded tensors are read where they lie."""
    if target.arrays.name != "torch":
        pytest.skip("torch")
    torch = target.arrays.torch
    call = make_prefill(541, TABLE, g=np.full((19, 4), 0.9375), beta=np.full((19, 4), 0.5))
    pools = [target.pool(make_pool(541, 7, 4)).view for _ in range(2)]
    shared = {
        x: torch.full((1, 1), y, device=target.arrays.device).expand(19, 4)
        for x, y in (("g", 0.9375), ("beta", 0.5))
    }
    outs = [
        target.prefill(call, pool, "bf16", options=o)
        for pool, o in zip(pools, ({}, shared), strict=True)
    ]
    assert np.array_equal(*(target.bits(x) for x in outs))
    assert np.array_equal(*(target.bits(x) for x in pools))


def test_pool_is_a_slice_of_a_cache(target):
    """The pool is one layer of a larger cache, [rows, layers, H, V, K]."""
    rows = make_pool(542, 7, 4)
    cache = target.array(np.full((7, 3, *rows.shape[1:]), 9.0), "fp32")
    cache[:, 1] = target.array(rows, "fp32")
    out, _pool = prefill(target, pool=cache[:, 1])
    plain, plain_pool = prefill(target, pool=target.pool(rows).view)
    assert np.array_equal(target.bits(out), target.bits(plain))
    assert np.array_equal(target.bits(cache[:, 1]), target.bits(plain_pool))
    assert np.all(target.values(cache[:, 0]) == 9) and np.all(target.values(cache[:, 2]) == 9)


@needs_jax
def test_jax_array_as_operand_and_as_destination():
    """A jax.Array may be read on the CPU; it is immutable, so it may not be written."""
    import jax

    target, cpu = CPU["numpy"], jax.devices("cpu")[0]
    plain, _ = prefill(target, "fp32")
    q = jax.device_put(target.prefill_arguments(make_prefill(540, TABLE), "fp32")["q"], cpu)
    pool = target.pool(make_pool(540, 7, 4)).view
    output = np.zeros(plain.shape, plain.dtype)
    target.prefill(make_prefill(540, TABLE), pool, "fp32", options={"q": q, "output": output})
    assert np.array_equal(output, plain)
    with pytest.raises(ValueError, match=r"state_pool.*jax\.Array.*immutable"):
        target.prefill(make_prefill(540, TABLE), jax.device_put(pool, cpu), "fp32")


@pytest.mark.parametrize("bad", [[1.0, 2.0], object(), 3], ids=["list", "object", "int"])
def test_other_objects(target, bad):
    with pytest.raises(ValueError, match=r"q.*array"):
        prefill(target, q=bad)


def test_big_endian_and_odd_dtypes(target):
    if target.arrays.name != "numpy":
        pytest.skip("NumPy alone has them")
    swapped = native(make_prefill(540, TABLE).q, "fp32").astype(">f4")
    with pytest.raises(ValueError, match="q"):
        prefill(target, q=swapped)
    with pytest.raises(ValueError, match=r"q.*complex64"):
        prefill(target, q=np.zeros((19, 2, 64), np.complex64))


@needs_torch
def test_torch_subclass_and_parameter():
    torch = CPU["torch"].arrays.torch
    call = make_decode(543, page_table(64, ([5, 2], 64, 65), decode=True), dim=64)
    target, outs = CPU["torch"], []
    for wrap in (lambda x: x, torch.nn.Parameter):
        pool = target.pool(make_pool(543, 7, 4)).view
        arguments = target.decode_arguments(call, "bf16")
        arguments |= {name: wrap(arguments[name]) for name in ("A_log", "dt_bias")}
        outs.append(gdn_paged.gated_delta_rule_decode_paged(**arguments, state_pool=pool))
    assert np.array_equal(*(target.bits(x) for x in outs))


@needs_torch
def test_meta_tensors_are_refused():
    torch = CPU["torch"].arrays.torch
    with pytest.raises((ValueError, RuntimeError), match=r"q|meta"):
        prefill(CPU["torch"], q=torch.zeros((19, 2, 64), dtype=torch.bfloat16, device="meta"))


@needs_torch
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("names", [("torch", "numpy"), ("numpy", "torch")], ids="-".join)
def test_packed_initial_state_of_another_framework(names, dtype):
    """The final state is allocated like q and starts from the initial one."""
    target, other = CPU[names[0]], CPU[names[1]]
    x = target.array(np.ones((3, 1, 8)), "fp32")
    given = make_pool(540, 2, 1)[:, :, :8, :8]

    def final_state(framework):
        return gdn_paged.chunk_gated_delta_rule(
            x, x, x, cu_seqlens=target.table(np.array([0, 3, 3])), output_final_state=True,
            initial_state=framework.array(given, dtype),
        )[1]  # fmt: skip

    assert np.array_equal(target.bits(final_state(other)), target.bits(final_state(target)))


def test_dlpack_failures_are_value_errors(target):
    """A producer of the protocol without max_version, and one without a device type."""

    class Refuses:
        def __dlpack__(self):
            raise BufferError("not shared")

        def __dlpack_device__(self):
            return (1, 0)

    class NoDevice(Refuses):
        def __dlpack_device__(self):
            return None

    x, cu_seqlens = target.array(np.ones((3, 1, 8)), "fp32"), target.table(np.array([0, 3]))
    for bad in (Refuses(), NoDevice()):
        with pytest.raises(ValueError, match=r"^k: "):
            gdn_paged.chunk_gated_delta_rule(x, bad, x, cu_seqlens=cu_seqlens)

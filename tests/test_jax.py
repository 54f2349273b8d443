"""`gdn_paged.jax`: the cases through `jax.jit`, pools in place, scan, shard_map."""

import functools
import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("gdn_paged._jax_ffi", reason="this build holds no XLA FFI handlers")

import jax
import jax.numpy as jnp

import gdn_paged
import gdn_paged.jax
from arrays import NumpyArrays
from calls import page_table
from cases import CASES, make_decode, make_pool, make_prefill
from cases_more import MORE_CASES
from compare import bars, case_bars, problems, relative_error, truth_of
from jax_places import io_of, jax_targets, jitted
from targets import Target

NUMPY = Target(NumpyArrays(), "cpu", "cpu")
SPANS = (([5, 2], 60, 70), ([1], 0, 9), ([0, 3, 4], 40, 190))
TABLE = page_table(64, *SPANS)
DECODE_TABLE = page_table(64, ([5, 2], 64, 65), ([1], 8, 9), ([-1], 1, 2), decode=True)
DECODE_CALL = make_decode(730, DECODE_TABLE, dim=64)


def pytest_generate_tests(metafunc):
    if "place" in metafunc.fixturenames:
        found = jax_targets(metafunc.config.getoption("--targets").replace("jax-", ""))
        metafunc.parametrize("place", found, ids=lambda t: f"jax-{t.device}")


def prefill_arguments(place, seed=720, dim=64):
    call = make_prefill(seed, TABLE, dim=dim).cast(io_of(place))
    return place.prefill_arguments(call, io_of(place))


def decode_arguments(place, seed=730, dim=64):
    call = make_decode(seed, DECODE_TABLE, dim=dim).cast(io_of(place))
    return place.decode_arguments(call, io_of(place)) | {"backend": place.decode_row}


def pool_of(place, seed=720, dim=64):
    return place.pool(make_pool(seed, 7, 4, dim)).view


def numpy_result(place, name, seed, dim=64):
    """Output and pool of the same call on NumPy arrays, for the CPU's bytes."""
    make, run = {
        "prefill": (make_prefill(seed, TABLE, dim=dim), NUMPY.prefill),
        "decode": (make_decode(seed, DECODE_TABLE, dim=dim), NUMPY.decode),
    }[name]
    pool = NUMPY.pool(make_pool(seed, 7, 4, dim)).view
    return np.asarray(run(make, pool, io_of(place))), pool


def assert_close(place, got, expected):
    """The same bytes on the CPU, the bars of the kernels on a GPU."""
    for x, y in zip(got, expected, strict=True):
        x, y = (np.asarray(z) for z in (x, y))
        assert x.shape == y.shape and x.dtype == y.dtype
        if place.device == "cpu":
            assert np.array_equal(x, y)
        else:
            error = relative_error(x.reshape(len(x), -1), y.reshape(len(y), -1).astype(np.float64))
            assert error <= bars("cuda", "bf16").out


@pytest.mark.parametrize("io", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES + MORE_CASES, ids=str)
def test_case(place, case, io):
    """The list of cases, jitted, against the float64 truth."""
    if place.device != "cpu" and (io == "fp32" or case.cpu_only):
        pytest.skip("CUDA rows take 16-bit operands and head sizes 64 and 128")
    result = place.run(case, io)
    assert not problems(case, result, truth_of(case, io), case_bars(case, place.device, io))


def pool_copies(lowered, pool):
    """The instructions of the compiled program that copy something of the pool's shape."""
    shape = re.escape(f"f32[{','.join(map(str, pool.shape))}]")
    return re.findall(rf"{shape}\S* (?:copy|copy-start)\(.*", lowered.compile().as_text())


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_pool_in_place(place, name, dim):
    """Donated: the result is the memory of the argument, which is gone; nothing is copied."""
    arguments = {"prefill": prefill_arguments, "decode": decode_arguments}[name](place, 720, dim)
    function, arrays = jitted(getattr(gdn_paged.jax, f"paged_{name}"), arguments)
    pool = pool_of(place, 720, dim)
    address = pool.unsafe_buffer_pointer()
    assert not pool_copies(function.lower(**arrays, state_pool=pool), pool)
    output, after = function(**arrays, state_pool=pool)
    assert after.unsafe_buffer_pointer() == address and pool.is_deleted()
    assert_close(place, (output, after), numpy_result(place, name, 720, dim))


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_eager_call_keeps_its_pool(place, name):
    """Not donated: the argument keeps its values, the result is a new pool."""
    arguments = {"prefill": prefill_arguments, "decode": decode_arguments}[name](place, 720)
    pool = pool_of(place)
    before = np.array(pool)
    function, arrays = jitted(getattr(gdn_paged.jax, f"paged_{name}"), arguments, donated=False)
    assert pool_copies(function.lower(**arrays, state_pool=pool), pool)  # what donation saves
    result = getattr(gdn_paged.jax, f"paged_{name}")(**arguments, state_pool=pool)
    assert np.array_equal(pool, before) and not np.array_equal(result[1], before)
    assert_close(place, result, numpy_result(place, name, 720))


def test_slots_and_plan(place):
    """Slots as the library makes them; with slots and plan a call gives the same bytes."""
    arguments = prefill_arguments(place)
    tables = place.page_arguments(TABLE) | {"page_size": 64}
    slots = gdn_paged.jax.prefill_slots(cu_seqlens=arguments["cu_seqlens"], **tables)
    reference = gdn_paged.gdn_paged_prefill_slots(
        NUMPY.table(TABLE.cu_seqlens), page_size=64, **NUMPY.page_arguments(TABLE)
    )
    for x, y in zip(slots, reference, strict=True):
        assert x.dtype == jnp.int32 and np.array_equal(x, y)
    function, arrays = jitted(gdn_paged.jax.paged_prefill, arguments)
    plain = function(**arrays, state_pool=pool_of(place))
    pool = pool_of(place)
    plan = gdn_paged.jax.prefill_plan(
        **{x: arguments[x] for x in ("q", "k", "v", "cu_seqlens", "backend")}, **tables,
        state_pool=pool,
    )  # fmt: skip
    assert plan.dtype == jnp.uint8 and (plan.size > 0) == (place.device == "cuda")
    planned = function(**arrays, state_pool=pool, slots=slots, plan=plan)
    for x, y in zip(planned, plain, strict=True):
        assert np.array_equal(place.bits(x), place.bits(y))


def test_decode_slots(place):
    tables = place.page_arguments(DECODE_TABLE)
    slots = jax.jit(gdn_paged.jax.decode_slots)(**tables)
    assert [x.tolist() for x in slots] == [[5, 1, -1], [2, 1, -1]]
    arguments = decode_arguments(place)
    function, arrays = jitted(gdn_paged.jax.paged_decode, arguments)
    plain = function(**arrays, state_pool=pool_of(place))
    for x, y in zip(function(**arrays, state_pool=pool_of(place), slots=slots), plain, strict=True):
        assert np.array_equal(place.bits(x), place.bits(y))


def test_forks_on_unaligned_pages(place):
    """Two sequences start from page 6; the slots hold it, and a plan is made with it."""
    table = page_table(80, ([5, 2], 70, 90), ([1], 0, 9), ([0, 3, 4], 40, 170))
    table = replace(table, initial_pages=np.array([6, -1, 6]))
    call = make_prefill(740, table, dim=64)
    pool = NUMPY.pool(make_pool(740, 7, 4, 64)).view
    expected = (np.asarray(NUMPY.prefill(call, pool, io_of(place))), pool)
    got = place.prefill(call, pool_of(place, 740), io_of(place))
    assert_close(place, got, expected)
    tables = place.page_arguments(table) | {"page_size": 80, "allow_unaligned_pages": True}
    cu = place.table(table.cu_seqlens)
    slots = gdn_paged.jax.prefill_slots(cu_seqlens=cu, **tables)
    assert [x.tolist() for x in slots] == [[6, -1, 6], [2, 1, 4], [0, 2, 3], [70, 0, 40]]
    arguments = place.prefill_arguments(call.cast(io_of(place)), io_of(place))
    operands = {x: arguments[x] for x in ("q", "k", "v", "cu_seqlens", "backend")}
    pool = pool_of(place, 740)
    plan = gdn_paged.jax.prefill_plan(**operands, **tables, state_pool=pool)
    planned = place.prefill(call, pool, io_of(place), options={"plan": plan})
    for x, y in zip(planned, got, strict=True):
        assert np.array_equal(place.bits(x), place.bits(y))
    step = replace(DECODE_TABLE, initial_pages=np.array([3, -1, 3]))
    slots = gdn_paged.jax.decode_slots(**place.page_arguments(step))
    assert [x.tolist() for x in slots] == [[3, 1, -1], [2, 1, -1]]
    with pytest.raises(ValueError, match="or allow_unaligned_pages"):
        gdn_paged.jax.prefill_slots(cu_seqlens=cu, **tables | {"allow_unaligned_pages": False})


def x64():
    """64-bit types, which JAX has only on request."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # before jax 0.8

    return enable_x64()


def test_int64_tables(place):
    expected = [place.bits(x) for x in place.decode(DECODE_CALL, pool_of(place), io_of(place))]
    with x64():
        tables = place.page_arguments(DECODE_TABLE, "int64")
        assert {x.dtype.name for x in tables.values()} == {"int64"}
        result = place.decode(DECODE_CALL, pool_of(place), io_of(place), options=tables)
    for x, y in zip(result, expected, strict=True):
        assert np.array_equal(place.bits(x), y)


def step_arguments(place, steps):
    """Decode operands [steps, B, 1, ...] of rows whose last page has room for all of them."""
    table = page_table(64, ([5, 2], 70, 71), ([1], 8, 9), decode=True)
    calls = [make_decode(740 + 7 * i, table, dim=64).cast(io_of(place)) for i in range(steps)]
    every = [place.decode_arguments(call, io_of(place)) for call in calls]
    changing = {x: jnp.stack([a[x] for a in every]) for x in ("q", "k", "v", "a", "b")}
    fixed = {x: y for x, y in every[0].items() if x not in changing}
    return changing, fixed | {"backend": place.decode_row}


def test_scan(place):
    """The pool is the carry of `lax.scan`: in place, and the bytes of single calls."""
    changing, fixed = step_arguments(place, 5)

    def step(pool, operands):
        output, pool = gdn_paged.jax.paged_decode(**operands, **fixed, state_pool=pool)
        return pool, output

    pool = pool_of(place)
    address = pool.unsafe_buffer_pointer()
    loop = jax.jit(lambda pool, changing: jax.lax.scan(step, pool, changing), donate_argnums=0)
    assert not pool_copies(loop.lower(pool, changing), pool)
    pool, outputs = loop(pool, changing)
    assert pool.unsafe_buffer_pointer() == address
    single = pool_of(place)
    for i, output in enumerate(outputs):
        operands = {name: x[i] for name, x in changing.items()}
        expected, single = gdn_paged.jax.paged_decode(**operands, **fixed, state_pool=single)
        assert np.array_equal(place.bits(output), place.bits(expected))
    assert np.array_equal(place.bits(pool), place.bits(single))


def test_layers_in_one_jit(place):
    """Slots and plan made inside the function that runs two layers, each on a pool of its own."""
    arguments = prefill_arguments(place, dim=128)
    tables = {x: arguments.pop(x) for x in ("page_indices", "page_indptr", "last_page_len")}
    page_size, backend = arguments.pop("page_size"), arguments.pop("backend")
    options = {x: y for x, y in arguments.items() if not hasattr(y, "dtype")}
    arrays = {x: y for x, y in arguments.items() if hasattr(y, "dtype")}

    @functools.partial(jax.jit, donate_argnames="pools")
    def step(arrays, tables, pools):
        common = {**tables, "page_size": page_size, "backend": backend}
        slots = gdn_paged.jax.prefill_slots(arrays["cu_seqlens"], page_size=page_size, **tables)
        plan = gdn_paged.jax.prefill_plan(
            arrays["q"], arrays["k"], arrays["v"], cu_seqlens=arrays["cu_seqlens"],
            state_pool=pools[0], slots=slots, **common,
        )  # fmt: skip
        results = [
            gdn_paged.jax.paged_prefill(
                **arrays, **options, **common, state_pool=pool, slots=slots, plan=plan
            )
            for pool in pools
        ]
        return [x for x, _ in results], [x for _, x in results]

    pools = [pool_of(place, dim=128) for _ in range(2)]
    addresses = [pool.unsafe_buffer_pointer() for pool in pools]
    outputs, pools = step(arrays, tables, pools)
    assert [pool.unsafe_buffer_pointer() for pool in pools] == addresses
    for output, pool in zip(outputs, pools, strict=True):
        assert_close(place, (output, pool), numpy_result(place, "prefill", 720, 128))


def shard_map(function, **options):
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, **options)
    from jax.experimental.shard_map import shard_map  # before jax 0.7

    return shard_map(function, **options)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_heads_over_devices(place, name):
    """Two devices run two heads each: the bytes of one device with all of them, in place."""
    devices = jax.devices(place.device)
    if len(devices) < 2:
        pytest.skip("one device")
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("heads",))
    spec = jax.sharding.PartitionSpec
    arguments = {"prefill": prefill_arguments, "decode": decode_arguments}[name](place, 720)
    function, arrays = jitted(getattr(gdn_paged.jax, f"paged_{name}"), arguments)
    pool = pool_of(place)
    expected = [place.bits(x) for x in function(**arrays, state_pool=pool)]
    heads = 1 if name == "prefill" else 2
    split = {x: spec(*(None,) * heads, "heads") for x in ("q", "k", "v", "g", "beta", "a", "b")}
    split |= {"A_log": spec("heads"), "dt_bias": spec("heads"), "state_pool": spec(None, "heads")}
    arrays = {x: y for x, y in arrays.items() if y is not None}
    specs = {x: split.get(x, spec()) for x in (*arrays, "state_pool")}
    mapped = shard_map(lambda x: function(**x), mesh=mesh, in_specs=(specs,),
                       out_specs=(split["q"], split["state_pool"]))  # fmt: skip
    placed = {
        x: jax.device_put(np.asarray(y), jax.sharding.NamedSharding(mesh, specs[x]))
        for x, y in (arrays | {"state_pool": pool_of(place)}).items()
    }
    addresses = [x.data.unsafe_buffer_pointer() for x in placed["state_pool"].addressable_shards]
    output, pool = jax.jit(mapped, donate_argnums=0)(placed)
    assert [x.data.unsafe_buffer_pointer() for x in pool.addressable_shards] == addresses
    for x, y in zip((output, pool), expected, strict=True):
        assert np.array_equal(place.bits(x), y)


def test_new_tables_do_not_trace_again(place):
    arguments = decode_arguments(place)
    function, arrays = jitted(gdn_paged.jax.paged_decode, arguments)
    _, pool = function(**arrays, state_pool=pool_of(place))
    other = page_table(64, ([5, 6], 64, 65), ([3], 8, 9), ([0], 1, 2), decode=True)
    function(**arrays | place.page_arguments(other), state_pool=pool)
    assert function._cache_size() == 1

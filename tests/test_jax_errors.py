"""What `gdn_paged.jax` refuses, in words, and when: while tracing wherever it can be told then."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("gdn_paged._jax_ffi", reason="this build holds no XLA FFI handlers")

import jax_places  # noqa: F401, I001  (before JAX looks for devices)
import jax
import jax.numpy as jnp

import gdn_paged.jax
from test_jax import DECODE_TABLE, decode_arguments, pool_of, prefill_arguments
from test_jax import pytest_generate_tests as pytest_generate_tests

FUNCTIONS = {
    "prefill": (gdn_paged.jax.paged_prefill, prefill_arguments),
    "decode": (gdn_paged.jax.paged_decode, decode_arguments),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def call_of(place, name, **changes):
    """The call as a function of q, with `changes` to its arguments."""
    function, make = FUNCTIONS[name]
    arguments = {**make(place), "state_pool": pool_of(place), **changes}
    q = arguments.pop("q")
    return lambda q=q: function(q, **arguments)


@each_function
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_vmap(place, name, compiled):
    wrap = jax.jit if compiled else lambda f: f
    q = FUNCTIONS[name][1](place)["q"]
    with pytest.raises(NotImplementedError, match=rf"paged_{name}: jax\.vmap is not supported.*"
                       "concatenate"):  # fmt: skip
        wrap(jax.vmap(call_of(place, name)))(jnp.stack([q, q]))


@each_function
@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f)),
                                       lambda f: jax.grad(jax.jit(f))],
                         ids=["grad", "jit-grad", "grad-jit"])  # fmt: skip
def test_grad(place, name, transform):
    call = call_of(place, name)
    q = FUNCTIONS[name][1](place)["q"]
    with pytest.raises(NotImplementedError, match=rf"paged_{name}: differentiation is not "
                       "supported.*no backward.*stop_gradient"):  # fmt: skip
        transform(lambda q: call(q)[0].astype(jnp.float32).sum())(q)


@each_function
def test_gradient_stops_before_the_call(place, name):
    """A loss with the call in it has a gradient where none goes through the call."""
    call = call_of(place, name)
    q = FUNCTIONS[name][1](place)["q"]

    def loss(weight):
        output, _ = call(jax.lax.stop_gradient(q * weight))
        return (output.astype(jnp.float32) * weight).sum()

    weight = jnp.ones((), q.dtype)
    expected = call(q)[0].astype(jnp.float32).sum()
    assert jnp.allclose(jax.grad(loss)(weight).astype(jnp.float32), expected, rtol=1e-2, atol=1e-2)


def changed(value):
    return lambda x: value if not callable(value) else value(x)


@each_function
@pytest.mark.parametrize("argument, value, text", [
    ("q", lambda x: x.astype(jnp.int32), r"^q: int32 \[.*expected float32 or bfloat16 or float16"),
    ("k", lambda x: x[..., :32], r"^k: \w+ \[.*32\]; expected shape \[.*64\], .* as in q"),
    ("v", lambda x: x.astype(jnp.float16), r"^v: float16 \[.*; expected (float32|bfloat16)"),
    ("v", lambda x: x[..., :1, :], r"^q, k, v: 2, 2 and 1 heads; expected Hv a multiple"),
    ("state_pool", lambda x: x[:, :2], r"^state_pool: .*; expected shape \[any, 4, 64, 64\]"),
    ("page_indptr", lambda x: x[1:], r"^page_indptr: int32 \[3\]; expected shape \[4\]"),
    ("last_page_len", lambda x: x * 1.0, r"^last_page_len: float32 \[3\]; expected int32 or int64"),
    ("page_indices", None, r"^page_indices: None; expected an array \[num_indices\]"),
    ("k", "text", r"^k: got str; expected an array"),
    ("slots", 3, r"^slots: got int; expected the result of"),
    ("backend", None, r"^backend: None; expected .auto. or the name"),
    ("num_threads", -1, r"^num_threads: -1; expected an int of 0 to 1024"),
    ("num_threads", True, r"^num_threads: True; expected an int"),
    ("deterministic", "no", r'^deterministic: \'no\'; expected None or "batch"'),
])  # fmt: skip
def test_arguments(place, name, argument, value, text):
    function, make = FUNCTIONS[name]
    arguments = {**make(place), "state_pool": pool_of(place)}
    arguments[argument] = changed(value)(arguments.get(argument))
    with pytest.raises(ValueError, match=text):
        function(**arguments)


@pytest.mark.parametrize("change, text", [
    ({"page_size": 96}, "^page_size: 96 given, a positive multiple of 64 expected"),
    ({"page_size": True}, "^page_size: True given"),
    ({"gate_domain": "ln"}, '^gate_domain: \'ln\'; expected "linear" or "log"'),
    ({"A_log": np.zeros(4)}, "^A_log: given; expected use_gate_in_kernel=True"),
    ({"use_gate_in_kernel": True}, "^A_log: None; use_gate_in_kernel=True expects"),
    ({"beta": None, "beta_is_logit": True}, "^beta: None; beta_is_logit=True expects"),
    ({"cu_seqlens": np.zeros(0, np.int32)}, r"^cu_seqlens: 0 entries; expected num_seqs \+ 1"),
    ({"g": np.zeros((5, 4), np.float32)}, r"^g: float32 \[5, 4\]; expected shape \[169, 4\]"),
    ({"plan": np.zeros(4, np.float32)}, r"^plan: float32 \[4\]; expected uint8"),
])  # fmt: skip
def test_prefill_arguments(place, change, text):
    with pytest.raises(ValueError, match=text):
        call_of(place, "prefill", **change)()


def test_no_row_is_told_while_tracing(place):
    arguments = {**prefill_arguments(place), "state_pool": pool_of(place)[..., :4]}
    arguments |= {x: arguments[x][..., :4] for x in ("q", "k")}
    with pytest.raises(NotImplementedError, match=r"no kernel row serves|refuses this prefill"):
        jax.make_jaxpr(lambda: gdn_paged.jax.paged_prefill(**arguments))()


def test_what_only_the_run_can_tell(place):
    """The library's own text, with the status as XLA's code; later calls run."""
    unknown = {"backend": "nowhere"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: gdn_paged: backend: "
                       "'nowhere' given"):  # fmt: skip
        jax.block_until_ready(call_of(place, "decode", **unknown)())
    assert jnp.isfinite(call_of(place, "decode")()[0]).all()


def test_broken_table_gives_zero(place):
    """A sequence with a broken table stores nothing, its output is zero; the others run."""
    tables = place.page_arguments(DECODE_TABLE)
    good, _ = call_of(place, "decode")()
    output, pool = call_of(place, "decode", page_indices=tables["page_indices"].at[2].set(99))()
    assert not output[1].any() and np.array_equal(place.bits(output[0]), place.bits(good[0]))
    assert np.array_equal(place.bits(pool[1]), place.bits(pool_of(place)[1]))


def test_without_the_extension():
    """A build without XLA's headers says what to do."""
    code = """
import sys
sys.modules["gdn_paged._jax_ffi"] = None
import numpy as np, gdn_paged.jax
x = np.zeros(1, np.int32)
try:
    gdn_paged.jax.decode_slots(x, np.zeros(2, np.int32), x)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "holds no XLA FFI handlers" in done.stdout and "GDN_PAGED_JAX=1" in done.stdout

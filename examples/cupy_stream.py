"""CuPy on a GPU: bf16 arrays by ml_dtypes, a stream of its own, a decode step as a CUDA graph."""

import sys

import ml_dtypes
import numpy as np

import gdn_paged

try:
    import cupy
except ImportError:
    print("CuPy is not installed: this example needs it and a GPU")
    sys.exit()
if not (gdn_paged.has_cuda() and cupy.cuda.is_available()):
    print("no GPU, or a build without CUDA: this example needs both")
    sys.exit()

PAGE_SIZE, HEADS_QK, HEADS_V, DIM = 64, 2, 4, 128
BF16 = ml_dtypes.bfloat16
rng = np.random.default_rng(0)


def bf16(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(BF16)


def device(x: np.ndarray) -> cupy.ndarray:
    """A copy on the GPU. ml_dtypes.bfloat16 is the dtype of the array there too."""
    return cupy.asarray(x.view(np.uint16)).view(BF16) if x.dtype == BF16 else cupy.asarray(x)


def host(x: cupy.ndarray) -> np.ndarray:
    return cupy.asnumpy(x.view(np.uint16)).view(BF16) if x.dtype == BF16 else cupy.asnumpy(x)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def difference(x: np.ndarray, y: np.ndarray) -> float:
    """Relative L2 norm."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


tokens = {"q": bf16(150, HEADS_QK, DIM), "k": bf16(150, HEADS_QK, DIM)}
tokens |= {"v": bf16(150, HEADS_V, DIM)}
tokens |= {"g": rng.uniform(0.8, 1, (150, HEADS_V)).astype(np.float32)}
pages = {"page_indices": int32(5, 2, 7), "page_indptr": int32(0, 3)}
prompt = tokens | pages | {"cu_seqlens": int32(0, 150), "last_page_len": int32(22)}
step = {"q": bf16(1, 1, HEADS_QK, DIM), "k": bf16(1, 1, HEADS_QK, DIM)}
step |= {"v": bf16(1, 1, HEADS_V, DIM), "a": bf16(1, 1, HEADS_V), "b": bf16(1, 1, HEADS_V)}
step |= {"A_log": np.zeros(HEADS_V, np.float32), "dt_bias": np.full(HEADS_V, -3, np.float32)}
step |= pages | {"last_page_len": int32(23)}
options = {"page_size": PAGE_SIZE, "use_qk_l2norm_in_kernel": True}

# The same three calls on NumPy arrays, by the CPU backend.
expected_pool = np.zeros((8, HEADS_V, DIM, DIM), np.float32)
expected = [gdn_paged.chunk_gated_delta_rule_paged(**prompt, **options, state_pool=expected_pool)]
for last in (23, 24):
    step["last_page_len"][:] = last
    expected += [gdn_paged.gated_delta_rule_decode_paged(**step, state_pool=expected_pool)]

gdn_paged.preload(cupy.cuda.Device().id)  # nothing may be loaded while a graph is captured
step["last_page_len"][:] = 23
stream = cupy.cuda.Stream(non_blocking=True)
with stream:  # calls run on the current stream of CuPy; or pass stream=
    pool = cupy.zeros((8, HEADS_V, DIM, DIM), np.float32)
    outputs = [gdn_paged.chunk_gated_delta_rule_paged(
        **{name: device(x) for name, x in prompt.items()}, **options, state_pool=pool)]  # fmt: skip
    arrays = {name: device(x) for name, x in step.items()}
    output = cupy.empty((1, 1, HEADS_V, DIM), np.uint16).view(BF16)
    stream.begin_capture()
    gdn_paged.gated_delta_rule_decode_paged(**arrays, output=output, state_pool=pool)
    graph = stream.end_capture()
    for _ in range(2):  # replays read the tables anew
        graph.launch(stream)
        outputs.append(output.copy())
        arrays["last_page_len"] += 1
stream.synchronize()

for name, got, want in (
    ("prefill", outputs[0], expected[0]),
    ("decode, first replay", outputs[1], expected[1]),
    ("decode, second replay", outputs[2], expected[2]),
    ("states", pool[[5, 2, 7]], expected_pool[[5, 2, 7]]),
):
    error = difference(host(got), want)
    print(f"{name}: GPU and CPU differ by {error:.1e} (relative L2)")
    assert error <= 2e-2

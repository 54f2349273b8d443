"""Decode launches are cut by the size of the batch, and start before the kernel ahead of them ends;
a row's bytes depend on neither."""

import pytest

import gdn_paged

HEADS = 8
SMALL = 4  # rows per call of the reference: few states, one kernel

# Its successors may start at once, and then it replaces their slots.
REPLACE = r"""
extern "C" __global__ void replace(int* slots, const int* others, int count) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const long long start = clock64();
  while (clock64() - start < 200000) {}
  for (int i = threadIdx.x; i < count; i += blockDim.x) slots[i] = others[i];
}
"""


def decode(torch, operands, pool, rows):
    q, k, v, a, b, A_log, slots = operands
    output, state = gdn_paged.gated_delta_rule_decode_pretranspose(
        q[rows],
        k[rows],
        v[rows],
        None,
        A_log,
        a[rows],
        None,
        b[rows],
        initial_state=pool,
        initial_state_indices=slots[rows],
        output_state_indices=slots[rows],
    )
    assert state.data_ptr() == pool.data_ptr()
    return output


@pytest.mark.parametrize("batch", [1, 9, 18, 40, 70, 140, 300, 600])
@pytest.mark.parametrize("dim", [64, 128], ids="cuts-{}".format)
@pytest.mark.parametrize("state", ["float32", "bfloat16", "float16"])
def test_batch_gives_the_bytes_of_small_calls(torch_cuda, state, dim, batch):
    torch = torch_cuda.arrays.torch
    generator = torch.Generator(device="cuda").manual_seed(batch)

    def randn(*shape):
        return torch.randn(*shape, device="cuda", generator=generator).to(torch.bfloat16)

    q, k, v = (randn(batch, 1, HEADS, dim) for _ in range(3))
    a, b = randn(batch, 1, HEADS), randn(batch, 1, HEADS)
    A_log = torch.zeros(HEADS, device="cuda")
    slots = torch.randperm(batch, device="cuda", generator=generator).to(torch.int32)
    operands = (q, k, v, a, b, A_log, slots)
    pool = randn(batch, HEADS, dim, dim).to(getattr(torch, state))
    expected_pool = pool.clone()
    expected = torch.cat(
        [
            decode(torch, operands, expected_pool, slice(i, min(i + SMALL, batch)))
            for i in range(0, batch, SMALL)
        ]
    )
    output = decode(torch, operands, pool, slice(None))
    assert torch.isfinite(output).all()
    assert torch.equal(output, expected)
    assert torch.equal(pool, expected_pool)


@pytest.mark.parametrize("batch", [1, 9, 40])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_slots_that_an_unfinished_kernel_replaces(torch_cuda, state, batch):
    torch = torch_cuda.arrays.torch
    cupy = pytest.importorskip("cupy")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels overlap from sm_90 on")
    replace = cupy.RawKernel(REPLACE, "replace")
    generator = torch.Generator(device="cuda").manual_seed(batch)

    def randn(*shape):
        return torch.randn(*shape, device="cuda", generator=generator).to(torch.bfloat16)

    heads, dim = 32, 128
    q, k, v = (randn(batch, 1, heads, dim) for _ in range(3))
    a, b = randn(batch, 1, heads), randn(batch, 1, heads)
    A_log = torch.zeros(heads, device="cuda")
    order = torch.randperm(2 * batch, device="cuda", generator=generator).to(torch.int32)
    right, wrong = order[:batch].clone(), order[batch:].clone()
    right[1::7] = -1
    wrong[1::5] = -1
    wrong[2::5] = right[2::5]
    wrong[3::5] = 2 * batch
    pool = randn(2 * batch, heads, dim, dim).to(getattr(torch, state))
    expected_pool = pool.clone()
    expected = decode(torch, (q, k, v, a, b, A_log, right), expected_pool, slice(None))
    slots, stream = wrong.clone(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        for _ in range(20):
            run = pool.clone()
            slots.copy_(wrong)
            arguments = (cupy.from_dlpack(slots), cupy.from_dlpack(right), cupy.int32(batch))
            replace((1,), (64,), arguments)
            output = decode(torch, (q, k, v, a, b, A_log, slots), run, slice(None))
            assert torch.equal(output, expected)
            assert torch.equal(run, expected_pool)

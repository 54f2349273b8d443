"""Decode launches are cut by the size of the batch; a row's bytes do not depend on the cut."""

import pytest

import gdn_paged

HEADS = 8
SMALL = 4  # rows per call of the reference: few states, one kernel


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

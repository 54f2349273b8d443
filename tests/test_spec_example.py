"""The specification's example: 2500 tokens on pages [7, 3, 12], the first 2048 of them cached."""

import numpy as np

import gdn_paged
from calls import page_table
from cases import make_pool, make_prefill
from compare import bars, relative_error
from oracle import Oracle

PAGE, TOTAL, CACHED, D, HEADS = 1024, 2500, 2048, 128, (2, 4)
WHOLE = make_prefill(2500, page_table(PAGE, ([7, 3, 12], 0, TOTAL)), HEADS, D)


def arrays(target, begin, end):
    names = ("q", "k", "v"), ("g", "beta")
    operands = [target.array(getattr(WHOLE, x)[begin:end], "bf16") for x in names[0]]
    return operands + [target.array(getattr(WHOLE, x)[begin:end], "fp32") for x in names[1]]


def test_example(target):
    pool = target.pool(make_pool(2500, 16, max(HEADS), D)).view

    # Another request has left the shared prefix in pages 7 and 3.
    q, k, v, g, beta = arrays(target, 0, CACHED)
    gdn_paged.chunk_gated_delta_rule_paged(
        q,
        k,
        v,
        g,
        beta,
        cu_seqlens=target.table([0, CACHED]),
        state_pool=pool,
        page_indices=target.table([7, 3]),
        page_indptr=target.table([0, 2]),
        page_size=PAGE,
        last_page_len=target.table([1024]),
    )
    before = target.bits(pool).copy()

    # Prefill a 2500-token prompt whose first 2048 tokens are cached in pages [7, 3]; 12 is new.
    q, k, v, g, beta = arrays(target, CACHED, TOTAL)
    assert tuple(q.shape) == (452, 2, 128) and tuple(v.shape) == (452, 4, 128)
    out = gdn_paged.chunk_gated_delta_rule_paged(
        q,
        k,
        v,
        g,
        beta,
        cu_seqlens=target.table([0, 452]),
        state_pool=pool,
        page_indices=target.table([7, 3, 12]),
        page_indptr=target.table([0, 3]),
        page_size=PAGE,
        last_page_len=target.table([452]),
    )

    # Reads page 3, writes page 12; pages 7 and 3 are unchanged.
    changed = (target.bits(pool) != before).reshape(16, -1).any(axis=1)
    assert np.flatnonzero(changed).tolist() == [12]
    assert tuple(out.shape) == (452, 4, 128)

    truth = make_pool(2500, 16, max(HEADS), D)
    expected = Oracle().prefill(WHOLE, truth, "bf16")[CACHED:]
    allowed = bars(target.device, "bf16")
    assert relative_error(target.values(out), expected) <= allowed.out
    assert relative_error(target.values(pool), truth) <= allowed.rows


def test_example_decodes_on(target):
    """The next token of the prompt continues page 12 in place: token 2501, last_page_len 453."""
    from cases import make_decode

    table = page_table(PAGE, ([7, 3, 12], TOTAL, TOTAL + 1), decode=True)
    assert table.last_page_len.tolist() == [453]
    call, start = make_decode(2501, table, HEADS, D), make_pool(2500, 16, max(HEADS), D)
    pool, truth = target.pool(start).view, start.copy()
    out = target.decode(call, pool, "bf16")
    expected = Oracle().decode(call, truth)
    allowed = bars(target.device, "bf16")
    assert tuple(out.shape) == (1, 1, 4, 128)
    assert relative_error(target.values(out)[:, 0], expected) <= allowed.out
    assert relative_error(target.values(pool), truth) <= allowed.rows

"""Context parallelism: one long prompt whose tokens lie on several devices.

    torchrun --nproc-per-node 4 examples/torch_context_parallel.py
    python examples/torch_context_parallel.py     # the same with four processes on the CPU

Over a run of tokens the state moves by an affine map, S_end = S_start M + N, with M [K, K] and N
[V, K] per head. So each process

1. begins its tokens (`segment_begin`): all work that does not need the state before them, and their
   map; the first process knows that state and gets the state after its tokens instead;
2. receives the maps of the others, 128 KB a head, and combines those before it
   (`segment_combine`) into the state before its own tokens;
3. finishes: outputs and page ends as one device gives them.

The pages of the prefix lie with other processes, so they are -1 in the table. Splitting heads
(torch_tensor_parallel.py) is cheaper where each device can have all tokens.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import gdn_paged

NUM_QK_HEADS, NUM_V_HEADS, HEAD_DIM, PAGE_SIZE = 2, 4, 128, 128
PAGES_EACH, LAST_PAGE = 2, 77  # pages of a process; tokens on the last page of the prompt
Operands = dict[str, torch.Tensor]


def prompt(size: int, device: torch.device, dtype: torch.dtype) -> Operands:
    """Projections of all tokens, the same in every process."""
    tokens = (size * PAGES_EACH - 1) * PAGE_SIZE + LAST_PAGE
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn((tokens, *shape), generator=generator)

    qk, v = (NUM_QK_HEADS, HEAD_DIM), (NUM_V_HEADS, HEAD_DIM)
    gates = {
        "g": 1 - torch.sigmoid(normal(NUM_V_HEADS)) / 64,
        "beta": torch.sigmoid(normal(NUM_V_HEADS)),
    }
    operands = {"q": normal(*qk), "k": normal(*qk), "v": normal(*v)}
    moved = {name: x.to(device, dtype) for name, x in operands.items()}
    return moved | {name: x.to(device) for name, x in gates.items()}


def int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def begin(x: Operands, pages_before: int, pool: torch.Tensor, **segment) -> gdn_paged.Segment:
    """The tokens in `x` after `pages_before` full pages of others, on the rows of `pool`."""
    device, own = pool.device, len(pool)
    return gdn_paged.segment_begin(
        **x, cu_seqlens=int32([0, len(x["v"])], device), state_pool=pool, page_size=PAGE_SIZE,
        page_indices=int32([-1] * pages_before + list(range(own)), device),
        page_indptr=int32([0, pages_before + own], device),
        last_page_len=int32([len(x["v"]) - (own - 1) * PAGE_SIZE], device),
        use_qk_l2norm_in_kernel=True, **segment,
    )  # fmt: skip


def prefill(x: Operands, pool: torch.Tensor) -> torch.Tensor:
    """All tokens on one device."""
    device, own = pool.device, len(pool)
    return gdn_paged.chunk_gated_delta_rule_paged(
        **x, cu_seqlens=int32([0, len(x["v"])], device), state_pool=pool, page_size=PAGE_SIZE,
        page_indices=int32(list(range(own)), device), page_indptr=int32([0, own], device),
        last_page_len=int32([len(x["v"]) - (own - 1) * PAGE_SIZE], device),
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def new_pool(pages: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(pages, NUM_V_HEADS, HEAD_DIM, HEAD_DIM, device=device)


def relative(x: torch.Tensor, expected: torch.Tensor) -> float:
    return ((x.float() - expected.float()).norm() / expected.float().norm()).item()


@torch.inference_mode()
def run(device: torch.device) -> None:
    """This process's tokens, compared with a run of all of them on its device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x = prompt(size, device, dtype)
    begin_token, end_token = (i * PAGES_EACH * PAGE_SIZE for i in (rank, rank + 1))
    mine = {name: y[begin_token:end_token] for name, y in x.items()}

    # One buffer a process for its map: a first segment has N alone, a last one is asked for none.
    own = torch.zeros(2, NUM_V_HEADS, HEAD_DIM, HEAD_DIM, device=device)
    state = torch.zeros_like(own[0])
    given = {"initial_state": state} if rank else {}
    if rank == size - 1:
        given["last"] = True
    else:
        given |= {"transition": own[0], "offset": own[1]} if rank else {"offset": own[1]}
    pool = new_pool(PAGES_EACH, device)
    segment = begin(mine, rank * PAGES_EACH, pool, **given)
    maps = torch.empty(size, *own.shape, device=device)
    dist.all_gather(list(maps), own)
    if rank:
        gdn_paged.segment_combine(maps[:rank, 0], maps[:rank, 1], state=state)
    output = segment.finish()

    whole = new_pool(size * PAGES_EACH, device)
    expected = prefill(x, whole)
    tolerance = 1e-5 if device.type == "cpu" else 2e-2
    first = rank * PAGES_EACH
    errors = {
        "outputs": relative(output, expected[begin_token:end_token]),
        "page ends": relative(pool, whole[first : first + PAGES_EACH]),
    }
    if rank:  # and the first state would not do
        assert relative(state, whole[first - 1]) <= tolerance
        state.zero_()
        wrong = begin(mine, first, torch.zeros_like(pool), initial_state=state, last=True).finish()
        assert relative(wrong, expected[begin_token:end_token]) > 10 * tolerance
    assert max(errors.values()) <= tolerance, errors
    worst = torch.tensor(list(errors.values()), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{size} processes on {device.type} ({dist.get_backend()}): {len(x['v'])} tokens")
        for name, error in zip(errors, worst.tolist(), strict=True):
            print(f"{name:<10} differ from those of one device by {error:.1e} (relative L2)")


def start(rank: int, size: int, store: str | None = None) -> None:
    """Joins the group of `size` processes; `store` is a file, None: torchrun's own."""
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", f"file://{store}" if store else "env://",
        rank=rank, world_size=size, device_id=device if on_gpu else None,
    )  # fmt: skip
    try:
        run(device)
    finally:
        dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:  # torchrun
        start(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        return
    size = 4
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        torch.multiprocessing.spawn(start, args=(size, store), nprocs=size)


if __name__ == "__main__":
    main()

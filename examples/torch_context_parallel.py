"""Context parallelism: one long prompt whose tokens lie on several devices.

    torchrun --nproc-per-node 4 examples/torch_context_parallel.py
    python examples/torch_context_parallel.py     # the same with four processes on the CPU

Over a run of tokens the state moves by an affine map, S_end = S_start M + N, with M [K, K] and N
[V, K] per head. So each process

1. forms the map of its own tokens (`summary`): N is where the zero state ends; M is where the
   identity ends if every v is zero, which the same call computes since K = V;
2. receives the maps of the others, 128 KB a head, and folds those before it (`combine`);
3. puts the state before its tokens on the page that ends there, and runs an ordinary paged prefill
   that finds its prefix cached (`resume`): outputs and page ends as one device gives them.

Three passes over 1 / size of the tokens replace one over all: it pays from four devices on, and
for prompts that fit no single one. Splitting heads (torch_tensor_parallel.py) is cheaper.
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


def summary(x: Operands) -> torch.Tensor:
    """M and N of the tokens in `x`: fp32 ``[2, H, 128, 128]``."""
    device = x["v"].device
    identity = torch.eye(HEAD_DIM, device=device).expand(1, NUM_V_HEADS, -1, -1).contiguous()
    ends = []
    for v, start in ((torch.zeros_like(x["v"]), identity), (x["v"], None)):
        _, end = gdn_paged.chunk_gated_delta_rule(
            **x | {"v": v}, initial_state=start, output_final_state=True,
            cu_seqlens=int32([0, len(v)], device), use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        ends.append(end)
    return torch.cat(ends)


def combine(maps: list[torch.Tensor]) -> torch.Tensor:
    """The state ``[H, V, K]`` after the runs of tokens with these maps, from the zero state."""
    state = torch.zeros_like(maps[0][1])
    for transition, offset in maps:
        state = state @ transition + offset
    return state


def resume(x: Operands, pages_before: int, state: torch.Tensor | None, pool: torch.Tensor):
    """Prefill of the tokens in `x` after `pages_before` full pages, from `state` (None: the first
    tokens); row 0 of the pool is for the page before, the others are the tokens' own pages."""
    device, own = pool.device, -(-len(x["v"]) // PAGE_SIZE)
    if state is not None:
        pool[0] = state
    pages = [-1] * (pages_before - 1) + [0] * (pages_before > 0) + list(range(1, own + 1))
    return gdn_paged.chunk_gated_delta_rule_paged(
        **x, cu_seqlens=int32([0, len(x["v"])], device), state_pool=pool, page_size=PAGE_SIZE,
        page_indices=int32(pages, device), page_indptr=int32([0, len(pages)], device),
        last_page_len=int32([len(x["v"]) - (own - 1) * PAGE_SIZE], device),
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def new_pool(pages: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(1 + pages, NUM_V_HEADS, HEAD_DIM, HEAD_DIM, device=device)


def relative(x: torch.Tensor, expected: torch.Tensor) -> float:
    return ((x.float() - expected.float()).norm() / expected.float().norm()).item()


@torch.inference_mode()
def run(device: torch.device) -> None:
    """This process's tokens, compared with a run of all of them on its device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x = prompt(size, device, dtype)
    begin, end = (i * PAGES_EACH * PAGE_SIZE for i in (rank, rank + 1))
    mine = {name: y[begin:end] for name, y in x.items()}

    own = summary(mine)
    maps = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(maps, own)
    pool = new_pool(PAGES_EACH, device)
    start = combine(maps[:rank]) if rank else None
    output = resume(mine, rank * PAGES_EACH, start, pool)

    whole = new_pool(size * PAGES_EACH, device)
    expected = resume(x, 0, None, whole)
    tolerance = 1e-5 if device.type == "cpu" else 2e-2
    errors = {"outputs": relative(output, expected[begin:end])}
    rows = slice(1 + rank * PAGES_EACH, 1 + (rank + 1) * PAGES_EACH)
    errors["page ends"] = relative(pool[1:], whole[rows])
    if rank:  # and the first state would not do
        assert relative(pool[0], torch.zeros_like(pool[0]) + whole[rows.start - 1]) <= tolerance
        wrong = new_pool(PAGES_EACH, device)
        output = resume(mine, rank * PAGES_EACH, torch.zeros_like(pool[0]), wrong)
        assert relative(output, expected[begin:end]) > 10 * tolerance
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

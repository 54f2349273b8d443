"""Tensor parallelism: the heads of a gated delta net layer split over GPUs.

    torchrun --nproc-per-node 2 examples/torch_tensor_parallel.py
    python examples/torch_tensor_parallel.py      # the same, starting two processes by itself

Each process holds some heads: the columns of the projections that make their q, k, v and gates, the
rows of the output projection that read them, and their part of the state pool, [pages, H / size, V,
K]. Page tables are the same everywhere, so one scheduler serves all. A state never leaves its GPU;
the only exchange is the sum after the output projection, as in an attention layer.

One GPU that holds every head gives the same bytes, which rank 0 checks. With fewer GPUs than
processes all of it runs on the CPU (gloo instead of NCCL).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist

import gdn_paged

WIDTH, NUM_QK_HEADS, NUM_V_HEADS, HEAD_DIM, PAGE_SIZE = 256, 4, 8, 128, 64
PAGES = ([3, 0], [7, 4, 1], [5])  # of three sequences
CHUNKS = ([64, 70, 20], [6, 60, 43])  # new tokens of each, in two prefill steps
DECODE_STEPS = 3


@dataclass
class Weights:
    """Of some heads of the layer; `size` equal shards make the whole."""

    q: torch.Tensor  # [WIDTH, Hq, D]
    k: torch.Tensor  # [WIDTH, Hq, D]
    v: torch.Tensor  # [WIDTH, H, D]
    a: torch.Tensor  # [WIDTH, H]
    b: torch.Tensor  # [WIDTH, H]
    out: torch.Tensor  # [WIDTH, H, D]
    A_log: torch.Tensor  # [H] fp32
    dt_bias: torch.Tensor  # [H] fp32

    @classmethod
    def random(cls, device: torch.device, dtype: torch.dtype) -> Weights:
        """The same numbers in every process."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) / WIDTH**0.5).to(device, dtype)

        qk, v = (NUM_QK_HEADS, HEAD_DIM), (NUM_V_HEADS, HEAD_DIM)
        heads = {"q": qk, "k": qk, "v": v, "a": v[:1], "b": v[:1], "out": v}
        return cls(
            **{name: normal(WIDTH, *shape) for name, shape in heads.items()},
            A_log=torch.linspace(0, 2, NUM_V_HEADS).to(device),
            dt_bias=torch.full((NUM_V_HEADS,), -3.0).to(device),
        )

    def shard(self, rank: int, size: int) -> Weights:
        """Neighbouring heads stay together: v head h reads q and k head h // (H // Hq)."""
        if NUM_QK_HEADS % size:
            raise ValueError(f"size: {size}; expected a divisor of {NUM_QK_HEADS} q heads")
        tensors = {x.name: getattr(self, x.name) for x in fields(self)}
        return Weights(**{
            name: x.chunk(size, dim=min(x.ndim - 1, 1))[rank].contiguous()
            for name, x in tensors.items()
        })  # fmt: skip

    def project(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x ``[T, WIDTH]`` to q, k ``[T, Hq, D]``, v ``[T, H, D]``, a, b ``[T, H]``."""
        return [
            (x @ w.flatten(1)).unflatten(1, w.shape[1:])
            for w in (self.q, self.k, self.v, self.a, self.b)
        ]

    def project_out(self, y: torch.Tensor) -> torch.Tensor:
        """y ``[T, H, D]`` of these heads to their part of the sum ``[T, WIDTH]``."""
        return y.flatten(1) @ self.out.flatten(1).t()


class Step:
    """One forward pass over new tokens: tables that are the same in every process."""

    def __init__(self, before: list[int], new: list[int], device: torch.device) -> None:
        ends = [n + m for n, m in zip(before, new, strict=True)]
        pages = [p[: -(-n // PAGE_SIZE)] for p, n in zip(PAGES, ends, strict=True)]

        def int32(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        def starts(counts: list[int]) -> torch.Tensor:
            return int32([sum(counts[:i]) for i in range(len(counts) + 1)])

        self.is_decode = max(new) == 1
        self.table = {
            "page_indices": int32([page for p in pages for page in p]),
            "page_indptr": starts([len(p) for p in pages]),
            "last_page_len": int32([(n - 1) % PAGE_SIZE + 1 for n in ends]),
        }
        if not self.is_decode:
            self.table |= {"cu_seqlens": starts(new), "page_size": PAGE_SIZE}

    def attend(self, operands: list[torch.Tensor], heads: Weights, pool: torch.Tensor):
        """The gated delta rule on the heads of `operands` and `pool`: ``[T, H, D]``."""
        q, k, v, a, b = operands
        # However many heads or sequences a GPU has, one head of one sequence gives the same bytes.
        common = {"state_pool": pool, "deterministic": "batch", **self.table}
        if self.is_decode:
            q, k, v, a, b = (t.unsqueeze(1) for t in (q, k, v, a, b))
            return gdn_paged.gated_delta_rule_decode_paged(
                q, k, v, heads.A_log, a, heads.dt_bias, b, **common
            ).squeeze(1)
        return gdn_paged.chunk_gated_delta_rule_paged(
            q, k, v, a, b, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            A_log=heads.A_log, dt_bias=heads.dt_bias, beta_is_logit=True, **common,
        )  # fmt: skip


def steps(device: torch.device) -> list[tuple[Step, torch.Tensor]]:
    """Prompts in two chunks, then tokens one by one (a page end is crossed), with inputs
    ``[T, WIDTH]``."""
    generator = torch.Generator().manual_seed(1)
    before, result = [0] * len(PAGES), []
    for new in (*CHUNKS, *([1] * len(PAGES) for _ in range(DECODE_STEPS))):
        x = torch.randn(sum(new), WIDTH, generator=generator)
        result.append((Step(before, new, device), x))
        before = [n + m for n, m in zip(before, new, strict=True)]
    return result


def new_pool(heads: Weights) -> torch.Tensor:
    return torch.zeros(8, len(heads.A_log), HEAD_DIM, HEAD_DIM, device=heads.A_log.device)


def gathered(x: torch.Tensor) -> torch.Tensor:
    """The heads (dimension 1) of all processes."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=1)


@torch.inference_mode()
def run(device: torch.device) -> None:
    """This process's part, compared with a run of all heads on rank 0's device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    whole = Weights.random(device, dtype)
    shards = [whole.shard(i, size) for i in range(size)]
    mine, pool, whole_pool = shards[rank], new_pool(shards[rank]), new_pool(whole)
    worst = 0.0
    for step, x in steps(device):
        x = x.to(device, dtype)
        # The layer.
        y = step.attend(mine.project(x), mine, pool)
        out = mine.project_out(y)
        dist.all_reduce(out)
        # The check: all heads in one call. The projections are made shard by shard, since matrix
        # products of other shapes may round differently.
        operands = zip(*(shard.project(x) for shard in shards), strict=True)
        expected = step.attend([torch.cat(x, dim=1) for x in operands], whole, whole_pool)
        assert torch.equal(gathered(y), expected), "outputs differ from those of one device"
        assert torch.equal(gathered(pool), whole_pool), "states differ from those of one device"
        difference = out.float() - whole.project_out(expected).float()
        worst = max(worst, (difference.norm() / out.float().norm()).item())
    assert whole_pool[[p for pages in PAGES for p in pages]].abs().amax((1, 2, 3)).min() > 0
    assert worst < (1e-5 if device.type == "cpu" else 1e-2)
    if rank == 0:
        backend = dist.get_backend()
        print(f"{size} processes on {device.type} ({backend}): {len(PAGES)} sequences")
        print(f"heads          {NUM_V_HEADS}, {len(mine.A_log)} in each process")
        print("states         bytes of one device with all heads")
        print(f"layer output   relative difference {worst:.1e} (the sum over heads is cut)")


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
    size = 2
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        torch.multiprocessing.spawn(start, args=(size, store), nprocs=size)


if __name__ == "__main__":
    main()

"""Short prefills and mixed batches on one GPU: microseconds per paged call.

    python tests/bench/short_gpu.py [--heads 2/8,16/64] [--backend cuda_sm90] [--decodes 63]

bf16, head size 128, pages of 1024 tokens, fp32 pool; sequences continue a prefix of 5000 tokens,
long ones start empty. "given": slots and plan given; "in call": made inside; "chunks": with
deterministic="batch", which keeps to chunks; "bounded": max_seqlen promised. A mixed batch (one of
2048 tokens and decode-like rows of one) stands beside its parts as calls of their own. Medians
over rounds of graph replays, one call a graph, so with the gap between graphs.
"""

from __future__ import annotations

import argparse

import timing
import torch

import gdn_paged
from gdn_paged._bench.grid import DIM, PAGE

PREFIX = 5000


def page_lists(spans: list[tuple[int, int]]) -> tuple[list[int], list[int], list[int], int]:
    """Tables of sequences (prefix, new); pages that no call touches lie on page 0."""
    indices, indptr, last, used = [], [0], [], 1
    for prefix, new in spans:
        count, first = -(-(prefix + new) // PAGE), max(prefix - 1, 0) // PAGE
        indices += [0] * first + list(range(used, used + count - first))
        used += count - first
        indptr.append(len(indices))
        last.append(prefix + new - (count - 1) * PAGE)
    return indices, indptr, last, used


class Batch:
    """Sequences (prefix, new tokens) on pages of their own."""

    def __init__(self, spans: list[tuple[int, int]], hq: int, hv: int, backend: str, state: str):
        generator = torch.Generator(device="cuda").manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=generator)

        def table(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        tokens = sum(new for _, new in spans)
        indices, indptr, last, pages = page_lists(spans)
        unit = lambda x: torch.nn.functional.normalize(x, dim=-1).bfloat16()  # noqa: E731
        self.longest = max(new for _, new in spans)
        operands = {"q": unit(randn(tokens, hq, DIM)), "k": unit(randn(tokens, hq, DIM))}
        operands["v"] = randn(tokens, hv, DIM).bfloat16()
        pool = (0.1 * randn(pages, hv, DIM, DIM)).to(getattr(torch, state))
        tables = {
            "page_indices": table(indices),
            "page_indptr": table(indptr),
            "last_page_len": table(last),
        }
        cu_seqlens = table([sum(new for _, new in spans[:b]) for b in range(len(spans) + 1)])
        output = torch.empty_like(operands["v"])
        gates = {
            "g": torch.nn.functional.logsigmoid(randn(tokens, hv)).div(16).exp(),
            "beta": randn(tokens, hv).sigmoid(),
        }
        self.arguments = operands | gates | tables
        self.arguments |= {"cu_seqlens": cu_seqlens, "page_size": PAGE, "state_pool": pool}
        self.arguments |= {"backend": backend}
        self.output = output
        self.slots = gdn_paged.gdn_paged_prefill_slots(
            **tables, page_size=PAGE, cu_seqlens=cu_seqlens
        )
        self.plan = gdn_paged.prefill_plan(**self.arguments, slots=self.slots)
        if tokens != len(spans):
            return
        zeros = torch.zeros(hv, device="cuda")
        self.decode_arguments = {name: x[:, None] for name, x in operands.items()} | tables
        self.decode_arguments |= {"A_log": zeros, "dt_bias": zeros, "state_pool": pool}
        self.decode_arguments |= {"a": randn(tokens, 1, hv), "b": randn(tokens, 1, hv)}
        self.decode_arguments |= {"output": output[:, None]}
        self.decode_arguments |= {"slots": gdn_paged.gdn_paged_decode_slots(**tables)}

    def _call(self, **options: object) -> None:
        gdn_paged.chunk_gated_delta_rule_paged(**self.arguments, output=self.output, **options)

    def given(self, _: int = 0) -> None:
        self._call(slots=self.slots, plan=self.plan)

    def in_call(self, _: int = 0) -> None:
        self._call()

    def chunks(self, _: int = 0) -> None:
        self._call(slots=self.slots, deterministic="batch")

    def bounded(self, _: int = 0) -> None:
        self._call(slots=self.slots, max_seqlen=self.longest)

    def decode(self, _: int = 0) -> None:
        gdn_paged.gated_delta_rule_decode_paged(**self.decode_arguments)


def times(steps: dict[str, timing.Step]) -> dict[str, float]:
    return timing.graph_us(steps, 1, rounds=5, round_ms=4.0)


def show(*words: str, **us: float) -> None:
    print(*words, ", ".join(f"{name} {value:.2f}" for name, value in us.items()), flush=True)


def short_rows(heads: str, backend: str) -> None:
    hq, hv = map(int, heads.split("/"))
    for count, new in ((1, 512), (1, 1), (1, 8), (1, 16), (8, 16), (64, 16), (256, 64), (8, 1024)):
        batch = Batch([(PREFIX if new <= 16 else 0, new)] * count, hq, hv, backend, "float32")
        steps = {"given": batch.given, "in call": batch.in_call, "chunks": batch.chunks}
        if new <= 16:
            steps["bounded"] = batch.bounded
        show(f"{heads:6s} {count} of {new}", **times(steps))
        torch.cuda.empty_cache()


def mixed_rows(heads: str, backend: str, decodes: int) -> None:
    hq, hv = map(int, heads.split("/"))
    ones = [(PREFIX, 1)] * decodes
    for state in ("float32", "bfloat16"):
        mixed, long, short = (
            Batch(spans, hq, hv, backend, state)
            for spans in ([(0, 2048), *ones], [(0, 2048)], ones)
        )
        us = times(
            {"mixed": mixed.given, "in call": mixed.in_call, "chunks": mixed.chunks}
            | {"long": long.given, "decode": short.decode, "short": short.given}
            | {"bounded": short.bounded}
        )
        total = us["long"] + min(us["decode"], us["short"])
        us["sum"] = total
        show(f"{heads:6s} 2048+{decodes}x1 {state} ratio {us['mixed'] / total:.3f}", **us)
        del mixed, long, short
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", default="2/8,8/32,16/32,16/64")
    parser.add_argument("--backend", default="cuda_sm90")
    parser.add_argument("--decodes", type=int, default=63)
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), args.backend, flush=True)
    for heads in args.heads.split(","):
        short_rows(heads, args.backend)
        mixed_rows(heads, args.backend, args.decodes)


if __name__ == "__main__":
    main()

"""Prefill on one GPU: microseconds per paged call, by heads and by the lengths of the batch.

    python tests/bench/prefill_gpu.py [--out FILE.json] [--rows TP8,TP1] [--lens 1x2048,8192x4]

bf16, head size 128, pages of 1024 tokens in shuffled order, fp32 pool, empty prefixes; slots, plan
and output are given. Unit q and k, v ~ N(0, 1), log gate logsigmoid(N) / 16 for three quarters of
the heads and 0 for the rest, beta sigmoid(N). Median over rounds of graph replays of at least
20 ms. The JSON is a list of {"hq", "hv", "lens", "us", "us_in_call", "host_us", "add_us"};
us_in_call has slots and plan made inside the call; host_us holds the host cost of both and of a
call that has its workspace given too, beside that of one `torch.Tensor.add_`; with --burst also
"burst_us", two replays on a rested card.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import timing
import torch

import gdn_paged
from gdn_paged._bench.grid import DIM, HEADS, LENGTHS, PAGE, lengths_of


class PrefillInputs:
    """One batch on a pool with one page to spare."""

    def __init__(self, lengths: list[int], hq: int, hv: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=generator)

        def table(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        tokens = sum(lengths)
        log_gate = torch.nn.functional.logsigmoid(randn(tokens, hv)) / 16
        log_gate[:, 3::4] = 0
        pages = [-(-n // PAGE) for n in lengths]
        starts = [0]
        for count in pages:
            starts.append(starts[-1] + count)
        order = torch.randperm(starts[-1] + 1, device="cuda", generator=generator)
        self.tensors = {
            "q": torch.nn.functional.normalize(randn(tokens, hq, DIM), dim=-1).bfloat16(),
            "k": torch.nn.functional.normalize(randn(tokens, hq, DIM), dim=-1).bfloat16(),
            "v": randn(tokens, hv, DIM).bfloat16(),
            "g": log_gate.exp(),
            "beta": randn(tokens, hv).sigmoid(),
        }
        self.table = {
            "page_indices": order[:-1].to(torch.int32),
            "page_indptr": table(starts),
            "last_page_len": table(
                [n - (count - 1) * PAGE for n, count in zip(lengths, pages, strict=True)]
            ),
            "page_size": PAGE,
            "cu_seqlens": table([sum(lengths[:b]) for b in range(len(lengths) + 1)]),
        }
        self.pool = torch.zeros(starts[-1] + 1, hv, DIM, DIM, device="cuda")
        self.output = torch.empty_like(self.tensors["v"])

    def calls(self, backend: str) -> dict[str, timing.Step]:
        slots = gdn_paged.gdn_paged_prefill_slots(**self.table)
        arguments = self.tensors | self.table | {"state_pool": self.pool, "backend": backend}
        plan = gdn_paged.prefill_plan(**arguments, slots=slots)

        def given(_: int) -> None:
            gdn_paged.chunk_gated_delta_rule_paged(
                **arguments, output=self.output, slots=slots, plan=plan
            )

        def in_call(_: int) -> None:
            gdn_paged.chunk_gated_delta_rule_paged(**arguments, output=self.output)

        room = gdn_paged.prefill_workspace_size(
            len(self.table["last_page_len"]),
            *self.tensors["q"].shape[:2],
            *(self.tensors[name].shape[1] for name in "kv"),
            DIM,
            page_size=PAGE,
            device=str(self.pool.device),
            backend=backend,
        )
        workspace = torch.empty(room, dtype=torch.uint8, device="cuda")

        def with_workspace(_: int) -> None:
            gdn_paged.chunk_gated_delta_rule_paged(
                **arguments, output=self.output, slots=slots, plan=plan, workspace=workspace
            )

        return {"given": given, "in_call": in_call, "with_workspace": with_workspace}


def measure(hq: int, hv: int, lens: str, backend: str, burst: bool) -> dict[str, object]:
    calls = PrefillInputs(lengths_of(lens), hq, hv).calls(backend)
    burst_us = {"burst_us": timing.burst_us(calls["given"])} if burst else {}
    host = {name: timing.host_us(step, calls=20) for name, step in calls.items()}
    numbers = torch.zeros(8, device="cuda")
    del calls["with_workspace"]
    us = timing.graph_us(calls, repeats=1)
    return burst_us | {
        "hq": hq,
        "hv": hv,
        "lens": lens,
        "us": us["given"],
        "us_in_call": us["in_call"],
        "host_us": host,
        "add_us": timing.host_us(lambda _: numbers.add_(1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", default=",".join(HEADS), help="names of head layouts")
    parser.add_argument("--lens", default=",".join(LENGTHS))
    parser.add_argument("--burst", action="store_true", help="also time a rested card")
    parser.add_argument("--backend", default="cuda_portable", help='a kernel row, or "auto"')
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), args.backend, flush=True)
    rows = []
    for name in args.rows.split(","):
        for lens in args.lens.split(","):
            row = measure(*HEADS[name], lens, args.backend, args.burst)
            rows.append(row)
            print(
                f"{name:6s} {row['hq']:2d}/{row['hv']:2d} {lens:11s} {row['us']:8.1f} us,",
                f"{row['us_in_call']:8.1f} us with slots and plan; host",
                ", ".join(f"{name} {us:.1f}" for name, us in row["host_us"].items()),
                f"us, add_ {row['add_us']:.1f} us",
                f"burst {row['burst_us']:8.1f} us" if args.burst else "",
                flush=True,
            )
            torch.cuda.empty_cache()
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

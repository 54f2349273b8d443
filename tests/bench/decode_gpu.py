"""Decode on one GPU: microseconds per call, share of the copy bandwidth, host cost.

    python tests/bench/decode_gpu.py [--out FILE.json] [--batches 1,32] [--heads 16/32]

A row is a graph of calls over disjoint page sets of at least 256 MB in all, so that states come
from device memory: one call per set ("us", as the peer's figures were taken), and the same over
and over to 64 calls ("us_of_64"), where the gap between two graphs hardly counts. Beside the host
cost stands that of one `torch.Tensor.add_`, which tells how fast the machine is. The JSON is a
list of {"hq", "hv", "state", "batch", "us", "us_of_64", "us_without_slots", "host_us", "add_us"}.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import timing
import torch

import gdn_paged

DIM = 128
LONG = 64  # calls of a long graph


class DecodeInputs:
    """One batch over `repeats` disjoint page sets of a shuffled pool."""

    def __init__(self, batch: int, hq: int, hv: int, state: torch.dtype) -> None:
        generator = torch.Generator(device="cuda").manual_seed(0)

        def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

        self.bytes = batch * hv * DIM * DIM * state.itemsize
        self.repeats = max(2, min(64, int(256e6 / self.bytes) + 1))
        self.q = randn(batch, 1, hq, DIM)
        self.k = randn(batch, 1, hq, DIM)
        self.v = randn(batch, 1, hv, DIM)
        self.A_log = randn(hv, dtype=torch.float32)
        self.a = randn(batch, 1, hv)
        self.dt_bias = randn(hv, dtype=torch.float32)
        self.b = randn(batch, 1, hv)
        self.output = torch.empty_like(self.v)
        pages = self.repeats * batch
        self.pool = (randn(pages, hv, DIM, DIM, dtype=torch.float32) * 0.1).to(state)
        order = torch.randperm(pages, device="cuda", generator=generator).to(torch.int32)
        self.page_sets = list(order.view(self.repeats, batch).unbind())
        self.indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        self.last_page_len = torch.full((batch,), 7, dtype=torch.int32, device="cuda")
        self.slots = [
            gdn_paged.gdn_paged_decode_slots(pages, self.indptr, self.last_page_len)
            for pages in self.page_sets
        ]

    def call(self, i: int, with_slots: bool = True) -> None:
        gdn_paged.gated_delta_rule_decode_paged(
            self.q,
            self.k,
            self.v,
            self.A_log,
            self.a,
            self.dt_bias,
            self.b,
            DIM**-0.5,
            self.output,
            True,
            state_pool=self.pool,
            page_indices=self.page_sets[i],
            page_indptr=self.indptr,
            last_page_len=self.last_page_len,
            slots=self.slots[i] if with_slots else None,
        )


def measure(
    batch: int, hq: int, hv: int, state: str, runs: int, round_ms: float
) -> dict[str, object]:
    inputs = DecodeInputs(batch, hq, hv, getattr(torch, state))
    host = timing.host_us(inputs.call)
    numbers = torch.zeros(8, device="cuda")
    add = timing.host_us(lambda _: numbers.add_(1))
    both = {"slots": inputs.call, "tables": lambda i: inputs.call(i, with_slots=False)}
    results = [timing.graph_us(both, inputs.repeats, round_ms=round_ms) for _ in range(runs)]
    long = {"long": lambda i: inputs.call(i % inputs.repeats)}
    calls = inputs.repeats * (LONG // inputs.repeats)
    long_us = [timing.graph_us(long, calls, round_ms=round_ms)["long"] for _ in range(runs)]
    return {
        "hq": hq,
        "hv": hv,
        "state": state,
        "batch": batch,
        "us": statistics.median(r["slots"] for r in results),
        "us_without_slots": statistics.median(r["tables"] for r in results),
        "us_of_64": statistics.median(long_us),
        "host_us": host,
        "add_us": add,
        "bytes": 2 * inputs.bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256,512")
    parser.add_argument("--heads", default="16/32,2/8")
    parser.add_argument("--states", default="float32,bfloat16")
    parser.add_argument("--runs", type=int, default=1, help="median of this many runs per row")
    parser.add_argument("--round-ms", type=float, default=20.0, help="at least, of a round")
    args = parser.parse_args()
    copy = timing.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {copy / 1e12:.2f} TB/s", flush=True)
    rows = []
    for heads in args.heads.split(","):
        hq, hv = map(int, heads.split("/"))
        for state in args.states.split(","):
            for batch in map(int, args.batches.split(",")):
                row = measure(batch, hq, hv, state, args.runs, args.round_ms)
                rows.append(row)
                share = row["bytes"] / (row["us"] * 1e-6) / copy
                print(
                    f"{heads:5s} {state:8s} B={batch:3d} {row['us']:8.2f} us {share:4.0%} of copy,",
                    f"{row['us_of_64']:8.2f} us of 64 calls,",
                    f"{row['us_without_slots']:8.2f} us without slots,",
                    f"host {row['host_us']:5.1f} us, of add_ {row['add_us']:5.1f} us",
                    flush=True,
                )
                torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

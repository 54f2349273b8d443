"""Speculative decoding on one GPU: a verify step against a decode step of the same batch.

    python tests/bench/verify_gpu.py [--out FILE.json] [--batches 1,64] [--drafts 4,8]

A verify step folds the draft tokens that were accepted (all, half, none) and runs T new ones. Both
contenders run in graphs over disjoint page sets of at least 256 MB, in turn. The JSON is a list of
{"hq", "hv", "state", "batch", "decode_us", "drafts": {"T/accepted": us}, "host_us"}.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import timing
import torch
from decode_gpu import DIM, DecodeInputs

import gdn_paged


class VerifyInputs:
    """A step of `tokens` draft tokens per sequence on the pages of a decode bench."""

    def __init__(self, base: DecodeInputs, tokens: int, accepted: int) -> None:
        batch = base.indptr.numel() - 1
        more = lambda x: x.repeat(1, tokens, 1, 1).flatten(0, 1)  # noqa: E731
        noise = lambda x: x + 0.3 * torch.randn_like(x)  # noqa: E731
        self.base, self.tokens = base, tokens
        self.q, self.k, self.v = (noise(more(x)) for x in (base.q, base.k, base.v))
        self.a, self.b = (x.repeat(1, tokens, 1).flatten(0, 1) for x in (base.a, base.b))
        self.output = torch.empty_like(self.v)
        self.cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * tokens
        self.accepted = torch.full((batch,), accepted, dtype=torch.int32, device="cuda")
        self.seq_lens = torch.full((batch,), 16, dtype=torch.int32, device="cuda")
        size = gdn_paged.verify_draft_size(tokens, base.v.shape[2], DIM, DIM, "bfloat16")
        # A buffer per page set, as the layers of a model have one each.
        drafts = torch.zeros(base.repeats, batch, size, dtype=torch.uint8, device="cuda")
        self.drafts = list(drafts.unbind())
        none = torch.zeros_like(self.accepted)
        for i in range(base.repeats):
            self.call(i, none)

    def call(self, i: int, accepted: torch.Tensor | None = None) -> None:
        base = self.base
        gdn_paged.gated_delta_rule_verify_paged(
            self.q,
            self.k,
            self.v,
            base.A_log,
            self.a,
            base.dt_bias,
            self.b,
            DIM**-0.5,
            self.output,
            True,
            cu_seqlens=self.cu_seqlens,
            state_pool=base.pool,
            page_indices=base.page_sets[i],
            page_indptr=base.indptr,
            page_size=1024,
            seq_lens=self.seq_lens,
            drafts=self.drafts[i],
            max_draft=self.tokens,
            accepted=self.accepted if accepted is None else accepted,
        )


def measure(batch: int, hq: int, hv: int, state: str, drafts: list[int]) -> dict[str, object]:
    base = DecodeInputs(batch, hq, hv, getattr(torch, state))
    steps = {
        f"{tokens}/{accepted}": VerifyInputs(base, tokens, accepted)
        for tokens in drafts
        for accepted in (tokens, tokens // 2, 0)
    }
    host = timing.host_us(next(iter(steps.values())).call)
    contenders = {"decode": base.call} | {name: step.call for name, step in steps.items()}
    times = timing.graph_us(contenders, base.repeats, round_ms=8.0)
    return {
        "hq": hq,
        "hv": hv,
        "state": state,
        "batch": batch,
        "decode_us": times.pop("decode"),
        "drafts": times,
        "host_us": host,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--heads", default="16/32")
    parser.add_argument("--states", default="float32,bfloat16")
    parser.add_argument("--drafts", default="4,8")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}; us per step, and times a decode step", flush=True)
    rows = []
    for heads in args.heads.split(","):
        hq, hv = map(int, heads.split("/"))
        for state in args.states.split(","):
            for batch in map(int, args.batches.split(",")):
                row = measure(batch, hq, hv, state, list(map(int, args.drafts.split(","))))
                rows.append(row)
                one = row["decode_us"]
                cells = [f"{k}: {us:.2f} ({us / one:.2f})" for k, us in row["drafts"].items()]
                print(
                    f"{heads} {state:8s} B={batch:3d} decode {one:.2f}; T/accepted",
                    ", ".join(cells) + f"; host {row['host_us']:.1f} us",
                    flush=True,
                )
                torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

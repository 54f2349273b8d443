"""``python -m gdn_paged explain``: which kernel row serves a problem that options describe."""

from __future__ import annotations

import argparse
import sys
from itertools import accumulate
from typing import Any

import gdn_paged

from .grid import heads_of, lengths_of
from .machine import Machine, open_machine

_DTYPES = ("float32", "bfloat16", "float16")
_USE_CP = {"auto": "auto", "on": True, "off": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a problem to `parser`."""
    add = parser.add_argument
    add("operation", choices=tuple(_BUILD), help="what would be called")
    add("--device", help="cpu, or a torch device such as cuda:0; default: a GPU if there is one")
    add("--heads", default="16/32", help="Hq/Hv; Hk is the smaller of both (default: 16/32)")
    add("--head-dim", type=int, default=128, help="K (default: 128)")
    add("--head-dim-v", type=int, help="V (default: K)")
    add("--io", choices=_DTYPES, default="bfloat16", help="dtype of q, k, v and output")
    add("--state", choices=_DTYPES, default="float32", help="dtype of the pool")
    add("--lens", default="1x4096", help="prefill: new tokens, as 1x4096, 512x8 or 28672+4096")
    add("--prefix", type=int, default=0, help="prefill: tokens before them (default: 0)")
    add("--batch", type=int, default=32, help="decode, verify: sequences (default: 32)")
    add("--drafts", type=int, default=4, help="verify: draft tokens of each (default: 4)")
    add("--page-size", type=int, default=1024, help="tokens of a page (default: 1024)")
    add("--slots", action="store_true", help="the slot form instead of the page table")
    add("--use-cp", choices=tuple(_USE_CP), default="auto", help="prefill with --slots: the regime")
    add("--deterministic", action="store_true", help='with deterministic="batch"')
    add("--backend", default="auto", help="a kernel row by name (default: auto)")


def run(args: argparse.Namespace) -> int:
    """Prints what :func:`gdn_paged.explain` says.

    Returns:
        0; 1 if no row serves the problem; 2 for a problem that contradicts the contract.
    """
    try:
        machine = open_machine(args.device)
        function, arguments = _BUILD[args.operation](args, machine)
        arguments["backend"] = args.backend
        arguments["deterministic"] = "batch" if args.deterministic else None
        text = gdn_paged.explain(function, **arguments)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        print(f"gdn_paged explain: {error}", file=sys.stderr)
        return 2
    print(text.rstrip())
    return 0 if "served by" in text.splitlines()[0] else 1


def _shape(args: argparse.Namespace) -> tuple[int, int, int, int, int]:
    """Hq, Hk, Hv, K and V."""
    hq, hv = heads_of(args.heads)
    dim_v = args.head_dim if args.head_dim_v is None else args.head_dim_v
    return hq, min(hq, hv), hv, args.head_dim, dim_v


def _prefill(args: argparse.Namespace, machine: Machine) -> tuple[Any, dict[str, Any]]:
    hq, hk, hv, dim_k, dim_v = _shape(args)
    lengths = lengths_of(args.lens)
    tokens = sum(lengths)
    page = max(args.page_size, 1)  # the call refuses what is no multiple of 64
    totals = [args.prefix + n for n in lengths]
    pages = [-(-total // page) for total in totals]
    state = machine.zeros((sum(pages), max(hq, hv), dim_v, dim_k), args.state)
    arguments = {
        "q": machine.zeros((tokens, hq, dim_k), args.io),
        "k": machine.zeros((tokens, hk, dim_k), args.io),
        "v": machine.zeros((tokens, hv, dim_v), args.io),
        "cu_seqlens": machine.table([0, *accumulate(lengths)]),
    }
    if args.slots:
        ids = machine.table(range(len(lengths)))
        host = open_machine("cpu").table([0, *accumulate(lengths)])
        return gdn_paged.chunk_gated_delta_rule, arguments | {
            "initial_state": state,
            "output_state": state,
            "output_final_state": True,
            "state_indices": ids,
            "use_cp": _USE_CP[args.use_cp],
            "cu_seqlens_cpu": host,
        }
    if args.use_cp != "auto":
        raise ValueError("use-cp: given without --slots; the paged call chooses by itself")
    last = [total - (count - 1) * page for total, count in zip(totals, pages, strict=True)]
    return gdn_paged.chunk_gated_delta_rule_paged, arguments | {
        "state_pool": state,
        "page_indices": machine.table(range(sum(pages))),
        "page_indptr": machine.table([0, *accumulate(pages)]),
        "page_size": args.page_size,
        "last_page_len": machine.table(last),
    }


def _decode(args: argparse.Namespace, machine: Machine) -> tuple[Any, dict[str, Any]]:
    hq, hk, hv, dim_k, dim_v = _shape(args)
    batch, heads = args.batch, max(hq, hv)
    state = machine.zeros((batch, heads, dim_v, dim_k), args.state)
    arguments = {
        "q": machine.zeros((batch, 1, hq, dim_k), args.io),
        "k": machine.zeros((batch, 1, hk, dim_k), args.io),
        "v": machine.zeros((batch, 1, hv, dim_v), args.io),
        "A_log": machine.zeros((heads,), "float32"),
        "a": machine.zeros((batch, 1, heads), "float32"),
        "dt_bias": machine.zeros((heads,), "float32"),
        "b": machine.zeros((batch, 1, heads), "float32"),
    }
    ids = machine.table(range(batch))
    if args.slots:
        return gdn_paged.gated_delta_rule_decode_pretranspose, arguments | {
            "state": None,
            "initial_state": state,
            "initial_state_indices": ids,
        }
    return gdn_paged.gated_delta_rule_decode_paged, arguments | {
        "state_pool": state,
        "page_indices": ids,
        "page_indptr": machine.table(range(batch + 1)),
        "last_page_len": machine.table([2] * batch),
    }


def _verify(args: argparse.Namespace, machine: Machine) -> tuple[Any, dict[str, Any]]:
    if args.slots:
        raise ValueError("slots: given; expected none, verify has the page table alone")
    hq, hk, hv, dim_k, dim_v = _shape(args)
    batch, heads, tokens = args.batch, max(hq, hv), args.batch * args.drafts
    size = gdn_paged.verify_draft_size(args.drafts, heads, dim_k, dim_v, args.io)
    return gdn_paged.gated_delta_rule_verify_paged, {
        "q": machine.zeros((tokens, hq, dim_k), args.io),
        "k": machine.zeros((tokens, hk, dim_k), args.io),
        "v": machine.zeros((tokens, hv, dim_v), args.io),
        "A_log": machine.zeros((heads,), "float32"),
        "a": machine.zeros((tokens, heads), "float32"),
        "dt_bias": machine.zeros((heads,), "float32"),
        "b": machine.zeros((tokens, heads), "float32"),
        "cu_seqlens": machine.table(range(0, tokens + 1, args.drafts)),
        "state_pool": machine.zeros((batch, heads, dim_v, dim_k), args.state),
        "page_indices": machine.table(range(batch)),
        "page_indptr": machine.table(range(batch + 1)),
        "page_size": args.page_size,
        "seq_lens": machine.table([2] * batch),
        "drafts": machine.zeros((batch, size), "uint8"),
        "max_draft": args.drafts,
    }


_BUILD = {"prefill": _prefill, "decode": _decode, "verify": _verify}

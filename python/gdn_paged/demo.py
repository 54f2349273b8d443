"""``python -m gdn_paged demo``: real text through pages, a prefix tree and continuous batching.

Every request is served twice, with and without reuse of the pages of a shared prefix; both ways
have to give the same result. The weights are random (fixed seed): what is shown is the serving of
recurrent states, not language.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ._progress import progress_bar

DEFAULT_PREFIX = 1024  # bytes of system prefix in a text without a `---` line
GPU_TOLERANCE = 2e-2  # relative L2 of the scores after the prompt, bf16 activations


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the demo to `parser`."""
    add = parser.add_argument
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="text to serve: what stands before a line `---` is the prefix that all requests "
        f"share (without one: the first {DEFAULT_PREFIX} bytes), every paragraph after it is a "
        "request; default: a text that comes with the package",
    )
    add(
        "--requests",
        type=positive,
        default=12,
        help="serve at most this many (default: %(default)s)",
    )
    add(
        "--new-tokens",
        type=positive,
        default=24,
        help="generated per request (default: %(default)s)",
    )
    add("--max-prompt", type=positive, default=8192, help="cut prompts here (default: %(default)s)")
    add("--page-size", type=positive, default=128, help="tokens per page (default: %(default)s)")
    add("--pages", type=positive, default=256, help="rows of the state pool (default: %(default)s)")
    add("--layers", type=positive, default=4, help="layers of the stack (default: %(default)s)")
    add("--device", help="cpu, or a torch device such as cuda:0; default: a GPU if there is one")


def read_requests(text: bytes, limit: int, max_prompt: int) -> tuple[int, list[bytes]]:
    """Splits a text into the shared prefix and the requests.

    Returns:
        Length of the shared prefix, and the prompts, each of which starts with it.

    Raises:
        ValueError: there is nothing to ask after the prefix.
    """
    text = text.replace(b"\r\n", b"\n")
    head, separator, rest = text.partition(b"\n---\n")
    if not separator:
        cut = min(DEFAULT_PREFIX, len(text) // 2)
        head, rest = text[:cut], text[cut:]
    prefix = head + b"\n"
    paragraphs = [p.strip() + b"\n" for p in rest.split(b"\n\n") if p.strip()]
    if not paragraphs:
        raise ValueError("text: found no paragraph after the shared prefix; expected at least one")
    if len(prefix) >= max_prompt:
        raise ValueError(
            f"max-prompt: got {max_prompt}, expected more than the shared prefix "
            f"({len(prefix)} bytes)"
        )
    return len(prefix), [(prefix + p)[:max_prompt] for p in paragraphs[:limit]]


def pick_device() -> str:
    """The first CUDA device of an importable torch, else the CPU."""
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda:0" if torch.cuda.is_available() else "cpu"


class MismatchError(Exception):
    """The two ways to serve a request gave different results."""


def compare(np: Any, plain: list[Any], shared: list[Any], exact: bool) -> str:
    """Words for how the two runs agree. Raises MismatchError if they do not."""
    if exact:
        for a, b in zip(plain, shared, strict=True):
            if a.generated != b.generated or not np.array_equal(a.logits, b.logits):
                raise MismatchError("reuse of pages changed the result of a request")
        return "every score of every step is equal to the last bit"
    first = [(a.logits[0], b.logits[0]) for a, b in zip(plain, shared, strict=True)]
    error = max(float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in first)
    if not error <= GPU_TOLERANCE:
        raise MismatchError(f"reuse of pages changed the scores by {error:.1e} (relative L2)")
    same = sum(a.generated == b.generated for a, b in zip(plain, shared, strict=True))
    return (
        f"scores after the prompt agree to {error:.1e} (tolerance {GPU_TOLERANCE:.0e}), "
        f"{same} of {len(plain)} requests generate the same bytes"
    )


def say(title: str, text: str) -> None:
    print(f"{title:<15}{text}", flush=True)


def run(args: argparse.Namespace) -> int:
    """Runs the demo. Returns the exit code: 0, 1 if the two runs differ, 2 for bad input."""
    # Before NumPy is loaded: its products here are too small to share between threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        import numpy as np
    except ImportError:
        print("gdn_paged demo: needs NumPy (pip install numpy)", file=sys.stderr)
        return 2
    from ._demo.engine import Engine, Request
    from ._demo.model import Config, Model

    path = args.text or Path(__file__).with_name("_demo") / "requests.txt"
    device = args.device or pick_device()
    try:
        prefix, prompts = read_requests(path.read_bytes(), args.requests, args.max_prompt)
        model = Model(Config(num_layers=args.layers), args.page_size, args.pages, device)
        c = model.config
        say("text", f"{path.name}: {len(prompts)} requests, {prefix} tokens of shared prefix")
        say("model", f"{c.num_layers} layers of {c.num_v_heads} states {c.head_dim} x {c.head_dim}")
        say("pool", f"{args.pages} pages of {args.page_size} tokens, on {device}")

        # Once on the side: threads are started, GPU kernels loaded.
        Engine(model, args.pages, reuse=False).run([Request(prompts[0], 2)], lambda count: None)
        for text in model.rows.values():
            say("kernel row", text.splitlines()[0])

        total = sum(map(len, prompts)) + args.new_tokens * len(prompts)
        runs = []
        for title, reuse in (("without reuse", False), ("with reuse", True)):
            requests = [Request(prompt, args.new_tokens) for prompt in prompts]
            engine = Engine(model, args.pages, reuse=reuse)
            with progress_bar(total, title, "tok") as progress:
                stats = engine.run(requests, progress.advance)
            runs.append((requests, stats))
            say(
                title,
                f"{stats.tokens_per_second:.0f} tokens/s ({stats.seconds:.2f} s, {stats.steps} "
                f"steps), {stats.reused_tokens} of {stats.prompt_tokens} prompt tokens from cached "
                "pages",
            )
        (plain, plain_stats), (shared, shared_stats) = runs
        say("speed-up", f"{plain_stats.seconds / shared_stats.seconds:.2f} x")
        say("same result", compare(np, plain, shared, exact=device == "cpu"))
    except MismatchError as error:
        print(f"gdn_paged demo: {error}", file=sys.stderr)
        return 1
    except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"gdn_paged demo: {error}", file=sys.stderr)
        return 2
    return 0

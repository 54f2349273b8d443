"""Continuous batching: chunked prefill and decode of many requests over one set of pages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .cache import PageAllocator, PrefixTree
from .model import TILE, Batch, Model


@dataclass
class Request:
    """One prompt and what became of it."""

    prompt: bytes
    num_new: int
    pages: list[int] = field(default_factory=list)
    num_reused: int = 0  # tokens taken from cached pages
    num_done: int = 0  # tokens whose state is in the pool
    generated: bytearray = field(default_factory=bytearray)
    logits: list[np.ndarray] = field(default_factory=list)  # one [256] per generated token

    def sample(self, logits: np.ndarray) -> None:
        self.logits.append(logits)
        self.generated.append(int(np.argmax(logits)))


@dataclass
class Stats:
    seconds: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens served, from the cache or computed, per second."""
        return (self.prompt_tokens + self.new_tokens) / self.seconds


class Engine:
    """Serves requests in steps of one prefill batch and one decode batch."""

    def __init__(
        self,
        model: Model,
        num_pages: int,
        *,
        reuse: bool,
        max_running: int = 8,
        prefill_budget: int = 512,
    ) -> None:
        self.model = model
        self.page_size = model.page_size
        self.num_pages = num_pages
        self.reuse = reuse
        self.max_running = max_running
        # Chunks are cut at page ends, so that a resumed sequence keeps its bytes (CPU).
        self.prefill_budget = max(prefill_budget // self.page_size, 1) * self.page_size
        self.allocator = PageAllocator(num_pages)
        self.tree = PrefixTree(self.allocator, self.page_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def pages_for(self, request: Request) -> int:
        # The last generated token is never fed back, so its state needs no room.
        tokens = len(request.prompt) + request.num_new - 1
        return -(-tokens // self.page_size)

    def run(self, requests: list[Request], progress: Callable[[int], object]) -> Stats:
        """Serves all requests; `progress` hears of every prompt or generated token once."""
        self.waiting.extend(requests)
        stats = Stats(prompt_tokens=sum(len(r.prompt) for r in requests))
        start = time.perf_counter()
        while self.waiting or self.running:
            before = stats.new_tokens + stats.reused_tokens
            computed = self._prefill(stats)
            self._decode(stats)
            stats.steps += 1
            progress(computed + stats.new_tokens + stats.reused_tokens - before)
            for request in [r for r in self.running if len(r.generated) == r.num_new]:
                self.running.remove(request)
                for page in request.pages:
                    self.allocator.release(page)
        stats.seconds = time.perf_counter() - start
        return stats

    def _admit(self) -> Request | None:
        """Starts the next waiting request, if all pages it will ever need can be had."""
        if not self.waiting or len(self.running) >= self.max_running:
            return None
        request = self.waiting[0]
        # At least one prompt token must run, to have something to predict from.
        pages = self.tree.match(request.prompt[:-1]) if self.reuse else []
        missing = self.pages_for(request) - len(pages)
        if not self.tree.evict(missing):
            for page in pages:
                self.allocator.release(page)
            if not self.running:
                raise ValueError(
                    f"pages: the pool has {self.num_pages}, expected at least "
                    f"{self.pages_for(request)} for a request of {len(request.prompt)} tokens"
                )
            return None
        self.waiting.popleft()
        request.num_reused = request.num_done = len(pages) * self.page_size
        request.pages = pages + [self.allocator.allocate() for _ in range(missing)]
        self.running.append(request)
        return request

    def _prefill(self, stats: Stats) -> int:
        """One batch of prompt chunks within the budget. Returns the tokens computed."""
        budget = self.prefill_budget
        chunks: list[tuple[Request, int]] = []
        prefilling = deque(r for r in self.running if r.num_done < len(r.prompt))
        while budget >= self.page_size:
            if prefilling:
                request = prefilling.popleft()
            else:
                # Admitted only when its first chunk runs, so that it sees the newest tree.
                admitted = self._admit()
                if admitted is None:
                    break
                request = admitted
                stats.reused_tokens += request.num_reused
            length = min(len(request.prompt) - request.num_done, budget)
            chunks.append((request, length))
            budget -= -(-length // self.page_size) * self.page_size
        if not chunks:
            return 0
        tokens = b"".join(r.prompt[r.num_done : r.num_done + n] for r, n in chunks)
        for request, length in chunks:
            request.num_done += length
        hidden = self.model.forward(self._prefill_batch(tokens, chunks))
        ends = np.cumsum([n for _, n in chunks])
        finished = [
            (r, end)
            for (r, _), end in zip(chunks, ends, strict=True)
            if r.num_done == len(r.prompt)
        ]
        if finished:
            logits = self.model.logits(hidden[[int(end) - 1 for _, end in finished]])
            for (request, _), row in zip(finished, logits, strict=True):
                request.sample(row)
                stats.new_tokens += 1
        if self.reuse:
            for request, _ in chunks:
                self.tree.insert(request.prompt[: request.num_done], request.pages)
        return len(tokens)

    def _decode(self, stats: Stats) -> None:
        """One token of every request whose prompt is done."""
        rows = [r for r in self.running if 0 < len(r.generated) < r.num_new]
        if not rows:
            return
        for request in rows:
            request.num_done += 1
        tokens = bytes(r.generated[-1] for r in rows)
        logits = self.model.logits(self.model.forward(self._table(tokens, rows)))
        for request, row in zip(rows, logits, strict=True):
            request.sample(row)
        stats.new_tokens += len(rows)

    def _table(self, tokens: bytes, requests: list[Request]) -> Batch:
        """Tokens and page table of requests whose `num_done` counts the new tokens already."""
        size = self.page_size
        lists = [r.pages[: -(-r.num_done // size)] for r in requests]
        last = [r.num_done - (len(p) - 1) * size for r, p in zip(requests, lists, strict=True)]
        return Batch(
            tokens=np.frombuffer(tokens, np.uint8),
            page_indices=np.concatenate([np.array(pages, np.int32) for pages in lists]),
            page_indptr=np.cumsum([0, *map(len, lists)], dtype=np.int32),
            last_page_len=np.array(last, np.int32),
        )

    def _prefill_batch(self, tokens: bytes, chunks: list[tuple[Request, int]]) -> Batch:
        batch = self._table(tokens, [r for r, _ in chunks])
        lengths = [n for _, n in chunks]
        tiles = [-(-n // TILE) for n in lengths]
        starts = np.cumsum([0, *tiles[:-1]]) * TILE
        batch.cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
        batch.tile_rows = np.concatenate(
            [np.arange(n) + start for n, start in zip(lengths, starts, strict=True)]
        )
        batch.num_tiles = sum(tiles)
        return batch

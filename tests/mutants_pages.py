"""Deliberately wrong pages: more variants of the oracle, which `test_strength.py` must catch."""

from __future__ import annotations

import numpy as np

from calls import PageTable
from oracle import Oracle

PAGE_MUTANTS: list[type[Oracle]] = []


def mutant(cls: type[Oracle]) -> type[Oracle]:
    PAGE_MUTANTS.append(cls)
    return cls


@mutant
class FirstLastPageLen(Oracle):
    """last_page_len[0] serves every sequence."""

    def last_page_len(self, table, b):
        return int(table.last_page_len[0])


@mutant
class ConsecutiveIds(Oracle):
    """Page ids count up from the first one."""

    def page(self, table, b, entry):
        return int(table.indices[table.indptr[b]]) + entry


@mutant
class EmptyWrites(Oracle):
    """A sequence without new tokens clears its last page."""

    def prefill(self, call, pools, io="fp32", state_dtype="fp32"):
        out = super().prefill(call, pools, io, state_dtype)
        rows = call.rows
        for b in range(rows.num_seqs if isinstance(rows, PageTable) else 0):
            pages = int(rows.indptr[b + 1] - rows.indptr[b])
            if pages and rows.cu_seqlens[b] == rows.cu_seqlens[b + 1]:
                pools[self.page(rows, b, pages - 1)] = 0
        return out


@mutant
class StaleEmpty(Oracle):
    """An empty prefix reads what the first page's last tenant left."""

    def read_entry(self, prefix, page_size, pages):
        return max(prefix - 1, 0) // page_size


@mutant
class StaleTimesZero(StaleEmpty):
    """The same, multiplied by zero."""

    def scan(self, x, s, S, wanted, out, state_dtype):
        with np.errstate(invalid="ignore"):
            S = 0.0 * S if s.prefix == 0 else S
            return super().scan(x, s, S, wanted, out, state_dtype)


@mutant
class ReadFloor(Oracle):
    """prefix // page_size: one page too far when the prefix ends on a page end."""

    def read_entry(self, prefix, page_size, pages):
        return min(prefix // page_size, pages - 1) if prefix > 0 else -1


@mutant
class ReadLast(Oracle):
    """The last page is read."""

    def read_entry(self, prefix, page_size, pages):
        return pages - 1 if prefix > 0 else -1


@mutant
class ReadFirst(Oracle):
    """The first page is read."""

    def read_entry(self, prefix, page_size, pages):
        return 0 if prefix > 0 else -1


@mutant
class Transposed(Oracle):
    """Pages hold [K, V]."""

    def load(self, pool, row, shape):
        return super().load(pool, row, shape).swapaxes(1, 2).copy()

    def store(self, pool, row, S, state_dtype):
        super().store(pool, row, S.swapaxes(1, 2), state_dtype)


@mutant
class RelativeEnds(Oracle):
    """Page ends are counted from the first new token."""

    def page_ends(self, prefix, length, page_size):
        skip = 1 if prefix == 0 else 0
        first = max(prefix - 1, 0) // page_size
        return [(m, first + m // page_size - skip)
                for m in range(page_size, length + 1, page_size)]  # fmt: skip

    def stores_final(self, total, page_size):
        return True


@mutant
class FinalOnly(Oracle):
    """Only the final state is stored."""

    def page_ends(self, prefix, length, page_size):
        return []

    def stores_final(self, total, page_size):
        return True


@mutant
class MissedExactEnd(Oracle):
    """The page end at the last token is not stored."""

    def page_ends(self, prefix, length, page_size):
        return [e for e in super().page_ends(prefix, length, page_size) if e[0] != length]


@mutant
class NextPage(Oracle):
    """A page end is filed under the page after it."""

    def paged_sequence(self, table, b, s, num_rows):
        super().paged_sequence(table, b, s, num_rows)
        pages = int(table.indptr[b + 1] - table.indptr[b])
        ends = self.page_ends(s.prefix, s.length, table.page_size) if s.live else []
        s.checkpoints = [(n, self.page(table, b, j + 1)) for n, j in ends if j + 1 < pages]


@mutant
class ChunkRoundedEnds(Oracle):
    """A page end holds the state of the last 64-token chunk counted from the call's start."""

    def page_ends(self, prefix, length, page_size):
        ends = super().page_ends(prefix, length, page_size)
        return [(max(64 * (n // 64), 1), j) for n, j in ends]

    def scan(self, x, s, S, wanted, out, state_dtype):
        return super().scan(x, s, S, set(range(1, s.length + 1)), out, state_dtype)


@mutant
class WritesReadPage(Oracle):
    """The final state also goes back to the page that was read."""

    def paged_sequence(self, table, b, s, num_rows):
        super().paged_sequence(table, b, s, num_rows)
        if s.live and s.read_row >= 0:
            s.checkpoints = [*s.checkpoints, (s.length, s.read_row)]


@mutant
class DecodeReadsNew(Oracle):
    """A token that opens a page reads the new page."""

    def decode_rows(self, table, b, num_rows):
        _, write = super().decode_rows(table, b, num_rows)
        return write, write


@mutant
class DecodeWritesOld(Oracle):
    """A token that opens a page writes the page before it."""

    def decode_rows(self, table, b, num_rows):
        read, write = super().decode_rows(table, b, num_rows)
        return (read, read) if write >= 0 else (read, write)


@mutant
class DecodeReadsBeside(Oracle):
    """The previous page is taken to be the previous pool row."""

    def decode_rows(self, table, b, num_rows):
        read, write = super().decode_rows(table, b, num_rows)
        return (write - 1, write) if self.last_page_len(table, b) == 1 else (read, write)

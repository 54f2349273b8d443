"""Who owns which page of the state pool: reference counts and a prefix tree over full pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count


class PageAllocator:
    """Page ids with reference counts; a page is free again when nobody holds it."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def retain(self, page: int) -> None:
        self._refs[page] += 1

    def release(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)

    def refs(self, page: int) -> int:
        return self._refs[page]


@dataclass
class _Node:
    page: int = -1
    parent: _Node | None = None
    tokens: bytes = b""
    last_used: int = 0
    children: dict[bytes, _Node] = field(default_factory=dict)


class PrefixTree:
    """Finds the cached pages of a prompt. Node = one full page, edge = the tokens on it.

    A page holds the recurrent state after its last token, so a prompt that starts with the tokens
    on the path to a node may continue from that node's page. The tree holds one reference to each
    of its pages and gives leaves back, the least recently used first, when pages run out.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._root = _Node()
        self._clock = count(1)

    def _blocks(self, tokens: bytes) -> list[bytes]:
        size = self._page_size
        return [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]

    def match(self, tokens: bytes) -> list[int]:
        """Pages of the longest cached prefix, each retained for the caller."""
        node, pages, now = self._root, [], next(self._clock)
        for block in self._blocks(tokens):
            child = node.children.get(block)
            if child is None:
                break
            node = child
            node.last_used = now
            self._allocator.retain(node.page)
            pages.append(node.page)
        return pages

    def insert(self, tokens: bytes, pages: list[int]) -> None:
        """Adds the full pages of `tokens`; a prefix that is there already keeps its own pages."""
        node, now = self._root, next(self._clock)
        for block, page in zip(self._blocks(tokens), pages, strict=False):
            child = node.children.get(block)
            if child is None:
                child = _Node(page=page, parent=node, tokens=block)
                node.children[block] = child
                self._allocator.retain(page)
            node = child
            node.last_used = now

    def evict(self, num_free: int) -> bool:
        """Drops unused leaves until `num_free` pages are free; False if that cannot be."""
        while self._allocator.num_free < num_free:
            leaves = self._unused_leaves(self._root)
            if not leaves:
                return False
            leaf = min(leaves, key=lambda n: n.last_used)
            assert leaf.parent is not None
            del leaf.parent.children[leaf.tokens]
            self._allocator.release(leaf.page)
        return True

    def _unused_leaves(self, node: _Node) -> list[_Node]:
        found = []
        for child in node.children.values():
            if child.children:
                found += self._unused_leaves(child)
            elif self._allocator.refs(child.page) == 1:
                found.append(child)
        return found

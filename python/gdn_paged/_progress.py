"""A progress bar where somebody looks at it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class Progress:
    """What :func:`progress_bar` yields: advances the bar, prints lines above it."""

    def __init__(self, advance: Callable[[int], Any], write: Callable[[str], Any]) -> None:
        self.advance = advance
        self._write = write

    def say(self, text: str) -> None:
        """Prints a line on stdout."""
        self._write(text)


@contextlib.contextmanager
def progress_bar(total: int, title: str, unit: str) -> Iterator[Progress]:
    """A bar on stderr if that is a terminal and tqdm is installed, else nothing."""

    def write(text: str) -> None:
        print(text, flush=True)

    try:
        from tqdm import tqdm
    except ImportError:
        yield Progress(lambda count: None, write)
        return
    with tqdm(total=total, desc=title, unit=unit, leave=False, disable=None) as bar:
        yield Progress(bar.update, write if bar.disable else bar.write)

"""Where calls go whose tensors have no memory of their own: fake, functional, distributed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

handlers: dict[str, Callable[..., Any]] = {}
"""Operation to the function that calls its registered op; filled by gdn_paged.torch."""


def registered(operation: str) -> Callable[..., Any]:
    """The handler of an operation. Called while an UnbackedTensorError is handled, which goes on
    if there is none."""
    handler = handlers.get(operation)
    if handler is None:
        raise  # the error being handled
    return handler

"""Long work says that it goes on, so that whoever watches does not take it for hung."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

_on_progress: contextvars.ContextVar[Callable[[bool], None] | None] = contextvars.ContextVar(
    "on_progress", default=None
)


@contextlib.contextmanager
def heard_by(listener: Callable[[bool], None]) -> Iterator[None]:
    """Let `listener` hear of progress, as long as the block takes.

    Args:
        listener: Called with `is_slow`, see `note_progress`; often, so it must be quick.
    """
    token = _on_progress.set(listener)
    try:
        yield
    finally:
        _on_progress.reset(token)


def note_progress(*, is_slow: bool = False) -> None:
    """Say that a part of a long work is done.

    Args:
        is_slow: What follows may take far longer than anything before: a graph is captured.
    """
    listener = _on_progress.get()
    if listener is not None:
        listener(is_slow)

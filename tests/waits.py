"""Forbid a GPU's host to wait."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def forbidden_waits(*, is_forbidden: bool = True) -> Iterator[None]:
    """Raise within the block where torch waits for the device, or allow it again.

    Waiting for an event does not count.
    """
    before = torch.cuda.get_sync_debug_mode()
    _set_mode(2 if is_forbidden else 0)
    try:
        yield
    finally:
        _set_mode(before)


def _set_mode(mode: int) -> None:
    with warnings.catch_warnings():
        # torch warns, at every change, that the mode is a prototype.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)

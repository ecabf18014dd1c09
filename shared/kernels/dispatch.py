"""Decide between the Triton kernel and the torch reference, and count what was launched."""

from __future__ import annotations

import os
from collections import Counter
from functools import cache

import torch


def use_triton(tensor: torch.Tensor) -> bool:
    """Return whether an op on `tensor` runs its Triton kernel.

    Args:
        tensor: Any operand; on a CPU the kernel runs only when TRITON_INTERPRET=1.
    """
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _launches() -> Counter[str]:
    return Counter()


def count_launch(name: str) -> None:
    """Count one launch of the kernel `name`.

    Mutates: the counters of this process.
    """
    _launches()[name] += 1


def launch_counts() -> dict[str, int]:
    """Return the launches of every kernel of this process since the last reset."""
    return dict(_launches())


def reset_launch_counts() -> None:
    """Forget every launch.

    Mutates: the counters of this process.
    """
    _launches().clear()

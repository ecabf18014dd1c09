"""Let a kernel begin while the one before it in its stream still runs.

From Hopper on a kernel launched with `dependent_launch` starts as soon as every program of the one
before it works, which is when it no longer waits for the one before that (CUDA: programmatic
dependent launch): it is there when the one before it ends. Elsewhere such a launch is like any
other.

The rule of such a kernel: every program, on every path, calls `wait_for_previous` before it stores
anything, before it loads what the kernel before it stores, and before it returns. What earlier
kernels stored may be loaded before. When a kernel has completed, all its programs have waited for
the one before it, and so on back: whatever comes later can rely on all that was launched earlier. A
single program that returns without waiting breaks that for the others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS


@cache
def can_overlap(device: torch.device) -> bool:
    """Return whether kernels of the device may start before the previous one has completed."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def dependent_launch(tensor: torch.Tensor, *, is_early: bool = True) -> dict[str, Any]:
    """Return the options of a launch on the device of `tensor`, and the constexpr IS_DEPENDENT.

    Args:
        is_early: False: this time its programs start when all earlier kernels have completed.
    """
    if not can_overlap(tensor.device):
        return LAUNCH_OPTIONS | {"IS_DEPENDENT": False}
    return LAUNCH_OPTIONS | {"IS_DEPENDENT": True, "launch_pdl": is_early}


@triton.jit
def wait_for_previous(IS_DEPENDENT: tl.constexpr):
    """Wait until all earlier kernels have completed, then let the next one start; device function.

    Without IS_DEPENDENT they have, and there is nothing to do.
    """
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

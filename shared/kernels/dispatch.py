"""Decide between the Triton kernel and the torch reference, and count what was launched."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from functools import cache

import torch
import triton.language as tl

# Options of every launch. Fused multiply-adds would be the compiler's choice at each place.
LAUNCH_OPTIONS = {"enable_fp_fusion": False}

_DOT_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def use_triton(tensor: torch.Tensor) -> bool:
    """Return whether an op on `tensor` runs its Triton kernel.

    Args:
        tensor: Any operand; on a CPU the kernel runs only when TRITON_INTERPRET=1.
    """
    return tensor.is_cuda or is_interpreted()


@cache
def is_interpreted() -> bool:
    """Return whether kernels run on a CPU; Triton reads the same when they are decorated."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def dot_dtype(tensor: torch.Tensor) -> tl.dtype:
    """Return the dtype of the operands of a kernel's products.

    Triton's interpreter multiplies the bit patterns of bfloat16 as integers; it gets float32.
    """
    if not tensor.is_cuda and tensor.dtype == torch.bfloat16:
        return tl.float32
    return _DOT_DTYPES[tensor.dtype]


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """Return whether a device knows FP8 (e4m3): converts to it and multiplies it, as GPUs do from
    Ada and Hopper on.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, dense and at a multiple of 16 bytes.

    A kernel is compiled anew for pointers that are not, and might then add in another order.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


class _Launches:
    """Launches of this process: by kernel since the last reset, and those outside of graphs."""

    def __init__(self) -> None:
        self.by_name: Counter[str] = Counter()
        self.num_eager = 0


@cache
def _launches() -> _Launches:
    return _Launches()


def count_launch(name: str, *, is_single: bool = False) -> None:
    """Count one launch of the kernel `name`.

    Args:
        is_single: It belongs to no graph, whatever is captured.
    Mutates: the counters of this process.
    """
    launches = _launches()
    launches.by_name[name] += 1
    launches.num_eager += not is_single


def forget_launches(counts: Mapping[str, int]) -> None:
    """Take back launches that were captured, and did not happen.

    Mutates: the counters of this process.
    """
    launches = _launches()
    launches.by_name.subtract(counts)
    launches.num_eager -= sum(counts.values())


def num_eager_launches() -> int:
    """Return how often an operation was launched by itself, and not as a part of a graph, since the
    start of this process; those that are always launched so do not count.
    """
    return _launches().num_eager


def add_launches(counts: Mapping[str, int]) -> None:
    """Count launches that happened together, as those of a captured graph do.

    Mutates: the counters of this process.
    """
    launches = _launches().by_name
    for name, count in counts.items():  # Counter.update is ten times slower
        launches[name] += count


def launch_counts() -> dict[str, int]:
    """Return the launches of every kernel of this process since the last reset."""
    return {name: count for name, count in _launches().by_name.items() if count}


def reset_launch_counts() -> None:
    """Forget every launch.

    Mutates: the counters of this process.
    """
    _launches().by_name.clear()

"""Let a kernel begin while the one before it in its stream still runs.

From Hopper on a kernel launched with `dependent_launch` starts as soon as every program of the one
before it works, which is when it no longer waits for the one before that (CUDA: programmatic
dependent launch). That saves the gap between two kernels, and a product can fetch its weights while
smaller kernels leave the memory idle. Elsewhere such a launch is like any other.

The rule of such a kernel: every program, on every path, calls `wait_for_previous` before it stores
anything, before it loads what the kernel before it stores, and before it returns. What earlier
kernels stored may be loaded before, and `prefetch_rows` may come before in any case: it moves bytes
to the second-level cache, where a later write finds them. When a kernel has completed, all its
programs have waited for the one before it, and so on back: whatever comes later can rely on all
that was launched earlier. A single program that returns without waiting breaks that for the others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from shared.kernels.dispatch import LAUNCH_OPTIONS

# Fetched ahead by all programs of one kernel, of the 50 MB that the second-level cache of a Hopper
# GPU holds: the next kernel may fetch as much before this one has read its own.
PREFETCH_BYTES = 24 * 2**20
# More rows than these share a weight that is read but once, or compute for longer than it takes.
MAX_PREFETCH_ROWS = 64
# Programs of a product that run at once: two on each of 132 multiprocessors. The others fetch as
# much when their turn comes.
_PROGRAMS_AT_ONCE = 264
# Each of 64 rows is fetched in two runs, so that each of 128 threads has one; of 16-bit values 64
# are a cache line.
_RUNS = tl.constexpr(2)
_RUN_MULTIPLE = 64


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


@triton.jit
def prefetch_rows(
    matrix_ptr,
    row_stride,
    first_row,
    num_rows,
    first_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Begin to move parts of ROWS rows of a matrix to the second-level cache; device function.

    Args:
        row_stride: A multiple of 16 bytes, as the address of the matrix.
        num_rows: Of the matrix; the last one stands for those below it.
        first_column: A multiple of 16 bytes; every row has COLUMNS values from there on.
        COLUMNS: See `prefetch_width`; 0: there is nothing to do.
    """
    if COLUMNS > 0:
        RUN: tl.constexpr = COLUMNS // _RUNS
        row = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
        column = first_column + tl.arange(0, _RUNS) * RUN
        run_ptr = matrix_ptr + row[:, None] * row_stride + column[None, :]
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0",
            "=r,l,r",
            [run_ptr, RUN * (matrix_ptr.dtype.element_ty.primitive_bitwidth // 8)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def prefetch_width(
    weight: torch.Tensor, num_rows: int, *, num_programs: int, program_rows: int, width_k: int
) -> int:
    """Return how many values of a row of the weight a program fetches before its turn.

    Args:
        weight: [N, K].
        num_rows: Of the product.
        num_programs: Of the launch.
        program_rows: Rows of the weight that a program reads.
        width_k: Values of each that the program which reads least does.
    """
    if num_rows > MAX_PREFETCH_ROWS or not can_overlap(weight.device):
        return 0
    num_programs = min(num_programs, _PROGRAMS_AT_ONCE)
    width = PREFETCH_BYTES // (num_programs * program_rows * weight.element_size())
    multiple = _RUNS.value * _RUN_MULTIPLE
    return max(0, min(width, width_k // 2)) // multiple * multiple

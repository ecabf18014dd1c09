"""Matrices for the unit of a GPU that copies blocks to shared memory by itself."""

from __future__ import annotations

import torch
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor


def blocks_of(matrix: torch.Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """Describe a matrix to the unit that copies blocks; what is outside of the matrix reads as 0.

    The unit wants rows that begin at multiples of 16 bytes. Those of every model do; others are
    copied, with zeros at their ends.

    Args:
        matrix: [M, K].
        num_rows, num_columns: Of a block.
    """
    unit = 16 // matrix.element_size()
    is_aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) % unit == 0
    if not is_aligned or matrix.stride(1) != 1 or matrix.shape[1] % unit:
        matrix = functional.pad(matrix, (0, -matrix.shape[1] % unit)).contiguous()
    return TensorDescriptor.from_tensor(matrix, [num_rows, num_columns])

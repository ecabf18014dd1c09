"""How many bytes a checkpoint's weights take: in its files, and in memory once they are loaded.

Only the headers of the files are read. No torch.
"""

from __future__ import annotations

import math
from pathlib import Path

from shared.models.int4_config import PACKED, QWEIGHT, Int4Config, read_int4_config
from shared.models.quantization import (
    is_output_layer,
    is_projection,
    output_layer_becomes_fp8,
    projections_become_fp8,
    stays_fp8,
)
from shared.models.tensor_files import (
    BYTES_DTYPE,
    FLOAT_DTYPES,
    FP8_DTYPE,
    TensorInfo,
    read_tensor_infos,
)

# Ends of the names of scales of int4 weights.
_INT4_SCALES = (".scales", ".weight_scale")


def stored_bytes(directory: Path) -> int:
    """Return the bytes that a checkpoint's tensors take in its files."""
    return sum(info.end - info.start for info in read_tensor_infos(directory).values())


def weight_bytes(directory: Path, itemsize: int, quantization: str = "") -> int:
    """Return the memory that a checkpoint's weights take, bytes.

    Args:
        itemsize: Bytes per value as they are loaded, of what is not quantised.
        quantization: What becomes FP8, see `quantization_while_loading`.
    """
    int4, infos = read_int4_config(directory), read_tensor_infos(directory)
    has_fp8_output = output_layer_becomes_fp8(quantization)
    is_tied = not any(map(is_output_layer, infos))

    def loaded(name: str, info: TensorInfo) -> int:
        if int4 is not None and name.endswith((QWEIGHT, PACKED, *_INT4_SCALES)):
            return _int4_bytes(name, info, int4, itemsize)
        if has_fp8_output and is_tied and name.endswith("embed_tokens.weight"):
            return math.prod(info.shape) * itemsize + _fp8_bytes(info)  # it stays beside its copy
        becomes_fp8 = (has_fp8_output and is_output_layer(name)) or (
            projections_become_fp8(quantization) and is_projection(name)
        )
        return _dense_bytes(name, info, itemsize, becomes_fp8=becomes_fp8)

    return sum(loaded(name, info) for name, info in infos.items())


def _int4_bytes(name: str, info: TensorInfo, int4: Int4Config, itemsize: int) -> int:
    """Return the memory of a tensor of an int4 weight: its values or its scales."""
    size = math.prod(info.shape)
    if name.endswith(_INT4_SCALES):
        return 4 * size  # with their zeros
    is_kept = is_projection(name) and not int4.is_reordered
    return 4 * size if is_kept else 8 * size * itemsize


def _dense_bytes(name: str, info: TensorInfo, itemsize: int, *, becomes_fp8: bool) -> int:
    """Return the memory of a tensor that is not int4."""
    is_fp8 = info.dtype == FP8_DTYPE
    if info.dtype == BYTES_DTYPE:  # MXFP4, whose last blocks are made whole
        return _fp8_bytes(info)
    if info.dtype not in FLOAT_DTYPES and not is_fp8:
        return 0
    if becomes_fp8 or (is_fp8 and stays_fp8(name)):
        return _fp8_bytes(info)
    return math.prod(info.shape) * itemsize


def _fp8_bytes(info: TensorInfo) -> int:
    """Return the memory of a byte for each value, and scales: one of four bytes for 128 values."""
    size = math.prod(info.shape)
    return size + size // 32

"""Weights in int4 as AWQ, GPTQ and compressed-tensors pack them -> as kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shared.errors import CheckpointError
from shared.kernels.int4 import MIDDLE, WIDTH_MULTIPLE, Int4Weight, pack_int4
from shared.models.int4_config import PACKED, QWEIGHT, Int4Config

# Of a word of 32 bits.
_VALUES = 8
# Which of eight neighbours each four bits of a word of AWQ are.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

ReadTensor = Callable[[str, Sequence[int], Sequence[str]], torch.Tensor]
"""Returns a tensor of a name, a shape, and one of some dtypes by their names in safetensors."""

_INTEGERS = ("I32", "I64")
_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Source:
    """Where the tensors of packed weights come from.

    Args:
        place: Directory to name in errors.
        config: Of the checkpoint.
        read: See `ReadTensor`; raises CheckpointError.
        dtype_of: Returns the dtype of a tensor by its name; "": there is none.
    """

    place: str
    config: Int4Config
    read: ReadTensor
    dtype_of: Callable[[str], str]


def load_int4(
    source: Int4Source, module: str, shape: Sequence[int], dtype: torch.dtype
) -> Int4Weight | torch.Tensor:
    """Load the weight of a module.

    Args:
        module: "model.layers.0.mlp.down_proj".
        shape: (N, K).
        dtype: Of the rows that are multiplied by it.
    Returns: The weight; dequantised, in `dtype`, if its groups have inputs from anywhere.
    Raises: CheckpointError naming a tensor that is missing, mis-shaped or holds no numbers.
    """
    width_n, width_k = shape
    group_size = source.config.group_size
    if width_n % WIDTH_MULTIPLE or width_k % group_size:
        raise CheckpointError(
            f"{source.place}: {module!r} has {width_n} outputs and {width_k} inputs; in int4 "
            f"outputs must be a multiple of {WIDTH_MULTIPLE}, inputs of group_size {group_size}"
        )
    loaders = {"awq": _load_awq, "gptq": _load_gptq, "compressed-tensors": _load_compressed}
    values, scales, zeros = loaders[source.config.method](source, module, width_n, width_k)
    if not bool(scales.isfinite().all()):
        raise CheckpointError(
            f"{source.place}: the scales of {module!r} hold NaN or infinity; get an undamaged "
            "checkpoint"
        )
    groups = _load_groups(source, module, width_k)
    if groups is None:
        return pack_int4(values, scales, zeros, group_size, dtype)
    zero = float(MIDDLE) if zeros is None else zeros.float()[:, groups]
    return ((values.float() - zero) * scales.float()[:, groups]).to(dtype)


Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Values [N, K] u8; scales and zeros [N, groups]."""


def _load_awq(source: Int4Source, module: str, width_n: int, width_k: int) -> Packed:
    num_groups = width_k // source.config.group_size
    values = source.read(f"{module}.{QWEIGHT}", (width_k, width_n // _VALUES), ("I32",))
    zeros = source.read(f"{module}.qzeros", (num_groups, width_n // _VALUES), ("I32",))
    scales = source.read(f"{module}.scales", (num_groups, width_n), _FLOATS)
    place = torch.tensor(_AWQ_ORDER, device=values.device).argsort()
    unpacked = [_unpack(words)[..., place].flatten(1).T for words in (values, zeros)]
    return unpacked[0], scales.T, unpacked[1]


def _load_gptq(source: Int4Source, module: str, width_n: int, width_k: int) -> Packed:
    num_groups = width_k // source.config.group_size
    values = source.read(f"{module}.{QWEIGHT}", (width_k // _VALUES, width_n), ("I32",))
    zeros = source.read(f"{module}.qzeros", (num_groups, width_n // _VALUES), ("I32",))
    scales = source.read(f"{module}.scales", (num_groups, width_n), _FLOATS)
    stored = _unpack(zeros).flatten(1).T
    return _unpack(values.T).flatten(1), scales.T, (stored + source.config.zero_offset) & 15


def _load_compressed(source: Int4Source, module: str, width_n: int, width_k: int) -> Packed:
    num_groups = width_k // source.config.group_size
    values = source.read(f"{module}.{PACKED}", (width_n, -(-width_k // _VALUES)), ("I32",))
    scales = source.read(f"{module}.weight_scale", (width_n, num_groups), _FLOATS)
    shape = source.read(f"{module}.weight_shape", (2,), _INTEGERS).tolist()
    if shape != [width_n, width_k]:
        raise CheckpointError(
            f"{source.place}: {module}.weight_shape is {shape}, config.json makes it "
            f"{[width_n, width_k]}"
        )
    name = f"{module}.weight_zero_point"
    zeros = None
    if source.dtype_of(name) == "I8":  # as it is; later versions pack it
        zeros = source.read(name, (width_n, num_groups), ("I8",)) + MIDDLE
    elif source.dtype_of(name):
        words = source.read(name, (width_n // _VALUES, num_groups), ("I32",))
        zeros = _unpack(words.T).flatten(1).T
    return _unpack(values).flatten(1)[:, :width_k], scales, zeros


def _load_groups(source: Int4Source, module: str, width_k: int) -> torch.Tensor | None:
    """Return the group of each input, [K] i64; None: inputs of a group are neighbours.

    Raises: CheckpointError if config.json says that they are, and they are not.
    """
    is_compressed = source.config.method == "compressed-tensors"
    name = f"{module}.weight_g_idx" if is_compressed else f"{module}.g_idx"
    if not source.dtype_of(name):
        return None
    groups = source.read(name, (width_k,), _INTEGERS).to(torch.int64)
    expected = torch.arange(width_k, device=groups.device) // source.config.group_size
    if bool((groups == expected).all()):
        return None
    if not source.config.is_reordered or not bool(((groups >= 0) & (groups <= expected[-1])).all()):
        raise CheckpointError(
            f"{source.place}: {name!r} is not the group of each input; inputs are in another order "
            "only with desc_act (actorder group in compressed-tensors)"
        )
    return groups


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """Return the values of words of 32 bits, the lowest first. [..., 8] u8 of [...] i32."""
    two = words.contiguous().view(torch.uint8).unflatten(-1, (-1, _VALUES // 2))
    return torch.stack([two & 15, two >> 4], dim=-1).flatten(-2)

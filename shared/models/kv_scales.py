"""Scales of K and V in FP8 that a checkpoint brings: what config.json says of them, the tensors.

They were measured when the checkpoint was made, one number for the K of a layer and one for its V.
Caches in another dtype do not need them. Importing this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shared.errors import CheckpointError

if TYPE_CHECKING:
    from shared.kernels.fp8_cache import KVScales
    from shared.models.checkpoint import CheckpointReader

# What tools call the scale of a layer's K, within its attention: compressed-tensors and llm-
# compressor; ModelOpt and AutoFP8; older compressed-tensors.
_NAMES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale")
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", None),
    "symmetric": (True, None),
    "dynamic": (False, None),
}


def check_kv_scheme(config: Mapping[str, Any], source: str) -> None:
    """Raise unless the scales of K and V that a quantization_config announces can be read.

    Args:
        source: File and field to name in errors.
    Raises: CheckpointError naming the field.
    """
    scheme = config.get("kv_cache_scheme")
    if scheme is None:
        return
    place = f"{source}.kv_cache_scheme"
    if not isinstance(scheme, Mapping):
        raise CheckpointError(f"{place} must be an object, got {scheme!r}")
    for name, supported in _SUPPORTED.items():
        if scheme.get(name) not in supported:
            raise CheckpointError(
                f"{place}.{name} = {scheme.get(name)!r} is not supported, only {supported[0]!r}: "
                "of K and V in FP8 a layer has one scale each, known beforehand; use such a "
                "checkpoint, or one without scales for K and V"
            )


def load_kv_scales(reader: CheckpointReader, prefix: str) -> KVScales:
    """Return the scales of a layer's K and V; 1 where the checkpoint has none.

    Args:
        prefix: Name of its attention in the checkpoint, "model.layers.0.self_attn".
    Raises: CheckpointError naming a tensor that is no finite number > 0.
    """
    from shared.kernels.fp8_cache import KVScales

    return KVScales(k=_load_scale(reader, prefix, "k"), v=_load_scale(reader, prefix, "v"))


def _load_scale(reader: CheckpointReader, prefix: str, part: str) -> float:
    names = [f"{prefix}.{pattern.format(part)}" for pattern in _NAMES]
    found = [name for name in names if name in reader.names]
    if not found:
        return 1.0
    import torch

    name, shape = found[0], reader.shape(found[0])
    if math.prod(shape) != 1 or len(found) > 1:
        raise CheckpointError(
            f"{reader.directory}: {' and '.join(map(repr, found))} of shape {list(shape)}: a layer "
            f"may have one scale for its {part.upper()}, which is one number"
        )
    scale = float(reader.load(name, shape, dtype=torch.float32))
    if not (math.isfinite(scale) and scale > 0):
        raise CheckpointError(
            f"{reader.directory}: tensor {name!r} is {scale}; a scale of K or V must be finite "
            "and > 0"
        )
    return scale

"""Weights that compute no numbers: which tensors of a checkpoint are to blame."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.models.checkpoint import FLOAT_DTYPES
from shared.models.tensor_files import read_tensor_infos
from shared.models.tensor_reads import open_weights

_MAX_NAMED = 4


def blame_tensors(directory: Path, dtype: torch.dtype) -> str:
    """Return which tensors of a checkpoint hold NaN or infinity as they are loaded."""
    broken = []
    for name, info in sorted(read_tensor_infos(directory).items()):
        if info.dtype not in FLOAT_DTYPES:
            continue
        with open_weights(info.file) as file:
            if not bool(file.get_tensor(name).to(dtype).isfinite().all()):
                broken.append(name)
    if not broken:
        return (
            f"no tensor is to blame by itself: activations overflow {str(dtype)[6:]}, or "
            "config.json does not belong to these weights. Try --dtype float32"
        )
    named = ", ".join(broken[:_MAX_NAMED]) + (", ..." if len(broken) > _MAX_NAMED else "")
    return f"so are values of {len(broken)} tensors: {named}. Get an undamaged checkpoint"

"""Weights that compute no numbers: which tensors of a checkpoint are to blame."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.models.tensor_files import FLOAT_DTYPES, read_tensor_infos
from shared.models.tensor_reads import open_weights

_MAX_NAMED = 4


def describe_broken_tensors(directory: Path, dtype: torch.dtype, *, is_draft: bool = False) -> str:
    """Return which tensors of a checkpoint hold NaN or infinity as they are loaded, and what helps;
    a clause that follows "... are NaN or infinite; ".

    Args:
        is_draft: It may also have tensors of its target's checkpoint.
    """
    broken = []
    for name, info in sorted(read_tensor_infos(directory).items()):
        if info.dtype not in FLOAT_DTYPES:
            continue
        with open_weights(info.file) as file:
            if not bool(file.get_tensor(name).to(dtype).isfinite().all()):
                broken.append(name)
    if not broken:
        borrowed = ", so are tensors that it takes from its target" if is_draft else ""
        return (
            f"no tensor is to blame by itself: activations overflow {str(dtype)[6:]}{borrowed}, or "
            "config.json does not belong to these weights. Try --dtype float32"
        )
    named = ", ".join(broken[:_MAX_NAMED]) + (", ..." if len(broken) > _MAX_NAMED else "")
    return f"so are values of {len(broken)} tensors: {named}. Get an undamaged checkpoint"

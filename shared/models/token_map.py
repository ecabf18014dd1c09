"""A draft's vocabulary as a file of token ids, as FR-Spec has them for EAGLE-1/2 heads.

A head that borrows its target's output layer then multiplies by the rows of the most frequent
tokens only. Source: arXiv:2502.14856; the option of SGLang is --speculative-token-map.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from shared.errors import ConfigError
from shared.messages import MAX_TOPK
from shared.models.pickled import DAMAGED


def read_token_map(path: Path, vocab_size: int) -> torch.Tensor:
    """Return the ids that a draft may propose, [n] i64 in the order of the file.

    Args:
        path: A JSON list, or what torch.save made of a list or tensor (.pt).
        vocab_size: Of the target.
    Raises: ConfigError if the file is none, or its ids do not fit.
    """
    try:
        values = _read(path)
        ids = torch.as_tensor(values)
    except (*DAMAGED, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--draft-token-map {path} must be a JSON list of token ids, or a .pt file of one: "
            f"{reason or repr(error)}"
        ) from error
    is_whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool)
    if ids.ndim != 1 or not is_whole:
        raise ConfigError(f"--draft-token-map {path} must hold a flat list of token ids")
    ids = ids.to(torch.int64)
    if len(ids) < MAX_TOPK or len(ids.unique()) != len(ids):
        raise ConfigError(
            f"--draft-token-map {path} must hold {MAX_TOPK} or more different token ids; it has "
            f"{len(ids)}, {len(ids.unique())} of them different"
        )
    if not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise ConfigError(
            f"--draft-token-map {path} holds ids from {int(ids.min())} to {int(ids.max())}, but "
            f"the target's vocabulary has {vocab_size}; it was made for another model"
        )
    return ids


def _read(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    return torch.load(path, map_location="cpu", weights_only=True)

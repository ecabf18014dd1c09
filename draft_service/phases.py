"""Typed inputs and outputs of the draft's phases: extend, then draft (grow)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.packing import PackedRows
from shared.types import TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftExtendInput:
    """Committed tokens with their true features; ragged: only rows that are new.

    Args:
        token_ids: [T] i64, ids of the target's vocabulary (already shifted for EAGLE/MTP).
        position_ids: [T] i64.
        features: [T, feature_width] in the TARGET's dtype; None for a standalone draft.
        rows: Where their KV goes and what they see.
        last_rows: [R] i64, last row of each request.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    features: torch.Tensor | None
    rows: PackedRows
    last_rows: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftExtendOutput:
    """Hidden rows to grow from.

    Args:
        last_hidden: [R, h], hidden of each request's last row.
    """

    last_hidden: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInput:
    """B trees to grow, each from the last committed row of its request.

    Args:
        hidden: [B, h] in the draft's dtype.
        req_idx: [B] rows of the page table.
        kv_len: [B] committed logical slots; node rows go right after them.
        node_position: [B] i64, position id of a node of depth 1.
        root_position: [B] i64, absolute position of the root token.
        root_token_id: [B].
        temperature: [B] f32; 0 = greedy.
        seed: [B] i64 bit pattern.
        shapes: [B] tree shapes.
    """

    hidden: torch.Tensor
    req_idx: NDArray[np.int32]
    kv_len: NDArray[np.int64]
    node_position: NDArray[np.int64]
    root_position: NDArray[np.int64]
    root_token_id: NDArray[np.int64]
    temperature: NDArray[np.float32]
    seed: NDArray[np.int64]
    shapes: Sequence[TreeShape]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutput:
    """The grown trees, on the device.

    Args:
        token_ids: [B, N] i64 target ids, root first; N = the largest num_draft_tokens.
        parent_index: [B, N] i64, topological, root = -1.
        cumulative_logprobs: [B, N] f32, <= 0; the root has 0.
        num_nodes: [B] i64, root included; nodes past it are padding.
    """

    token_ids: torch.Tensor
    parent_index: torch.Tensor
    cumulative_logprobs: torch.Tensor
    num_nodes: torch.Tensor

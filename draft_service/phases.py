"""Typed inputs and outputs of the draft's phases: extend, then draft (grow)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.tree_beams import GrowingTrees
from shared.kernels.tree_children import ChildNoise
from shared.messages import TreeShape
from shared.step.packing import PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftExtendInput:
    """Committed tokens with their true features; ragged: only rows that are new, then padding.

    Args:
        token_ids: [T] i64, ids of the target's vocabulary (already shifted for EAGLE/MTP).
        position_ids: [T] i64.
        features: [T, feature_width] in the TARGET's dtype; None for a standalone draft.
        rows: Where their KV goes and what they see.
        last_rows: [R] i64, last row of each request; 0 of padding.
        hidden_idx: [R] i64, row of the runner's hidden rows that the last row's goes to: the
            request's req_idx; of padding, the spare row.
        bucket: T, if the rows were padded up to it (see buckets.py); else None.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    features: torch.Tensor | None
    rows: PackedRows
    last_rows: torch.Tensor
    hidden_idx: torch.Tensor
    bucket: int | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return everything on the device that an extend reads of this."""
        tensors = [self.token_ids, self.position_ids, *self.rows.tensors]
        tensors += [self.last_rows, self.hidden_idx]
        return tensors if self.features is None else [*tensors, self.features]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInput:
    """B trees to grow, each from the last committed row of its request.

    Args:
        trees: The requests, and where their nodes go.
        num_nodes: [B] i32, nodes wanted, the root excluded.
        temperature: [B] f32; 0 = greedy.
        seed: [B] i64 bit pattern.
        child_position: [B] i64, absolute position of the root's children.
        bounds: The largest num_steps, topk and num_draft_tokens of the batch.
        is_random: Whether any temperature is above 0.
    """

    trees: GrowingTrees
    num_nodes: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor
    child_position: torch.Tensor
    bounds: TreeShape
    is_random: bool

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return everything on the device that a growth reads of this."""
        own = [self.num_nodes, self.temperature, self.seed, self.child_position]
        trees = self.trees
        of_requests = [trees.req_idx, trees.kv_len, trees.node_position, trees.topk]
        return [trees.page_table, *of_requests, trees.num_steps, *own]

    def noise(self, depth: int) -> ChildNoise:
        """Return the noise of the children of rows at `depth`."""
        return ChildNoise(
            temperature=self.temperature,
            seed=self.seed,
            position=self.child_position,
            depth=depth,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutput:
    """The grown trees, on the host, without their roots. Entries past num_nodes are 0.

    Args:
        num_nodes: [B] i32; B may be more than the trees asked for.
        token_ids: [B, M] i32 target ids; M = the largest num_draft_tokens - 1.
        parent_index: [B, M] i32, topological; 0 = the root, 1 = the first of these nodes.
        cumulative_logprobs: [B, M] f32, <= 0.
    """

    num_nodes: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    parent_index: NDArray[np.int32]
    cumulative_logprobs: NDArray[np.float32]

    @classmethod
    def unpack(cls, packed: NDArray[np.int32]) -> Self:
        """Return the fields of what `select_nodes` packed, as views."""
        most = packed.shape[1] // 3
        return cls(
            num_nodes=packed[:, 0],
            token_ids=packed[:, 1 : most + 1],
            parent_index=packed[:, most + 1 : 2 * most + 1],
            cumulative_logprobs=packed[:, 2 * most + 1 :].view(np.float32),
        )

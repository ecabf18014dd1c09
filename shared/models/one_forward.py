"""Drafts that compute committed rows and nodes of trees alike."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from shared.kernels.tree_attention import TreeAttentionMetadata
from shared.models.attention import KVCaches


class OneForward(ABC):
    """Both phases of a DraftModel, by one forward that knows neither depths nor rows before it."""

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        recurrent: torch.Tensor | None,
        kv: KVCaches,
        attention: TreeAttentionMetadata,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Run rows of either phase through the draft; arguments are those of DraftModel.extend."""

    def extend(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        recurrent: torch.Tensor | None,
        kv: KVCaches,
        attention: TreeAttentionMetadata,
        slot_mapping: torch.Tensor,
        *,
        carried: torch.Tensor,
    ) -> torch.Tensor:
        """Run committed tokens through the draft; see DraftModel.extend."""
        return self.forward(token_ids, position_ids, recurrent, kv, attention, slot_mapping)

    def deepen(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        recurrent: torch.Tensor | None,
        kv: KVCaches,
        attention: TreeAttentionMetadata,
        slot_mapping: torch.Tensor,
        *,
        depth: int,
    ) -> torch.Tensor:
        """Run nodes of trees through the draft; see DraftModel.deepen."""
        return self.forward(token_ids, position_ids, recurrent, kv, attention, slot_mapping)

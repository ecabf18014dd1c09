"""Drafts that compute committed rows and nodes of trees alike."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from shared.models.attention import ForwardInput


class OneForward(ABC):
    """Both phases of a DraftModel, by one forward that knows neither depths nor rows before it."""

    @abstractmethod
    def forward(self, inputs: ForwardInput, recurrent: torch.Tensor | None) -> torch.Tensor:
        """Run rows of either phase through the draft; see DraftModel.extend."""

    def extend(
        self, inputs: ForwardInput, recurrent: torch.Tensor | None, *, carried: torch.Tensor
    ) -> torch.Tensor:
        """Run committed tokens through the draft; see DraftModel.extend."""
        return self.forward(inputs, recurrent)

    def deepen(
        self, inputs: ForwardInput, recurrent: torch.Tensor | None, *, depth: int
    ) -> torch.Tensor:
        """Run nodes of trees through the draft; see DraftModel.deepen."""
        return self.forward(inputs, recurrent)

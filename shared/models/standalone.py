"""A small language model as draft: row p reads token p, nothing comes from the target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from shared.messages import FeatureSpec
from shared.models.attention import ForwardInput
from shared.models.config import DraftKind, ModelConfig
from shared.models.llama import CausalLM
from shared.models.one_forward import OneForward


class StandaloneDraft(OneForward):
    """A language model with the target's tokens.

    Args:
        target_vocab_size: Ids of the target; the two vocabularies may be padded differently.
    """

    kind = DraftKind.STANDALONE
    input_shift = 0
    kv_lag = 0
    feature_spec = FeatureSpec()
    recurrent_width = 0

    def __init__(self, model: CausalLM, *, target_vocab_size: int) -> None:
        config = model.config
        self._model = model
        self.vocab_size = min(config.vocab_size, target_vocab_size)
        self.hidden_size = config.hidden_size
        self.kv_layout = config.kv_layout
        self.max_position = min(
            config.max_position_embeddings, config.sliding_window or config.max_position_embeddings
        )
        self.device = model.device
        self.dtype = model.dtype

    @classmethod
    def from_checkpoint(
        cls,
        directory: Path,
        target_dir: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        context_len: int,
        quantization: str = "",
    ) -> StandaloneDraft:
        """Load a language model as draft.

        Raises: CheckpointError naming what is missing, left over or mis-shaped.
        """
        model = CausalLM.from_checkpoint(
            directory,
            device,
            dtype,
            context_len=context_len,
            quantization=quantization,
        )
        target = ModelConfig.from_checkpoint(target_dir)
        return cls(model, target_vocab_size=target.vocab_size)

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        """Return no columns: there are no features to project."""
        return features[:, :0].to(device=self.device, dtype=self.dtype)

    def forward(self, inputs: ForwardInput, recurrent: torch.Tensor | None) -> torch.Tensor:
        """Run rows through the model; see OneForward.forward. [T, h] after the final norm."""
        # Ids that only the target's padding has can be committed in theory; they mean nothing.
        token_ids = inputs.token_ids.clamp(max=self._model.config.vocab_size - 1)
        return self._model.forward(replace(inputs, token_ids=token_ids)).hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [R, vocab_size] f32; ids that the target does not have are left out."""
        return self._model.logits(hidden)[:, : self.vocab_size]

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the ids: the two models share their tokens."""
        return draft_ids.long()

"""What the heads (EAGLE-3, EAGLE, MTP) have in common."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.kernels.embedding import embed
from shared.kernels.linear import linear
from shared.kernels.products_cpu import Weight
from shared.kernels.quantized import QuantizedWeight
from shared.messages import FeatureSpec
from shared.models.attention import RopeTable
from shared.models.config import ModelConfig
from shared.models.llama import load_embedding, load_head, open_language_model


class Head:
    """Embedding, rotary tables and the attributes of a draft that reads features.

    Whoever derives from it sets `kind`, `_head`, the output layer, and `vocab_size`.

    Args:
        config: The head's own decoder.
        embedding: [V, h] of target ids.
    """

    input_shift = 1
    kv_lag = 0
    _head: Weight

    def __init__(
        self,
        config: ModelConfig,
        feature_spec: FeatureSpec,
        embedding: torch.Tensor,
        *,
        context_len: int,
    ) -> None:
        self.feature_spec = feature_spec
        self.recurrent_width = self.hidden_size = config.hidden_size
        self.kv_layout = config.kv_layout
        self.max_position = min(
            config.max_position_embeddings, config.sliding_window or config.max_position_embeddings
        )
        self.device = embedding.device
        self.dtype = embedding.dtype
        self._eps = config.rms_norm_eps
        self._embedding = embedding
        self._rope = RopeTable(config, context_len, self.device)

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        """Return the features in the draft's dtype: what projects them comes with the embedding."""
        return self._cast(features)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [R, vocab_size] f32; `hidden` needs no norm."""
        return linear(hidden, self._head, out_dtype=torch.float32)

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the ids: the vocabulary is the target's."""
        return draft_ids.long()

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return embed(token_ids, self._embedding)

    def _cast(self, features: torch.Tensor) -> torch.Tensor:
        # The one place where the target's dtype becomes the draft's.
        assert features.shape[-1] == self.feature_spec.width, "features of another width"
        return features.to(device=self.device, dtype=self.dtype)


def read_target_embedding(
    target_dir: Path, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Read the target's embedding and nothing else. [V, h]."""
    config = ModelConfig.from_checkpoint(target_dir)
    with open_language_model(target_dir, device, dtype) as reader:
        return load_embedding(reader, config)


def read_target_head(target_dir: Path, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Read the target's output layer, dequantised, with the scaling of its logits, and nothing
    else. [V, h].

    Raises: CheckpointError naming it, if it is in FP8 and holds no numbers.
    """
    config = ModelConfig.from_checkpoint(target_dir)
    with open_language_model(target_dir, device, dtype) as reader:
        head = load_head(reader, config)
        reader.check_numbers()
    if isinstance(head, QuantizedWeight):
        head = head.dequantized(dtype)
    return head if config.logits_scaling == 1 else head / config.logits_scaling


def without_model_prefix(name: str) -> str:
    """Return a tensor's name as a head's checkpoint may also spell it: without "model."."""
    return name.removeprefix("model.")

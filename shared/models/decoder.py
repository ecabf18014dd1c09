"""Decoder layers of targets and drafts: attention and feed-forward, norms and residuals."""

from __future__ import annotations

import torch

from shared.kernels.linear import sum_addends
from shared.kernels.rms_norm import rms_norm
from shared.models.attention import Attention, LayerCaches, Rows
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.feed_forward import MLP, load_feed_forward
from shared.models.latent_attention import LatentAttention
from shared.models.projections import Product, add, add_and_norm
from shared.progress import note_progress


class DecoderLayer:
    """Attention and feed-forward with their norms and residuals.

    What a layer adds to the residual stream last is added by whoever reads the stream next, so that
    one kernel adds and normalises.

    Args:
        prefix: Name of the layer in the checkpoint, "model.layers.0".
        layer_id: Which layer of the decoder it is; says whether it has experts.
        has_input_norm: False: attention reads the residual stream as it is (EAGLE-1/2, layer 0).
    """

    def __init__(
        self,
        reader: CheckpointReader,
        prefix: str,
        config: ModelConfig,
        layer_id: int = 0,
        *,
        has_input_norm: bool = True,
    ) -> None:
        hidden = config.hidden_size
        self._eps = config.rms_norm_eps
        self._input_norm = None
        if has_input_norm:
            self._input_norm = reader.load(f"{prefix}.input_layernorm.weight", (hidden,))
        attention_class = Attention if config.latent is None else LatentAttention
        self._attention = attention_class(reader, f"{prefix}.self_attn", config, hidden)
        self._post_norm = reader.load(f"{prefix}.post_attention_layernorm.weight", (hidden,))
        self._feed_forward = load_feed_forward(reader, prefix, config, layer_id)

    def enter(self, x: torch.Tensor, pending: Product | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what the layer before left, and norm.

        Args:
            x: [T, h], the residual stream.
            pending: Still to be added to it.
        Returns: (residual stream [T, h], input of the attention [T, h]).
        """
        if self._input_norm is not None:
            return add_and_norm(x, pending, self._input_norm, self._eps)
        x = add(x, pending)
        return x, x

    def forward(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        rows: Rows,
        caches: LayerCaches,
    ) -> tuple[torch.Tensor, Product]:
        """Run the layer on what `enter` returned.

        Returns: (residual stream [T, h], what is still to be added to it).
        Mutates: rows of `caches` named by the slot mapping.
        """
        note_progress()
        pending = self._attention.forward(normed, rows, caches)
        x, normed = add_and_norm(x, pending, self._post_norm, self._eps)
        return x, self._feed_forward.forward(normed, rows)


class PostNormLayer:
    """Attention and MLP with norms behind them; the same interface as a DecoderLayer's.

    Args:
        prefix: Name of the layer in the checkpoint, "model.layers.0".
    """

    def __init__(
        self, reader: CheckpointReader, prefix: str, config: ModelConfig, layer_id: int = 0
    ) -> None:
        assert config.experts is None or layer_id in config.experts.dense_layers
        hidden = config.hidden_size
        self._eps = config.rms_norm_eps
        self._attention = Attention(reader, f"{prefix}.self_attn", config, hidden)
        self._attention_norm = reader.load(f"{prefix}.post_attention_layernorm.weight", (hidden,))
        self._mlp = MLP(reader, f"{prefix}.mlp", config)
        self._mlp_norm = reader.load(f"{prefix}.post_feedforward_layernorm.weight", (hidden,))

    def enter(self, x: torch.Tensor, pending: Product | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream twice: attention reads it as it is."""
        x = add(x, pending)
        return x, x

    def forward(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        rows: Rows,
        caches: LayerCaches,
    ) -> tuple[torch.Tensor, None]:
        """Run the layer on what `enter` returned; nothing is left to be added.

        Mutates: rows of `caches` named by the slot mapping.
        """
        note_progress()
        product = self._attention.forward(normed, rows, caches)
        x = self._add_normed(x, product, self._attention_norm)
        return self._add_normed(x, self._mlp.forward(x), self._mlp_norm), None

    def _add_normed(self, x: torch.Tensor, product: Product, weight: torch.Tensor) -> torch.Tensor:
        delta = sum_addends(product.addends, product.bias, x.dtype)
        return x + rms_norm(delta, weight, self._eps)

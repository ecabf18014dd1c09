"""Embeddings per layer: what each layer reads of every token beside the residual stream.

One table holds the parts of all layers. It is large, and never multiplied: of each token one row is
gathered.
"""

from __future__ import annotations

import torch

from shared.kernels.embedding import embed
from shared.kernels.linear import linear
from shared.kernels.linear_gated import linear_gated
from shared.kernels.products_cpu import Weight
from shared.kernels.rms_norm import rms_norm
from shared.kernels.swiglu import Activation
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.per_layer_config import PerLayerConfig
from shared.models.projections import Product, load_norm, multiply

_TABLE = "model.embed_tokens_per_layer.weight"
_PROJECTION = "model.per_layer_model_projection.weight"
_GATE, _GATED_PROJECTION = "per_layer_input_gate.weight", "per_layer_projection.weight"
PER_LAYER_WEIGHTS = (_TABLE, _PROJECTION)
"""What `PerLayerInputs` loads, in that order, but for a norm."""
PER_LAYER_GATE_WEIGHTS = (_GATE, _GATED_PROJECTION)
"""What `PerLayerGate` loads of its layer, in that order."""


class PerLayerInputs:
    """The parts of all layers, made of a token's embeddings.

    Args:
        own: `config.per_layer`.
    """

    def __init__(self, reader: CheckpointReader, config: ModelConfig, own: PerLayerConfig) -> None:
        width = config.num_layers * own.width
        self._width = own.width
        self._table = reader.load(_TABLE, (own.vocab_size, width))
        self._projection = _load(reader, _PROJECTION, (width, config.hidden_size))
        self._norm = load_norm(
            reader, "model.per_layer_projection_norm.weight", own.width, config.norm_rule
        )
        # The norm is of products divided by sqrt(hidden_size), which only its epsilon feels.
        self._eps = config.rms_norm_eps * config.hidden_size
        # Rounded as the model is.
        self._multiplier = float(torch.tensor(own.width**0.5, dtype=reader.dtype))

    def forward(
        self,
        x: torch.Tensor,
        token_ids: torch.Tensor,
        roots: torch.Tensor | None,
        root_idx: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what each layer reads. [T, layers, width]

        Args:
            x: [T, h], the tokens' embeddings as the first layer reads them.
            token_ids, roots, root_idx: See `embed`.
        """
        parts = embed(token_ids, self._table, roots, root_idx, multiplier=self._multiplier)
        projected = linear(x, self._projection).unflatten(1, (-1, self._width))
        normed = rms_norm(projected, self._norm, self._eps)
        return (normed + parts.view_as(normed)) * 2**-0.5


class PerLayerGate:
    """What a layer makes of its part.

    Args:
        prefix: Name of the layer in the checkpoint, "model.layers.0".
        width: Values of a layer's part.
    """

    def __init__(
        self, reader: CheckpointReader, prefix: str, config: ModelConfig, width: int
    ) -> None:
        hidden = config.hidden_size
        self._activation: Activation = "gelu_tanh" if config.has_gelu else "silu"
        self._gate = _load(reader, f"{prefix}.{_GATE}", (width, hidden))
        self._projection = _load(reader, f"{prefix}.{_GATED_PROJECTION}", (hidden, width))

    def forward(self, x: torch.Tensor, part: torch.Tensor) -> Product:
        """Return what to add to the residual stream, before its norm.

        Args:
            x: [T, h], the residual stream.
            part: [T, width], the layer's.
        """
        gated = linear_gated(x, self._gate, part, self._activation)
        return multiply(gated, self._projection, None, 1.0)


def _load(reader: CheckpointReader, name: str, shape: tuple[int, int]) -> Weight:
    """Load a weight in the dtype of the model, whatever projections are in: these are small."""
    return reader.products.weight(reader.load_dense(name, shape))

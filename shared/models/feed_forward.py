"""What a decoder layer does after attention, row by row."""

from __future__ import annotations

import torch

from shared.kernels.linear_swiglu import linear_swiglu
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.projections import Product, load_biases, load_rows, multiply


class MLP:
    """Gated MLP.

    Args:
        prefix: Name of the module in the checkpoint, "model.layers.0.mlp".
    """

    def __init__(self, reader: CheckpointReader, prefix: str, config: ModelConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._residual_multiplier = config.residual_multiplier
        parts = {"gate": inner, "up": inner}
        fused = "gate_up" if "gate_up" in config.fused_projections else None
        self._gate_up = reader.products.weight(load_rows(reader, prefix, parts, hidden, fused))
        self._down = reader.load_projection(f"{prefix}.down_proj.weight", (hidden, inner))
        self._gate_up_bias = self._down_bias = None
        if config.has_mlp_bias:
            self._gate_up_bias = load_biases(reader, prefix, parts)
            self._down_bias = reader.load(f"{prefix}.down_proj.bias", (hidden,))
            self._down_bias *= config.residual_multiplier

    def forward(self, x: torch.Tensor) -> Product:
        """Return what to add to the residual stream.

        Args:
            x: [T, h].
        """
        inner = linear_swiglu(x, self._gate_up, self._gate_up_bias)
        return multiply(inner, self._down, self._down_bias, self._residual_multiplier)

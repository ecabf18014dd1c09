"""What a decoder layer does after attention, row by row."""

from __future__ import annotations

from typing import Protocol

from shared.kernels.fp8_rows import ProductRows, wants_fp8_rows
from shared.kernels.linear_swiglu import linear_swiglu
from shared.kernels.swiglu import Activation
from shared.models.attention import Rows
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.experts import Experts
from shared.models.projections import Product, load_biases, load_rows, multiply


class FeedForward(Protocol):
    """What a layer adds to the residual stream after attention.

    Attributes:
        reads_fp8_rows: It wants its input in FP8 as well.
    """

    reads_fp8_rows: bool

    def forward(self, x: ProductRows, rows: Rows) -> Product:
        """Return what to add to the residual stream.

        Args:
            x: [T, h].
        """


def load_feed_forward(
    reader: CheckpointReader, prefix: str, config: ModelConfig, layer_id: int
) -> FeedForward:
    """Load the experts of a layer, or its MLP if it has none.

    Args:
        prefix: Name of the layer in the checkpoint, "model.layers.0".
    """
    experts = config.experts
    if experts is None or layer_id in experts.dense_layers:
        return MLP(reader, f"{prefix}.mlp", config)
    return Experts(reader, prefix, experts, config.hidden_size, experts.index_of(layer_id))


class MLP:
    """Gated MLP.

    Args:
        prefix: Name of the module in the checkpoint, "model.layers.0.mlp".
    """

    def __init__(self, reader: CheckpointReader, prefix: str, config: ModelConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._residual_multiplier = config.residual_multiplier
        self._activation: Activation = "gelu_tanh" if config.has_gelu else "silu"
        parts = {"gate": inner, "up": inner}
        fused = "gate_up" if "gate_up" in config.fused_projections else None
        self._gate_up = reader.products.weight(load_rows(reader, prefix, parts, hidden, fused))
        self.reads_fp8_rows = wants_fp8_rows(self._gate_up)
        self._down = reader.load_projection(f"{prefix}.down_proj.weight", (hidden, inner))
        self._gate_up_bias = self._down_bias = None
        if config.has_mlp_bias:
            self._gate_up_bias = load_biases(reader, prefix, parts)
            self._down_bias = reader.load(f"{prefix}.down_proj.bias", (hidden,))
            self._down_bias *= config.residual_multiplier

    def forward(self, x: ProductRows, rows: Rows | None = None) -> Product:  # noqa: ARG002
        """Return what to add to the residual stream; padding is computed like any row.

        Args:
            x: [T, h].
        """
        inner = linear_swiglu(x, self._gate_up, self._gate_up_bias, self._activation)
        return multiply(inner, self._down, self._down_bias, self._residual_multiplier)

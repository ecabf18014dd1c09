"""What a decoder layer does after attention, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch.nn import functional

from shared.kernels.activations import squared_relu, xielu
from shared.kernels.fp8_rows import ProductRows, rows_of, wants_fp8_rows
from shared.kernels.linear import linear
from shared.kernels.linear_swiglu import linear_swiglu
from shared.kernels.rms_norm import rms_norm, rms_norm_fp8
from shared.kernels.swiglu import Activation
from shared.models.attention import Rows
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.expert_weights import expert_stacks
from shared.models.experts import Experts
from shared.models.experts_config import ExpertsConfig
from shared.models.family import Ungated
from shared.models.projections import (
    Product,
    add,
    load_biases,
    load_norm,
    load_rows,
    multiply,
)

# What an MLP loads, in that order; a fused projection instead of its parts.
_PROJECTIONS = tuple(f"{name}_proj.weight" for name in ("gate_up", "gate", "up", "down"))


class FeedForward(Protocol):
    """What a layer adds to the residual stream after attention.

    Attributes:
        reads_fp8_rows: It wants its input in FP8 as well.
    """

    reads_fp8_rows: bool

    def forward(self, x: ProductRows, rows: Rows, stream: torch.Tensor) -> Product:
        """Return what to add to the residual stream.

        Args:
            x: [T, h].
            stream: [T, h], the residual stream, which x is normed from.
        """


def load_feed_forward(
    reader: CheckpointReader, prefix: str, config: ModelConfig, layer_id: int
) -> FeedForward:
    """Load the experts of a layer, or its MLP if it has none.

    Args:
        prefix: Name of the layer in the checkpoint, "model.layers.0".
    """
    experts = _experts_of(config, layer_id)
    if experts is None:
        own_class = MLP if config.ungated is None else UngatedMLP
        return own_class(reader, f"{prefix}.mlp", config)
    own = Experts(reader, prefix, experts, config.hidden_size, experts.index_of(layer_id))
    return ExpertsBesideMLP(reader, prefix, config, own) if experts.is_beside_mlp else own


def feed_forward_stacks(
    reader: CheckpointReader, prefix: str, config: ModelConfig, layer_id: int
) -> Iterator[Sequence[str]]:
    """Yield the projections that `load_feed_forward` loads, by calls, in order; some of them may
    not be there."""
    modules, experts = ["mlp"], _experts_of(config, layer_id)
    if experts is not None:
        names = experts.tensors
        block = f"{names.block}." if names.block else ""
        yield from expert_stacks(reader, f"{prefix}.{block}".removesuffix("."), experts)
        modules = [f"{block}{names.shared}"] if experts.shared_width else []
        modules += ["mlp"] if experts.is_beside_mlp else []
    yield from ([f"{prefix}.{module}.{name}"] for module in modules for name in _PROJECTIONS)


def _experts_of(config: ModelConfig, layer_id: int) -> ExpertsConfig | None:
    """Return the experts of a layer; None: it has none."""
    experts = config.experts
    return None if experts is None or layer_id in experts.dense_layers else experts


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

    def forward(
        self,
        x: ProductRows,
        rows: Rows | None = None,  # noqa: ARG002
        stream: torch.Tensor | None = None,  # noqa: ARG002
    ) -> Product:
        """Return what to add to the residual stream; padding is computed like any row.

        Args:
            x: [T, h].
        """
        inner = linear_swiglu(x, self._gate_up, self._gate_up_bias, self._activation)
        return multiply(inner, self._down, self._down_bias, self._residual_multiplier)


class UngatedMLP:
    """MLP without a gate.

    Args:
        prefix: Name of the module in the checkpoint, "model.layers.0.mlp".
    """

    def __init__(self, reader: CheckpointReader, prefix: str, config: ModelConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._residual_multiplier = config.residual_multiplier
        self._up = reader.load_projection(f"{prefix}.up_proj.weight", (inner, hidden))
        self._down = reader.load_projection(f"{prefix}.down_proj.weight", (hidden, inner))
        self.reads_fp8_rows = wants_fp8_rows(self._up)
        self._up_bias = self._down_bias = None
        if config.has_mlp_bias:
            self._up_bias = reader.load(f"{prefix}.up_proj.bias", (inner,))
            self._down_bias = reader.load(f"{prefix}.down_proj.bias", (hidden,))
            self._down_bias *= config.residual_multiplier
        self._activate: Callable[[torch.Tensor], torch.Tensor] = squared_relu
        if config.ungated is Ungated.XIELU:
            self._activate = _load_xielu(reader, f"{prefix}.act_fn")

    def forward(
        self,
        x: ProductRows,
        rows: Rows | None = None,  # noqa: ARG002
        stream: torch.Tensor | None = None,  # noqa: ARG002
    ) -> Product:
        """Return what to add to the residual stream; padding is computed like any row.

        Args:
            x: [T, h].
        """
        wide = linear(x, self._up, self._up_bias, out_dtype=torch.float32)
        inner = self._activate(wide).to(rows_of(x).dtype)
        return multiply(inner, self._down, self._down_bias, self._residual_multiplier)


def _load_xielu(reader: CheckpointReader, prefix: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Load the four numbers of a layer's activation; two are kept as what softplus is taken of."""

    def number(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return reader.load(f"{prefix}.{name}", shape, dtype=torch.float32)

    beta, eps = number("beta", ()), number("eps", ())
    of_square = functional.softplus(number("alpha_p", (1,)))
    of_exponential = beta + functional.softplus(number("alpha_n", (1,)))
    return partial(
        xielu, of_square=of_square, of_exponential=of_exponential, of_value=beta, largest=eps
    )


class ExpertsBesideMLP:
    """An MLP and experts, both of which read the residual stream; the sum of what they return,
    each normed, is the output.

    Experts have a norm of their own before them. So has their router: without a weight, but each
    value is multiplied by a learned number, and by hidden_size**-0.5.

    Args:
        prefix: Name of the layer in the checkpoint, "model.layers.0".
        experts: Of the layer.

    Source: transformers' Gemma4TextDecoderLayer.
    """

    def __init__(
        self, reader: CheckpointReader, prefix: str, config: ModelConfig, experts: Experts
    ) -> None:
        hidden, self._eps = config.hidden_size, config.rms_norm_eps

        def norm(name: str) -> torch.Tensor:
            return load_norm(reader, f"{prefix}.{name}.weight", hidden, config.norm_rule)

        self._mlp = MLP(reader, f"{prefix}.mlp", config)
        self._experts = experts
        self._mlp_norm = norm("post_feedforward_layernorm_1")
        self._experts_input_norm = norm("pre_feedforward_layernorm_2")
        self._experts_norm = norm("post_feedforward_layernorm_2")
        scale = reader.load(f"{prefix}.router.scale", (hidden,), dtype=torch.float32)
        self._router_norm = scale * hidden**-0.5
        self.reads_fp8_rows = self._mlp.reads_fp8_rows

    def forward(self, x: ProductRows, rows: Rows, stream: torch.Tensor) -> Product:
        """Return what to add to the residual stream.

        Args:
            x: [T, h], what the MLP reads.
            stream: [T, h], what the experts and their router read.
        """
        eps, norm = self._eps, self._experts_input_norm
        judged = rms_norm(stream, self._router_norm, eps)
        to_fp8 = self._experts.reads_fp8_rows
        inner = rms_norm_fp8(stream, norm, eps) if to_fp8 else rms_norm(stream, norm, eps)
        of_mlp = replace(self._mlp.forward(x), norm=self._mlp_norm, eps=eps)
        of_experts = self._experts.forward(inner, rows, judged=judged)
        of_experts = replace(of_experts, norm=self._experts_norm, eps=eps)
        total = add(add(torch.zeros_like(stream), of_mlp), of_experts)
        return Product(addends=total.float()[None], bias=None)

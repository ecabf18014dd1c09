"""A feed-forward of experts: a router chooses a few of them for each row."""

from __future__ import annotations

import torch

from shared.kernels.expert_choice import ChoiceRule, ChosenExperts, choose_experts
from shared.kernels.expert_products import apply_experts
from shared.kernels.fp8_rows import ProductRows, rows_of, wants_fp8_rows
from shared.kernels.linear import linear, linear_addends, num_addends
from shared.kernels.linear_swiglu import linear_swiglu
from shared.kernels.swiglu import Activation, logistic
from shared.models.attention import Rows
from shared.models.checkpoint import CheckpointReader
from shared.models.expert_weights import load_expert_weights
from shared.models.experts_config import ExpertsConfig, GroupScore, Scoring
from shared.models.projections import Product, load_rows


class Experts:
    """Experts, their router, and what every row passes besides.

    Args:
        prefix: Name of the layer in the checkpoint, "model.layers.0".
        hidden_size: Width of the residual stream.
        index: How many layers with experts come before it.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        prefix: str,
        config: ExpertsConfig,
        hidden_size: int,
        index: int = 0,
    ) -> None:
        self._index = index
        names = config.tensors
        prefix = f"{prefix}.{names.block}" if names.block else prefix
        self._activation: Activation = "gelu_tanh" if config.has_gelu else "silu"
        self._rule = ChoiceRule(
            count=config.num_experts_per_tok,
            is_sigmoid=config.scoring is Scoring.SIGMOID,
            is_of_chosen=config.scoring is Scoring.SOFTMAX_OF_CHOSEN,
            is_normalised=config.is_normalised,
            scaling_factor=config.scaling_factor,
            num_groups=config.num_groups,
            num_chosen_groups=config.num_chosen_groups,
            judges_by_two=config.group_score is GroupScore.BEST_TWO,
        )
        num_experts = config.num_experts
        self._router = reader.load_weight(
            f"{prefix}.{names.router}.weight", (num_experts, hidden_size)
        )
        self._bias = None
        if config.router_bias:
            size = (1, num_experts) if names.is_bias_matrix else (num_experts,)
            name = f"{prefix}.{config.router_bias}"
            self._bias = reader.load(name, size, dtype=torch.float32).flatten()
        self._scales = None
        if names.expert_scale:
            name = f"{prefix}.{names.expert_scale}"
            self._scales = reader.load(name, (num_experts,), dtype=torch.float32)
        self._experts = load_expert_weights(reader, prefix, config, hidden_size)
        self._shared = None
        if config.shared_width:
            shared = f"{prefix}.{names.shared}"
            shape = (config.shared_width, hidden_size)
            parts = {"gate": config.shared_width, "up": config.shared_width}
            gate_up = load_rows(reader, shared, parts, hidden_size, None)
            down = reader.load_projection(f"{shared}.down_proj.weight", shape[::-1])
            self._shared = (reader.products.weight(gate_up), down)
        self.reads_fp8_rows = wants_fp8_rows(self._experts.gate_up) or (
            self._shared is not None and wants_fp8_rows(self._shared[0])
        )
        self._shared_gate = None
        if config.has_shared_gate:
            name = f"{prefix}.{names.shared}_gate.weight"
            self._shared_gate = reader.load_weight(name, (1, hidden_size))

    def forward(
        self,
        x: ProductRows,
        rows: Rows,
        stream: torch.Tensor | None = None,  # noqa: ARG002
        *,
        judged: torch.Tensor | None = None,
    ) -> Product:
        """Return what to add to the residual stream: first of the shared expert, then of the chosen
        ones in order of their ids.

        Args:
            x: [T, h].
            rows: Which of them are padding, which no expert computes.
            judged: [T, h], what the router reads; None: x.
        """
        chosen = self.choose(x if judged is None else judged, rows)
        shape, device = rows_of(x).shape, rows_of(x).device
        num_shared = 0 if self._shared is None else num_addends(shape[0], self._shared[1])
        count = num_shared + self._rule.count
        addends = torch.empty((count, *shape), dtype=torch.float32, device=device)
        if self._shared is not None:
            inner = linear_swiglu(x, self._shared[0], activation=self._activation)
            linear_addends(inner, self._shared[1], out=addends[:num_shared])
            if self._shared_gate is not None:
                gate = logistic(linear(x, self._shared_gate, out_dtype=torch.float32))  # [T, 1]
                addends[:num_shared].mul_(gate)
        experts = self._experts
        routed = addends[num_shared:]
        apply_experts(x, experts.gate_up, experts.down, chosen, routed, experts.form)
        return Product(addends=addends, bias=None)

    def choose(self, x: ProductRows, rows: Rows) -> ChosenExperts:
        """Return the experts of every row, by what the router reads; see `forward`."""
        logits = linear_addends(x, self._router)
        out = None if rows.expert_ids is None else rows.expert_ids[self._index]
        row_indptr = rows.attention.row_indptr
        return choose_experts(logits, self._bias, row_indptr, self._rule, out, self._scales)

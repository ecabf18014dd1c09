"""A feed-forward of experts: a router chooses a few of them for each row."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shared.kernels.expert_choice import ChoiceRule, ChosenExperts, choose_experts
from shared.kernels.expert_products import apply_experts
from shared.kernels.expert_products_cpu import ExpertWeights, hold_experts
from shared.kernels.linear import linear_addends, num_addends
from shared.kernels.linear_swiglu import linear_swiglu
from shared.models.attention import Rows
from shared.models.checkpoint import CheckpointReader
from shared.models.experts_config import ExpertsConfig, GroupScore, Scoring
from shared.models.projections import Product, load_rows


class Experts:
    """Experts, their router, and what every row passes besides.

    Args:
        prefix: Name of the layer in the checkpoint, "model.layers.0".
        hidden_size: Width of the residual stream.
    """

    def __init__(
        self, reader: CheckpointReader, prefix: str, config: ExpertsConfig, hidden_size: int
    ) -> None:
        names = config.tensors
        prefix = f"{prefix}.{names.block}"
        self._rule = ChoiceRule(
            count=config.num_experts_per_tok,
            is_sigmoid=config.scoring is Scoring.SIGMOID,
            is_normalised=config.is_normalised,
            scaling_factor=config.scaling_factor,
            num_groups=config.num_groups,
            num_chosen_groups=config.num_chosen_groups,
            judges_by_two=config.group_score is GroupScore.BEST_TWO,
        )
        num_experts = config.num_experts
        self._router = reader.load_weight(f"{prefix}.gate.weight", (num_experts, hidden_size))
        self._bias = None
        if config.has_correction_bias:
            name = f"{prefix}.gate.e_score_correction_bias"
            self._bias = reader.load(name, (num_experts,), dtype=torch.float32)
        experts = [f"{prefix}.experts.{expert}" for expert in range(num_experts)]
        gate_up_names = (names.gate, names.up)
        self._gate_up = hold_experts(
            reader.products,
            _gate_ups(reader, experts, gate_up_names, (config.width, hidden_size)),
            num_experts,
        )
        self._down: ExpertWeights = hold_experts(
            reader.products,
            (
                reader.load_dense(f"{expert}.{names.down}.weight", (hidden_size, config.width))
                for expert in experts
            ),
            num_experts,
        )
        self._shared = None
        if config.shared_width:
            shared = f"{prefix}.{names.shared}"
            shape = (config.shared_width, hidden_size)
            parts = {"gate": config.shared_width, "up": config.shared_width}
            gate_up = load_rows(reader, shared, parts, hidden_size, None)
            down = reader.load_projection(f"{shared}.down_proj.weight", shape[::-1])
            self._shared = (reader.products.weight(gate_up), down)

    def forward(self, x: torch.Tensor, rows: Rows) -> Product:
        """Return what to add to the residual stream: first of the shared expert, then of the chosen
        ones in order of their ids.

        Args:
            x: [T, h].
            rows: Which of them are padding, which no expert computes.
        """
        chosen = self.choose(x, rows)
        num_shared = 0 if self._shared is None else num_addends(len(x), self._shared[1])
        count = num_shared + self._rule.count
        addends = torch.empty((count, *x.shape), dtype=torch.float32, device=x.device)
        if self._shared is not None:
            inner = linear_swiglu(x, self._shared[0])
            linear_addends(inner, self._shared[1], out=addends[:num_shared])
        apply_experts(x, self._gate_up, self._down, chosen, addends[num_shared:])
        return Product(addends=addends, bias=None)

    def choose(self, x: torch.Tensor, rows: Rows) -> ChosenExperts:
        """Return the experts of every row; see `forward`."""
        logits = linear_addends(x, self._router)
        return choose_experts(logits, self._bias, rows.attention.row_indptr, self._rule)


def _gate_ups(
    reader: CheckpointReader, modules: list[str], names: tuple[str, str], shape: tuple[int, int]
) -> Iterator[torch.Tensor]:
    """Load the gate of each module above its up."""
    for module in modules:
        yield torch.cat([reader.load_dense(f"{module}.{name}.weight", shape) for name in names])

"""What a checkpoint's config.json says about experts: how many, how wide, and how they are chosen.

No torch here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import CheckpointError
from shared.models.config_fields import require_int, require_kinds, require_positive


class Scoring(enum.StrEnum):
    """What makes scores of a router's logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """The best logits are chosen, and the softmax is over these alone."""


class GroupScore(enum.StrEnum):
    """What a group of experts is judged by, where only the best groups are chosen from."""

    BEST_TWO = "best_two"
    """The sum of its two largest scores, correction bias included (DeepSeek-V3)."""
    BEST = "best"
    """Its largest score (DeepSeek-V2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """What an architecture calls the tensors of its experts.

    Args:
        block: The module of a layer, "mlp" or another; "": the layer itself.
        router: The module of the router.
        gate, up, down: The projections of one expert.
        shared: The module of what is applied to every token.
        is_bias_matrix: The bias of the router is a matrix of one row.
        is_fused: All experts are in one tensor of each projection: `gate_up_proj`, in which gate
            and up alternate, and `down_proj`.
        is_halved: Gate is the first half of `gate_up_proj`, up the other.
        is_transposed: Of such tensors, those that are no blocks and scales of MXFP4 have inputs
            before outputs.
        expert_scale: Tensor of the block, what weights of experts are multiplied by in the end; "":
            they are not.
    """

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    is_bias_matrix: bool = False
    is_fused: bool = False
    is_halved: bool = False
    is_transposed: bool = True
    expert_scale: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts of a decoder: feed-forwards of which a router chooses a few for each token.

    Args:
        num_experts_per_tok: Experts of one token.
        width: Width of an expert.
        scoring: Of the router.
        router_bias: Name of a tensor of the block; "": there is none. Experts are chosen by score +
            bias and weighted by score; a softmax of the chosen is over logits + bias.
        is_normalised: The weights of a token's experts are divided by their sum.
        scaling_factor: What the weights are then multiplied by.
        num_groups: Groups of neighbouring experts; 1: all are chosen from.
        num_chosen_groups: Groups that experts are chosen from.
        group_score: What groups are judged by.
        shared_width: Width of the feed-forward that every token passes besides; 0: there is none.
        has_shared_gate: Its output is multiplied by the logistic function of a projection, to one
            value, of its input.
        dense_layers: Layers without experts.
        has_bias: The projections of experts have biases.
        swiglu_limit: Gate and up are limited to it, see `clamped_swiglu`; 0: they are not.
        swiglu_alpha: Of the limited ones.
        has_gelu: Gates pass gelu, approximated by tanh, not silu.
        is_beside_mlp: Every layer has an MLP as well, see `ExpertsBesideMLP`.
        tensors: Names in the checkpoint.
    """

    num_experts: int
    num_experts_per_tok: int
    width: int
    scoring: Scoring = Scoring.SOFTMAX
    router_bias: str = ""
    is_normalised: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: GroupScore = GroupScore.BEST_TWO
    shared_width: int = 0
    has_shared_gate: bool = False
    dense_layers: frozenset[int] = frozenset()
    has_bias: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.0
    has_gelu: bool = False
    is_beside_mlp: bool = False
    tensors: ExpertTensors = ExpertTensors()

    def index_of(self, layer_id: int) -> int:
        """Return how many layers with experts come before a layer."""
        return layer_id - sum(dense < layer_id for dense in self.dense_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsFamily:
    """How an architecture's config.json describes experts.

    Args:
        count_fields: Names of the number of experts, any of them.
        count_per_tok_field: Name of the number of experts of a token.
        width_field: Name of an expert's width.
        router_bias, has_bias, is_beside_mlp: As in ExpertsConfig.
        switch: Field that says whether there are any; "": their number does.
        is_clamped: Gate and up are limited, as `swiglu_limit` and `swiglu_alpha` say.
        always_normalises: Weights are normalised whatever `norm_topk_prob` says.
        shared_width_field: Name of the width of what every token passes besides; "": `has_shared`.
        has_shared_gate: That has a gate.
        has_shared: `n_shared_experts` says how many experts' width every token passes besides.
        has_groups: `n_group` and `topk_group` limit what is chosen from, unless `topk_method` is
            "greedy".
    """

    count_fields: tuple[str, ...] = ("num_experts", "num_local_experts")
    count_per_tok_field: str = "num_experts_per_tok"
    width_field: str = "moe_intermediate_size"
    scoring: Scoring = Scoring.SOFTMAX
    router_bias: str = ""
    has_bias: bool = False
    is_clamped: bool = False
    always_normalises: bool = False
    shared_width_field: str = ""
    has_shared_gate: bool = False
    has_shared: bool = False
    has_groups: bool = False
    group_score: GroupScore = GroupScore.BEST_TWO
    is_beside_mlp: bool = False
    switch: str = ""
    tensors: ExpertTensors = ExpertTensors()


def parse_experts(
    fields: Mapping[str, Any],
    source: str,
    family: ExpertsFamily,
    num_layers: int,
    *,
    has_gelu: bool = False,
) -> ExpertsConfig | None:
    """Read the experts of a config.json; None: no layer has any.

    Args:
        source: File to name in errors.
        has_gelu: As in ExpertsConfig.
    Raises: CheckpointError naming the field.
    """

    def number(name: str, default: float) -> float:
        value = fields.get(name)
        return default if value is None else require_positive(value, f"{source}: {name}")

    if family.switch and not fields.get(family.switch):
        return None
    num_experts = _count(fields, family.count_fields, source)
    dense_layers = _dense_layers(fields, source, num_layers)
    if num_experts == 0 or len(dense_layers) == num_layers:
        return None
    per_token, num_groups, num_chosen = _parse_choice(fields, source, family, num_experts)
    width = require_int(fields, family.width_field, source)
    shared_width = _parse_shared_width(fields, source, family, width)
    return ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        width=width,
        scoring=family.scoring,
        router_bias=family.router_bias,
        is_normalised=family.always_normalises or bool(fields.get("norm_topk_prob", False)),
        scaling_factor=number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        num_chosen_groups=num_chosen,
        group_score=family.group_score,
        shared_width=shared_width,
        has_shared_gate=family.has_shared_gate,
        dense_layers=dense_layers,
        has_bias=family.has_bias,
        swiglu_limit=number("swiglu_limit", 7.0) if family.is_clamped else 0.0,
        swiglu_alpha=number("swiglu_alpha", 1.702) if family.is_clamped else 1.0,
        has_gelu=has_gelu,
        is_beside_mlp=family.is_beside_mlp,
        tensors=family.tensors,
    )


def _count(fields: Mapping[str, Any], names: tuple[str, ...], source: str) -> int:
    """Return the number of experts, by the first of its names that is there."""
    name = next((name for name in names if fields.get(name) is not None), names[0])
    return _natural(fields, name, source, is_required=True)


def _parse_choice(
    fields: Mapping[str, Any], source: str, family: ExpertsFamily, num_experts: int
) -> tuple[int, int, int]:
    """Return how many experts a token has, how many groups there are, and how many are chosen."""
    num_groups, num_chosen = 1, 1
    if family.has_groups and fields.get("topk_method") != "greedy":
        num_groups = require_int(fields, "n_group", source, default=1)
        num_chosen = require_int(fields, "topk_group", source, default=1)
    per_token = require_int(fields, family.count_per_tok_field, source)
    if num_experts % num_groups or num_chosen > num_groups:
        raise CheckpointError(
            f"{source}: n_group = {num_groups} must divide the {num_experts} experts, and "
            f"topk_group = {num_chosen} must not exceed it"
        )
    if per_token > num_experts // num_groups * num_chosen:
        raise CheckpointError(
            f"{source}: {family.count_per_tok_field} = {per_token} is more than the "
            f"{num_experts // num_groups * num_chosen} experts that are chosen from"
        )
    if num_groups > 1 and family.group_score is GroupScore.BEST_TWO and num_experts == num_groups:
        raise CheckpointError(f"{source}: n_group = {num_groups} leaves one expert to a group")
    return per_token, num_groups, num_chosen


def _parse_shared_width(
    fields: Mapping[str, Any], source: str, family: ExpertsFamily, width: int
) -> int:
    """Return the width of what every token passes besides; 0: there is none."""
    if family.shared_width_field:
        return require_int(fields, family.shared_width_field, source)
    return _natural(fields, "n_shared_experts", source) * width if family.has_shared else 0


def _dense_layers(fields: Mapping[str, Any], source: str, num_layers: int) -> frozenset[int]:
    """Return the layers without experts, by whichever fields there are."""
    kinds = require_kinds(fields, "mlp_layer_types", source, ("dense", "sparse"), num_layers)
    if kinds is not None:
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
    step = require_int(fields, "decoder_sparse_step", source, default=1)
    first = _natural(fields, "first_k_dense_replace", source)
    last = num_layers - 1
    if fields.get("moe_layer_end_index") not in (None, -1):
        last = _natural(fields, "moe_layer_end_index", source)
    listed = fields.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        raise CheckpointError(f"{source}: mlp_only_layers must list layers, got {listed!r}")
    with_experts = {i for i in range(first, last + 1) if (i + 1) % step == 0 and i not in listed}
    return frozenset(range(num_layers)) - with_experts


def _natural(
    fields: Mapping[str, Any], name: str, source: str, *, is_required: bool = False
) -> int:
    value = fields.get(name)
    if value is None and not is_required:
        return 0
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{source}: {name} must be an integer from 0 on, got {value!r}")
    return value

"""The weights of a layer's experts, in whichever tensors a checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shared.errors import CheckpointError
from shared.kernels.expert_products_cpu import ExpertForm, ExpertWeights, hold_experts, hold_mxfp4
from shared.kernels.fp8_experts import join_rows
from shared.kernels.mxfp4 import MXFP4_BLOCK, has_numbers
from shared.kernels.quantized import GpuWeight, QuantizedWeight, stack_rows
from shared.models.checkpoint import CheckpointReader
from shared.models.experts_config import ExpertsConfig

_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedExperts:
    """What rows of a layer are multiplied by, see `apply_experts`."""

    gate_up: ExpertWeights
    down: ExpertWeights
    form: ExpertForm


def expert_stacks(
    reader: CheckpointReader, prefix: str, config: ExpertsConfig
) -> Iterator[Sequence[str]]:
    """Yield the weights that `load_expert_weights` loads, by calls, in order; of tensors of all
    experts those that are there."""
    if config.tensors.is_fused:
        yield from ([name] for name in _fused_names(f"{prefix}.experts") if name in reader.names)
        return
    gate_ups, downs = _names(prefix, config)
    if _are_stacked(reader, [*gate_ups, *downs]):
        yield from (gate_ups, downs)
    else:
        yield from ([name] for name in (*gate_ups, *downs))


def load_expert_weights(
    reader: CheckpointReader, prefix: str, config: ExpertsConfig, hidden_size: int
) -> LoadedExperts:
    """Load the experts of a layer.

    Args:
        prefix: Name of their module in the checkpoint, "model.layers.0.mlp".
    Raises: CheckpointError naming a tensor that is missing, mis-shaped, or of MXFP4 no numbers.
    """
    if config.tensors.is_fused:
        return _load_fused(reader, f"{prefix}.experts", config, hidden_size)
    num_experts = config.num_experts
    gate_ups, downs = _names(prefix, config)
    if _are_stacked(reader, [*gate_ups, *downs]):
        if reader.are_float(downs):
            return _load_plain(reader, gate_ups, downs, config, hidden_size)
        return _load_fp8(reader, prefix, gate_ups, downs, config, hidden_size)
    shape = (config.width, hidden_size)
    gate_up = _alike(reader, prefix, _gate_ups(reader, gate_ups, shape))
    down = _alike(reader, prefix, (reader.load_expert(name, shape[::-1]) for name in downs))
    return LoadedExperts(
        gate_up=hold_experts(reader.products, gate_up, num_experts),
        down=hold_experts(reader.products, down, num_experts),
        form=_form(config),
    )


def _names(prefix: str, config: ExpertsConfig) -> tuple[list[str], list[str]]:
    """Return the names of gate and up of each expert, and of all downs."""
    names = config.tensors
    experts = [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)]
    gate_ups = [f"{expert}.{name}.weight" for expert in experts for name in (names.gate, names.up)]
    return gate_ups, [f"{expert}.{names.down}.weight" for expert in experts]


def _are_stacked(reader: CheckpointReader, names: Sequence[str]) -> bool:
    """Return whether weights are loaded as one, to where they stay."""
    return not reader.packs_weights() and (reader.are_float(names) or reader.are_fp8(names))


def _fused_names(module: str) -> list[str]:
    """Return the names that tensors of all experts may have, in the order of loading."""
    names = (f"{module}.{name}_proj" for name in ("gate_up", "down"))
    return [f"{name}{end}" for name in names for end in ("", _BLOCKS, _SCALES)]


def _load_plain(
    reader: CheckpointReader,
    gate_ups: Sequence[str],
    downs: Sequence[str],
    config: ExpertsConfig,
    hidden_size: int,
) -> LoadedExperts:
    """Load experts in the dtype to where they stay.

    Args:
        gate_ups: Names of gate and up of each expert.
    """
    gate_up = reader.load_stack(gate_ups, (config.width, hidden_size))
    down = reader.load_stack(downs, (hidden_size, config.width))
    gate_up = gate_up.unflatten(0, (-1, 2)).flatten(1, 2)
    return LoadedExperts(gate_up=gate_up, down=down, form=_form(config))


def _load_fp8(
    reader: CheckpointReader,
    prefix: str,
    gate_ups: Sequence[str],
    downs: Sequence[str],
    config: ExpertsConfig,
    hidden_size: int,
) -> LoadedExperts:
    """Load experts in FP8, as `_load_plain` does others."""
    gate_up = reader.load_fp8(gate_ups, (config.width, hidden_size))
    down = reader.load_fp8(downs, (hidden_size, config.width))
    if gate_up is None or down is None:
        raise _unlike(reader, prefix)
    return LoadedExperts(gate_up=join_rows(gate_up, 2), down=down, form=_form(config))


def _gate_ups(
    reader: CheckpointReader, names: Sequence[str], shape: tuple[int, int]
) -> Iterator[GpuWeight | None]:
    """Load the gate of each expert above its up; None: they are not in one form."""
    for gate, up in zip(names[::2], names[1::2], strict=True):
        yield stack_rows([reader.load_expert(name, shape) for name in (gate, up)])


def _alike(
    reader: CheckpointReader, prefix: str, weights: Iterable[GpuWeight | None]
) -> Iterator[GpuWeight]:
    """Yield the weights of experts, which are multiplied at once.

    Raises: CheckpointError unless all are in FP8 with scales of one kind, or none.
    """
    first: str | None = None
    for weight in weights:
        form = weight.scaling if isinstance(weight, QuantizedWeight) else ""
        if weight is None or form != (form if first is None else first):
            raise _unlike(reader, prefix)
        first = form
        yield weight


def _unlike(reader: CheckpointReader, prefix: str) -> CheckpointError:
    return CheckpointError(
        f"{reader.directory}: the experts of {prefix} are multiplied at once; all or none of them "
        "must be FP8, with scales of one kind"
    )


def _load_fused(
    reader: CheckpointReader, module: str, config: ExpertsConfig, hidden_size: int
) -> LoadedExperts:
    """Load experts that share a tensor of each projection."""
    width = config.width
    order = torch.arange(2 * width)
    if not config.tensors.is_halved:
        order = torch.cat([order[0::2], order[1::2]])
    shapes = {"gate_up": (2 * width, hidden_size), "down": (hidden_size, width)}
    held: dict[str, ExpertWeights] = {}
    biases: dict[str, torch.Tensor] = {}
    for projection, shape in shapes.items():
        name = f"{module}.{projection}_proj"
        rows = order if projection == "gate_up" else torch.arange(shape[0])
        full = (config.num_experts, *shape)
        is_transposed = config.tensors.is_transposed
        held[projection] = _hold_fused(reader, name, full, rows, is_transposed=is_transposed)
        if config.has_bias:
            bias = reader.load(f"{name}{_BIAS}", (config.num_experts, shape[0]))
            biases[projection] = bias[:, rows.to(bias.device)]
    return LoadedExperts(
        gate_up=held["gate_up"],
        down=held["down"],
        form=_form(config, biases.get("gate_up"), biases.get("down")),
    )


def _form(
    config: ExpertsConfig,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> ExpertForm:
    return ExpertForm(
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        limit=config.swiglu_limit,
        alpha=config.swiglu_alpha,
        activation="gelu_tanh" if config.has_gelu else "silu",
    )


def _hold_fused(
    reader: CheckpointReader,
    name: str,
    shape: tuple[int, int, int],
    rows: torch.Tensor,
    *,
    is_transposed: bool,
) -> ExpertWeights:
    """Load the weights [N, K] of experts of one tensor, or of its blocks and scales in MXFP4.

    Args:
        shape: (E, N, K).
        rows: [N] i64, the order in which the checkpoint's outputs are wanted.
        is_transposed: As in ExpertTensors.
    """
    num_experts, width_n, width_k = shape
    is_in_order = torch.equal(rows, torch.arange(width_n))
    if f"{name}{_BLOCKS}" not in reader.names:
        if is_transposed:
            weights = reader.load(name, (num_experts, width_k, width_n)).mT
        else:
            weights = reader.load(name, shape)
            if is_in_order and not reader.packs_weights():
                return weights
        rows = rows.to(weights.device)
        ordered = (weight[rows] for weight in weights)
        return hold_experts(reader.products, ordered, num_experts)
    if width_k % MXFP4_BLOCK:
        raise CheckpointError(
            f"{reader.directory}: {name!r} is MXFP4 with {width_k} inputs; they must be a multiple "
            f"of {MXFP4_BLOCK}"
        )
    num_blocks = width_k // MXFP4_BLOCK
    half = MXFP4_BLOCK // 2
    blocks = reader.load_bytes(f"{name}{_BLOCKS}", (num_experts, width_n, num_blocks, half))
    scales = reader.load_bytes(f"{name}{_SCALES}", (num_experts, width_n, num_blocks))
    if not has_numbers(scales):
        raise CheckpointError(
            f"{reader.directory}: tensor '{name}{_SCALES}' holds NaN or scales beyond float32; get "
            "an undamaged checkpoint"
        )
    rows = rows.to(blocks.device)
    pairs = (
        (block.flatten(1)[rows], scale[rows]) for block, scale in zip(blocks, scales, strict=True)
    )
    return hold_mxfp4(reader.products, pairs, num_experts, reader.dtype)

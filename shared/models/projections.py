"""Projections of a checkpoint: their weights, and what they add to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shared.errors import CheckpointError
from shared.kernels.fp8_rows import Fp8Rows, ProductRows, quantize_rows
from shared.kernels.linear import linear_addends, sum_addends
from shared.kernels.products_cpu import Weight
from shared.kernels.quantized import GpuWeight, stack_rows
from shared.kernels.rms_norm import add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8
from shared.models.checkpoint import CheckpointReader
from shared.models.family import NormRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The output of a projection, still in addends: whoever reads it adds them up on its way.

    Args:
        addends: [S, T, h] f32, see `linear_addends`.
        bias: [h] or None.
        norm: [h], weight of the norm that their sum passes before it is added; None: there is none.
        eps: Of that norm.
    """

    addends: torch.Tensor
    bias: torch.Tensor | None
    norm: torch.Tensor | None = None
    eps: float = 0.0


def add(x: torch.Tensor, pending: Product | None) -> torch.Tensor:
    """Add what is pending to the residual stream. [T, h]."""
    if pending is None:
        return x
    if pending.norm is None:
        return sum_addends(pending.addends, pending.bias, x.dtype, x)
    return add_rms_norm(x, pending.addends, pending.bias, None, pending.eps, pending.norm)[0]


def add_and_norm(
    x: torch.Tensor,
    pending: Product | None,
    weight: torch.Tensor,
    eps: float,
    *,
    is_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add what is pending to the residual stream, and norm the sum.

    Args:
        is_centered: See `rms_norm`.
    Returns: (residual stream [T, h], normalised [T, h]).
    """
    if pending is None:
        return x, rms_norm(x, weight, eps, is_centered=is_centered)
    assert pending.norm is None or pending.eps == eps
    return add_rms_norm(
        x, pending.addends, pending.bias, weight, eps, pending.norm, is_centered=is_centered
    )


def add_and_norm_fp8(
    x: torch.Tensor,
    pending: Product | None,
    weight: torch.Tensor | None,
    eps: float,
    *,
    is_centered: bool = False,
) -> tuple[torch.Tensor, Fp8Rows]:
    """Do what `add_and_norm` does, for products with weights that want rows in FP8.

    Args:
        x: [T, h] of 16 bits.
        weight: None: the sum is not normed.
    """
    if pending is None:
        if weight is None:
            return x, quantize_rows(x)
        return x, rms_norm_fp8(x, weight, eps, is_centered=is_centered)
    assert pending.norm is None or pending.eps == eps
    return add_rms_norm_fp8(
        x, pending.addends, pending.bias, weight, eps, pending.norm, is_centered=is_centered
    )


def multiply(
    x: ProductRows, weight: Weight, bias: torch.Tensor | None, multiplier: float
) -> Product:
    """Return a projection times `multiplier`, which its bias has been multiplied by."""
    addends = linear_addends(x, weight)
    return Product(addends=addends if multiplier == 1 else addends * multiplier, bias=bias)


def load_norm(reader: CheckpointReader, name: str, width: int, rule: NormRule) -> torch.Tensor:
    """Load the weight of an RMS norm, ready for `rms_norm`: [width], in float32 unless ROUNDED.

    1 + weight is added up in float32, as transformers does, and stays there.
    """
    if rule is NormRule.ROUNDED:
        return reader.load(name, (width,))
    weight = reader.load(name, (width,), dtype=torch.float32)
    return weight + 1 if rule is NormRule.OFFSET else weight


def load_rows(
    reader: CheckpointReader,
    prefix: str,
    parts: Mapping[str, int],
    input_width: int,
    fused: str | None,
    copies: Mapping[str, str] | None = None,
) -> GpuWeight:
    """Load the weights of several projections of one input, above each other.

    Args:
        parts: Projection, "q" or "gate" -> its outputs.
        fused: Name of the one tensor that holds them all; None: each has its own.
        copies: Projections whose weights are those of another one of them.
    Raises: CheckpointError if they are not in one form.
    """
    if fused is not None:
        parts = {fused: sum(parts.values())}
    sources = {name: (copies or {}).get(name, name) for name in parts}
    names = {part: f"{prefix}.{source}_proj.weight" for part, source in sources.items()}
    stacked = stack_rows(
        [reader.load_matrix(names[part], (n, input_width)) for part, n in parts.items()]
    )
    if stacked is None:
        raise CheckpointError(
            f"{reader.directory}: {', '.join(names.values())} are multiplied at once; all or none "
            "of them must be FP8, or int4, with scales of one kind"
        )
    return stacked


def load_biases(
    reader: CheckpointReader,
    prefix: str,
    parts: Mapping[str, int],
    copies: Mapping[str, str] | None = None,
) -> torch.Tensor:
    """Load the biases of projections that `load_rows` stacks."""
    sources = {name: (copies or {}).get(name, name) for name in parts}
    biases = [reader.load(f"{prefix}.{sources[name]}_proj.bias", (n,)) for name, n in parts.items()]
    return torch.cat(biases)


def pair_rows(rows: torch.Tensor, order: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    """Bring each head of the first `num_rows` rows, those of q and k, into an order.

    Args:
        order: [head_dim] i64, see `paired_rows`; None: they have it.
    """
    if order is None:
        return rows
    heads = rows[:num_rows].unflatten(0, (-1, len(order)))[:, order.to(rows.device)]
    return torch.cat([heads.flatten(0, 1), rows[num_rows:]])


def pair_weight_rows(weight: GpuWeight, order: torch.Tensor | None, num_rows: int) -> GpuWeight:
    """Do what `pair_rows` does with the rows of a weight."""
    if isinstance(weight, torch.Tensor):
        return pair_rows(weight, order, num_rows)
    return weight.rearranged(lambda rows: pair_rows(rows, order, num_rows))

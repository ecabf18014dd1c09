"""The products of rows by their experts' weights on a CPU, expert by expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from shared.kernels.expert_choice import ChosenExperts
from shared.kernels.products_cpu import CpuProducts, CpuWeight, Weight, linear_cpu
from shared.kernels.swiglu import swiglu

ExpertWeights = torch.Tensor | Sequence[Weight]
"""One weight [N, K] of each expert: a tensor [E, N, K], or packed, if a CPU computes with it."""


def hold_experts(
    products: CpuProducts, weights: Iterator[torch.Tensor], num_experts: int
) -> ExpertWeights:
    """Return weights [N, K] of experts as their products read them.

    Args:
        weights: Of expert 0, 1, ...; at least one, and taken one at a time.
    """
    first = next(weights)
    held = products.weight(first)
    if isinstance(held, CpuWeight):
        return [held, *(products.weight(weight) for weight in weights)]
    stacked = first.new_empty((num_experts, *first.shape))
    for expert, weight in enumerate(chain([first], weights)):
        stacked[expert] = weight
    return stacked


def apply_experts_cpu(
    x: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    chosen: ChosenExperts,
    out: torch.Tensor,
) -> None:
    """Do what `apply_experts` does on a CPU.

    Mutates: `out`, all of it.
    """
    out.zero_()
    for expert in chosen.ids.unique().tolist():
        if expert == len(down):  # padding
            continue
        rows, slots = (chosen.ids == expert).nonzero(as_tuple=True)
        product = linear_cpu(x[rows], gate_up[expert], out_dtype=torch.float32)
        inner = swiglu(*product.chunk(2, dim=1)).to(x.dtype)
        y = linear_cpu(inner, down[expert], out_dtype=torch.float32)
        out[slots, rows] = y * chosen.weights[rows, slots, None]

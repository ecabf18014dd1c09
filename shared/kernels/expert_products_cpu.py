"""The products of rows by their experts' weights on a CPU, expert by expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from shared.kernels.dispatch import use_triton
from shared.kernels.expert_choice import ChosenExperts
from shared.kernels.fp8_experts import QuantizedExperts, pack_fp8
from shared.kernels.mxfp4 import Mxfp4Weights, dequantize_mxfp4, pack_mxfp4
from shared.kernels.products_cpu import CpuProducts, CpuWeight, Weight, linear_cpu
from shared.kernels.quantized import QuantizedWeight
from shared.kernels.swiglu import Activation, clamped_swiglu, swiglu

KernelWeights = torch.Tensor | Mxfp4Weights | QuantizedExperts
"""One weight [N, K] of each expert, as kernels read them: [E, N, K]."""
ExpertWeights = KernelWeights | Sequence[Weight]
"""The same, or packed for a CPU that computes with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertForm:
    """What experts compute beside w * W_down (silu(W_gate x) * W_up x).

    Args:
        gate_up_bias: [E, 2 F], added to the first products; None: nothing is.
        down_bias: [E, N], added to the second one before it is weighted; None: nothing is.
        limit: What gate and up are limited to, in a `clamped_swiglu`; 0: they are not.
        alpha: Of the clamped one.
        activation: Of the gate, if it is not clamped, see `swiglu`.
    """

    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    limit: float = 0.0
    alpha: float = 1.0
    activation: Activation = "silu"


PLAIN_FORM = ExpertForm()


def hold_experts(
    products: CpuProducts,
    weights: Iterator[Any],
    num_experts: int,
) -> ExpertWeights:
    """Return weights [N, K] of experts as their products read them: a CPU dequantised.

    Args:
        weights: Of expert 0, 1, ..., tensors or all of them QuantizedWeight; at least one.
    """
    first = next(weights)
    held = products.weight(first)
    if isinstance(held, CpuWeight):
        return [held, *(products.weight(weight) for weight in weights)]
    rest = chain([first], weights)
    if isinstance(first, QuantizedWeight):
        return pack_fp8(rest)
    stacked = first.new_empty((num_experts, *first.shape))
    for expert, weight in enumerate(rest):
        stacked[expert] = weight
    return stacked


def hold_mxfp4(
    products: CpuProducts,
    weights: Iterator[tuple[torch.Tensor, torch.Tensor]],
    num_experts: int,
    dtype: torch.dtype,
) -> ExpertWeights:
    """Return weights of experts in MXFP4 as their products read them: a CPU dequantised.

    Args:
        weights: As in `pack_mxfp4`.
        dtype: Of the rows that are multiplied by them.
    """
    values, scales = next(weights)
    rest = chain([(values, scales)], weights)
    if values.is_cuda or use_triton(values):
        return pack_mxfp4(rest, num_experts, dtype)
    dense = (dequantize_mxfp4(*weight).to(dtype) for weight in rest)
    return hold_experts(products, dense, num_experts)


def apply_experts_cpu(
    x: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    chosen: ChosenExperts,
    out: torch.Tensor,
    form: ExpertForm = PLAIN_FORM,
) -> None:
    """Do what `apply_experts` does on a CPU.

    Args:
        gate_up, down: Not in MXFP4; in FP8 they are dequantised, expert by expert.
    Mutates: `out`, all of it.
    """
    assert not isinstance(gate_up, Mxfp4Weights) and not isinstance(down, Mxfp4Weights)
    out.zero_()
    for expert in chosen.ids.unique().tolist():
        if expert == len(down):  # padding
            continue
        rows, slots = (chosen.ids == expert).nonzero(as_tuple=True)
        bias = None if form.gate_up_bias is None else form.gate_up_bias[expert]
        product = linear_cpu(x[rows], gate_up[expert], bias, out_dtype=torch.float32)
        gate, up = product.chunk(2, dim=1)
        if form.limit:
            inner = clamped_swiglu(gate, up, form.limit, form.alpha)
        else:
            inner = swiglu(gate, up, form.activation)
        bias = None if form.down_bias is None else form.down_bias[expert]
        y = linear_cpu(inner.to(x.dtype), down[expert], bias, out_dtype=torch.float32)
        out[slots, rows] = y * chosen.weights[rows, slots, None]

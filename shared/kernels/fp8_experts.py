"""One weight of each expert in FP8 (e4m3), with scales in float32; see quantized.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from shared.kernels.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedExperts:
    """One weight [N, K] of each expert in FP8: values times scales.

    Args:
        values: [E, N, K] float8_e4m3fn, no NaN.
        scales: [E, 1, N] f32, one per output; or [E, ceil(K / SCALE_BLOCK), N] f32.
        dtype: Of the rows that are multiplied by them.
        has_fp8_rows: See QuantizedWeight.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype
    has_fp8_rows: bool = False

    @property
    def shape(self) -> torch.Size:
        """Return (E, N, K)."""
        return self.values.shape

    @property
    def scaling(self) -> str:
        """Return what shares a scale: "channel", an output, or "block"."""
        return self[0].scaling

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, expert: int) -> QuantizedWeight:
        return QuantizedWeight(
            values=self.values[expert],
            scales=self.scales[expert],
            dtype=self.dtype,
            has_fp8_rows=self.has_fp8_rows,
        )


def pack_fp8(weights: Iterable[QuantizedWeight], num_experts: int) -> QuantizedExperts:
    """Return weights as kernels read them.

    Args:
        weights: Of expert 0, 1, ..., alike in shape and scaling; taken one at a time.
    """
    held: QuantizedExperts | None = None
    for expert, weight in enumerate(weights):
        if held is None:
            held = QuantizedExperts(
                values=weight.values.new_empty((num_experts, *weight.values.shape)),
                scales=weight.scales.new_empty((num_experts, *weight.scales.shape)),
                dtype=weight.dtype,
                has_fp8_rows=weight.has_fp8_rows,
            )
        held.values[expert].view(torch.uint8).copy_(weight.values.view(torch.uint8))
        held.scales[expert].copy_(weight.scales)
    assert held is not None and expert == num_experts - 1
    return held

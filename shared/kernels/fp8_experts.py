"""One weight of each expert in FP8 (e4m3), with scales in float32; see quantized.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def join_fp8(
    values: torch.Tensor, weights: Sequence[QuantizedWeight], num_parts: int
) -> QuantizedExperts | None:
    """Return weights whose values lie where kernels read them; None: their scales are not alike.

    Args:
        values: [E, P, N, K], of the weights.
        weights: Of the parts of expert 0, then of expert 1, ..., whose outputs come one after the
            other.
        num_parts: P.
    """
    if len({(weight.scales.shape, weight.has_fp8_rows) for weight in weights}) > 1:
        return None
    scales = torch.stack([weight.scales for weight in weights]).unflatten(0, (-1, num_parts))
    return QuantizedExperts(
        values=values.flatten(1, 2),
        scales=scales.transpose(1, 2).flatten(2),  # [E, P, S, N] -> [E, S, P N]
        dtype=weights[0].dtype,
        has_fp8_rows=weights[0].has_fp8_rows,
    )


def pack_fp8(weights: Iterable[QuantizedWeight]) -> QuantizedExperts:
    """Return weights as kernels read them, by a copy.

    Args:
        weights: Of expert 0, 1, ..., alike in shape and scaling.
    """
    weights = list(weights)
    values = torch.stack([weight.values.view(torch.uint8) for weight in weights])
    experts = join_fp8(values.view(torch.float8_e4m3fn)[:, None], weights, 1)
    assert experts is not None
    return experts

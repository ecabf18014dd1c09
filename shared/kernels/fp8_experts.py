"""One weight of each expert in FP8 (e4m3), with scales in float32; see quantized.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from shared.kernels.quantized import QuantizedWeight, are_numbers


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

    def are_finite(self) -> torch.Tensor:
        """Return which experts hold numbers, see `QuantizedWeight.is_finite`.

        Returns: [E] bool on the device, which nobody has waited for yet.
        """
        have_numbers = are_numbers(self.values.view(torch.uint8).flatten(1))
        return have_numbers & self.scales.isfinite().flatten(1).all(dim=1)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, expert: int) -> QuantizedWeight:
        return QuantizedWeight(
            values=self.values[expert],
            scales=self.scales[expert],
            dtype=self.dtype,
            has_fp8_rows=self.has_fp8_rows,
        )


def join_rows(parts: QuantizedExperts, num_parts: int) -> QuantizedExperts:
    """Return experts whose outputs are those of several weights, one after the other.

    Args:
        parts: [E P, N, K], those of expert 0, then those of expert 1, ...; their values stay where
            they are.
        num_parts: P.
    """
    scales = parts.scales.unflatten(0, (-1, num_parts))
    return replace(
        parts,
        values=parts.values.unflatten(0, (-1, num_parts)).flatten(1, 2),
        scales=scales.transpose(1, 2).flatten(2),  # [E, P, S, N] -> [E, S, P N]
    )


def pack_fp8(weights: Iterable[QuantizedWeight]) -> QuantizedExperts:
    """Return weights as kernels read them, by a copy.

    Args:
        weights: Of expert 0, 1, ..., alike in shape and scaling.
    """
    weights = list(weights)
    values = torch.stack([weight.values.view(torch.uint8) for weight in weights])
    return QuantizedExperts(
        values=values.view(torch.float8_e4m3fn),
        scales=torch.stack([weight.scales for weight in weights]),
        dtype=weights[0].dtype,
        has_fp8_rows=weights[0].has_fp8_rows,
    )

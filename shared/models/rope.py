"""Tables of the rotary embedding."""

from __future__ import annotations

import math

import torch

from shared.kernels.vector_math import settle_vector_math
from shared.models.config import ModelConfig
from shared.models.rope_config import RopeConfig, RopeKind


def rope_cos_sin(
    config: ModelConfig, num_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of every position.

    Computed in float64 on the CPU, so that all workers hold the same bits whatever their device.

    Args:
        num_positions: P, positions 0..P-1; may exceed max_position_embeddings.
    Returns: cos, sin: [P, head_dim / 2] f32 on the device.
    """
    settle_vector_math()
    frequencies = rope_frequencies(config.rope, config.head_dim)
    positions = torch.arange(num_positions, dtype=torch.float64)
    angles = positions[:, None] * frequencies  # [P, d / 2]
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle per position of every pair. [head_dim / 2] f64 on the CPU.

    Source: transformers' modeling_rope_utils (linear, llama3).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = rope.theta**-exponent
    if rope.kind is RopeKind.LINEAR:
        return frequencies / rope.factor
    if rope.kind is RopeKind.LLAMA3:
        # How often a pair turns within the original context decides: rare turns are stretched,
        # frequent ones kept, those between blended.
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        return frequencies * (blend + (1 - blend) / rope.factor)
    return frequencies

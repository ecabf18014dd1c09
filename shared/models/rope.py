"""Tables of the rotary embedding."""

from __future__ import annotations

import math

import torch

from shared.kernels.vector_math import settle_vector_math
from shared.models.config import ModelConfig
from shared.models.rope_config import RopeConfig, RopeKind


def rope_cos_sin(
    config: ModelConfig, num_positions: int, device: torch.device, *, context_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of every position, those of yarn and longrope scaled.

    Computed in float64 on the CPU, so that all workers hold the same bits whatever their device.

    Args:
        num_positions: P, positions 0..P-1; may exceed max_position_embeddings.
        context_len: Longest sequence that the engine is configured for, tokens; see RopeConfig.
    Returns: cos, sin: [P, rope_width / 2] f32 on the device. Pairs that are not rotated are the
        last ones, and have 1 and 0.
    """
    settle_vector_math()
    rope, head_dim = config.rope, config.rope_width
    frequencies = rope_frequencies(rope, head_dim, context_len)
    positions = torch.arange(num_positions, dtype=torch.float64)
    angles = positions[:, None] * frequencies  # [P, rotary_dim / 2]
    num_still = head_dim // 2 - angles.shape[1]
    cos, sin = (
        torch.nn.functional.pad(values * rope.attention_factor, (0, num_still), value=still)
        for values, still in ((angles.cos(), 1.0), (angles.sin(), 0.0))
    )
    return cos.float().to(device), sin.float().to(device)


def query_scales(rope: RopeConfig, num_positions: int, device: torch.device) -> torch.Tensor | None:
    """Return what the queries of every position are multiplied by, [P, 1] f32; None: by nothing.

    Source: transformers' get_llama_4_attn_scale.
    """
    if not rope.query_beta:
        return None
    settle_vector_math()
    turns = torch.arange(num_positions) // rope.original_max_position
    scales = 1 + rope.query_beta * torch.log1p(turns.double())
    return scales[:, None].float().to(device)


def rope_frequencies(rope: RopeConfig, head_dim: int, context_len: int) -> torch.Tensor:
    """Return the angle per position of every rotated pair. [rotary_dim / 2] f64 on the CPU.

    Args:
        context_len: As in `rope_cos_sin`.
    Source: transformers' modeling_rope_utils (linear, llama3, yarn, longrope, proportional).
    """
    dim = rope.rotary_dim(head_dim)
    is_proportional = rope.kind is RopeKind.PROPORTIONAL
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / (head_dim if is_proportional else dim)
    frequencies = rope.theta**-exponent
    if is_proportional or rope.kind is RopeKind.LINEAR:
        return frequencies / rope.factor
    if rope.kind is RopeKind.LLAMA3:
        # How often a pair turns within the original context decides: rare turns are stretched,
        # frequent ones kept, those between blended.
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        return frequencies * (blend + (1 - blend) / rope.factor)
    if rope.kind is RopeKind.YARN:
        stretched = _yarn_ramp(rope, dim)
        return frequencies * (1 - stretched + stretched / rope.factor)
    if rope.kind is RopeKind.LONGROPE:
        is_long = context_len > rope.original_max_position
        factors = rope.long_factors if is_long else rope.short_factors
        return frequencies / torch.tensor(factors, dtype=torch.float64)
    return frequencies


def _yarn_ramp(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Return how much of each pair's frequency is stretched, 0..1. [dim / 2] f64."""

    def pair_of(turns: float) -> float:
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as transformers does
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    return ((pairs - low) / (high - low)).clamp(0, 1)


def paired_rows(rope: RopeConfig, head_dim: int) -> torch.Tensor | None:
    """Return the order in which a head's rows of q and k have their pairs at (i, i + head_dim / 2).

    Rotations know this layout alone. Scores do not change when q and k are permuted alike.

    Returns: [head_dim] i64, or None where the checkpoint has that order.
    """
    dim = rope.rotary_dim(head_dim)
    if rope.kind is RopeKind.PROPORTIONAL or (dim == head_dim and not rope.is_interleaved):
        return None
    first, second = torch.arange(dim).chunk(2)
    if rope.is_interleaved:
        first, second = torch.arange(0, dim, 2), torch.arange(1, dim, 2)
    still_first, still_second = torch.arange(dim, head_dim).chunk(2)
    return torch.cat([first, still_first, second, still_second])

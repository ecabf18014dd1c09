"""The widths of multi-head latent attention, as written in config.json. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import CheckpointError
from shared.models.config_fields import require_int
from shared.models.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention of one model; names are those of config.json.

    Args:
        q_lora_rank: Width that queries pass through; 0: they are projected at once.
        kv_lora_rank: Width of a latent, of which a head makes its key and its value.
        qk_nope_head_dim, qk_rope_head_dim: Values of a head's query that are not rotated, and that
            are; the rotated part of the key is the same for all heads, and beside the latent.
        v_head_dim: Values of a head's value.
    """

    q_lora_rank: int = 0
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Return how many values a head's query has."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_width(self) -> int:
        """Return how many values are kept of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def scale(self, rope: RopeConfig) -> float:
        """Return what scores are multiplied by.

        Source: transformers' yarn_apply_mscale.
        """
        scale = self.qk_head_dim**-0.5
        if rope.mscale_all_dim and rope.factor > 1:
            scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
        return scale


_REQUIRED = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def parse_latent(fields: Mapping[str, Any], source: str) -> LatentConfig:
    """Read the widths.

    Args:
        source: File to name in errors.
    Raises: CheckpointError naming the field.
    """
    widths = {name: require_int(fields, name, source) for name in _REQUIRED}
    if fields.get("q_lora_rank") is not None:
        widths["q_lora_rank"] = require_int(fields, "q_lora_rank", source, hint="; or null")
    config = LatentConfig(**widths)
    if config.qk_rope_head_dim % 2:
        raise CheckpointError(
            f"{source}: qk_rope_head_dim = {config.qk_rope_head_dim} is odd, which rules out RoPE"
        )
    return config

"""The pre-norm decoder layer that targets and drafts share: paged attention and a gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shared.kernels.linear import linear
from shared.kernels.rms_norm import rms_norm
from shared.kernels.rope import apply_rope
from shared.kernels.store_kv import store_kv
from shared.kernels.swiglu import swiglu
from shared.kernels.tree_attention import TreeAttentionMetadata, tree_attention
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.rope import rope_cos_sin


class KVCaches(Protocol):
    """K and V of every layer, [num_slots, Hkv, d] each."""

    @property
    def k(self) -> Sequence[torch.Tensor]: ...

    @property
    def v(self) -> Sequence[torch.Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What all layers of one forward share about its T rows.

    Args:
        cos, sin: [T, d / 2] f32.
        slot_mapping: [T] i32.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    attention: TreeAttentionMetadata
    slot_mapping: torch.Tensor


class RopeTable:
    """Cosines and sines of positions 0..num_positions - 1."""

    def __init__(self, config: ModelConfig, num_positions: int, device: torch.device) -> None:
        self._cos, self._sin = rope_cos_sin(config, num_positions, device)

    @property
    def num_positions(self) -> int:
        """Return how many positions the table holds."""
        return self._cos.shape[0]

    def rows(
        self,
        position_ids: torch.Tensor,
        attention: TreeAttentionMetadata,
        slot_mapping: torch.Tensor,
    ) -> Rows:
        """Gather the rows' angles.

        Args:
            position_ids: [T] i64.
        """
        return Rows(
            cos=self._cos[position_ids],
            sin=self._sin[position_ids],
            attention=attention,
            slot_mapping=slot_mapping,
        )


class Attention:
    """Self-attention over paged K/V, projections included.

    Args:
        prefix: Name of the module in the checkpoint, "model.layers.0.self_attn".
        input_width: Width of its input; EAGLE-3 reads two vectors at once.
    """

    def __init__(
        self, reader: CheckpointReader, prefix: str, config: ModelConfig, input_width: int
    ) -> None:
        self._config = config
        q_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self._widths = [q_width, kv_width, kv_width]
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        self._qkv = torch.cat(
            [
                reader.load(f"{name}.weight", (width, input_width))
                for name, width in zip(names, self._widths, strict=True)
            ]
        )
        self._qkv_bias = None
        if config.has_qkv_bias:
            self._qkv_bias = torch.cat(
                [
                    reader.load(f"{name}.bias", (width,))
                    for name, width in zip(names, self._widths, strict=True)
                ]
            )
        self._o = reader.load(f"{prefix}.o_proj.weight", (config.hidden_size, q_width))
        self._o_bias = None
        if config.has_o_bias:
            self._o_bias = reader.load(f"{prefix}.o_proj.bias", (config.hidden_size,))
        self._q_norm = self._k_norm = None
        if config.has_qk_norm:
            self._q_norm = reader.load(f"{prefix}.q_norm.weight", (config.head_dim,))
            self._k_norm = reader.load(f"{prefix}.k_norm.weight", (config.head_dim,))

    def forward(
        self, x: torch.Tensor, rows: Rows, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """Store the rows' K/V, then attend.

        Args:
            x: [T, input_width].
        Returns: [T, h], without a residual.
        Mutates: `k_cache` and `v_cache` rows named by the slot mapping.
        """
        head_dim = self._config.head_dim
        qkv = linear(x, self._qkv, self._qkv_bias).split(self._widths, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in qkv)  # [T, H, d]
        if self._q_norm is not None and self._k_norm is not None:
            q = rms_norm(q, self._q_norm, self._config.rms_norm_eps)
            k = rms_norm(k, self._k_norm, self._config.rms_norm_eps)
        q = apply_rope(q, rows.cos, rows.sin)
        k = apply_rope(k, rows.cos, rows.sin)
        store_kv(k, v, k_cache, v_cache, rows.slot_mapping)
        out = tree_attention(q, k_cache, v_cache, rows.attention, head_dim**-0.5)
        return linear(out.flatten(1), self._o, self._o_bias)


class MLP:
    """Gated MLP.

    Args:
        prefix: Name of the module in the checkpoint, "model.layers.0.mlp".
    """

    def __init__(self, reader: CheckpointReader, prefix: str, config: ModelConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        names = [f"{prefix}.{name}_proj" for name in ("gate", "up")]
        self._gate_up = torch.cat([reader.load(f"{n}.weight", (inner, hidden)) for n in names])
        self._down = reader.load(f"{prefix}.down_proj.weight", (hidden, inner))
        self._gate_up_bias = self._down_bias = None
        if config.has_mlp_bias:
            self._gate_up_bias = torch.cat([reader.load(f"{n}.bias", (inner,)) for n in names])
            self._down_bias = reader.load(f"{prefix}.down_proj.bias", (hidden,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, h], without a residual."""
        gate, up = linear(x, self._gate_up, self._gate_up_bias).chunk(2, dim=-1)
        return linear(swiglu(gate, up), self._down, self._down_bias)


class DecoderLayer:
    """Attention and MLP with their norms and residuals.

    Args:
        prefix: Name of the layer in the checkpoint, "model.layers.0".
        has_input_norm: False: attention reads the residual stream as it is (EAGLE-1/2, layer 0).
    """

    def __init__(
        self,
        reader: CheckpointReader,
        prefix: str,
        config: ModelConfig,
        *,
        has_input_norm: bool = True,
    ) -> None:
        hidden = config.hidden_size
        self._eps = config.rms_norm_eps
        self._input_norm = None
        if has_input_norm:
            self._input_norm = reader.load(f"{prefix}.input_layernorm.weight", (hidden,))
        self._attention = Attention(reader, f"{prefix}.self_attn", config, hidden)
        self._post_norm = reader.load(f"{prefix}.post_attention_layernorm.weight", (hidden,))
        self._mlp = MLP(reader, f"{prefix}.mlp", config)

    def forward(
        self, x: torch.Tensor, rows: Rows, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """Advance the residual stream by one layer.

        Args:
            x: [T, h].
        Returns: [T, h].
        Mutates: `k_cache` and `v_cache` rows named by the slot mapping.
        """
        normed = x if self._input_norm is None else rms_norm(x, self._input_norm, self._eps)
        x = x + self._attention.forward(normed, rows, k_cache, v_cache)
        return x + self._mlp.forward(rms_norm(x, self._post_norm, self._eps))

"""The pre-norm decoder layer that targets and drafts share: paged attention and a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from shared.kernels.embedding import embed
from shared.kernels.linear import linear_addends, sum_addends
from shared.kernels.linear_swiglu import linear_swiglu
from shared.kernels.products_cpu import Weight
from shared.kernels.rms_norm import add_rms_norm, rms_norm
from shared.kernels.rope_store import rope_store
from shared.kernels.tree_attention import TreeAttentionMetadata, prepared, tree_attention
from shared.messages import MAX_TREE_NODES
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.rope import paired_rows, rope_cos_sin
from shared.progress import note_progress


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

    def unrotated(self) -> Rows:
        """Return the same rows for a layer without a rotary embedding."""
        return replace(self, cos=torch.ones_like(self.cos), sin=torch.zeros_like(self.sin))


class RopeTable:
    """Cosines, and beside them sines, of the positions of the longest sequence and a tree after it.

    Args:
        context_len: Longest sequence, tokens.
    """

    def __init__(self, config: ModelConfig, context_len: int, device: torch.device) -> None:
        cos, sin = rope_cos_sin(
            config, context_len + MAX_TREE_NODES, device, context_len=context_len
        )
        self._angles = torch.cat([cos, sin], dim=1)  # [P, d]
        self._heads = (config.num_heads, config.num_kv_heads)

    def rows(
        self,
        position_ids: torch.Tensor,
        attention: TreeAttentionMetadata,
        slot_mapping: torch.Tensor,
        dtype: torch.dtype,
    ) -> Rows:
        """Gather the rows' angles, and cut their attention.

        Args:
            position_ids: [T] i64.
            dtype: Of queries, keys and values.
        """
        cos, sin = embed(position_ids, self._angles).chunk(2, dim=1)
        return Rows(
            cos=cos,
            sin=sin,
            attention=prepared(attention, dtype, *self._heads),
            slot_mapping=slot_mapping,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The output of a projection, still in addends: whoever reads it adds them up on its way.

    Args:
        addends: [S, T, h] f32, see `linear_addends`.
        bias: [h] or None.
    """

    addends: torch.Tensor
    bias: torch.Tensor | None


class Attention:
    """Self-attention over paged K/V, projections included.

    Args:
        prefix: Name of the module in the checkpoint, "model.layers.0.self_attn".
        input_width: Width of its input; EAGLE-3 reads two vectors at once.
    """

    def __init__(
        self, reader: CheckpointReader, prefix: str, config: ModelConfig, input_width: int
    ) -> None:
        self._products = reader.products
        self._eps = config.rms_norm_eps
        self._scale = config.attention_multiplier or config.head_dim**-0.5
        self._residual_multiplier = config.residual_multiplier
        q_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        parts = {"q": q_width, "k": kv_width, "v": kv_width}
        order = paired_rows(config.rope, config.head_dim)
        fused = "qkv" if "qkv" in config.fused_projections else None
        qkv = _load_rows(reader, prefix, parts, input_width, fused)
        self._qkv = reader.products.weight(_pair_rows(qkv, order, q_width + kv_width))
        self._qkv_bias = None
        if config.has_qkv_bias:
            bias = _load_biases(reader, prefix, parts)
            self._qkv_bias = _pair_rows(bias, order, q_width + kv_width)
        self._o = reader.load_weight(f"{prefix}.o_proj.weight", (config.hidden_size, q_width))
        self._o_bias = None
        if config.has_o_bias:
            self._o_bias = reader.load(f"{prefix}.o_proj.bias", (config.hidden_size,))
            self._o_bias *= config.residual_multiplier
        self._widths = list(parts.values())
        self._norms = self._wide_norms = None
        if config.has_qk_norm:
            self._norms = self._load_norms(reader, prefix, order, config.head_dim, config.head_dim)
        if config.has_wide_qk_norm:
            self._wide_norms = self._load_norms(reader, prefix, order, q_width, kv_width)

    @staticmethod
    def _load_norms(
        reader: CheckpointReader,
        prefix: str,
        order: torch.Tensor | None,
        q_width: int,
        k_width: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Load the weights of the norms of q and k."""
        q_norm = reader.load(f"{prefix}.q_norm.weight", (q_width,))
        k_norm = reader.load(f"{prefix}.k_norm.weight", (k_width,))
        return _pair_rows(q_norm, order, q_width), _pair_rows(k_norm, order, k_width)

    def forward(
        self, x: torch.Tensor, rows: Rows, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> Product:
        """Store the rows' K/V, then attend.

        Args:
            x: [T, input_width].
        Returns: What to add to the residual stream.
        Mutates: `k_cache` and `v_cache` rows named by the slot mapping.
        """
        addends, bias = linear_addends(x, self._qkv), self._qkv_bias
        if self._wide_norms is not None:
            addends, bias = self._normed(addends, x.dtype), None
        q = rope_store(
            addends,
            bias,
            self._norms,
            self._eps,
            rows.cos,
            rows.sin,
            k_cache,
            v_cache,
            rows.slot_mapping,
        )
        out = tree_attention(
            q, k_cache, v_cache, rows.attention, self._scale, products=self._products
        )
        return _multiply(out.flatten(1), self._o, self._o_bias, self._residual_multiplier)

    def _normed(self, addends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Add up q, k and v, and norm q and k over all heads. [1, T, Hq d + 2 Hkv d] f32."""
        assert self._wide_norms is not None
        qkv = sum_addends(addends, self._qkv_bias, dtype)
        q, k, v = qkv.split(self._widths, dim=1)
        q = rms_norm(q.contiguous(), self._wide_norms[0], self._eps)
        k = rms_norm(k.contiguous(), self._wide_norms[1], self._eps)
        return torch.cat([q, k, v], dim=1).float()[None]


class MLP:
    """Gated MLP.

    Args:
        prefix: Name of the module in the checkpoint, "model.layers.0.mlp".
    """

    def __init__(self, reader: CheckpointReader, prefix: str, config: ModelConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._residual_multiplier = config.residual_multiplier
        parts = {"gate": inner, "up": inner}
        fused = "gate_up" if "gate_up" in config.fused_projections else None
        self._gate_up = reader.products.weight(_load_rows(reader, prefix, parts, hidden, fused))
        self._down = reader.load_weight(f"{prefix}.down_proj.weight", (hidden, inner))
        self._gate_up_bias = self._down_bias = None
        if config.has_mlp_bias:
            self._gate_up_bias = _load_biases(reader, prefix, parts)
            self._down_bias = reader.load(f"{prefix}.down_proj.bias", (hidden,))
            self._down_bias *= config.residual_multiplier

    def forward(self, x: torch.Tensor) -> Product:
        """Return what to add to the residual stream.

        Args:
            x: [T, h].
        """
        inner = linear_swiglu(x, self._gate_up, self._gate_up_bias)
        return _multiply(inner, self._down, self._down_bias, self._residual_multiplier)


class DecoderLayer:
    """Attention and MLP with their norms and residuals.

    What a layer adds to the residual stream last is added by whoever reads the stream next, so that
    one kernel adds and normalises.

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

    def enter(self, x: torch.Tensor, pending: Product | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what the layer before left, and norm.

        Args:
            x: [T, h], the residual stream.
            pending: Still to be added to it.
        Returns: (residual stream [T, h], input of the attention [T, h]).
        """
        if self._input_norm is not None:
            return add_and_norm(x, pending, self._input_norm, self._eps)
        x = add(x, pending)
        return x, x

    def forward(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        rows: Rows,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, Product]:
        """Run the layer on what `enter` returned.

        Returns: (residual stream [T, h], what is still to be added to it).
        Mutates: `k_cache` and `v_cache` rows named by the slot mapping.
        """
        note_progress()
        pending = self._attention.forward(normed, rows, k_cache, v_cache)
        x, normed = add_and_norm(x, pending, self._post_norm, self._eps)
        return x, self._mlp.forward(normed)


class PostNormLayer:
    """Attention and MLP with norms behind them; the same interface as a DecoderLayer's.

    Args:
        prefix: Name of the layer in the checkpoint, "model.layers.0".
    """

    def __init__(self, reader: CheckpointReader, prefix: str, config: ModelConfig) -> None:
        hidden = config.hidden_size
        self._eps = config.rms_norm_eps
        self._attention = Attention(reader, f"{prefix}.self_attn", config, hidden)
        self._attention_norm = reader.load(f"{prefix}.post_attention_layernorm.weight", (hidden,))
        self._mlp = MLP(reader, f"{prefix}.mlp", config)
        self._mlp_norm = reader.load(f"{prefix}.post_feedforward_layernorm.weight", (hidden,))

    def enter(self, x: torch.Tensor, pending: Product | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream twice: attention reads it as it is."""
        x = add(x, pending)
        return x, x

    def forward(
        self,
        x: torch.Tensor,
        normed: torch.Tensor,
        rows: Rows,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Run the layer on what `enter` returned; nothing is left to be added.

        Mutates: `k_cache` and `v_cache` rows named by the slot mapping.
        """
        note_progress()
        product = self._attention.forward(normed, rows, k_cache, v_cache)
        x = self._add_normed(x, product, self._attention_norm)
        return self._add_normed(x, self._mlp.forward(x), self._mlp_norm), None

    def _add_normed(self, x: torch.Tensor, product: Product, weight: torch.Tensor) -> torch.Tensor:
        delta = sum_addends(product.addends, product.bias, x.dtype)
        return x + rms_norm(delta, weight, self._eps)


def add(x: torch.Tensor, pending: Product | None) -> torch.Tensor:
    """Add what is pending to the residual stream. [T, h]."""
    if pending is None:
        return x
    return sum_addends(pending.addends, pending.bias, x.dtype, x)


def add_and_norm(
    x: torch.Tensor, pending: Product | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add what is pending to the residual stream, and norm the sum.

    Returns: (residual stream [T, h], normalised [T, h]).
    """
    if pending is None:
        return x, rms_norm(x, weight, eps)
    return add_rms_norm(x, pending.addends, pending.bias, weight, eps)


def _multiply(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, multiplier: float
) -> Product:
    """Return a projection times `multiplier`, which its bias has been multiplied by."""
    addends = linear_addends(x, weight)
    return Product(addends=addends if multiplier == 1 else addends * multiplier, bias=bias)


def _load_rows(
    reader: CheckpointReader,
    prefix: str,
    parts: Mapping[str, int],
    input_width: int,
    fused: str | None,
) -> torch.Tensor:
    """Load the weights of several projections of one input, above each other.

    Args:
        parts: Projection, "q" or "gate" -> its outputs.
        fused: Name of the one tensor that holds them all; None: each has its own.
    """
    if fused is not None:
        parts = {fused: sum(parts.values())}
    return torch.cat(
        [
            reader.load(f"{prefix}.{name}_proj.weight", (num_outputs, input_width))
            for name, num_outputs in parts.items()
        ]
    )


def _load_biases(reader: CheckpointReader, prefix: str, parts: Mapping[str, int]) -> torch.Tensor:
    return torch.cat([reader.load(f"{prefix}.{name}_proj.bias", (n,)) for name, n in parts.items()])


def _pair_rows(rows: torch.Tensor, order: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    """Bring each head of the first `num_rows` rows, those of q and k, into an order.

    Args:
        order: [head_dim] i64, see `paired_rows`; None: they have it.
    """
    if order is None:
        return rows
    heads = rows[:num_rows].unflatten(0, (-1, len(order)))[:, order.to(rows.device)]
    return torch.cat([heads.flatten(0, 1), rows[num_rows:]])

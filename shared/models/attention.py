"""Self-attention over paged K/V, and what its layers share about the rows of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from shared.kernels.embedding import embed
from shared.kernels.fp8_cache import from_cache
from shared.kernels.fp8_rows import ProductRows, rows_of, wants_fp8_rows
from shared.kernels.latent_attention import prepared_latents
from shared.kernels.linear import linear_addends, sum_addends
from shared.kernels.rms_norm import rms_norm
from shared.kernels.rope_store import rope_store
from shared.kernels.tree_attention import (
    AttentionParams,
    TreeAttentionMetadata,
    prepared,
    tree_attention,
)
from shared.messages import MAX_TREE_NODES
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.family import NormRule
from shared.models.kv_scales import load_kv_scales
from shared.models.projections import (
    Product,
    load_biases,
    load_norm,
    load_rows,
    multiply,
    pair_rows,
    pair_weight_rows,
)
from shared.models.rope import paired_rows, query_scales, rope_cos_sin

LayerCaches = tuple[torch.Tensor, ...]


class KVCaches(Protocol):
    """The caches of every layer, [num_slots, Hkv, width] each; see KVLayout."""

    @property
    def layers(self) -> Sequence[LayerCaches]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInput:
    """Rows of new tokens, and where their keys and values go.

    Args:
        token_ids: [T] i64.
        position_ids: [T] i64.
        slot_mapping: [T] i32, slots of `kv` that the rows' keys and values are written to.
        attention: What the rows see.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    slot_mapping: torch.Tensor
    attention: TreeAttentionMetadata
    kv: KVCaches


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What all layers of one forward share about its T rows.

    Args:
        cos, sin: [T, d / 2] f32.
        slot_mapping: [T] i32.
        expert_ids: [layers with experts, T, top_k] i32, where the choice of each layer is left;
            None: nobody asks.
        per_layer_inputs: [T, layers, w], what each layer reads beside the residual stream; None:
            nothing.
        query_scale: [T, 1], what queries are multiplied by; None: by nothing.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    attention: TreeAttentionMetadata
    slot_mapping: torch.Tensor
    expert_ids: torch.Tensor | None = None
    per_layer_inputs: torch.Tensor | None = None
    query_scale: torch.Tensor | None = None

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
        self._query_scales = query_scales(config.rope, len(cos), device)
        self._config = config

    def rows(self, inputs: ForwardInput, dtype: torch.dtype) -> Rows:
        """Gather the rows' angles, and cut their attention.

        Args:
            dtype: Of queries, keys and values.
        """
        cos, sin = self.angles(inputs.position_ids)
        return Rows(
            cos=cos,
            sin=sin,
            attention=prepare_attention(self._config, inputs.attention, dtype),
            slot_mapping=inputs.slot_mapping,
            query_scale=self.query_scale(inputs.position_ids, dtype),
        )

    def query_scale(self, position_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what queries at [T] i64 positions are multiplied by, [T, 1]; None: by nothing."""
        if self._query_scales is None:
            return None
        return embed(position_ids, self._query_scales).to(dtype)

    def angles(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of rows at [T] i64 positions, [T, d / 2] f32 each."""
        cos, sin = embed(position_ids, self._angles).chunk(2, dim=1)
        return cos, sin


def prepare_attention(
    config: ModelConfig, attention: TreeAttentionMetadata, dtype: torch.dtype
) -> TreeAttentionMetadata:
    """Return a forward's attention with what all of a model's layers share, see `prepared`."""
    if config.latent is not None:
        rank = config.latent.kv_lora_rank
        return prepared_latents(attention, dtype, config.num_heads, rank)
    return prepared(attention, dtype, config.num_heads, config.num_kv_heads)


class Attention:
    """Self-attention over paged K/V, projections included.

    Args:
        prefix: Name of the module in the checkpoint, "model.layers.0.self_attn".
        input_width: Width of its input; EAGLE-3 reads two vectors at once.

    Attributes:
        reads_fp8_rows: It wants its input in FP8 as well.
    """

    def __init__(
        self, reader: CheckpointReader, prefix: str, config: ModelConfig, input_width: int
    ) -> None:
        self._products = reader.products
        self._eps = config.rms_norm_eps
        self._residual_multiplier = config.residual_multiplier
        q_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        parts = {"q": q_width, "k": kv_width, "v": config.num_kv_heads * config.v_dim}
        order = paired_rows(config.rope, config.head_dim)
        fused = "qkv" if "qkv" in config.fused_projections else None
        copies = {"v": "k"} if config.has_k_as_v else None
        qkv = load_rows(reader, prefix, parts, input_width, fused, copies)
        self._qkv = reader.products.weight(pair_weight_rows(qkv, order, q_width + kv_width))
        self.reads_fp8_rows = wants_fp8_rows(self._qkv)
        self._qkv_bias = None
        if config.has_qkv_bias:
            bias = load_biases(reader, prefix, parts, copies)
            self._qkv_bias = pair_rows(bias, order, q_width + kv_width)
        out_width = config.num_heads * config.v_dim
        self._o = reader.load_projection(f"{prefix}.o_proj.weight", (config.hidden_size, out_width))
        self._o_bias = None
        if config.has_o_bias:
            self._o_bias = reader.load(f"{prefix}.o_proj.bias", (config.hidden_size,))
            self._o_bias *= config.residual_multiplier
        self._widths = list(parts.values())
        sinks = None
        if config.sinks:
            name = f"{prefix}.{config.sinks}"
            sinks = reader.load(name, (config.num_heads,), dtype=torch.float32)
        self._params = AttentionParams(
            scale=config.attention_multiplier or config.head_dim**-0.5,
            sinks=sinks,
            softcap=config.attention_softcap,
            kv_scales=load_kv_scales(reader, prefix),
        )
        self._has_v_norm = config.has_v_norm
        self._v_multiplier = config.v_multiplier
        self._norms = self._wide_norms = None
        if config.has_qk_norm:
            widths = (config.head_dim, config.head_dim)
            self._norms = self._load_norms(reader, prefix, config.norm_rule, order, widths)
        if config.has_wide_qk_norm:
            widths = (q_width, kv_width)
            self._wide_norms = self._load_norms(reader, prefix, config.norm_rule, order, widths)
        self._late_norm = None
        if config.has_late_qk_norm:
            # A rotation keeps lengths, so q and k are divided by them before it. The weights of
            # both stay with q, which leaves scores as they are.
            widths, names = (config.head_dim,) * 2, ("query_layernorm", "key_layernorm")
            norms = self._load_norms(reader, prefix, config.norm_rule, order, widths, names)
            self._norms = (torch.ones_like(norms[0]), torch.ones_like(norms[1]))
            self._late_norm = norms[0].float() * norms[1].float()

    @staticmethod
    def _load_norms(
        reader: CheckpointReader,
        prefix: str,
        rule: NormRule,
        order: torch.Tensor | None,
        widths: tuple[int, int],
        names: tuple[str, str] = ("q_norm", "k_norm"),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Load the weights of the norms of q and k."""
        q_norm, k_norm = (
            load_norm(reader, f"{prefix}.{name}.weight", width, rule)
            for name, width in zip(names, widths, strict=True)
        )
        return pair_rows(q_norm, order, widths[0]), pair_rows(k_norm, order, widths[1])

    def forward(self, x: ProductRows, rows: Rows, caches: LayerCaches) -> Product:
        """Store the rows' K/V, then attend.

        Args:
            x: [T, input_width].
            caches: K [num_slots, Hkv, d] and V [num_slots, Hkv, dv], in the dtype of x or in FP8.
        Returns: What to add to the residual stream.
        Mutates: rows of `caches` named by the slot mapping.
        """
        k_cache, v_cache = caches
        dtype = rows_of(x).dtype
        addends, bias = linear_addends(x, self._qkv), self._qkv_bias
        if self._wide_norms is not None:
            addends, bias = self._normed(addends, dtype), None
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
            dtype=dtype,
            scales=self._params.kv_scales,
            has_v_norm=self._has_v_norm,
            v_multiplier=self._v_multiplier,
        )
        if self._late_norm is not None:
            q = (q * self._late_norm).to(dtype)
        if rows.query_scale is not None:
            q = q * rows.query_scale[:, None]
        out = tree_attention(
            q, k_cache, v_cache, rows.attention, self._params, products=self._products
        )
        return multiply(out.flatten(1), self._o, self._o_bias, self._residual_multiplier)

    def stored(self, slots: torch.Tensor, caches: LayerCaches, dtype: torch.dtype) -> torch.Tensor:
        """Return what the caches hold of slots, K and beside it V. [T, Hkv * (d + dv)]

        Args:
            slots: [T] i64.
            dtype: Of the model.
        """
        scales = self._params.kv_scales
        return torch.cat(
            [
                from_cache(cache, slots, dtype, scale).flatten(1)
                for cache, scale in zip(caches, (scales.k, scales.v), strict=True)
            ],
            dim=1,
        )

    def _normed(self, addends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Add up q, k and v, and norm q and k over all heads. [1, T, Hq d + Hkv (d + dv)] f32."""
        assert self._wide_norms is not None
        qkv = sum_addends(addends, self._qkv_bias, dtype)
        q, k, v = qkv.split(self._widths, dim=1)
        q = rms_norm(q.contiguous(), self._wide_norms[0], self._eps)
        k = rms_norm(k.contiguous(), self._wide_norms[1], self._eps)
        return torch.cat([q, k, v], dim=1).float()[None]

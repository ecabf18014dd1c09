"""Multi-head latent attention: of a token one latent is kept, of which all heads make K and V.

Neither is ever made. A head's query is multiplied by what would make its key of a latent, its share
of the latents by what would make its value: every head attends to the latents themselves, in
prompts as in trees, since another order of products would round otherwise.

Source: arXiv:2405.04434, section 2.1; formats as read by transformers' modeling_deepseek_v3.py.
"""

from __future__ import annotations

import torch

from shared.kernels.fp8_rows import ProductRows, wants_fp8_rows
from shared.kernels.head_linear import head_linear, head_weights
from shared.kernels.latent_attention import latent_attention
from shared.kernels.latent_store import latent_store
from shared.kernels.linear import linear, linear_addends
from shared.kernels.rms_norm import rms_norm, rms_norm_fp8
from shared.models.attention import LayerCaches, Rows
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.projections import Product, multiply, pair_weight_rows
from shared.models.rope import paired_rows

# Of the norms inside, whatever rms_norm_eps says.
_EPS = 1e-6


class LatentAttention:
    """Latent self-attention over a paged cache, projections included.

    Args:
        prefix: Name of the module in the checkpoint, "model.layers.0.self_attn".
        input_width: Width of its input.

    Attributes:
        reads_fp8_rows: It wants its input in FP8 as well.
    """

    def __init__(
        self, reader: CheckpointReader, prefix: str, config: ModelConfig, input_width: int
    ) -> None:
        assert config.latent is not None
        self._widths = widths = config.latent
        self._num_heads = num_heads = config.num_heads
        self._products = reader.products
        self._scale = widths.scale(config.rope)
        self._q_a = None
        q_name, q_input = "q_proj", input_width
        if widths.q_lora_rank:
            q_name, q_input = "q_b_proj", widths.q_lora_rank
            self._q_a = reader.load_projection(f"{prefix}.q_a_proj.weight", (q_input, input_width))
            self._q_a_norm = reader.load(f"{prefix}.q_a_layernorm.weight", (q_input,))
        order = paired_rows(config.rope, widths.qk_rope_head_dim)
        q_width = num_heads * widths.qk_head_dim
        q = reader.load_matrix(f"{prefix}.{q_name}.weight", (q_width, q_input))
        q = pair_weight_rows(q, _after(widths.qk_nope_head_dim, order), q_width)
        self._q = reader.products.weight(q)
        rank, kept = widths.kv_lora_rank, widths.cached_width
        kv_a = reader.load_matrix(f"{prefix}.kv_a_proj_with_mqa.weight", (kept, input_width))
        self._kv_a = reader.products.weight(pair_weight_rows(kv_a, _after(rank, order), kept))
        self._kv_a_norm = reader.load(f"{prefix}.kv_a_layernorm.weight", (rank,))
        first = self._q if self._q_a is None else self._q_a
        self.reads_fp8_rows = wants_fp8_rows(self._kv_a) or wants_fp8_rows(first)
        made = widths.qk_nope_head_dim + widths.v_head_dim
        kv_b = reader.load_dense(f"{prefix}.kv_b_proj.weight", (num_heads * made, rank))
        key, value = kv_b.unflatten(0, (num_heads, made)).split(
            [widths.qk_nope_head_dim, widths.v_head_dim], dim=1
        )
        self._of_query = head_weights(reader.products, key.transpose(1, 2))  # [Hq, r, n]
        self._of_latent = head_weights(reader.products, value)  # [Hq, v, r]
        self._o = reader.load_projection(
            f"{prefix}.o_proj.weight", (config.hidden_size, num_heads * widths.v_head_dim)
        )

    def forward(self, x: ProductRows, rows: Rows, caches: LayerCaches) -> Product:
        """Store the rows' latents, then attend.

        Args:
            x: [T, input_width].
            caches: The latents with the rotated part of the keys, [num_slots, 1, r + p].
        Returns: What to add to the residual stream.
        Mutates: rows of `caches` named by the slot mapping.
        """
        (cache,) = caches
        widths, num_heads = self._widths, self._num_heads
        addends = linear_addends(x, self._kv_a)
        if self._q_a is not None:
            norm = rms_norm_fp8 if wants_fp8_rows(self._q) else rms_norm
            x = norm(linear(x, self._q_a), self._q_a_norm, _EPS)
        q = linear(x, self._q).unflatten(1, (num_heads, widths.qk_head_dim))
        if rows.query_scale is not None:
            q = q * rows.query_scale[:, None]
        query = latent_store(
            addends,
            self._kv_a_norm,
            _EPS,
            q,
            rows.cos,
            rows.sin,
            cache,
            rows.slot_mapping,
        )
        rank = widths.kv_lora_rank
        head_linear(q[..., : widths.qk_nope_head_dim], self._of_query, query[..., :rank])
        latents = latent_attention(
            query,
            cache,
            rows.attention,
            self._scale,
            value_width=rank,
            products=self._products,
        )
        out = q.new_empty((len(q), num_heads, widths.v_head_dim))
        head_linear(latents, self._of_latent, out)
        return multiply(out.flatten(1), self._o, None, 1.0)


def _after(width: int, order: torch.Tensor | None) -> torch.Tensor | None:
    """Return the order of values of which the first `width` stay where they are."""
    if order is None:
        return None
    return torch.cat([torch.arange(width), width + order])

"""Attention of layers without K and V of their own, over those of another layer or model."""

from __future__ import annotations

from shared.kernels.fp8_cache import UNSCALED, KVScales
from shared.kernels.fp8_rows import ProductRows, rows_of, wants_fp8_rows
from shared.kernels.linear import linear_addends
from shared.kernels.rope_store import rope_queries
from shared.kernels.tree_attention import AttentionParams, tree_attention
from shared.models.attention import LayerCaches, Rows
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.projections import Product, load_norm, multiply


class QueryAttention:
    """Attention over paged K/V that lie there already.

    Args:
        prefix: Name of the module in the checkpoint, "model.layers.0.self_attn".
        input_width: Width of its input.
        kv_scales: Of K and V, where they lie in FP8.

    Attributes:
        reads_fp8_rows: It wants its input in FP8 as well.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        prefix: str,
        config: ModelConfig,
        input_width: int,
        kv_scales: KVScales = UNSCALED,
    ) -> None:
        self._products = reader.products
        self._eps = config.rms_norm_eps
        q_width = config.num_heads * config.head_dim
        self._q = reader.load_projection(f"{prefix}.q_proj.weight", (q_width, input_width))
        self._o = reader.load_projection(f"{prefix}.o_proj.weight", (config.hidden_size, q_width))
        self.reads_fp8_rows = wants_fp8_rows(self._q)
        self._q_bias = self._o_bias = None
        if config.has_qkv_bias:
            self._q_bias = reader.load(f"{prefix}.q_proj.bias", (q_width,))
        if config.has_o_bias:
            self._o_bias = reader.load(f"{prefix}.o_proj.bias", (config.hidden_size,))
        self._norm = load_norm(reader, f"{prefix}.q_norm.weight", config.head_dim, config.norm_rule)
        scale = config.attention_multiplier or config.head_dim**-0.5
        self._params = AttentionParams(scale=scale, kv_scales=kv_scales)

    def forward(self, x: ProductRows, rows: Rows, caches: LayerCaches) -> Product:
        """Attend to what the rows see.

        Args:
            x: [T, input_width].
            caches: K and V, [num_slots, Hkv, d] each, in the dtype of x or in FP8.
        Returns: What to add to the residual stream.
        """
        k_cache, v_cache = caches
        q = rope_queries(
            linear_addends(x, self._q),
            self._q_bias,
            self._norm,
            self._eps,
            rows.cos,
            rows.sin,
            dtype=rows_of(x).dtype,
        )
        out = tree_attention(
            q, k_cache, v_cache, rows.attention, self._params, products=self._products
        )
        return multiply(out.flatten(1), self._o, self._o_bias, 1.0)

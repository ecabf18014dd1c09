"""Decoder layers of targets and drafts: attention and feed-forward, norms and residuals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch

from shared.kernels.fp8_cache import UNSCALED
from shared.kernels.fp8_rows import ProductRows
from shared.models.attention import Attention, LayerCaches, Rows
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.feed_forward import feed_forward_stacks, load_feed_forward
from shared.models.kv_scales import load_kv_scales
from shared.models.latent_attention import LatentAttention
from shared.models.per_layer_inputs import PER_LAYER_GATE_WEIGHTS, PerLayerGate
from shared.models.projections import Product, add, add_and_norm, add_and_norm_fp8, load_norm
from shared.models.query_attention import QueryAttention
from shared.progress import note_progress

_KV_PROJECTIONS = ("self_attn.k_proj.weight", "self_attn.v_proj.weight")
# What attention loads, in that order; a fused projection instead of its parts.
_ATTENTION = (
    "self_attn.qkv_proj.weight",
    "self_attn.q_a_proj.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.q_proj.weight",
    *_KV_PROJECTIONS,
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.kv_b_proj.weight",
    "self_attn.o_proj.weight",
)


def announce_layers(
    reader: CheckpointReader,
    config: ModelConfig,
    prefixes: Sequence[str],
    *,
    first_id: int = 0,
    then: Sequence[str] = (),
) -> None:
    """Let the projections of all layers be read ahead: what a layer waits for, and what is done
    with its weights, takes no time from the reading of those after it.

    Args:
        prefixes: Of the layers in order, see `DecoderLayer`.
        first_id: `layer_id` of the first one.
        then: Weights that are loaded after the layers.
    """
    layers = enumerate(prefixes, first_id)
    stacks = (_stacks(reader, prefix, config, layer_id) for layer_id, prefix in layers)
    reader.read_ahead(chain(chain.from_iterable(stacks), ([name] for name in then)))


def _stacks(
    reader: CheckpointReader, prefix: str, config: ModelConfig, layer_id: int
) -> Iterator[Sequence[str]]:
    """Yield the projections that a layer loads, by calls, in order; some may not be there."""
    for name in _ATTENTION:
        # Some files have tensors of K and V in layers without them: never asked for, they would
        # keep the memory that others are read into.
        if config.kv_layer(layer_id) == layer_id or name not in _KV_PROJECTIONS:
            yield [f"{prefix}.{name}"]
    yield from feed_forward_stacks(reader, prefix, config, layer_id)
    yield from ([f"{prefix}.{name}"] for name in PER_LAYER_GATE_WEIGHTS)


class DecoderLayer:
    """Attention and feed-forward with their norms and residuals.

    What a layer adds to the residual stream last is added by whoever reads the stream next, so that
    one kernel adds and normalises.

    Args:
        prefix: Name of the layer in the checkpoint, "model.layers.0".
        layer_id: Which layer of the decoder it is; says what it has that others do not.
        has_input_norm: False: attention reads the residual stream as it is (EAGLE-1/2, layer 0).
    """

    def __init__(
        self,
        reader: CheckpointReader,
        prefix: str,
        config: ModelConfig,
        layer_id: int = 0,
        *,
        has_input_norm: bool = True,
    ) -> None:
        hidden, model = config.hidden_size, config
        config = model.at_layer(layer_id)
        self._eps = config.rms_norm_eps
        self._is_centered = config.norm_rule.is_centered

        def norm(name: str | None) -> torch.Tensor | None:
            if name is None:
                return None
            return load_norm(reader, f"{prefix}.{name}.weight", hidden, config.norm_rule)

        norms = config.layer_norms
        self._input_norm = norm(norms.before_attention if has_input_norm else None)
        self._attention_norm = norm(norms.after_attention)
        self._mlp_input_norm = norm(norms.before_mlp)
        self._mlp_norm = norm(norms.after_mlp)
        self._attention = _load_attention(reader, prefix, model, layer_id)
        self._feed_forward = load_feed_forward(reader, prefix, config, layer_id)
        self._is_parallel = norms.is_parallel
        self._per_layer, self._layer_id = None, layer_id
        if config.per_layer is not None:
            self._per_layer = PerLayerGate(reader, prefix, config, config.per_layer.width)
            self._per_layer_norm = norm("post_per_layer_input_norm")
        self._scalar = None
        if config.has_layer_scalar:
            self._scalar = reader.load(f"{prefix}.layer_scalar", (1,))

    def enter(self, x: torch.Tensor, pending: Product | None) -> tuple[torch.Tensor, ProductRows]:
        """Add what the layer before left, and norm.

        Args:
            x: [T, h], the residual stream.
            pending: Still to be added to it.
        Returns: (residual stream [T, h], input of the attention [T, h]).
        """
        to_fp8 = self._attention.reads_fp8_rows
        if self._is_parallel:
            to_fp8 = to_fp8 or self._feed_forward.reads_fp8_rows
        return self._add(x, pending, self._input_norm, to_fp8=to_fp8)

    def forward(
        self,
        x: torch.Tensor,
        normed: ProductRows,
        rows: Rows,
        caches: LayerCaches,
    ) -> tuple[torch.Tensor, Product | None]:
        """Run the layer on what `enter` returned.

        Returns: (residual stream [T, h], what is still to be added to it; None: nothing is).
        Mutates: rows of `caches` named by the slot mapping.
        """
        note_progress()
        if self._is_parallel:
            x = add(x, self._attention.forward(normed, rows, caches))
            return x, self._feed_forward.forward(normed, rows, x)
        product = self._normed(self._attention.forward(normed, rows, caches), self._attention_norm)
        to_fp8 = self._feed_forward.reads_fp8_rows
        x, normed = self._add(x, product, self._mlp_input_norm, to_fp8=to_fp8)
        product = self._normed(self._feed_forward.forward(normed, rows, x), self._mlp_norm)
        if self._per_layer is not None:
            assert rows.per_layer_inputs is not None, "its embeddings are those of a whole model"
            x, own = add(x, product), rows.per_layer_inputs[:, self._layer_id]
            product = self._normed(self._per_layer.forward(x, own), self._per_layer_norm)
        if self._scalar is None:
            return x, product
        return add(x, product) * self._scalar, None

    def stored_kv(
        self, slots: torch.Tensor, caches: LayerCaches, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return K and V of slots [T] i64 beside each other; see Attention.stored."""
        assert isinstance(self._attention, Attention), "latents are neither K nor V"
        return self._attention.stored(slots, caches, dtype)

    def _add(
        self, x: torch.Tensor, pending: Product | None, norm: torch.Tensor | None, *, to_fp8: bool
    ) -> tuple[torch.Tensor, ProductRows]:
        """Add what is pending, and norm; without a norm return the sum twice."""
        if to_fp8:
            return add_and_norm_fp8(x, pending, norm, self._eps, is_centered=self._is_centered)
        if norm is not None:
            return add_and_norm(x, pending, norm, self._eps, is_centered=self._is_centered)
        x = add(x, pending)
        return x, x

    def _normed(self, product: Product, norm: torch.Tensor | None) -> Product:
        """Return a product that is normed before it is added, if there is a norm."""
        return product if norm is None else replace(product, norm=norm, eps=self._eps)


def _load_attention(
    reader: CheckpointReader, prefix: str, config: ModelConfig, layer_id: int
) -> Attention | LatentAttention | QueryAttention:
    """Load the attention of a layer.

    Args:
        prefix: Name of the layer in the checkpoint, "model.layers.0".
        config: Of the model.
    """
    own, name, hidden = config.at_layer(layer_id), f"{prefix}.self_attn", config.hidden_size
    if own.latent is not None:
        return LatentAttention(reader, name, own, hidden)
    if own.has_own_kv:
        return Attention(reader, name, own, hidden)
    kv_scales = UNSCALED
    if config.kv_layers:
        layers, _, _ = prefix.rpartition(".")
        kv_scales = load_kv_scales(reader, f"{layers}.{config.kv_layer(layer_id)}.self_attn")
    return QueryAttention(reader, name, own, hidden, kv_scales)

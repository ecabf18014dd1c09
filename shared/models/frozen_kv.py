"""Frozen-KV MTP: drafts whose layers attend to K and V of two layers of their target.

A feature row is the target's K and V of the last layer with a window, those of the last layer
without one, and the final hidden state (after its last norm). Committed rows leave the K and V in
the draft's own pages, of two layers; nodes of trees leave nothing there, and see what is committed.

Row p reads token p + 1 and the hidden state of position p, or, as a node, that of its parent:
pre_projection([scaled embedding of the target; hidden state]) runs through the layers and a norm.
What comes out is read by the output layer; post_projection of it is the children's hidden state.
The row sits at position p + 1, that of its token; nodes sit where the root of their tree does.

Source: transformers' modeling_gemma4_assistant.py, and SinglePositionMultiTokenCandidateGenerator
of its generation/candidate_generator.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from shared.kernels.embedding import embed
from shared.kernels.fp8_cache import as_bytes, to_cache
from shared.kernels.linear import linear
from shared.messages import FeatureSpec
from shared.models.assistant_config import AssistantConfig
from shared.models.attention import ForwardInput
from shared.models.checkpoint import CheckpointReader
from shared.models.config import DraftKind, ModelConfig
from shared.models.decoder import DecoderLayer
from shared.models.head import read_target_embedding
from shared.models.layer_rows import LayerRows
from shared.models.llama import embedding_multiplier, load_embedding, load_head
from shared.models.projections import Product, add_and_norm, load_norm
from shared.models.token_clusters import TokenClusters


class FrozenKVDraft:
    """An assistant of Gemma 4.

    Args:
        reader: Of its checkpoint.
        target: Whose K and V it reads.
        embedding: [V, h], the target's.
        context_len: Longest sequence, tokens.
    """

    kind = DraftKind.FROZEN_KV_MTP
    input_shift = 1
    kv_lag = 0

    def __init__(
        self,
        reader: CheckpointReader,
        config: AssistantConfig,
        feature_spec: FeatureSpec,
        target: ModelConfig,
        *,
        embedding: torch.Tensor,
        context_len: int,
    ) -> None:
        decoder, width = config.decoder, config.target_hidden_size
        self.feature_spec = feature_spec
        self.recurrent_width = feature_spec.width
        self.hidden_size = decoder.hidden_size
        self.vocab_size = decoder.vocab_size
        self.kv_layout = config.kv_layout(target)
        self.max_position = decoder.max_position_embeddings
        self.device = embedding.device
        self.dtype = embedding.dtype
        self._eps = decoder.rms_norm_eps
        self._embedding = embedding
        self._multiplier = embedding_multiplier(target, self.dtype)
        self._input = reader.load_weight("pre_projection.weight", (self.hidden_size, 2 * width))
        self._output = reader.load_weight("post_projection.weight", (width, self.hidden_size))
        self._layers = [
            DecoderLayer(reader, f"model.layers.{i}", decoder, i) for i in range(decoder.num_layers)
        ]
        self._cache_of_layer = config.cache_of_layer
        self._norm = load_norm(reader, "model.norm.weight", self.hidden_size, decoder.norm_rule)
        own = load_embedding(reader, decoder) if decoder.is_tied else None
        self._head = reader.output_layer(load_head(reader, decoder, own))
        self._clusters = None
        if config.clusters is not None:
            self._clusters = TokenClusters(
                reader, config.clusters, self.vocab_size, self.hidden_size
            )
        self._rows = LayerRows(decoder, context_len, self.device)
        shapes = self.kv_layout.layers
        kv_widths = [shape.num_heads * width for shape in shapes for width in shape.widths]
        self._widths = [*kv_widths, width]

    @classmethod
    def from_checkpoint(
        cls,
        directory: Path,
        target_dir: Path,
        feature_spec: FeatureSpec,
        *,
        device: torch.device,
        dtype: torch.dtype,
        context_len: int,
        quantization: str = "",
    ) -> FrozenKVDraft:
        """Load an assistant; what embeds tokens is the target's.

        Raises: CheckpointError naming what is missing, left over or mis-shaped.
        """
        config = AssistantConfig.from_checkpoint(directory)
        with CheckpointReader(
            directory, device=device, dtype=dtype, quantization=quantization
        ) as reader:
            draft = cls(
                reader,
                config,
                feature_spec,
                ModelConfig.from_checkpoint(target_dir),
                embedding=read_target_embedding(target_dir, device, dtype),
                context_len=context_len,
            )
            reader.finish(["model.embed_tokens.weight"])
        return draft

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        """Return the features in the draft's dtype."""
        assert features.shape[-1] == self.feature_spec.width, "features of another width"
        return features.to(device=self.device, dtype=self.dtype)

    def extend(
        self, inputs: ForwardInput, recurrent: torch.Tensor | None, *, carried: torch.Tensor
    ) -> torch.Tensor:
        """Keep the K and V of committed tokens, and run them through the layers; see
        DraftModel.extend.
        """
        assert recurrent is not None, "K and V of committed tokens come with their features"
        *stored, hidden = recurrent.split(self._widths, dim=1)
        slots = inputs.slot_mapping.long()
        caches = [cache for layer in inputs.kv.layers for cache in layer]
        for cache, rows in zip(caches, stored, strict=True):
            values = to_cache(rows.reshape(-1, *cache.shape[1:]), cache.dtype, 1.0)
            as_bytes(cache).index_copy_(0, slots, as_bytes(values))
        return self._run(replace(inputs, position_ids=inputs.position_ids + 1), hidden)

    def deepen(
        self, inputs: ForwardInput, recurrent: torch.Tensor | None, *, depth: int
    ) -> torch.Tensor:
        """Run nodes of trees through the layers; see DraftModel.deepen. Mutates: nothing."""
        assert recurrent is not None, "a node needs the hidden row of its parent"
        return self._run(_frozen(inputs, depth), linear(recurrent, self._output))

    def _run(self, inputs: ForwardInput, hidden: torch.Tensor) -> torch.Tensor:
        """Return what rows of the target's embedding and hidden state become. [T, hidden_size]"""
        x = embed(inputs.token_ids, self._embedding, multiplier=self._multiplier)
        x = linear(torch.cat([x, hidden], dim=1), self._input)
        rows = self._rows.rows(inputs, self.dtype)
        pending: Product | None = None
        for layer_id, layer in enumerate(self._layers):
            caches = inputs.kv.layers[self._cache_of_layer[layer_id]]
            x, normed = layer.enter(x, pending)
            x, pending = layer.forward(x, normed, rows[layer_id], caches)
        return add_and_norm(x, pending, self._norm, self._eps)[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [R, vocab_size] f32; `hidden` needs no norm."""
        logits = linear(hidden, self._head, out_dtype=torch.float32)
        return logits if self._clusters is None else self._clusters.keep_chosen(logits, hidden)

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the ids: the vocabulary is the target's."""
        return draft_ids.long()


def _frozen(inputs: ForwardInput, depth: int) -> ForwardInput:
    """Return nodes of one depth as rows that see all that is committed and nothing else, at the
    position of the root of their tree.

    Of what they see the newest committed row is their path, as a path has a row at least.
    """
    attention = inputs.attention
    return replace(
        inputs,
        position_ids=(inputs.position_ids - (depth - 1)).clamp(min=0),
        attention=replace(
            attention,
            prefix_len=(attention.prefix_len - 1).clamp(min=0),
            path_len=torch.ones_like(attention.path_len),
            path_offset=torch.zeros_like(attention.path_offset[:, :1]),
        ),
    )

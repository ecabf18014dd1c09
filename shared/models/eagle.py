"""EAGLE-1/2 heads (`LlamaForCausalLMEagle`).

Row p reads token p + 1 and f: the target's final hidden state (after its last norm) at p, or the
recurrent hidden state of the parent row. x = fc([embedding; f]) runs through the layers, the first
of which has no input norm; the residual stream that comes out is fed back, and is read by the
target's output layer, without a norm.

Source: arXiv:2401.15077; formats as read by SGLang's models/llama_eagle.py.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shared.kernels.linear import linear
from shared.messages import FeatureSpec
from shared.models.attention import ForwardInput
from shared.models.checkpoint import CheckpointReader
from shared.models.config import DraftKind, HeadConfig
from shared.models.decoder import DecoderLayer
from shared.models.head import (
    Head,
    read_target_embedding,
    read_target_head,
    without_model_prefix,
)
from shared.models.one_forward import OneForward
from shared.models.projections import Product, add

# Copies of the target's, which is used instead.
_KNOWN_EXTRAS = ("embed_tokens.weight", "lm_head.weight", "layers.*.self_attn.rotary_emb.inv_freq")


class EagleDraft(OneForward, Head):
    """An EAGLE-1/2 head.

    Args:
        reader: Of the head's checkpoint.
        embedding, target_head: [V, h], the target's.
        token_map: [n] i64, the ids that it may propose; None: all.
    """

    kind = DraftKind.EAGLE

    def __init__(
        self,
        reader: CheckpointReader,
        config: HeadConfig,
        feature_spec: FeatureSpec,
        *,
        embedding: torch.Tensor,
        target_head: torch.Tensor,
        token_map: torch.Tensor | None,
        context_len: int,
    ) -> None:
        decoder = config.decoder
        super().__init__(decoder, feature_spec, embedding, context_len=context_len)
        hidden = decoder.hidden_size
        self._fc = reader.load_weight("fc.weight", (hidden, 2 * hidden))
        has_bias = config.has_fc_bias
        if has_bias is None:
            has_bias = "fc.bias" in reader.names
        self._fc_bias = reader.load("fc.bias", (hidden,)) if has_bias else None
        self._layers = [
            DecoderLayer(reader, f"layers.{i}", decoder, has_input_norm=i > 0)
            for i in range(decoder.num_layers)
        ]
        self._token_map = token_map
        if token_map is not None:
            self._token_map = token_map = token_map.to(self.device)
            target_head = target_head[token_map]
        self._head = reader.output_layer(target_head)
        self.vocab_size = target_head.shape[0]

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
        token_map: torch.Tensor | None = None,
    ) -> EagleDraft:
        """Load a head; embedding and output layer are the target's.

        Args:
            token_map: [n] i64, the ids that it may propose; None: all.
        Raises: CheckpointError naming what is missing, left over or mis-shaped.
        """
        config = HeadConfig.from_checkpoint(directory, DraftKind.EAGLE)
        with CheckpointReader(
            directory,
            device=device,
            dtype=dtype,
            rename=without_model_prefix,
            quantization=quantization,
        ) as reader:
            draft = cls(
                reader,
                config,
                feature_spec,
                embedding=read_target_embedding(target_dir, device, dtype),
                target_head=read_target_head(target_dir, device, dtype),
                token_map=token_map,
                context_len=context_len,
            )
            reader.finish(_KNOWN_EXTRAS)
        return draft

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Map draft ids to target ids by the token map."""
        return draft_ids.long() if self._token_map is None else self._token_map[draft_ids.long()]

    def forward(self, inputs: ForwardInput, recurrent: torch.Tensor | None) -> torch.Tensor:
        """Run rows through the layers; see OneForward.forward."""
        assert recurrent is not None, "an EAGLE head needs a feature or a hidden state per row"
        rows = self._rope.rows(inputs, self.dtype)
        x = torch.cat([self._embed(inputs.token_ids), recurrent], dim=-1)
        x = linear(x, self._fc, self._fc_bias)
        pending: Product | None = None
        for layer, caches in zip(self._layers, inputs.kv.layers, strict=True):
            x, normed = layer.enter(x, pending)
            x, pending = layer.forward(x, normed, rows, caches)
        return add(x, pending)

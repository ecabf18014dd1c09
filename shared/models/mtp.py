"""The layer of multi-token prediction in MiMo-7B-style checkpoints (`model.mtp_layers.0`).

Row p reads token p + 1 and f: the target's final hidden state (after its last norm) at p, or the
recurrent hidden state of the parent row. x = input_proj([norm(f); norm(embedding)]), hidden state
FIRST, runs through a Qwen2 layer and a final norm; the result is fed back and read by the target's
output layer. The embedding of the row at position 0 is zero.

Source: arXiv:2505.07608; formats as read by SGLang's models/mimo_mtp.py.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shared.kernels.linear import linear
from shared.kernels.rms_norm import rms_norm
from shared.kernels.tree_attention import TreeAttentionMetadata
from shared.messages import FeatureSpec
from shared.models.attention import KVCaches
from shared.models.checkpoint import CheckpointReader
from shared.models.config import DraftKind, ModelConfig
from shared.models.decoder import DecoderLayer
from shared.models.head import Head
from shared.models.llama import load_embedding, load_head
from shared.models.projections import add_and_norm

_PREFIX = "model.mtp_layers.0"
# The rest of the checkpoint is the target; what is left over of the layer itself is an error.
_KNOWN_EXTRAS = (
    "model.layers.*",
    "model.norm.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.rotary_emb.inv_freq",
    "model.mtp_layers.0.self_attn.rotary_emb.inv_freq",
)


class MTPDraft(Head):
    """MiMo's layer of multi-token prediction.

    Args:
        reader: Of the target's checkpoint, where the layer lies.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        config: ModelConfig,
        feature_spec: FeatureSpec,
        *,
        context_len: int,
    ) -> None:
        embedding = load_embedding(reader, config)
        super().__init__(
            kind=DraftKind.MTP,
            config=config,
            feature_spec=feature_spec,
            embedding=embedding,
            num_layers=1,
            context_len=context_len,
        )
        hidden = config.hidden_size
        self._token_norm = reader.load(f"{_PREFIX}.token_layernorm.weight", (hidden,))
        self._hidden_norm = reader.load(f"{_PREFIX}.hidden_layernorm.weight", (hidden,))
        self._input_proj = reader.load_weight(f"{_PREFIX}.input_proj.weight", (hidden, 2 * hidden))
        self._layer = DecoderLayer(reader, _PREFIX, config)
        self._final_norm = reader.load(f"{_PREFIX}.final_layernorm.weight", (hidden,))
        self._head = reader.products.weight(load_head(reader, config, embedding))
        self.vocab_size = config.vocab_size

    @classmethod
    def from_checkpoint(
        cls,
        directory: Path,
        feature_spec: FeatureSpec,
        *,
        device: torch.device,
        dtype: torch.dtype,
        context_len: int,
        quantization: str = "",
    ) -> MTPDraft:
        """Load the layer, the embedding and the output layer out of a target's checkpoint.

        Raises: CheckpointError naming what is missing, left over or mis-shaped.
        """
        config = ModelConfig.from_checkpoint(directory)
        with CheckpointReader(
            directory, device=device, dtype=dtype, quantization=quantization
        ) as reader:
            draft = cls(reader, config, feature_spec, context_len=context_len)
            reader.finish(_KNOWN_EXTRAS)
        return draft

    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        recurrent: torch.Tensor | None,
        kv: KVCaches,
        attention: TreeAttentionMetadata,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Run rows through the layer; see DraftModel.forward."""
        assert recurrent is not None, "an MTP layer needs a feature or a hidden state per row"
        rows = self._rope.rows(position_ids, attention, slot_mapping, self.dtype)
        embeds = self._embed(token_ids).masked_fill((position_ids == 0)[:, None], 0)
        x = torch.cat(
            [
                rms_norm(recurrent, self._hidden_norm, self._eps),
                rms_norm(embeds, self._token_norm, self._eps),
            ],
            dim=-1,
        )
        x, normed = self._layer.enter(linear(x, self._input_proj), None)
        x, pending = self._layer.forward(x, normed, rows, kv.k[0], kv.v[0])
        return add_and_norm(x, pending, self._final_norm, self._eps)[1]

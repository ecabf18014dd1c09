"""The layer of multi-token prediction in the checkpoint of a target: MiMo, DeepSeek-V3 or GLM-4.5.

Row p reads token p + 1 and f: the target's final hidden state (after its last norm) at p, or the
recurrent hidden state of the parent row. A projection of [norm(f); norm(embedding)], in an order
that the form says, runs through a layer of the target's kind and a final norm; the result is fed
back and read by the target's output layer.

Source: arXiv:2505.07608, arXiv:2412.19437; formats as read by SGLang's models/mimo_mtp.py and
models/deepseek_nextn.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What a family calls the layer's tensors, and what is its own in the computation.

    Args:
        token_norm, hidden_norm, projection, final_norm: Their names in the layer.
        copies: Tensors of the layer that are the target's, which are used instead.
        is_embedding_first: The projection reads the embedding before the hidden state.
        hides_first_token: The embedding of the row at position 0 is zero.
    """

    token_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    copies: tuple[str, ...]
    is_embedding_first: bool = False
    hides_first_token: bool = False


_MIMO_LAYERS = "model.mtp_layers."
_MIMO = _Form(
    token_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
    copies=("self_attn.rotary_emb.inv_freq",),
    hides_first_token=True,
)
_DEEPSEEK = _Form(
    token_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="shared_head.norm",
    copies=("embed_tokens.weight", "shared_head.head.weight", "self_attn.rotary_emb.inv_freq"),
    is_embedding_first=True,
)


class MTPDraft(Head):
    """A layer of multi-token prediction.

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
            config=replace(config, num_layers=1),
            feature_spec=feature_spec,
            embedding=embedding,
            context_len=context_len,
        )
        is_mimo = any(name.startswith(_MIMO_LAYERS) for name in reader.names)
        self._form = form = _MIMO if is_mimo else _DEEPSEEK
        prefix = f"{_MIMO_LAYERS}0" if is_mimo else f"model.layers.{config.num_layers}"
        hidden = config.hidden_size
        self._token_norm = reader.load(f"{prefix}.{form.token_norm}.weight", (hidden,))
        self._hidden_norm = reader.load(f"{prefix}.{form.hidden_norm}.weight", (hidden,))
        self._projection = reader.load_weight(
            f"{prefix}.{form.projection}.weight", (hidden, 2 * hidden)
        )
        self._layer = DecoderLayer(reader, prefix, config, config.num_layers)
        self._final_norm = reader.load(f"{prefix}.{form.final_norm}.weight", (hidden,))
        self._head = reader.products.weight(load_head(reader, config, embedding))
        self.vocab_size = config.vocab_size
        # The rest of the checkpoint is the target.
        layers = _MIMO_LAYERS if is_mimo else f"{prefix}."
        reader.finish([f"{prefix}.{name}" for name in form.copies], within=layers)

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
            return cls(reader, config, feature_spec, context_len=context_len)

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
        embeds = self._embed(token_ids)
        if self._form.hides_first_token:
            embeds = embeds.masked_fill((position_ids == 0)[:, None], 0)
        parts = [
            rms_norm(recurrent, self._hidden_norm, self._eps),
            rms_norm(embeds, self._token_norm, self._eps),
        ]
        x = torch.cat(parts[::-1] if self._form.is_embedding_first else parts, dim=-1)
        x, normed = self._layer.enter(linear(x, self._projection), None)
        x, pending = self._layer.forward(x, normed, rows, kv.layers[0])
        return add_and_norm(x, pending, self._final_norm, self._eps)[1]

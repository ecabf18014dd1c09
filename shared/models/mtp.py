"""Layers of multi-token prediction in the checkpoint of a target: MiMo, MiMo-V2, DeepSeek-V3, GLM.

Row p of the first layer reads token p + 1 and f: the target's final hidden state (after its last
norm) at p, or the recurrent hidden state of the parent row. A projection of [norm(f);
norm(embedding)], in an order that the form says, runs through a layer of the target's kind and a
final norm; the result is read by the target's output layer, and fed back.

Of several layers, layer k drafts depth k + 1. With the token of a row it reads what layer k - 1
returned for the row before, and has KV of its own; mtp_rows.py says where that lies. Past its depth
the last one is fed its own output. All layers run over committed tokens, so that their KV holds no
guesses, whatever was accepted; nodes of depth d run layers d, d + 1, ..., which nodes below them
attend to.

Source: arXiv:2505.07608, arXiv:2412.19437 (section 2.2), transformers' MtpModel; formats as read by
SGLang's models/mimo_mtp.py, models/mimo_v2_flash_nextn.py and models/deepseek_nextn.py, and vLLM's
models/mimo_v2_mtp.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shared.kernels.linear import linear
from shared.kernels.rms_norm import rms_norm
from shared.messages import FeatureSpec
from shared.models.attention import ForwardInput, LayerCaches, Rows
from shared.models.checkpoint import CheckpointReader
from shared.models.config import DraftKind, ModelConfig
from shared.models.decoder import DecoderLayer, announce_layers
from shared.models.head import Head
from shared.models.llama import load_embedding, load_head, open_language_model
from shared.models.mtp_rows import RowBlocks
from shared.models.projections import add_and_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What a family calls the layer's tensors, and what is its own in the computation.

    Args:
        layers: What the names of the layers begin with; their numbers follow, from 0 on or, of
            "model.layers.", after those of the target.
        token_norm, hidden_norm, projection, final_norm: Their names in the layer.
        copies: Tensors of the layer that are the target's, which are used instead.
        is_embedding_first: The projection reads the embedding before the hidden state.
        hides_first_token: The embedding of the row at position 0 is zero.
    """

    layers: str
    token_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    copies: tuple[str, ...]
    is_embedding_first: bool = False
    hides_first_token: bool = False


_TARGET_LAYERS = "model.layers."
_MIMO = _Form(
    layers="model.mtp_layers.",
    token_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
    copies=("self_attn.rotary_emb.inv_freq",),
    hides_first_token=True,
)
_MIMO_V2 = _Form(
    layers="model.mtp.layers.",
    token_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="final_layernorm",
    copies=("self_attn.rotary_emb.inv_freq",),
    is_embedding_first=True,
)
_DEEPSEEK = _Form(
    layers=_TARGET_LAYERS,
    token_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="shared_head.norm",
    copies=("embed_tokens.weight", "shared_head.head.*", "self_attn.rotary_emb.inv_freq"),
    is_embedding_first=True,
)


class _Layer:
    """One layer of multi-token prediction.

    Args:
        reader: Of the target's checkpoint.
        prefix: Name of the layer there.
        layer_id: Counted on from the target's layers.
        lag: Which of the layers it is.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        prefix: str,
        config: ModelConfig,
        form: _Form,
        layer_id: int,
        *,
        lag: int,
    ) -> None:
        hidden = config.hidden_size
        self.lag = lag
        self._form = form
        self._eps = config.rms_norm_eps
        self._token_norm = reader.load(f"{prefix}.{form.token_norm}.weight", (hidden,))
        self._hidden_norm = reader.load(f"{prefix}.{form.hidden_norm}.weight", (hidden,))
        self._projection = reader.load_weight(
            f"{prefix}.{form.projection}.weight", (hidden, 2 * hidden)
        )
        self._layer = DecoderLayer(reader, prefix, config, layer_id)
        self._final_norm = reader.load(f"{prefix}.{form.final_norm}.weight", (hidden,))

    def forward(
        self,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        recurrent: torch.Tensor,
        rows: Rows,
        caches: LayerCaches,
    ) -> torch.Tensor:
        """Run rows through the layer.

        Args:
            embeds: [T, h] of the rows' tokens.
            position_ids: [T] i64, of this layer.
            recurrent: [T, h].
        Returns: [T, h] after the final norm.
        Mutates: rows of `caches` named by the slot mapping.
        """
        if self._form.hides_first_token:
            embeds = embeds.masked_fill((position_ids == 0)[:, None], 0)
        parts = [
            rms_norm(recurrent, self._hidden_norm, self._eps),
            rms_norm(embeds, self._token_norm, self._eps),
        ]
        x = torch.cat(parts[::-1] if self._form.is_embedding_first else parts, dim=-1)
        x, normed = self._layer.enter(linear(x, self._projection), None)
        x, pending = self._layer.forward(x, normed, rows, caches)
        return add_and_norm(x, pending, self._final_norm, self._eps)[1]


class MTPDraft(Head):
    """The layers of multi-token prediction of a target.

    What is returned for a row is what its children read: the outputs of the layers that they
    run, but for the last one, beside each other; the first of them is what `logits` reads.

    Args:
        reader: Of the target's checkpoint, where the layers lie.
    """

    kind = DraftKind.MTP

    def __init__(
        self,
        reader: CheckpointReader,
        config: ModelConfig,
        feature_spec: FeatureSpec,
        *,
        context_len: int,
    ) -> None:
        embedding = load_embedding(reader, config)
        num_layers = config.num_mtp_layers
        own = config.mtp or replace(config, num_layers=num_layers)
        super().__init__(own, feature_spec, embedding, context_len=context_len)
        form = _form_of(reader, config)
        is_among_targets = form.layers == _TARGET_LAYERS
        first = config.num_layers if is_among_targets else 0
        prefixes = [f"{form.layers}{first + i}" for i in range(num_layers)]
        announce_layers(reader, own, prefixes, first_id=config.num_layers)
        self._layers = [
            _Layer(reader, prefix, own, form, config.num_layers + i, lag=i)
            for i, prefix in enumerate(prefixes)
        ]
        self._width = config.hidden_size
        self.hidden_size = max(num_layers - 1, 1) * self._width
        self.kv_lag = num_layers - 1
        self._head = reader.output_layer(load_head(reader, config, embedding))
        self.vocab_size = config.vocab_size
        # The rest of the checkpoint is the target.
        for prefix in [f"{one}." for one in prefixes] if is_among_targets else [form.layers]:
            reader.finish(
                [f"{one}.{name}" for one in prefixes for name in form.copies], within=prefix
            )

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
        """Load the layers, the embedding and the output layer out of a target's checkpoint.

        Raises: CheckpointError naming what is missing, left over or mis-shaped.
        """
        config = ModelConfig.from_checkpoint(directory)
        with open_language_model(directory, device, dtype, quantization) as reader:
            return cls(reader, config, feature_spec, context_len=context_len)

    def extend(
        self, inputs: ForwardInput, recurrent: torch.Tensor | None, *, carried: torch.Tensor
    ) -> torch.Tensor:
        """Run committed tokens through all layers; see DraftModel.extend."""
        assert recurrent is not None, "layers of MTP need a feature per row"
        first = self._run(self._layers[0], inputs, recurrent)
        if len(self._layers) == 1:
            return first
        blocks, outputs = RowBlocks(inputs), [first]
        before = carried[blocks.req_idx]  # [T, hidden_size]
        for layer in self._layers[1:]:
            lag = layer.lag
            # What the layer above returned for the row before: in this forward, or an earlier one.
            above = before[:, (lag - 1) * self._width : lag * self._width]
            recurrent = outputs[-1].roll(1, dims=0)
            recurrent = torch.where(blocks.is_first[:, None], above, recurrent)
            rows = blocks.chains(lag)
            output = self._run(layer, rows.inputs, recurrent[rows.source].contiguous())
            outputs.append(output[rows.place])
        return torch.cat(outputs[:-1], dim=1)

    def deepen(
        self, inputs: ForwardInput, recurrent: torch.Tensor | None, *, depth: int
    ) -> torch.Tensor:
        """Run nodes through the layers that they and the nodes below them need; see
        DraftModel.deepen.
        """
        assert recurrent is not None, "layers of MTP need a hidden row per node"
        if len(self._layers) == 1:
            return self._run(self._layers[0], inputs, recurrent)
        blocks = RowBlocks(inputs)
        first = min(depth, len(self._layers) - 1)
        parts = recurrent.split(self._width, dim=1)
        outputs = [
            self._run(layer, blocks.nodes(layer.lag), part.contiguous())
            for layer, part in zip(self._layers[first:], parts, strict=False)
        ]
        outputs += [torch.zeros_like(outputs[0])] * (len(parts) - len(outputs))
        return torch.cat(outputs, dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [R, vocab_size] f32; `hidden` needs no norm."""
        return super().logits(hidden[:, : self._width].contiguous())

    def _run(self, layer: _Layer, inputs: ForwardInput, recurrent: torch.Tensor) -> torch.Tensor:
        """Run rows, which are the layer's own, through it."""
        embeds, rows = self._embed(inputs.token_ids), self._rope.rows(inputs, self.dtype)
        caches = inputs.kv.layers[layer.lag]
        return layer.forward(embeds, inputs.position_ids, recurrent, rows, caches)


def _form_of(reader: CheckpointReader, config: ModelConfig) -> _Form:
    """Return the form of the layers in the checkpoint of a target."""
    if config.mtp is not None:
        return _MIMO_V2
    return _MIMO if any(name.startswith(_MIMO.layers) for name in reader.names) else _DEEPSEEK

"""EAGLE-3 heads (`LlamaForCausalLMEagle3`).

Row p reads token p + 1 and h: fc of the concatenated outputs of some target layers at p, or the
recurrent hidden state of the parent row. Its first layer attends from [norm(embedding); norm(h)],
the residual is h alone, and the sum before the final norm is what is fed back. Further layers are
plain decoder layers. Heads of speculators and of EAGLE-3.1 differ in norms: HeadConfig has them.

Source: arXiv:2503.01840; formats as read by SGLang's and vLLM's models/llama_eagle3.py; of several
layers as speculators trains them.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shared.errors import CheckpointError
from shared.kernels.fp8_rows import ProductRows, rows_of, wants_fp8_rows
from shared.kernels.head_input import head_input, head_input_fp8
from shared.kernels.linear import linear
from shared.kernels.rms_norm import rms_norm, rms_norm_fp8
from shared.messages import FeatureSpec
from shared.models.attention import Attention, ForwardInput
from shared.models.checkpoint import CheckpointReader
from shared.models.config import DraftKind, HeadConfig
from shared.models.decoder import DecoderLayer
from shared.models.feed_forward import MLP
from shared.models.head import (
    Head,
    read_target_embedding,
    read_target_head,
    without_model_prefix,
)
from shared.models.one_forward import OneForward
from shared.models.projections import Product, add, add_and_norm, add_and_norm_fp8

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
# t2d is d2t seen from the other side.
_FEATURE_NORM = "input_norm.weight"
_PROJECTION = ("fc.weight", "fc.bias", "fc_norm.*.weight", _FEATURE_NORM)
_KNOWN_EXTRAS = (
    "t2d",
    "midlayer.self_attn.rotary_emb.inv_freq",
    # Copies of the target's, which speculators trains with.
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)
_NAME_ALIASES = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


class FeatureProjection:
    """fc of an EAGLE-3 head, with the norms before it: what it does to a feature first.

    The target may apply it in place of the draft; in the same dtype and on the same kind of device
    the bits are the same.

    Args:
        reader: Of the head's checkpoint.
        width: Values of a feature.
    """

    def __init__(self, reader: CheckpointReader, config: HeadConfig, width: int) -> None:
        hidden = config.decoder.hidden_size
        weight = reader.load("fc.weight", (hidden, width))
        self._norm_width = 0
        self._eps = config.decoder.rms_norm_eps
        scales = _load_norms(reader, config, width)
        if scales is not None:
            # fc takes over the weights of the norms: all of them are one launch.
            self._norm_width = scales.shape[1]
            self._ones = torch.ones_like(scales[0])
            weight = (weight.float() * scales.flatten().float()).to(weight.dtype)
        self._weight = reader.products.weight(weight)
        self._bias = reader.load("fc.bias", (hidden,)) if config.has_fc_bias else None

    @classmethod
    def from_checkpoint(
        cls, directory: Path, width: int, *, device: torch.device, dtype: torch.dtype
    ) -> FeatureProjection:
        """Load fc and nothing else.

        Raises: CheckpointError if it is missing or mis-shaped.
        """
        config = HeadConfig.from_checkpoint(directory, DraftKind.EAGLE3)
        with CheckpointReader(directory, device=device, dtype=dtype, rename=_rename) as reader:
            return cls(reader, config, width)

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Return [T, h] of features [T, width]."""
        if self._norm_width:
            taps = features.unflatten(1, (-1, self._norm_width))
            features = rms_norm(taps, self._ones, self._eps).flatten(1)
        return linear(features, self._weight, self._bias)


def _load_norms(reader: CheckpointReader, config: HeadConfig, width: int) -> torch.Tensor | None:
    """Load the weights of the norms before fc, [number of norms, width of each], if there are."""
    if config.has_feature_norm:
        return reader.load(_FEATURE_NORM, (width,))[None]
    if not config.has_tap_norms:
        return None
    tap = config.target_hidden_size
    return torch.stack([reader.load(f"fc_norm.{i}.weight", (tap,)) for i in range(width // tap)])


class Eagle3Draft(OneForward, Head):
    """An EAGLE-3 head.

    Args:
        reader: Of the head's checkpoint.
        feature_spec: With a projection: features arrive projected, and fc is not loaded.
        embedding: [V, h], the head's own or the target's.
        target_head: The target's output layer when the head has none, else None.
    """

    kind = DraftKind.EAGLE3

    def __init__(
        self,
        reader: CheckpointReader,
        config: HeadConfig,
        feature_spec: FeatureSpec,
        *,
        embedding: torch.Tensor,
        target_head: torch.Tensor | None,
        context_len: int,
    ) -> None:
        decoder = config.decoder
        super().__init__(decoder, feature_spec, embedding, context_len=context_len)
        hidden = decoder.hidden_size
        self._feeds_back_norm = config.feeds_back_norm
        self._has_normed_residual = config.has_normed_residual
        self._projection = None
        if not feature_spec.projection:
            self._projection = FeatureProjection(reader, config, feature_spec.width)
        self._input_norm = reader.load("midlayer.input_layernorm.weight", (hidden,))
        self._hidden_norm = reader.load("midlayer.hidden_norm.weight", (hidden,))
        self._attention = Attention(reader, "midlayer.self_attn", decoder, 2 * hidden)
        self._post_norm = reader.load("midlayer.post_attention_layernorm.weight", (hidden,))
        self._mlp = MLP(reader, "midlayer.mlp", decoder)
        self._others = [
            DecoderLayer(reader, f"layers.{i}", decoder, i) for i in range(1, decoder.num_layers)
        ]
        self._norm = reader.load("norm.weight", (hidden,))
        if target_head is None:
            size = config.draft_vocab_size or decoder.vocab_size
            is_fp8 = reader.are_fp8([_HEAD])
            load = reader.load_quantized if is_fp8 else reader.load
            own_head = load(_HEAD, (size, hidden))
        self._head = reader.output_layer(own_head if target_head is None else target_head)
        self.vocab_size = self._head.shape[0]
        self._target_ids = self._load_target_ids(reader, decoder.vocab_size)

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
    ) -> Eagle3Draft:
        """Load a head; embedding and output layer come from the target where it has none.

        Raises: CheckpointError naming what is missing, left over or mis-shaped.
        """
        config = HeadConfig.from_checkpoint(directory, DraftKind.EAGLE3)
        hidden = config.decoder.hidden_size
        with CheckpointReader(
            directory, device=device, dtype=dtype, rename=_rename, quantization=quantization
        ) as reader:
            if _EMBEDDING in reader.names:
                embedding = reader.load(_EMBEDDING, (config.decoder.vocab_size, hidden))
            else:
                embedding = read_target_embedding(target_dir, device, dtype)
                _require_width(directory, _EMBEDDING, embedding, hidden)
            target_head = None
            if _HEAD not in reader.names and not config.draft_vocab_size:
                target_head = read_target_head(target_dir, device, dtype)
                _require_width(directory, _HEAD, target_head, hidden)
            draft = cls(
                reader,
                config,
                feature_spec,
                embedding=embedding,
                target_head=target_head,
                context_len=context_len,
            )
            reader.finish([*_KNOWN_EXTRAS, *(_PROJECTION if feature_spec.projection else ())])
        return draft

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        """Return [T, h] = fc of the captured layers, unless the target has applied it."""
        features = self._cast(features)
        return features if self._projection is None else self._projection(features)

    def forward(self, inputs: ForwardInput, recurrent: torch.Tensor | None) -> torch.Tensor:
        """Run rows through the layers; see OneForward.forward."""
        assert recurrent is not None, "an EAGLE-3 head needs a feature or a hidden state per row"
        rows = self._rope.rows(inputs, self.dtype)
        norms = (self._input_norm, self._hidden_norm)
        enter = head_input_fp8 if self._attention.reads_fp8_rows else head_input
        x = enter(inputs.token_ids, self._embedding, recurrent, norms, self._eps)
        attended = self._attention.forward(x, rows, inputs.kv.layers[0])
        if self._has_normed_residual:
            recurrent = rows_of(x)[:, self.hidden_size :].contiguous()
        norm = add_and_norm_fp8 if self._mlp.reads_fp8_rows else add_and_norm
        hidden, normed = norm(recurrent, attended, self._post_norm, self._eps)
        pending: Product | None = self._mlp.forward(normed)
        for layer, caches in zip(self._others, inputs.kv.layers[1:], strict=True):
            hidden, normed = layer.enter(hidden, pending)
            hidden, pending = layer.forward(hidden, normed, rows, caches)
        if self._feeds_back_norm:
            return add_and_norm(hidden, pending, self._norm, self._eps)[1]
        return add(hidden, pending)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [R, vocab_size] f32 over draft ids."""
        return linear(self.normed(hidden), self._head, out_dtype=torch.float32)

    def normed(self, hidden: torch.Tensor) -> ProductRows:
        """Return what the output layer reads, [R, h]."""
        if self._feeds_back_norm:
            return hidden
        norm = rms_norm_fp8 if wants_fp8_rows(self._head) else rms_norm
        return norm(hidden, self._norm, self._eps)

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Map draft ids to target ids by d2t."""
        return self._target_ids[draft_ids.long()]

    def _load_target_ids(self, reader: CheckpointReader, target_vocab_size: int) -> torch.Tensor:
        # d2t holds offsets: target id = draft id + d2t[draft id].
        ids = torch.arange(self.vocab_size, device=self.device)
        if "d2t" not in reader.names and self.vocab_size == target_vocab_size:
            return ids
        ids = ids + reader.load_int64("d2t", (self.vocab_size,))
        is_inside = bool((ids >= 0).all()) and bool((ids < target_vocab_size).all())
        if not is_inside or len(ids.unique()) != len(ids):
            raise CheckpointError(
                f"{reader.directory}: tensor 'd2t' must map draft ids to distinct target ids "
                f"below {target_vocab_size}"
            )
        return ids


def _rename(name: str) -> str:
    name = without_model_prefix(name)
    for alias, usual in _NAME_ALIASES.items():
        if name.startswith(alias):
            return usual + name.removeprefix(alias)
    return name


def _require_width(directory: Path, name: str, tensor: torch.Tensor, hidden: int) -> None:
    if tensor.shape[1] != hidden:
        raise CheckpointError(
            f"{directory}: missing tensor {name!r}; the target's is {tensor.shape[1]} wide and "
            f"cannot stand in for one of {hidden}"
        )

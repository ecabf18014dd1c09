"""Causal language models: those of families.py, which are Llama with switches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shared.errors import CheckpointError
from shared.kernels.embedding import embed
from shared.kernels.linear import linear
from shared.kernels.quantized import QuantizedWeight
from shared.kernels.softcap import softcap_
from shared.models.attention import ForwardInput
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.decoder import DecoderLayer, announce_layers
from shared.models.layer_rows import LayerRows
from shared.models.own_slots import own_slots
from shared.models.per_layer_inputs import PER_LAYER_WEIGHTS, PerLayerInputs
from shared.models.projections import Product, add_and_norm, load_norm

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# In some checkpoints, and never needed: the tables that rope.py computes, and the layers of
# multi-token prediction, which belong to the draft; of ERNIE's and K-EXAONE's there is none.
_KNOWN_EXTRAS = (
    "model.layers.*.self_attn.rotary_emb.inv_freq",
    "model.rotary_emb.inv_freq",
    "mtp.*",
    *(f"model.mtp_{name}.*" for name in ("block", "emb_norm", "hidden_norm", "linear_proj")),
)
_VISION_EXTRAS = tuple(
    f"{prefix}{name}.*"
    for prefix in ("", "model.")
    for name in (
        *("vision_tower", "multi_modal_projector", "mm_projector", "visual"),
        *("embed_vision", "audio_tower", "embed_audio", "vision_embedder"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """What one forward computed.

    Args:
        hidden: [T, h] after the final norm.
        captured: [T, len(capture_layers) * h] outputs of the layers asked for, concatenated in the
            order asked for; None when none were.
        stored: [T, any] K and V of the layers asked for, likewise.
    """

    hidden: torch.Tensor
    captured: torch.Tensor | None
    stored: torch.Tensor | None = None


class CausalLM:
    """A language model on one device.

    Args:
        context_len: Longest sequence, tokens; None = max_position_embeddings.

    Attributes:
        products: How its weights and its attention are multiplied on a CPU.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        config: ModelConfig,
        *,
        context_len: int | None = None,
    ) -> None:
        self.config = config
        self._embedding = load_embedding(reader, config)
        prefixes = [f"model.layers.{i}" for i in range(config.num_layers)]
        announce_layers(reader, config, prefixes, then=PER_LAYER_WEIGHTS)
        self._layers = [
            DecoderLayer(reader, prefix, config, i) for i, prefix in enumerate(prefixes)
        ]
        self._cache_of_layer = config.cache_of_layer
        self._per_layer = None
        if config.per_layer is not None:
            self._per_layer = PerLayerInputs(reader, config, config.per_layer)
        self._norm = load_norm(reader, "model.norm.weight", config.hidden_size, config.norm_rule)
        self._head = reader.output_layer(load_head(reader, config, self._embedding))
        self.products = reader.products
        self.device = self._embedding.device
        self.dtype = self._embedding.dtype
        self._embedding_multiplier = embedding_multiplier(config, self.dtype)
        self._rows = LayerRows(config, context_len or config.max_position_embeddings, self.device)

    @classmethod
    def from_checkpoint(
        cls,
        directory: Path,
        device: torch.device,
        dtype: torch.dtype,
        *,
        context_len: int | None = None,
        quantization: str = "",
    ) -> CausalLM:
        """Load a checkpoint, every tensor accounted for.

        Args:
            quantization: See CheckpointReader.
        Raises: CheckpointError naming what is missing, left over, mis-shaped or unsupported.
        """
        config = ModelConfig.from_checkpoint(directory)
        with open_language_model(directory, device, dtype, quantization) as reader:
            model = cls(reader, config, context_len=context_len)
            mtp = _mtp_extras(config)
            vision = _VISION_EXTRAS if config.has_vision else ()
            reader.finish([*_KNOWN_EXTRAS, *mtp, *vision, *_unread_kv(config)])
        return model

    def forward(
        self,
        inputs: ForwardInput,
        *,
        capture_layers: tuple[int, ...] = (),
        capture_kv: tuple[int, ...] = (),
        roots: torch.Tensor | None = None,
        root_idx: torch.Tensor | None = None,
        expert_ids: torch.Tensor | None = None,
    ) -> ForwardOutput:
        """Run rows of new tokens through all layers.

        Args:
            capture_layers: Layers whose OUTPUT (residual stream) is wanted.
            capture_kv: Layers whose K and V are wanted, as the caches hold them.
            roots: [num_reqs] i64, tokens that only the device knows; None: there are none.
            root_idx: [T] i64, which of the roots each row's token is; -1: it is in `inputs`.
            expert_ids: [layers with experts, at least T, top_k] i32, where the rows' experts are
                left; None: nowhere.
        Returns: ForwardOutput.
        Mutates: `inputs.kv`, the rows' slots; the first T rows of each layer's `expert_ids`.
        """
        rows = self._rows.rows(inputs, self.dtype)
        if expert_ids is not None:
            expert_ids = expert_ids[:, : len(inputs.token_ids)]
            rows = [replace(one, expert_ids=expert_ids) for one in rows]
        multiplier = self._embedding_multiplier
        x = embed(inputs.token_ids, self._embedding, roots, root_idx, multiplier=multiplier)
        if self._per_layer is not None:
            own = self._per_layer.forward(x, inputs.token_ids, roots, root_idx)
            rows = [replace(one, per_layer_inputs=own) for one in rows]
        pending: Product | None = None
        captured = {}
        for layer_id, layer in enumerate(self._layers):
            x, normed = layer.enter(x, pending)
            if layer_id - 1 in capture_layers:
                captured[layer_id - 1] = x
            caches = inputs.kv.layers[self._cache_of_layer[layer_id]]
            x, pending = layer.forward(x, normed, rows[layer_id], caches)
        eps, is_centered = self.config.rms_norm_eps, self.config.norm_rule.is_centered
        x, hidden = add_and_norm(x, pending, self._norm, eps, is_centered=is_centered)
        captured[len(self._layers) - 1] = x
        return ForwardOutput(
            hidden=hidden,
            captured=torch.cat([captured[i] for i in capture_layers], dim=-1)
            if capture_layers
            else None,
            stored=self._stored(inputs, capture_kv) if capture_kv else None,
        )

    def _stored(self, inputs: ForwardInput, layer_ids: tuple[int, ...]) -> torch.Tensor:
        """Return the rows' K and V of layers, of each layer first K."""
        slots, caches = own_slots(inputs.attention), inputs.kv.layers
        stored = [
            self._layers[i].stored_kv(slots, caches[self._cache_of_layer[i]], self.dtype)
            for i in layer_ids
        ]
        return torch.cat(stored, dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows.

        Args:
            hidden: [R, h] after the final norm.
        Returns: [R, V] f32.
        """
        logits = linear(hidden, self._head, out_dtype=torch.float32)
        if self.config.logits_scaling != 1:
            logits = logits / self.config.logits_scaling
        limit = self.config.logits_softcap
        return logits if limit == 0 else softcap_(logits, limit)


def embedding_multiplier(config: ModelConfig, dtype: torch.dtype) -> float:
    """Return what a language model multiplies its embeddings by."""
    if not config.has_scaled_embedding:
        return config.embedding_multiplier
    return float(torch.tensor(config.hidden_size**0.5, dtype=dtype))  # rounded as the model is


def _mtp_extras(config: ModelConfig) -> list[str]:
    """Return patterns of the tensors of layers of multi-token prediction, under any name."""
    first, count = config.num_layers, config.num_mtp_layers
    layers = [f"model.layers.{i}.*" for i in range(first, first + count)]
    return ["model.mtp_layers.*", "model.mtp.layers.*", *layers] if count else []


def _unread_kv(config: ModelConfig) -> list[str]:
    """Return patterns of tensors of K and V that layers without them have in some files."""
    layers = range(config.num_layers)
    shared = [layer_id for layer_id in layers if config.kv_layer(layer_id) != layer_id]
    return [f"model.layers.{layer_id}.self_attn.[kv]_*" for layer_id in shared]


def open_language_model(
    directory: Path, device: torch.device, dtype: torch.dtype, quantization: str = ""
) -> CheckpointReader:
    """Open the checkpoint of a language model, or of one within a model that sees, too."""
    return CheckpointReader(
        directory, device=device, dtype=dtype, rename=_language_name, quantization=quantization
    )


def _language_name(name: str) -> str:
    """Return a tensor's name without what says that it belongs to the language model."""
    for old, new in (("language_model.", ""), ("model.language_model.", "model.")):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def load_embedding(reader: CheckpointReader, config: ModelConfig) -> torch.Tensor:
    """Load a language model's embedding. [V, h]."""
    return reader.load(EMBEDDING, (config.vocab_size, config.hidden_size))


def load_head(
    reader: CheckpointReader, config: ModelConfig, embedding: torch.Tensor | None = None
) -> torch.Tensor | QuantizedWeight:
    """Load a language model's output layer, which may be its embedding, or in FP8. [V, h].

    Args:
        embedding: The loaded embedding, shared when the two are tied.
    Raises: CheckpointError naming an output layer that contradicts `tie_word_embeddings`.
    """
    shape, is_fp8 = (config.vocab_size, config.hidden_size), reader.are_fp8([HEAD])
    if not config.is_tied:
        if is_fp8:
            return reader.load_quantized(HEAD, shape)
        return reader.load(HEAD, shape)
    if embedding is None:
        embedding = load_embedding(reader, config)
    # Some exporters write a tied head all the same; it must then be the very same.
    has_head = HEAD in reader.names
    if has_head and (is_fp8 or not torch.equal(reader.load(HEAD, shape), embedding)):
        raise CheckpointError(
            f"{reader.directory}: tie_word_embeddings is true, but {HEAD!r} is not {EMBEDDING!r}"
        )
    return embedding

"""Every draft kind as one function of a sequence of rows: no cache, no tree, no pages.

A head's row is (token p + 1, vector) at position p. The vector is the target's feature at p, or the
hidden state that the draft computed for the row before it. A standalone row is the token at p.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tests.reference.causal_lm import (
    DenseOutput,
    ReferenceLM,
    attend,
    decoder_layer,
    mlp,
    project,
    read_config,
    read_weights,
    rms_norm,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a draft.

    Args:
        recurrent: [h] the projected feature, or the hidden state fed back; None for standalone.
    """

    token_id: int
    position: int
    recurrent: torch.Tensor | None


class ReferenceDraft(Protocol):
    """A draft as a pure function of rows."""

    def true_rows(self, token_ids: list[int], target: DenseOutput) -> list[Row]:
        """Return a row per committed token.

        Args:
            token_ids: Prompt and output, the root (newest token) last.
            target: Of at least all tokens before the root.
        """
        ...

    def hidden(self, rows: list[Row]) -> torch.Tensor:
        """Return [h] of the last row: what is fed back to a row that follows it."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [V] over TARGET ids, -inf for those that the draft cannot say."""
        ...


class _Head:
    """What reads features."""

    def __init__(self, directory: Path, target: ReferenceLM, window: int) -> None:
        self.config = read_config(directory)
        self.weights = {
            name.removeprefix("model."): tensor for name, tensor in read_weights(directory).items()
        }
        self.target = target
        self.window = window

    def features(self, target: DenseOutput) -> torch.Tensor:
        """Return [T, width]; the output of the target's final norm unless a kind says otherwise."""
        return target.final

    def project(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def true_rows(self, token_ids: list[int], target: DenseOutput) -> list[Row]:
        vectors = self.project(self.features(target))
        return [
            Row(token_id=token_ids[p + 1], position=p, recurrent=vectors[p])
            for p in range(len(token_ids) - 1)
        ]

    def unpack(self, rows: list[Row]) -> tuple[list[int], list[int], torch.Tensor]:
        vectors = [row.recurrent for row in rows if row.recurrent is not None]
        return [row.token_id for row in rows], [row.position for row in rows], torch.stack(vectors)


class ReferenceEagle3(_Head):
    """EAGLE-3: arXiv:2503.01840, `LlamaForCausalLMEagle3`."""

    def __init__(self, directory: Path, target: ReferenceLM, window: int = 0) -> None:
        super().__init__(directory, target, window)
        self.weights = {
            name.replace("layers.0.", "midlayer."): t for name, t in self.weights.items()
        }
        # What is absent in speculators' files means true (vLLM), in all others false.
        layer = self.config.get("transformer_layer_config")
        self.norms_residual = self.config.get("norm_before_residual", layer is not None)
        self.config |= layer or {}

    def features(self, target: DenseOutput) -> torch.Tensor:
        n = len(target.layers)
        eagle_config = self.config.get("eagle_config") or {}
        # By default the inputs of layers 2, n // 2 and n - 3, that is outputs of those before.
        ids = eagle_config.get("eagle_aux_hidden_state_layer_ids", [1, n // 2 - 1, n - 4])
        if "eagle_aux_hidden_state_layer_ids" in self.config:
            ids = [i - 1 for i in self.config["eagle_aux_hidden_state_layer_ids"]]
        return torch.cat([target.layers[i] for i in ids], dim=-1)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        w = self.weights
        if "input_norm.weight" in w:
            features = rms_norm(features, w["input_norm.weight"], self.config)
        names = [name for name in w if name.startswith(("fc_norm.", "aux_norm_"))]
        order = ("fc_norm.0", "fc_norm.1", "fc_norm.2", "low", "mid", "high")
        norms = [w[name] for part in order for name in names if part in name]
        if norms:
            taps = features.chunk(len(norms), dim=-1)
            pairs = zip(taps, norms, strict=True)
            features = torch.cat([rms_norm(tap, norm, self.config) for tap, norm in pairs], dim=-1)
        return project(w, "fc", features)

    def hidden(self, rows: list[Row]) -> torch.Tensor:
        tokens, positions, vectors = self.unpack(rows)
        w, config = self.weights, self.config
        embedding = w.get("embed_tokens.weight", self.target.embedding)
        x = torch.cat(
            [
                rms_norm(embedding[tokens], w["midlayer.input_layernorm.weight"], config),
                rms_norm(vectors, w["midlayer.hidden_norm.weight"], config),
            ],
            dim=-1,
        )
        residual = x[:, vectors.shape[1] :] if self.norms_residual else vectors
        x = residual + attend(w, "midlayer.self_attn", x, config, positions, self.window)
        normed = rms_norm(x, w["midlayer.post_attention_layernorm.weight"], config)
        x = x + mlp(w, "midlayer.mlp", normed)
        for i in range(1, config["num_hidden_layers"]):
            x = decoder_layer(w, f"layers.{i}", x, config, positions=positions, window=self.window)
        if config.get("norm_output"):
            x = rms_norm(x, w["norm.weight"], config)
        return x[-1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.config.get("norm_output"):
            hidden = rms_norm(hidden, self.weights["norm.weight"], self.config)
        small = self.weights.get("lm_head.weight", self.target.head) @ hidden
        if "d2t" not in self.weights:
            return small
        full = torch.full((self.config["vocab_size"],), float("-inf"))
        for draft_id, offset in enumerate(self.weights["d2t"].tolist()):
            full[draft_id + offset] = small[draft_id]
        return full


class ReferenceEagle(_Head):
    """EAGLE-1/2: arXiv:2401.15077, `LlamaForCausalLMEagle`."""

    def __init__(self, directory: Path, target: ReferenceLM, window: int = 0) -> None:
        super().__init__(directory, target, window)

    def hidden(self, rows: list[Row]) -> torch.Tensor:
        tokens, positions, vectors = self.unpack(rows)
        x = torch.cat([self.target.embedding[tokens], vectors], dim=-1)
        x = project(self.weights, "fc", x)
        for i in range(self.config["num_hidden_layers"]):
            x = decoder_layer(
                self.weights, f"layers.{i}", x, self.config,
                positions=positions, window=self.window,
            )  # fmt: skip
        return x[-1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.head @ hidden


class ReferenceMTP(_Head):
    """MiMo's multi-token prediction: arXiv:2505.07608, `model.mtp_layers.0`."""

    def __init__(self, target: ReferenceLM, window: int = 0) -> None:
        self.config = target.config
        self.weights = target.weights
        self.target = target
        self.window = window

    def hidden(self, rows: list[Row]) -> torch.Tensor:
        return self.layer(0, *self.unpack(rows))[-1]

    def layer(
        self, index: int, tokens: list[int], positions: list[int], vectors: torch.Tensor
    ) -> torch.Tensor:
        """Run all rows through one of the layers. [T, h]"""
        w, prefix, config = self.weights, f"model.mtp_layers.{index}", self.config
        embeds = self.target.embedding[tokens].clone()
        for i, position in enumerate(positions):
            if position == 0:
                embeds[i] = 0
        x = torch.cat(
            [
                rms_norm(vectors, w[f"{prefix}.hidden_layernorm.weight"], config),
                rms_norm(embeds, w[f"{prefix}.token_layernorm.weight"], config),
            ],
            dim=-1,
        )
        x = project(w, f"{prefix}.input_proj", x)
        x = decoder_layer(w, prefix, x, config, positions=positions, window=self.window)
        return rms_norm(x, w[f"{prefix}.final_layernorm.weight"], config)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.head @ hidden


class ReferenceStandalone:
    """A small language model."""

    def __init__(self, directory: Path) -> None:
        self.model = ReferenceLM(directory)

    def true_rows(self, token_ids: list[int], target: DenseOutput) -> list[Row]:
        return [Row(token_id=t, position=p, recurrent=None) for p, t in enumerate(token_ids)]

    def hidden(self, rows: list[Row]) -> torch.Tensor:
        return self.model.forward([row.token_id for row in rows]).final[-1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.head @ hidden

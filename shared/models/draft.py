"""The interface behind which every kind of draft stands, and how one is loaded.

A head (EAGLE-3, EAGLE, MTP of either kind) reads a token and a vector per row: row p takes token
p + 1 and the feature of position p, or, past the last true feature, the recurrent hidden state of
its parent row.
A standalone model reads the token at p and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from shared.errors import ConfigError
from shared.kv.layout import KVLayout
from shared.messages import FeatureSpec
from shared.models.attention import ForwardInput
from shared.models.config import DraftKind, ModelConfig, feature_spec
from shared.models.eagle import EagleDraft
from shared.models.eagle3 import Eagle3Draft
from shared.models.frozen_kv import FrozenKVDraft
from shared.models.mtp import MTPDraft
from shared.models.standalone import StandaloneDraft
from shared.models.token_map import read_token_map


class DraftModel(Protocol):
    """A draft on one device.

    Attributes:
        input_shift: 1: row p takes token p + 1 and feature p; 0: row p takes token p (standalone).
        feature_spec: What it reads of the target; its dtype is the target's choice, left "".
        recurrent_width: Values per row of a projected feature; 0 = nothing recurrent is taken.
        hidden_size: Values per row of what `extend` and `deepen` return.
        vocab_size: Draft ids, columns of `logits`.
        kv_layout: Of its KV pool.
        kv_lag: Rows by which the KV of its last layer is behind that of its first, see mtp_rows.py.
        max_position: Most tokens that a row should attend to: max_position_embeddings, or a sliding
            window that is shorter.
    """

    @property
    def kind(self) -> DraftKind: ...
    @property
    def input_shift(self) -> int: ...
    @property
    def feature_spec(self) -> FeatureSpec: ...
    @property
    def recurrent_width(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def kv_layout(self) -> KVLayout: ...
    @property
    def kv_lag(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        """Turn the target's features into what `extend` takes as `recurrent`.

        Args:
            features: [T, feature_spec.width], any dtype and device; converted here.
        Returns: [T, recurrent_width] in the draft's dtype.
        """
        ...

    def extend(
        self, inputs: ForwardInput, recurrent: torch.Tensor | None, *, carried: torch.Tensor
    ) -> torch.Tensor:
        """Run committed tokens through the draft, a chain of each request.

        Args:
            inputs: Of TARGET ids: token p + input_shift for the row at position p.
            recurrent: [T, recurrent_width] projected features; None when recurrent_width is 0.
            carried: [any, hidden_size] by req_idx, what was returned for the row before each
                request's first one here. Only drafts with kv_lag read it.
        Returns: [T, hidden_size], which `logits` reads and, as `recurrent`, `deepen`.
        Mutates: `inputs.kv`, the rows' slots.
        """
        ...

    def deepen(
        self, inputs: ForwardInput, recurrent: torch.Tensor | None, *, depth: int
    ) -> torch.Tensor:
        """Run nodes of trees, all of one depth, through the draft; as `extend`, but for:

        Args:
            recurrent: [T, hidden_size], what was returned for the parents; None when
                recurrent_width is 0.
            depth: Of the nodes; 1 for the children of roots.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [R, vocab_size] f32 over draft ids, the last norm included."""
        ...

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Map draft ids to target ids, same shape, i64."""
        ...


def load_draft(
    algorithm: str,
    draft_dir: Path,
    target_dir: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    context_len: int | None = None,
    is_projected: bool = False,
    quantization: str = "",
    token_map: Path | None = None,
) -> DraftModel:
    """Load a draft, every tensor of its checkpoint accounted for.

    Args:
        algorithm: "auto" or a DraftKind.
        target_dir: The target's checkpoint: what a head lacks (embedding, output layer) is read
            from there, and nothing else.
        context_len: Longest sequence, tokens; None = the target's max_position_embeddings, which
            may exceed the draft's: past its own it attends to a sliding window.
        is_projected: As in `feature_spec`.
        quantization: See `draft_quantization_while_loading`.
        token_map: File of the ids that an EAGLE-1/2 head may propose; None: all.
    Raises: CheckpointError naming what is missing, left over, mis-shaped or does not fit;
        ConfigError if the token map does not.
    """
    kind, spec = feature_spec(draft_dir, target_dir, algorithm, is_projected=is_projected)
    target = ModelConfig.from_checkpoint(target_dir)
    if context_len is None:
        context_len = target.max_position_embeddings
    if token_map is not None and kind is not DraftKind.EAGLE:
        raise ConfigError(
            f"--draft-token-map restricts EAGLE-1/2 heads, and the draft is {kind}: leave it out "
            "(an EAGLE-3 head has its own, d2t)"
        )
    place: dict[str, Any] = {"device": device, "dtype": dtype, "context_len": context_len}
    place["quantization"] = quantization
    match kind:
        case DraftKind.EAGLE3:
            return Eagle3Draft.from_checkpoint(draft_dir, target_dir, spec, **place)
        case DraftKind.EAGLE:
            ids = None if token_map is None else read_token_map(token_map, target.vocab_size)
            return EagleDraft.from_checkpoint(draft_dir, target_dir, spec, token_map=ids, **place)
        case DraftKind.MTP:
            return MTPDraft.from_checkpoint(draft_dir, spec, **place)
        case DraftKind.FROZEN_KV_MTP:
            return FrozenKVDraft.from_checkpoint(draft_dir, target_dir, spec, **place)
        case DraftKind.STANDALONE:
            return StandaloneDraft.from_checkpoint(draft_dir, target_dir, **place)

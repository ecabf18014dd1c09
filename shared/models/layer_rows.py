"""What each layer of a model knows about the rows of a forward, where layers differ in it.

Layers that agree share one object: its angles are gathered, and its attention is planned, once per
forward. A model whose layers all agree has one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import torch

from shared.kernels.tree_attention import TreeAttentionMetadata
from shared.messages import MAX_TREE_NODES
from shared.models.attention import ForwardInput, RopeTable, Rows, prepare_attention
from shared.models.config import ModelConfig


class _Rope(enum.Enum):
    MAIN = enum.auto()
    LOCAL = enum.auto()
    NONE = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What layers may differ in.

    Args:
        window: Tokens that a row sees, beside the limit of its forward; 0 = all.
        rope: Its rotary embedding.
        num_heads, num_kv_heads, head_dim: Of its heads.
    """

    window: int
    rope: _Rope
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def table(self) -> tuple[_Rope, int]:
        """Return which table its angles are of: what is not rotated reads any of that width."""
        return _Rope.MAIN if self.rope is _Rope.NONE else self.rope, self.head_dim


class LayerRows:
    """The rows of a forward, layer by layer.

    Args:
        context_len: Longest sequence, tokens.
    """

    def __init__(self, config: ModelConfig, context_len: int, device: torch.device) -> None:
        # No row gets as far as a wider one.
        widest = context_len + MAX_TREE_NODES
        windows = config.layer_windows or (0,) * config.num_layers
        views = [
            _View(
                window=window if window < widest else 0,
                rope=_rope_of(config, layer, window),
                num_heads=own.num_heads,
                num_kv_heads=own.num_kv_heads,
                head_dim=own.head_dim,
            )
            for layer, window in enumerate(windows)
            for own in [config.at_layer(layer)]
        ]
        self._views = list(dict.fromkeys(views))
        self._view_of_layer = [self._views.index(view) for view in views]
        self._configs: dict[_View, ModelConfig] = {}
        self._tables: dict[tuple[_Rope, int], RopeTable] = {}
        for view in self._views:
            own = replace(
                config,
                num_heads=view.num_heads,
                num_kv_heads=view.num_kv_heads,
                head_dim=view.head_dim,
            )
            if view.rope is _Rope.LOCAL and config.local_rope is not None:
                own = replace(own, rope=config.local_rope)
            self._configs[view] = own
            if view.table not in self._tables:
                self._tables[view.table] = RopeTable(own, context_len, device)

    def rows(self, inputs: ForwardInput, dtype: torch.dtype) -> list[Rows]:
        """Gather the rows' angles, and cut their attention; a layer's window may hide more.

        Args:
            dtype: Of queries, keys and values.
        Returns: One for each layer.
        """
        attention = inputs.attention
        seen: dict[tuple[int, int, int], TreeAttentionMetadata] = {}
        rows: list[Rows] = []
        angles = {name: table.angles(inputs.position_ids) for name, table in self._tables.items()}
        for view in self._views:
            window = _narrower(view.window, attention.window)
            sight = (window, view.num_heads, view.num_kv_heads)
            if sight not in seen:
                is_same = window == attention.window
                narrowed = attention if is_same else replace(attention, window=window)
                seen[sight] = prepare_attention(self._configs[view], narrowed, dtype)
            cos, sin = angles[view.table]
            turned = Rows(
                cos=cos,
                sin=sin,
                attention=seen[sight],
                slot_mapping=inputs.slot_mapping,
                query_scale=self._tables[view.table].query_scale(inputs.position_ids, dtype),
            )
            rows.append(turned.unrotated() if view.rope is _Rope.NONE else turned)
        return [rows[view] for view in self._view_of_layer]


def _rope_of(config: ModelConfig, layer: int, window: int) -> _Rope:
    if layer in config.unrotated_layers:
        return _Rope.NONE
    return _Rope.LOCAL if window and config.local_rope is not None else _Rope.MAIN


def _narrower(window: int, other: int) -> int:
    """Return the smaller of two windows, of which 0 has no end."""
    return min(window, other) if window and other else window or other

"""What config.json of MiMo-V2 says in its own way: layers with a window that differ in their heads.

Published files list windows and experts as 0 or 1 of each layer, and have fields of layers with a
window, `swa_...`; transformers writes the names that all families have. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shared.errors import CheckpointError
from shared.models.config_fields import require_int
from shared.models.families import LayerNorms
from shared.models.layer_heads import LayerHeads, checked_heads

if TYPE_CHECKING:
    from shared.models.decoder_config import ModelConfig

# Of the class in transformers, where nothing says which layers have a window.
_PERIOD = 6
_NEXT_TOKEN_NORMS = LayerNorms(before_mlp="pre_mlp_layernorm")


def with_usual_names(fields: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the fields of a config.json with what it says of layers in the names of all families.

    Args:
        source: File to name in errors.
    Raises: CheckpointError naming the field.
    """
    num_layers = require_int(fields, "num_hidden_layers", source)
    said: dict[str, Any] = {
        "layer_types": _kinds(
            fields, source, "hybrid_layer_pattern", ("full_attention", "sliding_attention")
        )
        or [
            "sliding_attention" if layer and (layer + 1) % _PERIOD else "full_attention"
            for layer in range(num_layers)
        ],
        "mlp_layer_types": _kinds(fields, source, "moe_layer_freq", ("dense", "sparse")),
    }
    said |= {name: value for name, value in fields.items() if value is not None or name not in said}
    if fields.get("sliding_window_size") is not None:  # tokens before the row's own
        said["sliding_window"] = require_int(fields, "sliding_window_size", source) + 1
    return said


def _kinds(
    fields: Mapping[str, Any], source: str, name: str, kinds: tuple[str, str]
) -> list[str] | None:
    """Return a field of 0 or 1 for each layer in words; None: there is none."""
    value = fields.get(name)
    if value is None:
        return None
    num_layers = fields["num_hidden_layers"]
    is_list = isinstance(value, list) and len(value) == num_layers
    if not is_list or any(type(one) is not int or one not in (0, 1) for one in value):
        raise CheckpointError(
            f"{source}: {name} must hold 0 ({kinds[0]}) or 1 ({kinds[1]}) for each of "
            f"{num_layers} layers, got {value!r}"
        )
    return [kinds[one] for one in value]


def parse_window_heads(
    fields: Mapping[str, Any], source: str, windows: Sequence[int], usual: LayerHeads
) -> tuple[LayerHeads, LayerHeads]:
    """Return the heads of layers without a window, and of those with one.

    Args:
        source: File to name in errors.
        windows: How many tokens each layer sees; 0 = all.
        usual: Heads of Q and K by the fields that all families have.
    Raises: CheckpointError naming the field.
    """
    if not any(windows):
        raise CheckpointError(
            f"{source}: hybrid_layer_pattern, or layer_types, must name a layer with a window: "
            "those of multi-token prediction are such layers"
        )
    v_head_dim = require_int(fields, "v_head_dim", source, default=usual.head_dim)
    full = replace(
        usual,
        v_head_dim=v_head_dim,
        has_sinks=bool(fields.get("add_full_attention_sink_bias")),
    )

    def number(name: str, default: int) -> int:
        return require_int(fields, name, source, default=default)

    windowed = LayerHeads(
        num_heads=number("swa_num_attention_heads", usual.num_heads),
        num_kv_heads=number("swa_num_key_value_heads", 2 * usual.num_kv_heads),
        head_dim=number("swa_head_dim", usual.head_dim),
        v_head_dim=number("swa_v_head_dim", v_head_dim),
        has_sinks=bool(fields.get("add_swa_attention_sink_bias", True)),
    )
    return (
        checked_heads(full, f"{source}: a layer without a window"),
        checked_heads(windowed, f"{source}: a layer with a window (swa_...)"),
    )


def next_token_layers(
    config: ModelConfig, heads: LayerHeads, windows: Sequence[int]
) -> ModelConfig | None:
    """Return the layers of multi-token prediction as a decoder of their own; None: there are none.

    Each has a window, its heads and its rotary embedding, and an MLP.

    Args:
        config: Of the target.
        heads: Of layers with a window.
        windows: How many tokens each layer of the target sees; 0 = all.
    """
    if not config.num_mtp_layers:
        return None
    return replace(
        config.with_heads(heads),
        num_layers=config.num_mtp_layers,
        rope=config.local_rope or config.rope,
        local_rope=None,
        sliding_window=max(windows),
        layer_windows=(),
        layer_norms=_NEXT_TOKEN_NORMS,
        experts=None,
    )

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
from shared.models.family import LayerNorms
from shared.models.layer_heads import LayerHeads, checked_heads

if TYPE_CHECKING:
    from shared.models.decoder_config import ModelConfig

_NEXT_TOKEN_NORMS = LayerNorms(before_mlp="pre_mlp_layernorm")


def with_usual_names(fields: Mapping[str, Any], source: str, period: int) -> dict[str, Any]:
    """Return the fields of a config.json with what it says of layers in the names of all families.

    Args:
        source: File to name in errors.
        period: Where nothing says which layers have no window: the first, and each of so many.
    Raises: CheckpointError naming the field.
    """
    num_layers = require_int(fields, "num_hidden_layers", source)
    said: dict[str, Any] = {
        "layer_types": _kinds(
            fields, source, "hybrid_layer_pattern", ("full_attention", "sliding_attention")
        )
        or [
            "sliding_attention" if layer and (layer + 1) % period else "full_attention"
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


def with_window_heads(
    config: ModelConfig,
    fields: Mapping[str, Any],
    source: str,
    windows: Sequence[int],
    usual: LayerHeads,
) -> ModelConfig:
    """Return a config whose layers have the heads of their kind, those of multi-token prediction
    the heads of layers with a window.

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
    full, windowed = _parse_heads(fields, source, usual)
    return replace(
        config,
        layer_heads=tuple(windowed if window else full for window in windows),
        mtp=_next_token_layers(config, windowed, max(windows)) if config.num_mtp_layers else None,
    )


def _parse_heads(
    fields: Mapping[str, Any], source: str, usual: LayerHeads
) -> tuple[LayerHeads, LayerHeads]:
    """Return the heads of layers without a window, and of those with one."""

    def number(name: str, default: int) -> int:
        return require_int(fields, name, source, default=default)

    full = replace(
        usual,
        v_head_dim=number("v_head_dim", usual.head_dim),
        has_sinks=bool(fields.get("add_full_attention_sink_bias")),
    )
    windowed = LayerHeads(
        num_heads=number("swa_num_attention_heads", full.num_heads),
        num_kv_heads=number("swa_num_key_value_heads", 2 * full.num_kv_heads),
        head_dim=number("swa_head_dim", full.head_dim),
        v_head_dim=number("swa_v_head_dim", number("v_head_dim", full.head_dim)),
        has_sinks=bool(fields.get("add_swa_attention_sink_bias", True)),
    )
    return (
        checked_heads(full, f"{source}: a layer without a window"),
        checked_heads(windowed, f"{source}: a layer with a window (swa_...)"),
    )


def _next_token_layers(config: ModelConfig, heads: LayerHeads, window: int) -> ModelConfig:
    """Return the layers of multi-token prediction, each with a window, its heads and its rotary
    embedding, and an MLP, as a decoder of their own.

    Args:
        config: Of the target.
    """
    return replace(
        config.with_heads(heads),
        num_layers=config.num_mtp_layers,
        rope=config.local_rope or config.rope,
        local_rope=None,
        sliding_window=window,
        layer_windows=(),
        layer_norms=_NEXT_TOKEN_NORMS,
        experts=None,
    )

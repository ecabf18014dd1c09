"""Gemma 4 as a target: heads of layers as config.json says them, and what is refused of it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.device import require_heads_fit
from shared.errors import CheckpointError, ConfigError
from shared.kv.layout import CacheShape, KVLayout
from shared.models.config import ModelConfig
from shared.models.layer_heads import LayerHeads
from shared.models.rope import rope_frequencies
from shared.models.rope_config import parse_rope
from tests import families

NARROW = LayerHeads(num_heads=4, num_kv_heads=2, head_dim=24)
WIDE = LayerHeads(num_heads=4, num_kv_heads=1, head_dim=40, has_k_as_v=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write(tmp_path_factory.mktemp("gemma4"), "gemma4_text", **families.GEMMA4)


def edited(target: Path, tmp_path: Path, **fields: Any) -> ModelConfig:
    """Read the target's config.json with other fields; None takes one away."""
    config = json.loads((target / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_checkpoint(tmp_path)


def test_heads_of_layers_as_published_and_as_transformers_writes_them(
    target: Path, tmp_path: Path
) -> None:
    config = ModelConfig.from_checkpoint(target)
    assert config.layer_heads == (NARROW, WIDE) * 2
    shapes = (CacheShape(num_heads=2, width=24), CacheShape(num_heads=1, width=40))
    assert config.kv_layout.layers == shapes * 2
    assert config.kv_layout.bytes_per_token(4) == 2 * 2 * (2 * 24 + 40) * 4
    published = {"global_head_dim": 40, "num_global_key_value_heads": 1, "per_layer_config": None}
    assert edited(target, tmp_path, **published) == config


@pytest.mark.parametrize(("width", "fits"), [(256, True), (512, False)])
def test_wide_heads_need_16_bits_on_a_gpu(width: int, fits: bool) -> None:  # noqa: FBT001
    layout = KVLayout(layers=(CacheShape(num_heads=1, width=width),))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    require_heads_fit(layout, dtype=torch.bfloat16, device=gpu)
    require_heads_fit(layout, dtype=torch.float32, device=cpu)
    with nullcontext() if fits else pytest.raises(ConfigError, match="float32.*heads of 512.*bfl"):
        require_heads_fit(layout, dtype=torch.float32, device=gpu)


def test_layers_that_are_alike_have_one_shape(target: Path, tmp_path: Path) -> None:
    config = edited(target, tmp_path, per_layer_config={}, attention_k_eq_v=False)
    assert config.layer_heads == ()
    assert config.at_layer(1) is config
    wide = edited(target, tmp_path, per_layer_config=None, attention_k_eq_v=False)
    assert [heads.head_dim for heads in wide.layer_heads] == [24, 512] * 2  # the class's own
    assert {heads.num_kv_heads for heads in wide.layer_heads} == {2}


def test_the_first_pairs_turn_as_if_all_did() -> None:
    config = families.GEMMA4["rope_parameters"]["full_attention"]
    rope = parse_rope({"rope_parameters": config}, "here", head_dim=40, max_positions=64)
    angles = rope_frequencies(rope, 40, 64)
    want = 50000.0 ** -(torch.arange(5, dtype=torch.float64) * 2 / 40)
    torch.testing.assert_close(angles, want)


def test_proportional_rope_of_pairs_of_neighbours_is_refused() -> None:
    config = {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match="rope_parameters has rope_type proportional"):
        parse_rope(config, "here", head_dim=40, max_positions=64, is_interleaved=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input = 8.*embedding of its"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input = 256"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2.*K and V of layers before"),
        ({"enable_moe_block": True}, "num_experts must be an integer"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types must end with full_attention"),
        ({"per_layer_config": {"4": {}}}, 'per_layer_config.*"0" to "3"'),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "layer 1 may have head_dim and"),
        ({"per_layer_config": {"1": {"head_dim": 5}}}, "layer 1 has head_dim = 5"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "num_key_value_heads = 3"),
        ({"per_layer_config": {"1": {"head_dim": "x"}}}, "layer 1: head_dim must be a positive"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional"} | {"x": 1}}},
            "x = 1 is not supported for proportional",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}
                }
            },
            "partial_rotary_factor = 2.0 must be at most 1",
        ),
    ],
)
def test_what_is_not_implemented_is_named(
    target: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        edited(target, tmp_path, **fields)

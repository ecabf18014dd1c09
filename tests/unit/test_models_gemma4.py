"""Gemma 4 as a target: what config.json says of its layers, what they keep, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
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
from shared.models.llama import CausalLM
from shared.models.per_layer_config import PerLayerConfig
from shared.models.rope import rope_frequencies
from shared.models.rope_config import parse_rope
from shared.models.weight_memory import weight_bytes
from tests import checkpoints, families
from tests.paged import PagedKV

NARROW = LayerHeads(num_heads=4, num_kv_heads=2, head_dim=24)
WIDE = LayerHeads(num_heads=4, num_kv_heads=1, head_dim=40, has_k_as_v=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write(tmp_path_factory.mktemp("gemma4"), "gemma4_text", **families.GEMMA4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write(tmp_path_factory.mktemp("gemma4-e"), "gemma4_text", **families.GEMMA4_E)


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


def test_layers_without_kv_have_no_caches_and_wider_mlps(small: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_checkpoint(small)
    assert config.layer_heads == (NARROW, WIDE) * 3
    assert config.kv_layers == (0, 1, 2, 1, 2, 1)
    assert config.cache_of_layer == (0, 1, 2, 1, 2, 1)
    narrow, wide = CacheShape(num_heads=2, width=24), CacheShape(num_heads=1, width=40)
    assert config.kv_layout.layers == (narrow, wide, narrow)
    assert config.kv_layout.bytes_per_token(2) == 2 * (2 * 2 * 24 + 40) * 2
    assert config.head_shapes == [(4, narrow), (4, wide)]
    layers = [config.at_layer(layer_id) for layer_id in range(6)]
    assert [layer.has_own_kv for layer in layers] == [True] * 3 + [False] * 3
    assert [layer.intermediate_size for layer in layers] == [80] * 3 + [160] * 3
    alike = edited(small, tmp_path, use_double_wide_mlp=False)
    assert {alike.at_layer(layer_id).intermediate_size for layer_id in range(6)} == {80}
    own = edited(small, tmp_path, num_kv_shared_layers=0)
    assert own.kv_layers == own.layer_intermediate_sizes == ()
    assert own.kv_layout.num_layers == 6


def test_a_token_of_e4b_takes_the_memory_of_24_of_42_layers(small: Path, tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    sizes = {"num_hidden_layers": 42, "num_kv_shared_layers": 18, "layer_types": kinds * 7}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
    heads |= {"attention_k_eq_v": False, "global_head_dim": 512, "per_layer_config": None}
    config = edited(small, tmp_path, **sizes, **heads, use_double_wide_mlp=False)
    assert config.kv_layers[-18:] == (*[22] * 5, 23) * 3
    assert config.kv_layout.num_layers == 24
    assert config.kv_layout.bytes_per_token(2) == 2 * 2 * 2 * (20 * 256 + 4 * 512)


def test_embeddings_per_layer_are_those_that_config_json_says(small: Path, tmp_path: Path) -> None:
    size = checkpoints.TINY.vocab_size
    assert ModelConfig.from_checkpoint(small).per_layer == PerLayerConfig(
        vocab_size=size + 24, width=12
    )
    without = {"hidden_size_per_layer_input": None, "vocab_size_per_layer_input": None}
    assert edited(small, tmp_path, **without).per_layer == PerLayerConfig(
        vocab_size=262_144, width=256
    )
    assert edited(small, tmp_path, hidden_size_per_layer_input=0).per_layer is None


def test_weights_take_the_memory_of_the_table_as_it_is(small: Path) -> None:
    tensors = checkpoints.read_tensors(small)
    table = tensors["model.embed_tokens_per_layer.weight"]
    assert table.shape == (checkpoints.TINY.vocab_size + 24, 6 * 12)
    size = sum(tensor.numel() for tensor in tensors.values())
    assert weight_bytes(small, 2) == 2 * size
    # Projections of layers become FP8; the table, and what is made of it, do not.
    projections = sum(t.numel() for name, t in tensors.items() if "_proj.weight" in name)
    expected = 2 * (size - projections) + projections + projections // 32
    assert weight_bytes(small, 2, "fp8") == pytest.approx(expected, rel=1e-3)


@torch.inference_mode()
def test_layers_without_kv_read_fp8_caches_by_the_scales_of_what_they_hold(
    small: Path, tmp_path: Path
) -> None:
    """Scales of powers of two change nothing but what of K and V is next to zero."""
    scaled = shutil.copytree(small, tmp_path / "scaled")

    def scale(tensors: checkpoints.Tensors) -> None:
        for layer_id, factor in enumerate((2.0, 0.5, 0.25, 64.0, 64.0, 64.0)):
            for part in ("k", "v"):  # of layers 3 to 5, which have neither, as some tools write
                name = f"model.layers.{layer_id}.self_attn.{part}_scale"
                tensors[name] = torch.tensor([factor])

    checkpoints.edit_checkpoint(scaled, tensors=scale)
    ids = list(range(30))
    want, got = (logits_of(one, ids, torch.float8_e4m3fn) for one in (small, scaled))
    assert float((got - want).std()) < 0.1 * float(want.std())


def logits_of(directory: Path, ids: list[int], kv_dtype: torch.dtype) -> torch.Tensor:
    model = CausalLM.from_checkpoint(directory, torch.device("cpu"), torch.float32)
    kv = PagedKV(model.config.kv_layout, dtype=kv_dtype)
    return model.logits(model.forward(kv.chain(ids)).hidden)


@torch.inference_mode()
def test_tokens_that_only_the_device_knows_have_their_embeddings_per_layer(small: Path) -> None:
    model = CausalLM.from_checkpoint(small, torch.device("cpu"), torch.float32)
    ids = [7, 5, 3, 2]
    kv = PagedKV(model.config.kv_layout)
    want = model.forward(kv.chain(ids)).hidden
    unknown = kv.chain([ids[0], 0, ids[2], 0])
    roots, root_idx = torch.tensor([ids[3], ids[1]]), torch.tensor([-1, 1, -1, 0])
    assert torch.equal(model.forward(unknown, roots=roots, root_idx=root_idx).hidden, want)
    assert not torch.equal(model.forward(unknown).hidden, want)


def test_left_over_kv_of_other_layers_is_named(small: Path, tmp_path: Path) -> None:
    """Layers without K and V may have tensors of them; others may have no more than they read."""
    other = shutil.copytree(small, tmp_path / "other")
    stray = {"model.layers.5.self_attn.k_norm.weight": torch.ones(40)}
    checkpoints.edit_checkpoint(other, tensors=lambda tensors: tensors.update(stray))
    CausalLM.from_checkpoint(other, torch.device("cpu"), torch.float32)
    stray = {"model.layers.1.self_attn.v_proj.weight": torch.ones(40, 64)}
    checkpoints.edit_checkpoint(other, tensors=lambda tensors: tensors.update(stray))
    with pytest.raises(CheckpointError, match="left-over.*layers.1.self_attn.v_proj.weight"):
        CausalLM.from_checkpoint(other, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("config", "name", "shape", "message"),
    [
        ({}, "model.embed_tokens_per_layer.weight", None, "missing"),
        ({}, "model.embed_tokens_per_layer.weight", (280, 60), r"has shape \[280, 60\]"),
        ({}, "model.per_layer_model_projection.weight", None, "missing"),
        ({}, "model.per_layer_projection_norm.weight", None, "missing"),
        ({}, "model.layers.4.per_layer_input_gate.weight", None, "missing"),
        ({}, "model.layers.4.per_layer_projection.weight", (64, 13), r"has shape \[64, 13\]"),
        ({}, "model.layers.4.post_per_layer_input_norm.weight", None, "missing"),
        ({}, "model.layers.4.self_attn.q_norm.weight", None, "missing"),
        ({}, "model.layers.2.self_attn.k_proj.weight", None, "missing"),
        (
            {"use_double_wide_mlp": False},
            "model.layers.3.mlp.gate_proj.weight",
            (160, 64),
            r"has shape \[160, 64\], config.json makes it \[80, 64\]",
        ),
        (
            {"hidden_size_per_layer_input": 0},
            "model.layers.0.per_layer_input_gate.weight",
            (12, 64),
            "left-over",
        ),
    ],
)
def test_tensors_of_what_layers_share_and_read_are_accounted_for_by_name(
    small: Path,
    tmp_path: Path,
    config: dict[str, Any],
    name: str,
    shape: tuple[int, int] | None,
    message: str,
) -> None:
    other = shutil.copytree(small, tmp_path / "other")

    def edit(tensors: checkpoints.Tensors) -> None:
        del tensors[name]
        if shape is not None:
            tensors[name] = torch.zeros(shape)

    checkpoints.edit_checkpoint(other, tensors=edit, config=lambda fields: fields.update(config))
    with pytest.raises(CheckpointError) as raised:
        CausalLM.from_checkpoint(other, torch.device("cpu"), torch.float32)
    assert name in str(raised.value) and re.search(message, str(raised.value))


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
        ({"hidden_size_per_layer_input": -8}, "hidden_size_per_layer_input must be a positive"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 255},
            "vocab_size_per_layer_input = 255 must be at least vocab_size = ",
        ),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers = 3 leaves layer 1 no K and V.*full_"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers = 4 must be from 0 to 3"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers = -1 must be from 0 to 3"),
        ({"num_kv_shared_layers": "2"}, "num_kv_shared_layers = '2' must be from 0 to 3"),
        (
            {"num_kv_shared_layers": 2, "per_layer_config": {"1": {"head_dim": 32}}},
            "layer 3 attend to K and V of layer 1, .*head_dim = 32; its own are 2 and 24",
        ),
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

"""MiMo-V2: config.json as published and as transformers writes it, heads by kind of layer, MTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import CheckpointError
from shared.kv.layout import CacheShape
from shared.models.config import ModelConfig
from shared.models.draft import load_draft
from shared.models.layer_heads import LayerHeads
from shared.models.llama import CausalLM
from tests.mimo_v2 import FIELDS, OTHER_HEADS, write_mimo_v2
from tests.quantized import write_dequantized, write_fp8
from tests.reference.mimo_v2 import ReferenceMiMoV2
from tests.unit.test_models_llama import Runner, load_transformers, tokens_of

CPU = torch.device("cpu")
FULL = LayerHeads(num_heads=4, num_kv_heads=1, head_dim=24, v_head_dim=20, has_sinks=False)
WINDOWED = LayerHeads(num_heads=4, num_kv_heads=2, head_dim=24, v_head_dim=20)
# What published files say in their own words.
OWN_WORDS = (
    *("hybrid_layer_pattern", "moe_layer_freq", "sliding_window_size", "layernorm_epsilon"),
    *("rope_theta", "swa_rope_theta", "partial_rotary_factor", "routed_scaling_factor"),
    *(name for name in FIELDS if name.startswith(("swa_", "add_"))),
)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def config_of(directory: Path, fields: dict[str, Any]) -> ModelConfig:
    """Read a config.json; fields of None are not in it."""
    said = {name: value for name, value in fields.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(said))
    return ModelConfig.from_checkpoint(directory)


def logits_of(directory: Path, ids: list[int]) -> torch.Tensor:
    model = CausalLM.from_checkpoint(directory, CPU, torch.float32)
    runner = Runner(model, page_size=3)
    chunks = [ids[:17], ids[17:40], *([i] for i in ids[40:])]
    return torch.cat([model.logits(runner.extend(chunk).hidden) for chunk in chunks])


def test_a_published_checkpoint_is_what_transformers_reads(tmp_path: Path) -> None:
    """Of a window of 12 it sees 12 tokens before each; the reference of other tests is right."""
    directory, ids = write_mimo_v2(tmp_path), tokens_of(50)
    oracle = load_transformers(directory)
    assert oracle.config.sliding_window == 13
    want = oracle(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(directory, ids), want, atol=1e-4, rtol=0)
    reference = ReferenceMiMoV2(directory).forward(ids)
    torch.testing.assert_close(reference.logits, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "fields",
    [
        OTHER_HEADS,
        {"attention_value_scale": 1.3, "v_head_dim": 24, "swa_v_head_dim": 8},
        {"add_swa_attention_sink_bias": False, "swa_num_key_value_heads": 1},
        {"hybrid_layer_pattern": [1, 1, 1], "moe_layer_freq": [1, 0, 1]},
    ],
)
def test_layers_have_the_heads_of_their_kind(tmp_path: Path, fields: dict[str, Any]) -> None:
    directory, ids = write_mimo_v2(tmp_path, **fields), tokens_of(50)
    want = ReferenceMiMoV2(directory).forward(ids).logits
    torch.testing.assert_close(logits_of(directory, ids), want, atol=1e-4, rtol=0)


def test_published_fields_mean_what_those_of_transformers_do(tmp_path: Path) -> None:
    config = config_of(tmp_path, FIELDS)
    assert config.layer_heads == (FULL, WINDOWED, WINDOWED)
    assert config.layer_windows == (0, 13, 13)
    narrow = CacheShape(num_heads=1, width=24, v_width=20)
    assert config.kv_layout.layers[0] == narrow and narrow.widths == (24, 20)
    assert config.kv_layout.bytes_per_token(2) == 2 * (1 + 2 + 2) * (24 + 20)
    assert [heads for heads, _ in config.head_shapes] == [4, 4]
    rope = {"rope_type": "default", "partial_rotary_factor": 0.334}
    in_other_words = {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "sliding_window": 13,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0,
        "rope_parameters": {
            "full_attention": rope | {"rope_theta": 5000000.0},
            "sliding_attention": rope | {"rope_theta": 10000.0},
        },
    }
    fields = {name: value for name, value in FIELDS.items() if name not in OWN_WORDS}
    assert config_of(tmp_path, fields | in_other_words) == config
    # Which layers have windows and experts, bases, shares and sizes are also those of the class.
    spare = ("head_dim", "v_head_dim", "num_key_value_heads", "sliding_window")
    fields = {name: value for name, value in fields.items() if name not in spare}
    sizes = {"head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 4}
    plain = config_of(
        tmp_path, fields | sizes | {"num_hidden_layers": 12, "num_attention_heads": 64}
    )
    assert [i for i, window in enumerate(plain.layer_windows) if not window] == [0, 5, 11]
    assert max(plain.layer_windows) == 129
    assert plain.experts is not None and plain.experts.dense_layers == {0}
    assert plain.rope.rotary_dim(192) == 64 and plain.rope.theta == 5_000_000
    assert plain.layer_heads[1] == LayerHeads(
        num_heads=64, num_kv_heads=8, head_dim=192, v_head_dim=128
    )


def test_layers_of_multi_token_prediction_are_those_with_a_window(tmp_path: Path) -> None:
    config = config_of(tmp_path, FIELDS | OTHER_HEADS)
    mtp = config.mtp
    assert config.num_mtp_layers == 3, "as published, where config.json says nothing of them"
    assert mtp is not None and mtp.num_layers == 3 and mtp.experts is None
    assert (mtp.num_heads, mtp.num_kv_heads, mtp.head_dim, mtp.v_dim) == (6, 3, 16, 16)
    assert mtp.rope.theta == 300 and mtp.sliding_window == 13 and mtp.sinks
    assert config_of(tmp_path, FIELDS | {"num_nextn_predict_layers": 0}).mtp is None


@pytest.mark.parametrize("num_mtp_layers", [0, 1])
def test_a_draft_without_its_tensors_is_refused_by_their_name(
    tmp_path: Path, num_mtp_layers: int
) -> None:
    directory = write_mimo_v2(tmp_path, num_mtp_layers=num_mtp_layers)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 2}))
    CausalLM.from_checkpoint(directory, CPU, torch.float32)
    name = rf"missing tensor 'model\.mtp\.layers\.{num_mtp_layers}\.enorm\.weight'"
    with pytest.raises(CheckpointError, match=name):
        load_draft("mtp", directory, directory, device=CPU, dtype=torch.float32)


def test_a_checkpoint_in_fp8_whose_o_proj_is_not(tmp_path: Path) -> None:
    """As published: in blocks of 128, with rows of a head in two of them."""
    fields = {"swa_head_dim": 192, "swa_v_head_dim": 128, "swa_num_key_value_heads": 1}
    source, ids = write_mimo_v2(tmp_path / "source", **fields), tokens_of(50)
    quantized = write_fp8(source, tmp_path / "fp8", "block", kept=("o_proj",))
    want = ReferenceMiMoV2(write_dequantized(quantized, tmp_path / "plain")).forward(ids).logits
    torch.testing.assert_close(logits_of(quantized, ids), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern must hold 0 .full_attention. or"),
        ({"hybrid_layer_pattern": [0, 1, 2]}, "hybrid_layer_pattern must hold"),
        ({"hybrid_layer_pattern": [0, 0, 0]}, "hybrid_layer_pattern, or layer_types, must name a"),
        ({"moe_layer_freq": [0, True, 1]}, "moe_layer_freq must hold 0 .dense. or 1 .sparse."),
        ({"sliding_window_size": 0}, "sliding_window_size must be a positive integer"),
        ({"swa_num_key_value_heads": 3}, "with a window .swa_....*num_key_value_heads = 3"),
        ({"swa_head_dim": 23}, "with a window .swa_.... has head_dim = 23"),
        ({"v_head_dim": 26}, "without a window has v_head_dim = 26.*at most head_dim = 24"),
        ({"swa_v_head_dim": 7}, "with a window .swa_.... has v_head_dim = 7.*even"),
        ({"attention_value_scale": -1}, "attention_value_scale must be a finite number > 0"),
        ({"attention_projection_layout": "fused_qkv"}, "attention_projection_layout.*one tensor"),
        ({"hybrid_block_size": 6}, "hybrid_block_size = 6 is not supported: it says which"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling = .*leaves open which layers"),
        ({"n_shared_experts": 1}, "n_shared_experts = 1 is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
    ],
)
def test_what_is_not_implemented_is_named(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path, FIELDS | fields)


def test_values_are_not_scaled_elsewhere(tmp_path: Path) -> None:
    fields = {**FIELDS, "architectures": ["Glm4MoeForCausalLM"]}
    with pytest.raises(CheckpointError, match=r"attention_value_scale = 0\.707 is not supported"):
        config_of(tmp_path, fields)

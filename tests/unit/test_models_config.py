"""config.json of every family and era; refusals name the field; what fits which target."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shared.errors import CheckpointError, ConfigError
from shared.models.config import (
    DraftKind,
    HeadConfig,
    ModelConfig,
    detect_kind,
    feature_spec,
    resolve_draft,
)
from shared.models.families import FAMILIES
from shared.models.llama import CausalLM
from shared.models.refused_families import REFUSED
from shared.models.rope_config import RopeConfig, RopeKind
from tests import checkpoints
from tests.checkpoints import EOS_ID, LLAMA3_ROPE, Shape, edit_checkpoint
from tests.families import YARN, longrope

CPU = torch.device("cpu")


def read(directory: Path) -> ModelConfig:
    return ModelConfig.from_checkpoint(directory)


def test_config_and_hashes_do_not_import_torch() -> None:
    code = (
        "import sys; import shared.models.config, shared.models.weight_memory; "
        "sys.exit(int('torch' in sys.modules or 'transformers' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_old_and_new_names_of_the_config_mean_the_same(tmp_path: Path) -> None:
    new = read(checkpoints.write_llama(tmp_path / "new"))
    old = read(checkpoints.write_llama(tmp_path / "old", old_names=True))
    assert new == old
    assert new.rope == RopeConfig(
        theta=20000.0,
        kind=RopeKind.LLAMA3,
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=32,
    )
    assert new.dtype == "float32"


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_of_either_name(tmp_path: Path, name: str) -> None:
    directory = checkpoints.write_llama(tmp_path)

    def change(fields: dict[str, Any]) -> None:
        del fields["dtype"]
        fields[name] = "bfloat16"

    assert read(edit_checkpoint(directory, config=change)).dtype == "bfloat16"
    edit_checkpoint(directory, config=lambda c: c.update({name: "int8"}))
    with pytest.raises(CheckpointError, match="dtype 'int8'"):
        read(directory)


def test_config_that_transformers_wrote_is_read(tmp_path: Path) -> None:
    config = transformers.MistralConfig(
        architectures=["MistralForCausalLM"],
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=32,
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    got = read(tmp_path)
    assert (got.sliding_window, got.head_dim, got.dtype) == (32, config.head_dim, "bfloat16")
    assert got.rope == RopeConfig(theta=10000.0)


def test_switches_of_each_family(tmp_path: Path) -> None:
    def switches(config: ModelConfig) -> tuple[bool, bool, bool, int, int]:
        return (
            config.has_qkv_bias,
            config.has_o_bias,
            config.has_qk_norm,
            config.sliding_window,
            config.num_mtp_layers,
        )

    write = checkpoints
    assert switches(read(write.write_llama(tmp_path / "l"))) == (False, False, False, 0, 0)
    biased = write.write_llama(tmp_path / "b", has_attention_bias=True)
    assert switches(read(biased)) == (True, True, False, 0, 0)
    assert switches(read(write.write_mistral(tmp_path / "m"))) == (False, False, False, 12, 0)
    assert switches(read(write.write_qwen2(tmp_path / "2"))) == (True, False, False, 0, 0)
    assert switches(read(write.write_qwen3(tmp_path / "3"))) == (False, False, True, 0, 0)
    assert switches(read(write.write_mimo(tmp_path / "x"))) == (True, False, False, 0, 1)


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"sliding_window": None}, 0),
        ({"sliding_window": 7}, 7),
        ({}, 4096),  # MistralConfig's default
    ],
)
def test_mistral_window(tmp_path: Path, fields: dict[str, Any], window: int) -> None:
    directory = checkpoints.write_mistral(tmp_path)
    edit_checkpoint(directory, config=lambda c: c.pop("sliding_window"))
    assert read(edit_checkpoint(directory, config=lambda c: c.update(fields))).sliding_window == (
        window
    )


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"use_sliding_window": True, "max_window_layers": 0}, 8),
        ({"use_sliding_window": True, "max_window_layers": 3}, 0),
        ({"use_sliding_window": False, "max_window_layers": 0}, 0),
        ({"layer_types": ["full_attention"] * 3}, 0),
        ({"layer_types": ["sliding_attention"] * 3}, 8),
    ],
)
def test_qwen_window(tmp_path: Path, fields: dict[str, Any], window: int) -> None:
    directory = checkpoints.write_qwen2(tmp_path)
    edit_checkpoint(directory, config=lambda c: c.update(fields))
    assert read(directory).sliding_window == window


MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 1}, (0, 8, 8)),
        ("Qwen2ForCausalLM", {"layer_types": MIXED}, (8, 0, 8)),
        ("MistralForCausalLM", {"layer_types": MIXED}, (8, 0, 8)),
        ("LlamaForCausalLM", {"layer_types": MIXED}, ()),  # its class knows no window
    ],
)
def test_windows_that_differ_from_layer_to_layer(
    tmp_path: Path, architecture: str, fields: dict[str, Any], windows: tuple[int, ...]
) -> None:
    directory = checkpoints.write_qwen2(tmp_path)
    fields = {"architectures": [architecture], **fields}
    config = read(edit_checkpoint(directory, config=lambda c: c.update(fields)))
    assert (config.sliding_window, config.layer_windows) == (0, windows)


# What files on the Hub say, beside sizes.
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}
OLMO3_7B = {
    "architectures": ["Olmo3ForCausalLM"],
    "rope_theta": 500000,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
        "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "sliding_window": 4096,
}  # fmt: skip
EXAONE4_32B = {
    "architectures": ["Exaone4ForCausalLM"],
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
}


def published(tmp_path: Path, fields: dict[str, Any], **sizes: Any) -> ModelConfig:
    """Return the ModelConfig of a file on the Hub."""
    dims = {
        "vocab_size": 1000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
    }
    written = fields if "text_config" in fields else dims | sizes | fields
    (tmp_path / "config.json").write_text(json.dumps(written))
    return read(tmp_path)


def test_gemma_2_as_published(tmp_path: Path) -> None:
    config = published(tmp_path, GEMMA2_2B)
    assert config.layer_windows == (4096, 0) * 4
    assert (config.attention_softcap, config.logits_softcap) == (50.0, 30.0)
    assert (config.has_gelu, config.has_scaled_embedding, config.is_tied) == (True, True, True)
    assert config.attention_multiplier == 1 / 16
    assert published(tmp_path, GEMMA2_2B | {"final_logit_softcapping": None}).logits_softcap == 0


def test_gemma_3_as_published(tmp_path: Path) -> None:
    config = published(tmp_path, GEMMA3_4B)
    assert config.layer_windows == (*[1024] * 5, 0, 1024)
    assert config.rope == RopeConfig(theta=1e6, kind=RopeKind.LINEAR, factor=8.0)
    assert config.local_rope == RopeConfig(theta=1e4)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
    assert (config.head_dim, config.max_position_embeddings, config.is_tied) == (256, 131072, True)
    # All layers of a kind: there is one rotary embedding, theirs.
    text = GEMMA3_4B["text_config"] | {"num_hidden_layers": 5}
    local = published(tmp_path, GEMMA3_4B | {"text_config": text})
    assert (local.sliding_window, local.layer_windows) == (1024, ())
    assert (local.rope, local.local_rope) == (RopeConfig(theta=1e4), None)


def test_olmo_3_as_published(tmp_path: Path) -> None:
    config = published(tmp_path, OLMO3_7B)
    assert config.layer_windows == (4096, 4096, 4096, 0) * 2
    assert config.rope.kind is RopeKind.YARN
    assert config.local_rope == RopeConfig(theta=500000.0)
    plain = published(tmp_path, OLMO3_7B | {"rope_scaling": None})
    assert (plain.rope, plain.local_rope) == (RopeConfig(theta=500000.0), None)


def test_one_base_for_two_kinds_of_layers_is_refused(tmp_path: Path) -> None:
    """Whose it is nobody says; transformers writes one of each kind."""
    with pytest.raises(CheckpointError, match="rope_parameters.rope_theta.*sliding_attention"):
        published(tmp_path, OLMO3_7B | {"rope_parameters": {"rope_theta": 1e4}})


def test_exaone_4_as_published(tmp_path: Path) -> None:
    config = published(tmp_path, EXAONE4_32B)
    assert config.layer_windows == (4096, 4096, 4096, 0) * 2
    assert config.unrotated_layers == (3, 7)
    small = published(tmp_path, EXAONE4_32B | {"sliding_window": None, "layer_types": None})
    assert (small.sliding_window, small.layer_windows, small.unrotated_layers) == (0, (), ())


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (EXAONE4_32B | {"layer_types": None}, "sliding_window_pattern.*write layer_types"),
        (EXAONE4_32B | {"sliding_window": 0}, "sliding_window must be"),
        (GEMMA2_2B | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA2_2B | {"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        (GEMMA2_2B | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA2_2B | {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        (
            {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 8},
            "shared_expert_intermediate_size",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 8, "hidden_act": "gelu_pytorch_tanh"},
            "hidden_act = 'gelu_pytorch_tanh' is not supported, only silu",
        ),
        (
            {"architectures": ["Gemma4ForCausalLM"], "hidden_size_per_layer_input": 0}
            | {"enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 8},
            "top_k_experts",
        ),
        (
            {"architectures": ["Gemma4ForCausalLM"], "hidden_size_per_layer_input": 0}
            | {"enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 8}
            | {"top_k_experts": 5},
            "top_k_experts = 5 is more than the 4 experts",
        ),
    ],
)
def test_what_a_family_cannot_mean_is_named(
    tmp_path: Path, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(CheckpointError, match=name):
        published(tmp_path, fields)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
UNSUPPORTED = [
    ({"architectures": ["InternLM2ForCausalLM"]}, "InternLM2ForCausalLM"),
    ({"architectures": []}, "architectures"),
    ({"architectures": None}, "architectures"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"num_experts": 8}, "num_experts"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"attention_sinks": True}, "attention_sinks"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"residual_multiplier": 0.5}, "residual_multiplier"),
    ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "logits_scaling"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"hidden_size": None}, "hidden_size"),
    ({"vocab_size": "many"}, "vocab_size"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 15}, "head_dim"),
    ({"use_sliding_window": True, "sliding_window": "8", "max_window_layers": 1}, "sliding_window"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ({"eos_token_id": "x"}, "eos_token_id"),
    ({"eos_token_id": [3, True]}, "eos_token_id"),
    ({"eos_token_id": 1 << 20}, "eos_token_id"),
    ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
    ({"max_position_embeddings": 1e12}, "max_position_embeddings"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position"),
    ({"rope_parameters": {**YARN, "factor": "4"}}, "factor"),
    ({"rope_parameters": {**YARN, "beta_slow": -1}}, "beta_slow"),
    ({"rope_parameters": {**YARN, "short_factor": [1.0]}}, "short_factor"),
    ({"rope_parameters": longrope(7)}, "short_factor must be a list of 8 numbers"),
    ({"rope_parameters": {**longrope(8), "long_factor": [0.0] * 8}}, "long_factor"),
    ({"rope_parameters": {"rope_type": "dynamic"}}, "factor"),
    ({"rope_parameters": {**DYNAMIC, "original_max_position_embeddings": 32}}, "write yarn"),
    ({"rope_parameters": {**DYNAMIC, "alpha": 2.0}}, "alpha"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    ({"rope_parameters": {**LLAMA3_ROPE, "beta_fast": 32}}, "beta_fast"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rot"),
    ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
    ({"rope_parameters": 3}, "rope_parameters"),
]


@pytest.mark.parametrize(("fields", "name"), UNSUPPORTED, ids=lambda x: str(x)[:40])
def test_what_is_not_supported_is_named(tmp_path: Path, fields: dict[str, Any], name: str) -> None:
    directory = checkpoints.write_qwen2(tmp_path)
    edit_checkpoint(directory, config=lambda c: c.update(fields))
    with pytest.raises(CheckpointError, match=name):
        read(directory)


@pytest.mark.parametrize("architecture", REFUSED)
def test_architectures_that_are_known_are_refused_with_what_they_have(
    tmp_path: Path, architecture: str
) -> None:
    assert hasattr(transformers, architecture), "no class of that name"
    assert architecture not in FAMILIES
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    needed = re.escape(REFUSED[architecture])
    with pytest.raises(
        CheckpointError, match=f"'{architecture}' is not supported: it has {needed}"
    ):
        read(tmp_path)


def test_language_model_within_a_model_that_sees(tmp_path: Path) -> None:
    """Its fields lie in text_config, its tensors have a prefix of either era, or an old one."""
    alone = checkpoints.write_mistral(tmp_path / "alone")
    nested = checkpoints.write_mistral(tmp_path / "nested")
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {}}

    def nest(fields: dict[str, Any]) -> None:
        text = dict(fields)
        fields.clear()
        fields.update(outer, text_config=text)

    edit_checkpoint(nested, config=nest)
    assert replace(read(nested), has_vision=False) == read(alone)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in sorted(tensors):
            old = name.startswith("model.layers.0") or not name.startswith("model.")
            new = (
                f"language_model.{name}" if old else name.replace("model.", "model.language_model.")
            )
            tensors[new] = tensors.pop(name)
        tensors["vision_tower.patch_conv.weight"] = torch.zeros(2)

    edit_checkpoint(nested, tensors=rename)
    CausalLM.from_checkpoint(nested, CPU, torch.float32)
    edit_checkpoint(nested, config=lambda c: c.update(quantization_config={"quant_method": "awq"}))
    with pytest.raises(CheckpointError, match="quantization_config"):
        read(nested)
    edit_checkpoint(nested, config=lambda c: c.update(text_config={"model_type": "llama"}))
    with pytest.raises(CheckpointError, match=r"text_config.*llama"):
        read(nested)


def test_layers_without_rope(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path, rope={"rope_type": "default"})
    smollm3 = {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2}
    edit_checkpoint(directory, config=lambda c: c.update(smollm3))
    assert read(directory).unrotated_layers == (1,)
    edit_checkpoint(directory, config=lambda c: c.update(no_rope_layers=[0, 1, 0]))
    assert read(directory).unrotated_layers == (0, 2)
    edit_checkpoint(directory, config=lambda c: c.update(use_sliding_window=True, sliding_window=8))
    assert read(directory).layer_windows == (8, 0, 8)
    edit_checkpoint(directory, config=lambda c: c.update(no_rope_layers=[1, 1]))
    with pytest.raises(CheckpointError, match="no_rope_layers"):
        read(directory)


def test_neutral_values_of_unsupported_fields_are_fine(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path)
    neutral = {"quantization_config": None, "partial_rotary_factor": 1.0, "num_experts": 0}
    before = read(directory)
    assert read(edit_checkpoint(directory, config=lambda c: c.update(neutral))) == before


def test_directory_without_config_or_with_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read(tmp_path)


def test_generation_config_says_what_ends_a_text(tmp_path: Path) -> None:
    directory = checkpoints.write_llama(tmp_path)
    assert read(directory).eos_token_ids == (EOS_ID,)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert read(directory).eos_token_ids == (3, 5)
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    assert read(directory).eos_token_ids == (EOS_ID,)
    edit_checkpoint(directory, config=lambda c: c.update({"eos_token_id": None}))
    assert read(directory).eos_token_ids == ()


@pytest.mark.parametrize("eos", [-1, "vocab_size", [3, "vocab_size"]])
def test_an_end_of_text_outside_the_vocabulary_is_refused(tmp_path: Path, eos: Any) -> None:
    """Every request would fail with a field that its client never set."""
    directory = checkpoints.write_llama(tmp_path)
    size = read(directory).vocab_size
    ids = [size if i == "vocab_size" else i for i in (eos if isinstance(eos, list) else [eos])]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: eos_.*{size - 1}"):
        read(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": size - 1}))
    assert read(directory).eos_token_ids == (size - 1,)


KINDS = {
    DraftKind.EAGLE3: checkpoints.write_eagle3,
    DraftKind.EAGLE: checkpoints.write_eagle,
    DraftKind.STANDALONE: checkpoints.write_standalone,
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind_is_detected(tmp_path: Path, kind: DraftKind) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    draft = KINDS[kind](tmp_path / "draft", target)
    assert detect_kind(draft, "auto") is kind
    # The EAGLE authors' own files call themselves LlamaForCausalLM: the tensors tell.
    edit_checkpoint(draft, config=lambda c: c.update({"architectures": ["LlamaForCausalLM"]}))
    assert detect_kind(draft, "auto") is kind
    assert feature_spec(draft, target, "auto")[0] is kind
    assert feature_spec(draft, target, kind)[0] is kind


def test_a_draft_of_another_target_is_refused_with_the_flag_to_mend_it(tmp_path: Path) -> None:
    """It is the bundled one, if only a target was named."""
    target = checkpoints.write_tokenizer(checkpoints.write_llama(tmp_path))
    head = resolve_draft("demo", "auto", target)
    small_model = resolve_draft("demo", "standalone", target)
    for draft, field in ((head, "vocab_size = 4096"), (small_model, r"tokenizer\.json gives ids")):
        with pytest.raises(CheckpointError, match=f"{field}.*--draft-model none"):
            feature_spec(draft, target, "auto")


def test_mtp_is_detected_and_explicit_algorithms_are_believed(tmp_path: Path) -> None:
    target = checkpoints.write_mimo(tmp_path)
    assert detect_kind(target, "auto") is DraftKind.MTP
    assert detect_kind(target, "standalone") is DraftKind.STANDALONE
    with pytest.raises(ConfigError, match="algorithm 'medusa'"):
        detect_kind(target, "medusa")
    kind, spec = feature_spec(target, target, "mtp")
    assert (kind, spec.layer_ids, spec.width, spec.dtype) == (DraftKind.MTP, (), 48, "")


def test_feature_specs(tmp_path: Path) -> None:
    target = checkpoints.write_llama(tmp_path / "target", shape=Shape(num_layers=6))
    eagle3 = checkpoints.write_eagle3(tmp_path / "eagle3", target, layer_ids=(4, 1))
    assert feature_spec(eagle3, target, "auto")[1].layer_ids == (4, 1)
    assert feature_spec(eagle3, target, "auto")[1].width == 96
    default = checkpoints.write_eagle3(tmp_path / "default", target, layer_ids=None)
    assert feature_spec(default, target, "auto")[1].layer_ids == (1, 2, 2)
    eagle = checkpoints.write_eagle(tmp_path / "eagle", target)
    assert feature_spec(eagle, target, "auto")[1].width == 48
    standalone = checkpoints.write_standalone(tmp_path / "standalone", target)
    assert feature_spec(standalone, target, "auto")[1].width == 0


def _set(**fields: Any) -> dict[str, Any]:
    return fields


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        (DraftKind.EAGLE3, _set(vocab_size=999), "vocab_size"),
        (DraftKind.EAGLE3, _set(hidden_size=64), "target_hidden_size"),
        (DraftKind.EAGLE3, _set(draft_vocab_size=0), "draft_vocab_size"),
        (DraftKind.EAGLE3, _set(norm_before_residual="yes"), "norm_before_residual"),
        (DraftKind.EAGLE3, _set(fc_norm=True, use_aux_norm=False), "use_aux_norm"),
        (DraftKind.EAGLE3, _set(fc_norm=True, norm_before_fc=True), "one or the other"),
        (DraftKind.EAGLE3, _set(parallel_drafting=True), "parallel_drafting"),
        (DraftKind.EAGLE3, _set(eagle_config={"layers": [1]}), "layers"),
        (DraftKind.EAGLE3, _set(eagle_config={"use_aux_hidden_state": False}), "use_aux"),
        (DraftKind.EAGLE3, _set(eagle_config={"use_mtp_layernorm": True}), "use_mtp_layernorm"),
        (
            DraftKind.EAGLE3,
            _set(norm_before_fc=False, eagle_config={"norm_before_fc": True}),
            "norm_before_fc",
        ),
        (DraftKind.EAGLE, _set(norm_before_residual=True), "norm_before_residual"),
        (DraftKind.EAGLE3, _set(eagle_config=[1]), "eagle_config"),
        (
            DraftKind.EAGLE3,
            _set(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3]}),
            "eagle_aux_hidden_state_layer_ids",
        ),
        (
            DraftKind.EAGLE3,
            _set(eagle_config={"eagle_aux_hidden_state_layer_ids": "0"}),
            "eagle_aux_hidden_state_layer_ids",
        ),
        (DraftKind.EAGLE, _set(vocab_size=999), "vocab_size"),
        (DraftKind.EAGLE, _set(hidden_size=64), "hidden_size"),
        (DraftKind.EAGLE, _set(hot_vocab_size=100), "hot_vocab_size"),
        (DraftKind.EAGLE, _set(architectures=["QwenHead"]), "QwenHead"),
    ],
)
def test_head_that_does_not_fit_is_refused(
    tmp_path: Path, kind: DraftKind, fields: dict[str, Any], name: str
) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    head = KINDS[kind](tmp_path / "head", target)
    edit_checkpoint(head, config=lambda c: c.update(fields))
    with pytest.raises(CheckpointError, match=name):
        feature_spec(head, target, kind)


def test_the_place_of_the_layer_ids_says_how_they_count(tmp_path: Path) -> None:
    """Nested as SpecForge and SGLang mean them, at top level as vLLM and speculators do."""
    target = checkpoints.write_llama(tmp_path / "target", shape=Shape(num_layers=6))
    head = checkpoints.write_eagle3(tmp_path / "head", target, layer_ids=(1, 2, 5))
    assert feature_spec(head, target, "auto")[1].layer_ids == (1, 2, 5)
    name = "eagle_aux_hidden_state_layer_ids"
    edit_checkpoint(head, config=lambda c: c.update({name: [2, 3, 6]}))  # the same layers
    assert feature_spec(head, target, "auto")[1].layer_ids == (1, 2, 5)
    edit_checkpoint(head, config=lambda c: c.update({name: [1, 2, 5]}))
    with pytest.raises(
        CheckpointError, match=rf"{name} \[1, 2, 5\].*vLLM.*but eagle_config.*SGLang"
    ):
        feature_spec(head, target, "auto")
    edit_checkpoint(head, config=lambda c: c.pop("eagle_config"))
    assert feature_spec(head, target, "auto")[1].layer_ids == (0, 1, 4)
    for said in ([0, 2, 3], [2, 3, 7]):
        edit_checkpoint(head, config=lambda c, said=said: c.update({name: said}))
        with pytest.raises(CheckpointError, match="number of layers before the tap.*6 layers"):
            feature_spec(head, target, "auto")


def test_speculators_format(tmp_path: Path) -> None:
    target = checkpoints.write_llama(tmp_path / "target", shape=Shape(num_layers=6))
    head = checkpoints.write_eagle3(
        tmp_path / "head", target, layer_ids=(1, 2, 4), is_speculators=True
    )
    assert feature_spec(head, target, "auto") == feature_spec(head, target, "eagle3")
    assert feature_spec(head, target, "auto")[1].layer_ids == (1, 2, 4)
    assert HeadConfig.from_checkpoint(head, DraftKind.EAGLE3).has_normed_residual
    with pytest.raises(CheckpointError, match=r"no eagle head.*--algorithm eagle3"):
        feature_spec(head, target, "eagle")
    layer = "transformer_layer_config"
    sliding = {"layer_types": ["sliding_attention"], "sliding_window": 64}
    assert HeadConfig.from_checkpoint(head, DraftKind.EAGLE3).decoder.sliding_window == 0
    edit_checkpoint(head, config=lambda c: c[layer].update(sliding))
    assert HeadConfig.from_checkpoint(head, DraftKind.EAGLE3).decoder.sliding_window == 64
    edit_checkpoint(head, config=lambda c: c[layer].update({"sliding_window": None}))
    with pytest.raises(CheckpointError, match="sliding_window"):
        feature_spec(head, target, "auto")
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    edit_checkpoint(head, config=lambda c: c[layer].update(mixed))
    with pytest.raises(CheckpointError, match="layer_types = .*sliding_attention.*or none"):
        HeadConfig.from_checkpoint(head, DraftKind.EAGLE3)
    one = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    edit_checkpoint(head, config=lambda c: c[layer].update(one))
    edit_checkpoint(head, config=lambda c: c[layer].pop("hidden_size"))
    with pytest.raises(CheckpointError, match=rf"{layer}: hidden_size"):
        feature_spec(head, target, "auto")
    for broken in ([], {"model_type": "mamba"}):
        edit_checkpoint(head, config=lambda c, broken=broken: c.update({layer: broken}))
        with pytest.raises(CheckpointError, match=f"{layer} must be an object of model_type llama"):
            feature_spec(head, target, "auto")
    edit_checkpoint(head, config=lambda c: c.update({"speculators_model_type": "medusa"}))
    with pytest.raises(CheckpointError, match="speculators_model_type = 'medusa'.*only 'eagle3'"):
        detect_kind(head, "auto")


def test_default_layers_need_a_target_deep_enough(tmp_path: Path) -> None:
    target = checkpoints.write_llama(tmp_path / "target")  # 3 layers
    head = checkpoints.write_eagle3(tmp_path / "head", target, layer_ids=None)
    with pytest.raises(CheckpointError, match="do not lie in the target's 3 layers"):
        feature_spec(head, target, "auto")


def test_mtp_of_a_checkpoint_without_the_layer(tmp_path: Path) -> None:
    target = checkpoints.write_mimo(tmp_path)
    edit_checkpoint(target, config=lambda c: c.update({"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers = 0"):
        feature_spec(target, target, "auto")


def test_standalone_needs_the_targets_tokens(tmp_path: Path) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    draft = checkpoints.write_llama(tmp_path / "draft", shape=Shape(vocab_size=300))
    feature_spec(draft, target, "auto")  # the same tokenizer, padded differently
    path = draft / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(CheckpointError, match="tokenizer"):
        feature_spec(draft, target, "auto")
    path.unlink()
    with pytest.raises(CheckpointError, match="vocab_size = 300"):
        feature_spec(draft, target, "auto")


def test_head_config_switches(tmp_path: Path) -> None:
    target = checkpoints.write_llama(tmp_path / "target")
    head = checkpoints.write_eagle3(
        tmp_path / "head", target, hidden_size=32, has_embedding=True, has_fc_bias=True,
        feeds_back_norm=True, max_position_embeddings=128,
    )  # fmt: skip
    config = HeadConfig.from_checkpoint(head, DraftKind.EAGLE3)
    assert (config.decoder.hidden_size, config.target_hidden_size) == (32, 48)
    assert (config.has_fc_bias, config.feeds_back_norm) == (True, True)
    assert (config.draft_vocab_size, config.decoder.max_position_embeddings) == (100, 128)
    assert not (config.has_normed_residual or config.has_tap_norms or config.has_feature_norm)
    nested = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
    edit_checkpoint(head, config=lambda c: c["eagle_config"].update(nested))
    config = HeadConfig.from_checkpoint(head, DraftKind.EAGLE3)
    assert config.has_normed_residual and config.has_tap_norms and config.feeds_back_norm


def test_resolve_draft(tmp_path: Path) -> None:
    assert resolve_draft("demo", "mtp", tmp_path) == tmp_path
    assert resolve_draft("demo", "auto", tmp_path).name == "eagle3"
    assert resolve_draft("demo", "eagle3", tmp_path).name == "eagle3"
    assert resolve_draft("demo", "standalone", tmp_path).name == "standalone"
    directory = checkpoints.write_llama(tmp_path / "draft")
    assert resolve_draft(str(directory), "auto", tmp_path) == directory

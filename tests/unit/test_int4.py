"""Checkpoints in int4: what their weights mean, what is refused, and the memory they take."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import CheckpointError
from shared.kernels.int4 import Int4Weight
from shared.messages import SamplingParams, TreeShape
from shared.models.checkpoint import CheckpointReader
from shared.models.int4_config import parse_int4
from shared.models.llama import CausalLM
from shared.models.weight_memory import weight_bytes
from tests import checkpoints
from tests.checkpoints import Shape, Tensors, edit_checkpoint
from tests.engines import Pairing, fresh, make_draft, make_target, random_tokens, run_plain
from tests.int4 import (
    AWQ_CONFIG,
    COMPRESSED_CONFIG,
    CONFIGS,
    GPTQ_CONFIG,
    GROUP,
    compressed_config,
    write_int4,
)
from tests.local_pair import LocalPair, LocalRequest
from tests.quantized import is_quantized
from tests.unit.test_quantization import logits_of

CPU = torch.device("cpu")
SHAPE = Shape(
    hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24
)
MODULE = "model.layers.0.self_attn.q_proj"
QUANTIZED_DTYPES = (torch.int32, torch.int64, torch.int8)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_llama(tmp_path_factory.mktemp("source") / "llama", shape=SHAPE)


@pytest.mark.parametrize("form", CONFIGS)
def test_logits_are_those_of_the_dequantised_weights(
    source: Path, tmp_path: Path, form: str
) -> None:
    quantized, plain = write_int4(source, tmp_path, form)
    logits = logits_of(quantized)
    assert torch.equal(logits, logits_of(plain))
    assert not torch.equal(logits, logits_of(source))


@pytest.mark.parametrize("form", CONFIGS)
def test_weights_have_four_bits_unless_their_groups_have_inputs_from_anywhere(
    source: Path, tmp_path: Path, form: str
) -> None:
    quantized, _ = write_int4(source, tmp_path, form)
    with CheckpointReader(quantized, device=CPU, dtype=torch.bfloat16) as reader:
        weight = reader.load_matrix(f"{MODULE}.weight", (96, 64))
    if form in ("gptq desc_act", "compressed actorder"):
        assert isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16
        return
    assert isinstance(weight, Int4Weight) and weight.dtype == torch.bfloat16
    is_symmetric = form in ("gptq symmetric", "compressed")
    assert weight.scaling == ("group" if is_symmetric else "zeros")
    padded = 128  # of 64 inputs: a block of four parts of 32
    assert weight.values.nbytes == 96 * padded // 2


def test_experts_are_dequantised_while_they_load(tmp_path: Path) -> None:
    source = checkpoints.write_qwen3_moe(tmp_path / "source", shape=SHAPE, width=32)
    quantized, plain = write_int4(source, tmp_path, "awq")
    assert torch.equal(logits_of(quantized), logits_of(plain))


def test_modules_that_are_not_converted_stay_as_they_are(source: Path, tmp_path: Path) -> None:
    def is_chosen(name: str) -> bool:
        return is_quantized(name) and ".layers.1.mlp." not in name

    quantized, plain = write_int4(source, tmp_path, "awq", is_chosen=is_chosen)
    edit_checkpoint(
        quantized,
        config=lambda c: c["quantization_config"].update(modules_to_not_convert=["layers.1.mlp"]),
    )
    assert torch.equal(logits_of(quantized), logits_of(plain))


@pytest.mark.parametrize("form", ["awq", "compressed", "gptq desc_act"])
def test_memory_is_planned_for_what_stays_in_int4(source: Path, tmp_path: Path, form: str) -> None:
    quantized, _ = write_int4(source, tmp_path, form)
    tensors = checkpoints.read_tensors(source)
    size = sum(t.numel() for t in tensors.values())
    projections = sum(t.numel() for name, t in tensors.items() if is_quantized(name))
    values = 2 * projections if form == "gptq desc_act" else projections // 2
    expected = 2 * (size - projections) + values + 4 * projections // GROUP
    biases = 2 * sum(
        t.numel() for n, t in checkpoints.read_tensors(quantized).items() if "bias" in n
    )
    assert weight_bytes(quantized, 2) == expected + biases


def test_biases_of_zeros_are_nothing_and_others_are_refused(source: Path, tmp_path: Path) -> None:
    quantized, _ = write_int4(source, tmp_path, "gptq")
    edit_checkpoint(quantized, tensors=lambda t: t[f"{MODULE}.bias"][3:4].fill_(1.0))
    with pytest.raises(CheckpointError, match=f"1 left-over.*{MODULE}.bias"):
        CausalLM.from_checkpoint(quantized, CPU, torch.float32)


BREAKS: list[tuple[str, Callable[[Tensors], Any], str]] = [
    ("awq", lambda t: t.pop(f"{MODULE}.qzeros"), f"missing.*{MODULE}.qzeros"),
    ("awq", lambda t: t.pop(f"{MODULE}.scales"), f"missing.*{MODULE}.scales"),
    (
        "awq",
        lambda t: t.update({f"{MODULE}.scales": torch.ones(1, 96)}),
        f"{MODULE}.scales.*shape .1, 96.*makes it .2, 96",
    ),
    (
        "awq",
        lambda t: t.update({f"{MODULE}.qweight": t[f"{MODULE}.qweight"].float()}),
        f"{MODULE}.qweight.*F32, expected I32",
    ),
    ("awq", lambda t: t[f"{MODULE}.scales"].fill_(torch.nan), f"scales of .{MODULE}.*NaN"),
    ("gptq", lambda t: t[f"{MODULE}.g_idx"].fill_(0), f"{MODULE}.g_idx.*desc_act"),
    ("gptq desc_act", lambda t: t[f"{MODULE}.g_idx"].fill_(2), f"{MODULE}.g_idx.*desc_act"),
    (
        "compressed",
        lambda t: t[f"{MODULE}.weight_shape"].fill_(8),
        f"{MODULE}.weight_shape is .8, 8.*.96, 64",
    ),
    (
        "awq",
        lambda t: (
            t.pop("lm_head.weight"),
            t.update({"lm_head.qweight": torch.zeros(64, 8).int()}),
        ),
        "missing tensor 'lm_head.weight'.*in int4, which only projections",
    ),
    (
        "awq",
        lambda t: (
            [t.pop(f"{MODULE}.{end}") for end in ("qweight", "qzeros", "scales")],
            t.update({f"{MODULE}.weight": torch.ones(96, 64)}),
        ),
        "q_proj.*k_proj.*at once.*int4",
    ),
]


@pytest.mark.parametrize(("form", "change", "message"), BREAKS)
def test_broken_checkpoints_are_refused_by_tensor(
    source: Path, tmp_path: Path, form: str, change: Callable[[Tensors], Any], message: str
) -> None:
    quantized, _ = write_int4(source, tmp_path, form)
    edit_checkpoint(quantized, tensors=change)
    with pytest.raises(CheckpointError, match=message):
        CausalLM.from_checkpoint(quantized, CPU, torch.float32)


def test_packed_weights_need_a_config_that_says_how(source: Path, tmp_path: Path) -> None:
    quantized, _ = write_int4(source, tmp_path, "awq")
    edit_checkpoint(quantized, config=lambda c: c.pop("quantization_config"))
    with pytest.raises(CheckpointError, match="packed in int4, but quantization_config"):
        CausalLM.from_checkpoint(quantized, CPU, torch.float32)


def test_widths_that_words_and_groups_do_not_divide_are_refused(tmp_path: Path) -> None:
    shape = replace(SHAPE, intermediate_size=64)
    source = checkpoints.write_llama(tmp_path / "llama", shape=shape)
    quantized, _ = write_int4(source, tmp_path, "awq")
    edit_checkpoint(quantized, config=lambda c: c.update(hidden_size=80))
    with CheckpointReader(quantized, device=CPU, dtype=torch.float32) as reader:
        for shape in ((96, 80), (92, 64)):
            with pytest.raises(CheckpointError, match=f"{MODULE}.*multiple of 8.*group_size 32"):
                reader.load_matrix(f"{MODULE}.weight", shape)


REFUSED = [
    (AWQ_CONFIG | {"bits": 3}, "bits = 3"),
    (AWQ_CONFIG | {"bits": 8}, "bits = 8"),
    (AWQ_CONFIG | {"version": "gemv"}, "version = 'gemv'"),
    (AWQ_CONFIG | {"version": "marlin"}, "version = 'marlin'"),
    (AWQ_CONFIG | {"zero_point": False}, "zero_point = False"),
    (AWQ_CONFIG | {"group_size": -1}, "group_size = -1.*32, 64, 128"),
    (GPTQ_CONFIG | {"bits": 8}, "bits = 8"),
    (GPTQ_CONFIG | {"group_size": 256}, "group_size = 256"),
    (GPTQ_CONFIG | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
    (GPTQ_CONFIG | {"is_marlin_format": True}, "is_marlin_format = True"),
    (GPTQ_CONFIG | {"lm_head": True}, "lm_head = True"),
    (GPTQ_CONFIG | {"dynamic": {"-:.*": {}}}, "dynamic: modules with settings"),
    (COMPRESSED_CONFIG | {"config_groups": {}}, "config_groups must be"),
    (COMPRESSED_CONFIG | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme.type = None"),
    (COMPRESSED_CONFIG | {"sparsity_config": {"format": "2:4"}}, "sparsity_config.format = '2:4'"),
    (COMPRESSED_CONFIG | {"config_groups": {"a": {}}}, "a.weights must be an object"),
    (compressed_config(num_bits=8), "group_0.weights.num_bits = 8"),
    (compressed_config(type="float"), "group_0.weights.type = 'float'"),
    (compressed_config(strategy="channel"), "group_0.weights.strategy = 'channel'"),
    (compressed_config(group_size=16), "group_0.weights.group_size = 16"),
    (compressed_config(actorder="other"), "group_0.weights.actorder = 'other'"),
    (
        COMPRESSED_CONFIG
        | {
            "config_groups": COMPRESSED_CONFIG["config_groups"]
            | {"b": compressed_config(group_size=128)["config_groups"]["group_0"]}
        },
        "group_0, b differ in group_size",
    ),
    (
        COMPRESSED_CONFIG
        | {
            "config_groups": {
                "a": COMPRESSED_CONFIG["config_groups"]["group_0"]
                | {"input_activations": {"num_bits": 8}}
            }
        },
        "a.input_activations",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_other_formats_are_refused_by_field(source: Path, config: Any, message: str) -> None:
    from shared.models.config_file import read_config_json
    from shared.models.decoder_config import parse_model_config

    fields = read_config_json(source) | {"quantization_config": config}
    with pytest.raises(CheckpointError, match=f"c: quantization_config.*{message}"):
        parse_model_config(fields, "c", "LlamaForCausalLM")


def test_speculation_changes_no_token_of_a_target_in_int4(source: Path, tmp_path: Path) -> None:
    quantized, _ = write_int4(source, tmp_path, "awq")
    pairing = Pairing(target=quantized, draft=source, algorithm="standalone")
    target = make_target(pairing)
    assert target.info.quantization == "int4"
    rng = random.Random(5)
    samplings = (SamplingParams(), SamplingParams(temperature=1.0, seed=9))
    shape = TreeShape(num_steps=3, topk=2, num_draft_tokens=6)
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, length), max_new_tokens=10, shape=shape, sampling=sampling
        )
        for length, sampling in zip((7, 21), samplings, strict=True)
    ]
    plain = run_plain(target, requests, alone=True)
    speculative = [fresh(request) for request in requests]
    LocalPair(target, make_draft(pairing)).run(speculative)
    assert [request.output for request in speculative] == [request.output for request in plain]
    assert max(request.accept_length for request in speculative) > 1.5


@pytest.mark.parametrize("field", ["checkpoint_format", "format"])
def test_zeros_of_gptq_v2_have_no_offset_whichever_field_says_so(field: str) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, field: "gptq_v2"}
    parsed = parse_int4(config, "config.json: quantization_config")
    assert parsed is not None
    assert parsed.zero_offset == 0


def test_transforms_of_inputs_are_refused_by_name() -> None:
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config["transform_config"] = {"config_groups": {"R1": {}}}
    with pytest.raises(CheckpointError, match=r"quantization_config\.transform_config"):
        parse_int4(config, "config.json: quantization_config")

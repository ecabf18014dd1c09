"""Checkpoints in FP8, and weights that become FP8: the values, what is refused, and who says so."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.pairing import ModelIdentity
from shared.errors import CheckpointError
from shared.kernels.quantized import QuantizedWeight, are_numbers, quantize, spread_scales
from shared.messages import SamplingParams, TokenTree
from shared.models.checkpoint import CheckpointReader
from shared.models.draft import load_draft
from shared.models.llama import CausalLM
from shared.models.quantization import (
    FP8_LM_HEAD,
    FP8_OUTPUT,
    draft_quantization_while_loading,
    has_fp8_rows,
    quantization_while_loading,
)
from shared.models.weight_memory import weight_bytes
from tests import checkpoints, families
from tests.checkpoints import Shape, Tensors, edit_checkpoint
from tests.deepseek import write_deepseek
from tests.engines import (
    SHAPES,
    Models,
    Pairing,
    PoisonedPair,
    fresh,
    graft,
    make_draft,
    make_target,
    random_tokens,
    run_plain,
)
from tests.local_pair import LocalRequest
from tests.marks import exhaustive
from tests.paged import PagedKV
from tests.quantized import (
    BLOCK_CONFIG,
    FORMS,
    HEAD,
    compressed_config,
    scales_of,
    spread,
    write_dequantized,
    write_fp8,
    write_rounded,
)

CPU = torch.device("cpu")
# Neither width nor any part of what is loaded at once is a multiple of 128.
RAGGED = Shape(
    hidden_size=160, intermediate_size=208, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=40
)
MATRIX, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"


def logits_of(directory: Path, **options: Any) -> torch.Tensor:
    """Return the logits of a prompt."""
    model = CausalLM.from_checkpoint(directory, CPU, torch.float32, **options)
    kv = PagedKV(model.config.kv_layout, page_size=4)
    rows = kv.chain(random_tokens(random.Random(0), 20))
    with torch.inference_mode():
        return model.logits(model.forward(rows).hidden)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_llama(tmp_path_factory.mktemp("source") / "llama", shape=RAGGED)


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_dequantised_weights(
    source: Path, tmp_path: Path, form: str
) -> None:
    quantized = write_fp8(source, tmp_path / "fp8", form)
    plain = write_dequantized(quantized, tmp_path / "plain")
    logits = logits_of(quantized)
    assert torch.equal(logits, logits_of(plain))
    assert not torch.equal(logits, logits_of(source))


@pytest.mark.parametrize("form", ["block", "channel"])
def test_latent_attention_in_fp8_is_that_of_the_dequantised_weights(
    tmp_path: Path, form: str
) -> None:
    source = write_deepseek(tmp_path / "source", num_dense=2)
    quantized = write_fp8(source, tmp_path / "fp8", form)
    logits = logits_of(quantized)
    assert torch.equal(logits, logits_of(write_dequantized(quantized, tmp_path / "plain")))
    assert not torch.equal(logits, logits_of(source))


def test_weights_become_fp8_row_by_row_but_embedding_head_and_norms(
    source: Path, tmp_path: Path
) -> None:
    logits = logits_of(source, quantization="fp8")
    assert torch.equal(logits, logits_of(write_rounded(source, tmp_path / "rounded")))


PER_LAYER = ("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")


@pytest.mark.parametrize("others", [(), PER_LAYER])
@pytest.mark.parametrize("form", FORMS)
def test_layers_without_kv_may_be_fp8_and_what_they_read_is_dequantised(
    tmp_path: Path, form: str, others: tuple[str, ...]
) -> None:
    source = families.write_gemma4_e_with_vision(tmp_path / "source")
    quantized = write_fp8(source, tmp_path / "fp8", form, others=others)
    logits = logits_of(quantized)
    assert torch.equal(logits, logits_of(write_dequantized(quantized, tmp_path / "plain")))
    assert not torch.equal(logits, logits_of(source))


@pytest.mark.parametrize("has_fp8_head", [False, True])
def test_projections_of_layers_without_kv_become_fp8_and_embeddings_per_layer_do_not(
    tmp_path: Path, *, has_fp8_head: bool
) -> None:
    source = families.write(tmp_path / "source", "gemma4_text", **families.GEMMA4_E)
    rounded = write_rounded(source, tmp_path / "rounded", has_fp8_head=has_fp8_head)
    logits = logits_of(source, quantization=FP8_LM_HEAD if has_fp8_head else "fp8")
    assert torch.equal(logits, logits_of(rounded))


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_output_layer_becomes_fp8_beside_its_embedding(tmp_path: Path, *, is_tied: bool) -> None:
    source = checkpoints.write_llama(tmp_path / "source", shape=RAGGED, is_tied=is_tied)
    rounded = write_rounded(source, tmp_path / "rounded", has_fp8_head=True)
    logits = logits_of(source, quantization=FP8_LM_HEAD)
    assert torch.equal(logits, logits_of(rounded))
    assert not torch.equal(logits, logits_of(source, quantization="fp8"))


def test_logits_of_an_output_layer_in_fp8_are_near(source: Path) -> None:
    hidden = torch.randn(9, RAGGED.hidden_size)
    models = [
        CausalLM.from_checkpoint(source, CPU, torch.float32, quantization=quantization)
        for quantization in ("", FP8_OUTPUT)
    ]
    dense, fp8 = (model.logits(hidden) for model in models)
    head = checkpoints.read_tensors(source)[HEAD]
    # A value is off by 1/16 of itself at most; below 2^-6 of its scale, by 2^-10 of the scale.
    step = head.abs().amax(dim=1) / 448 * 2**-10
    most = hidden.abs() @ (head.abs() / 16 + step[:, None]).T
    assert ((fp8 - dense).abs() <= most).all() and not torch.equal(fp8, dense)
    alone = torch.cat([models[1].logits(row[None]) for row in hidden])
    assert torch.equal(alone, fp8)


@pytest.mark.parametrize("form", FORMS)
def test_output_layers_of_checkpoints_may_be_fp8(source: Path, tmp_path: Path, form: str) -> None:
    """Their config.json lists nothing to ignore; what is asked for beside it changes nothing."""
    quantized = write_fp8(source, tmp_path / "fp8", form, has_fp8_head=True)
    plain = write_dequantized(quantized, tmp_path / "plain")
    logits = logits_of(quantized)
    assert torch.equal(logits, logits_of(plain))
    assert torch.equal(logits, logits_of(quantized, quantization=FP8_OUTPUT))
    without = write_fp8(source, tmp_path / "without", form)
    assert not torch.equal(logits, logits_of(without))


def test_an_output_layer_in_fp8_beside_a_tied_embedding_is_refused(
    source: Path, tmp_path: Path
) -> None:
    quantized = write_fp8(source, tmp_path / "fp8", "channel", has_fp8_head=True)
    edit_checkpoint(quantized, config=lambda c: c.update(tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, but .lm_head\.weight"):
        CausalLM.from_checkpoint(quantized, CPU, torch.float32)


def write_minimax(directory: Path) -> Path:
    return families.write(directory, "minimax_m2", **families.MINIMAX_M2)


@pytest.mark.parametrize(
    ("write", "form"), [*((write_deepseek, form) for form in FORMS), (write_minimax, "block")]
)
def test_experts_in_fp8_are_those_of_the_dequantised_weights(
    tmp_path: Path, write: Callable[[Path], Path], form: str
) -> None:
    source = write(tmp_path / "source")
    quantized = write_fp8(source, tmp_path / "fp8", form)
    plain = write_dequantized(quantized, tmp_path / "plain")
    logits = logits_of(quantized)
    assert torch.equal(logits, logits_of(plain))
    assert not torch.equal(logits, logits_of(source))


def test_memory_is_planned_for_experts_that_stay_fp8(tmp_path: Path) -> None:
    """What latent attention cuts into parts is dequantised."""
    quantized = write_fp8(write_deepseek(tmp_path / "deepseek"), tmp_path / "fp8", "block")
    tensors = checkpoints.read_tensors(quantized)
    dense = sum(
        t.numel()
        for name, t in tensors.items()
        if "kv_b_proj.weight" in name or t.dtype != torch.float8_e4m3fn
    )
    total = sum(t.numel() for t in tensors.values())
    expected = 4 * dense + (total - dense) * 33 / 32
    assert weight_bytes(quantized, 4) == pytest.approx(expected, rel=1e-2)
    experts = sum(t.numel() for name, t in tensors.items() if ".experts." in name)
    assert experts > total / 5, "experts are a small part: the comparison proves little"


@pytest.mark.parametrize("name", ["gate_proj", "down_proj"])
def test_experts_of_a_layer_in_several_forms_are_refused(tmp_path: Path, name: str) -> None:
    """One is not in FP8 and the others are."""
    quantized = write_fp8(write_deepseek(tmp_path / "deepseek"), tmp_path / "fp8", "block")
    matrix = f"model.layers.1.mlp.experts.2.{name}.weight"

    def widen(tensors: Tensors) -> None:
        tensors[matrix] = tensors[matrix].float()
        del tensors[f"{matrix}_scale_inv"]

    edit_checkpoint(quantized, tensors=widen)
    with pytest.raises(CheckpointError, match=r"experts of model\.layers\.1\.mlp.*all or none"):
        CausalLM.from_checkpoint(quantized, CPU, torch.float32)


def test_fused_tensors_of_a_checkpoint_have_scales_of_their_own(tmp_path: Path) -> None:
    def fuse(tensors: Tensors) -> None:
        for layer in range(RAGGED.num_layers):
            prefix = f"model.layers.{layer}"
            for fused, module, parts in (
                ("qkv", "self_attn", ("q", "k", "v")),
                ("gate_up", "mlp", ("gate", "up")),
            ):
                names = [f"{prefix}.{module}.{part}_proj.weight" for part in parts]
                stacked = torch.cat([tensors.pop(name) for name in names])
                tensors[f"{prefix}.{module}.{fused}_proj.weight"] = stacked

    phi3 = {"architectures": ["Phi3ForCausalLM"], "rope_scaling": None}
    source = checkpoints.write_llama(tmp_path / "phi3", shape=RAGGED, rope={"rope_type": "default"})
    edit_checkpoint(source, tensors=fuse, config=lambda c: c.update(phi3))
    quantized = write_fp8(source, tmp_path / "fp8", "block")
    plain = write_dequantized(quantized, tmp_path / "plain")
    assert torch.equal(logits_of(quantized), logits_of(plain))


BREAKS: list[tuple[Callable[[Tensors], Any], str]] = [
    (lambda t: t.pop(f"{MATRIX}_scale_inv"), f"{MATRIX}.*needs one tensor of scales"),
    (lambda t: t.update({f"{MATRIX}_scale": torch.ones(1)}), "one tensor of scales.*there are 2"),
    (
        lambda t: t.update({f"{MATRIX}_scale_inv": torch.ones(3, 2)}),
        f"{MATRIX}_scale_inv.*shape .3, 2.*block of 128 x 128",
    ),
    (
        lambda t: t.update({f"{MATRIX}_scale_inv": torch.ones(2, 2, dtype=torch.int32)}),
        f"{MATRIX}_scale_inv.*I32",
    ),
    (lambda t: t[MATRIX].view(torch.uint8)[3, 7:8].fill_(0xFF), f"{MATRIX}.*NaN"),
    (lambda t: t[f"{MATRIX}_scale_inv"].fill_(torch.inf), f"{MATRIX}.*infinity"),
    (
        lambda t: t.update({MATRIX: t[MATRIX].float()}) or t.pop(f"{MATRIX}_scale_inv"),
        "q_proj.*k_proj.*at once.*FP8",
    ),
    (
        lambda t: t.update({HEAD: t[HEAD].to(torch.float8_e4m3fn)}),
        f"{HEAD}.*needs one tensor of scales",
    ),
    (
        lambda t: t.update({EMBEDDING: t[EMBEDDING].to(torch.float8_e4m3fn)}),
        f"{EMBEDDING}.*only projections of layers and the output layer may be FP8",
    ),
    (lambda t: t.update({"model.norm.input_scale": torch.ones(1)}), "left-over.*input_scale"),
]


@pytest.mark.parametrize(("change", "message"), BREAKS)
def test_broken_checkpoints_are_refused_by_tensor(
    source: Path, tmp_path: Path, change: Callable[[Tensors], Any], message: str
) -> None:
    directory = edit_checkpoint(write_fp8(source, tmp_path / "fp8", "block"), tensors=change)
    with pytest.raises(CheckpointError, match=message):
        CausalLM.from_checkpoint(directory, CPU, torch.float32)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_without_numbers_do_not_become_fp8(
    source: Path, tmp_path: Path, value: float
) -> None:
    directory = checkpoints.write_llama(tmp_path / "llama", shape=RAGGED)
    edit_checkpoint(directory, tensors=lambda t: t[MATRIX].view(-1)[7:8].fill_(value))
    with pytest.raises(CheckpointError, match=f"{MATRIX}.*NaN or infinity"):
        CausalLM.from_checkpoint(directory, CPU, torch.float32, quantization="fp8")


CHANNEL = compressed_config("channel")
GROUP = CHANNEL["config_groups"]["group_0"]


def with_weights(**fields: Any) -> dict[str, Any]:
    weights = GROUP["weights"] | fields
    return CHANNEL | {"config_groups": {"group_0": {"weights": weights}}}


REFUSED = [
    ("fp8", "quantization_config must be an object"),
    ({"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes'.*--quantization fp8"),
    ({"quant_method": "mxfp4"}, "quant_method = 'mxfp4'"),
    (BLOCK_CONFIG | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
    (BLOCK_CONFIG | {"weight_block_size": [64, 64]}, "weight_block_size = .64, 64."),
    (CHANNEL | {"format": "int-quantized"}, "format = 'int-quantized'"),
    (CHANNEL | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme.type = None"),
    (CHANNEL | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    (CHANNEL | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config = "),
    (CHANNEL | {"config_groups": {}}, "config_groups must be"),
    (CHANNEL | {"config_groups": {"group_0": {}}}, "group_0.weights must be"),
    (with_weights(num_bits=4), "group_0.weights.num_bits = 4"),
    (with_weights(type="int"), "group_0.weights.type = 'int'"),
    (with_weights(strategy="group"), "strategy = 'group'"),
    (with_weights(symmetric=False), "symmetric = False"),
    (with_weights(strategy="block", block_structure=[1, 128]), "block_structure"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_other_formats_are_refused_by_field(source: Path, config: Any, message: str) -> None:
    from shared.models.config_file import read_config_json
    from shared.models.decoder_config import parse_model_config

    fields = read_config_json(source)
    assert parse_model_config(fields, "c", "LlamaForCausalLM").quantization == ""
    with pytest.raises(CheckpointError, match=f"c: quantization_config.*{message}|{message}"):
        parse_model_config(fields | {"quantization_config": config}, "c", "LlamaForCausalLM")


def test_memory_is_planned_for_what_becomes_fp8(source: Path, tmp_path: Path) -> None:
    tensors = checkpoints.read_tensors(source)
    size = sum(t.numel() for t in tensors.values())
    projections = sum(t.numel() for name, t in tensors.items() if name.endswith("_proj.weight"))
    assert weight_bytes(source, 2) == 2 * size
    expected = 2 * (size - projections) + projections * 33 / 32
    assert weight_bytes(source, 2, "fp8") == pytest.approx(expected, rel=1e-3)
    stored = write_fp8(source, tmp_path / "fp8", "block")
    assert weight_bytes(stored, 2) == pytest.approx(expected, rel=1e-3)
    head = tensors[HEAD].numel()
    smaller = expected - 2 * head + head * 33 / 32
    assert weight_bytes(source, 2, FP8_LM_HEAD) == pytest.approx(smaller, rel=1e-3)
    assert weight_bytes(stored, 2, FP8_OUTPUT) == pytest.approx(smaller, rel=1e-3)
    stored = write_fp8(source, tmp_path / "head", "block", has_fp8_head=True)
    assert weight_bytes(stored, 2) == pytest.approx(smaller, rel=1e-3)
    tied = checkpoints.write_llama(tmp_path / "tied", shape=RAGGED, is_tied=True)
    assert weight_bytes(tied, 2, FP8_LM_HEAD) == pytest.approx(smaller, rel=1e-3)


def test_a_target_says_how_it_is_quantised_and_moves_to_none_that_is_not(
    models: Models, tmp_path: Path
) -> None:
    def info(directory: Path, quantization: str = "auto") -> Any:
        pairing = Pairing(target=directory, draft=directory, algorithm="none")
        return make_target(pairing, quantization=quantization).info

    plain, online = info(models.llama), info(models.llama, "fp8")
    assert (plain.quantization, online.quantization) == ("", "fp8")
    assert plain.model_hash == online.model_hash and plain.logits_hash != online.logits_hash
    same_logits = replace(plain, logits_hash=online.logits_hash)
    mine, other = ModelIdentity.of(online), ModelIdentity.of(same_logits)
    assert mine.fingerprint != other.fingerprint
    assert mine.difference(other) == "quantization 'fp8' instead of ''"
    stored = info(write_fp8(models.llama, tmp_path / "fp8", "channel"))
    assert stored.quantization == "fp8" and stored.model_hash != online.model_hash
    assert stored.logits_hash == online.logits_hash  # the same scales, by the same rule
    with_head = info(models.llama, FP8_LM_HEAD)
    assert with_head.quantization == "fp8_lm_head" and with_head.logits_hash != online.logits_hash
    difference = ModelIdentity.of(with_head).difference(ModelIdentity.of(online))
    assert "quantization 'fp8_lm_head' instead of 'fp8'" in difference
    both = info(tmp_path / "fp8", FP8_LM_HEAD)
    assert both.quantization == "fp8+fp8_lm_head" and both.logits_hash == with_head.logits_hash


def test_what_an_fp8_checkpoint_has_in_another_dtype_stays_so() -> None:
    assert quantization_while_loading("fp8", checkpoint="") == "fp8"
    assert quantization_while_loading("fp8", checkpoint="fp8") == ""
    assert quantization_while_loading("auto", checkpoint="fp8") == ""
    assert quantization_while_loading("auto", checkpoint="") == ""
    assert quantization_while_loading("none", checkpoint="") == ""
    assert quantization_while_loading("fp8_lm_head", checkpoint="") == FP8_LM_HEAD
    assert quantization_while_loading("fp8_lm_head", checkpoint="int4") == FP8_OUTPUT


DRAFTS = [
    ("auto", "", True, FP8_LM_HEAD),
    ("auto", "", False, ""),
    ("auto", "fp8", True, FP8_OUTPUT),
    ("auto", "int4", False, ""),
    ("fp8", "", False, FP8_LM_HEAD),
    ("fp8_lm_head", "", False, FP8_LM_HEAD),
    ("fp8", "int4", False, FP8_OUTPUT),
    ("none", "", True, ""),
]


@pytest.mark.parametrize(("name", "checkpoint", "is_faster", "expected"), DRAFTS)
def test_drafts_take_what_is_faster(
    name: str, checkpoint: str, expected: str, *, is_faster: bool
) -> None:
    found = draft_quantization_while_loading(name, checkpoint=checkpoint, is_faster=is_faster)
    assert found == expected


@pytest.mark.parametrize("quantization", [FP8_LM_HEAD, FP8_OUTPUT, ""])
@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp", "standalone", "frozen_kv_mtp"])
def test_output_layers_of_drafts_become_fp8(
    models: Models, kind: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []

    def note(weight: torch.Tensor, **options: bool) -> QuantizedWeight:
        made.append(weight)
        return quantize(weight, **options)

    monkeypatch.setattr("shared.models.checkpoint.quantize", note)
    pairing = models.pairing(kind)
    draft = load_draft(
        kind,
        pairing.draft,
        pairing.target,
        device=CPU,
        dtype=torch.float32,
        quantization=quantization,
    )
    outputs = [weight for weight in made if len(weight) == draft.vocab_size]
    assert len(outputs) == bool(quantization)
    assert (len(made) > 1) == (quantization == FP8_LM_HEAD)


@pytest.mark.parametrize("kind", ["eagle", "mtp", "standalone"])
def test_drafts_take_an_output_layer_in_fp8_from_the_checkpoint_of_their_target(
    models: Models, tmp_path: Path, kind: str
) -> None:
    pairing = models.pairing(kind)
    options = {"kept": ("input_proj",), "has_fp8_head": True}
    fp8 = write_fp8(pairing.target, tmp_path / "fp8", "block", **options)
    plain = write_dequantized(fp8, tmp_path / "plain")
    drafts = [
        load_draft(
            kind,
            pairing.draft if kind == "eagle" else target,
            target,
            device=CPU,
            dtype=torch.float32,
        )
        for target in (fp8, plain)
    ]
    hidden = torch.randn(3, drafts[0].hidden_size)
    logits, want = (draft.logits(hidden) for draft in drafts)
    assert torch.equal(logits, want)


def test_an_eagle3_head_may_have_its_output_layer_in_fp8(models: Models, tmp_path: Path) -> None:
    pairing = models.pairing("eagle3")
    fp8 = write_fp8(pairing.draft, tmp_path / "fp8", "channel", has_fp8_head=True)
    drafts = [
        load_draft("eagle3", path, pairing.target, device=CPU, dtype=torch.float32)
        for path in (fp8, write_dequantized(fp8, tmp_path / "plain"))
    ]
    hidden = torch.randn(3, drafts[0].hidden_size)
    logits, want = (draft.logits(hidden) for draft in drafts)
    assert torch.equal(logits, want)


def test_an_output_layer_in_fp8_that_a_draft_takes_must_hold_numbers(
    models: Models, tmp_path: Path
) -> None:
    def damage(tensors: Tensors) -> None:
        tensors[HEAD].view(torch.uint8)[3, 2] = 0x7F

    pairing = models.pairing("eagle")
    fp8 = write_fp8(pairing.target, tmp_path / "fp8", "block", has_fp8_head=True)
    target = edit_checkpoint(fp8, tensors=damage)
    with pytest.raises(CheckpointError, match=f"{target}.*'{HEAD}' or its scales hold NaN"):
        load_draft("eagle", pairing.draft, target, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_dequantised_and_looked_at_in_parts_as_they_are_whole(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    weight = torch.randn(300, 140)
    scales = scales_of(weight, form)
    values = (weight / spread(scales, weight.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = spread_scales(scales[None], weight.shape)
    assert stored is not None
    fp8 = QuantizedWeight(values=values, scales=stored[0], dtype=torch.bfloat16)
    whole = fp8.dequantized()
    monkeypatch.setattr("shared.kernels.quantized._QUANTIZED_ROWS", 7)
    assert torch.equal(fp8.dequantized(), whole)
    assert torch.equal(fp8.dequantized(torch.bfloat16), whole.bfloat16())
    for at_once in (8, 1000, 1 << 20):
        monkeypatch.setattr("shared.kernels.quantized._CHECKED_VALUES", at_once)
        assert fp8.is_finite()
        values.view(torch.uint8)[299, 139] = 0xFF
        assert not fp8.is_finite()
        values.view(torch.uint8)[299, 139] = 0


@pytest.mark.parametrize("at_once", [8, 24, 1 << 20])
@pytest.mark.parametrize(("width", "begin"), [(256, 0), (256, 3), (251, 0), (1, 0)])
def test_every_byte_that_is_nan_is_found_in_its_row(
    monkeypatch: pytest.MonkeyPatch, width: int, begin: int, at_once: int
) -> None:
    """Whether eight bytes are looked at at once or, since they lie elsewhere, one by one."""
    monkeypatch.setattr("shared.kernels.quantized._CHECKED_VALUES", at_once)
    numbers = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
    num_rows = 2 * width + 1
    bits = torch.empty(begin + num_rows * width, dtype=torch.uint8)[begin:].view(num_rows, width)
    bits.copy_(numbers[torch.randint(len(numbers), bits.shape)])
    assert are_numbers(bits).all()
    for column in range(width):
        bits[2 * column, column] = 0x7F if column % 3 else 0xFF
    assert are_numbers(bits).tolist() == [
        row % 2 == 1 or row == 2 * width for row in range(num_rows)
    ]


def test_weights_become_fp8_in_parts_as_they_do_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(23, 40) * torch.logspace(-3, 3, 23)[:, None]
    weight[4] = 0
    whole = quantize(weight, has_fp8_rows=True)
    monkeypatch.setattr("shared.kernels.quantized._QUANTIZED_ROWS", 5)
    parts = quantize(weight, has_fp8_rows=True)
    assert torch.equal(parts.values.view(torch.uint8), whole.values.view(torch.uint8))
    assert torch.equal(parts.scales, whole.scales)
    assert parts.values.dtype is torch.float8_e4m3fn and parts.has_fp8_rows


@pytest.mark.parametrize("kind", ["eagle3", "standalone", "target"])
def test_an_output_layer_that_is_to_become_fp8_and_holds_no_numbers_is_refused(
    models: Models, tmp_path: Path, kind: str
) -> None:
    def damage(tensors: Tensors) -> None:
        tensors[HEAD][3, 2] = math.nan

    pairing = models.pairing("standalone" if kind == "target" else kind)
    damaged = edit_checkpoint(shutil.copytree(pairing.draft, tmp_path / kind), tensors=damage)
    options = {"device": CPU, "dtype": torch.float32, "quantization": FP8_LM_HEAD}
    with pytest.raises(CheckpointError, match="the output layer holds NaN"):
        if kind == "target":
            CausalLM.from_checkpoint(damaged, **options)
        else:
            load_draft(kind, damaged, pairing.target, **options)


def test_the_output_layer_of_a_target_stays(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        "shared.models.checkpoint.quantize",
        lambda weight, **options: sizes.append(len(weight)) or quantize(weight, **options),
    )
    model = CausalLM.from_checkpoint(models.llama, CPU, torch.float32, quantization="fp8")
    assert sizes and model.config.vocab_size not in sizes


CASES = [
    *(("fp8", 16, True), ("fp8_lm_head", 4, True)),
    *exhaustive([("fp8", 1, True), ("fp8", 4, True), ("fp8_lm_head", 64, True)]),
    *exhaustive([("fp8", 16, False), ("fp8", 2, False)]),
]


@pytest.mark.parametrize(("quantization", "page_size", "is_self_tested"), CASES)
def test_speculation_changes_no_token_of_a_quantised_target(
    models: Models, quantization: str, page_size: int, *, is_self_tested: bool
) -> None:
    pairing = models.pairing("eagle3")
    options = {"quantization": quantization, "page_size": page_size}
    target = make_target(pairing, self_test=is_self_tested, **options)
    rng = random.Random(5)
    samplings = (SamplingParams(), SamplingParams(temperature=1.0, seed=9))
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, length), max_new_tokens=12, shape=shape, sampling=sampling
        )
        for length, shape, sampling in zip((7, 33), SHAPES[3:5], samplings, strict=True)
    ]
    plain = run_plain(target, requests, alone=True)
    by_id = {f"r{i + 1}": request for i, request in enumerate(plain)}
    pair = PoisonedPair(target, make_draft(pairing, quantization=quantization, page_size=4))

    def edit(tree: TokenTree) -> TokenTree:
        done = len(pair.requests[tree.request_id].output)
        return graft(tree, by_id[tree.request_id].output[done:], rng)

    pair.edit_tree = edit
    speculative = [fresh(request) for request in requests]
    pair.run(speculative)
    for got, want in zip(speculative, plain, strict=True):
        assert got.output == want.output
    assert max(request.accept_length for request in speculative) > 1.5


def activations(**scheme: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors with a scheme of activations."""
    config = compressed_config("channel")
    config["config_groups"]["group_0"]["input_activations"] = scheme or None
    return config


@pytest.mark.parametrize(
    ("config", "are_fp8"),
    [
        (BLOCK_CONFIG, True),
        (BLOCK_CONFIG | {"activation_scheme": "static"}, True),
        ({"quant_method": "fp8"}, False),
        (activations(num_bits=8, type="float", dynamic=True), True),
        (activations(num_bits=8, type="int", dynamic=True), False),
        (activations(num_bits=16, type="float"), False),
        (activations(), False),
        (compressed_config("channel"), False),
    ],
)
def test_rows_are_quantised_if_the_checkpoint_asks_for_it(
    config: dict[str, Any], *, are_fp8: bool
) -> None:
    assert has_fp8_rows(config) == are_fp8


@pytest.mark.parametrize(("form", "are_fp8"), [("block", True), ("channel", False)])
def test_weights_say_whether_rows_are_quantised(
    tmp_path: Path, form: str, *, are_fp8: bool
) -> None:
    source = checkpoints.write_llama(tmp_path / "source", shape=RAGGED)
    directory = write_fp8(source, tmp_path / "fp8", form)
    size = (RAGGED.num_heads * RAGGED.head_dim, RAGGED.hidden_size)
    for place, quantization, want in ((directory, "", are_fp8), (source, "fp8", True)):
        with CheckpointReader(
            place, device=CPU, dtype=torch.bfloat16, quantization=quantization
        ) as reader:
            weight = reader.load_matrix(MATRIX, size)
        assert isinstance(weight, QuantizedWeight)
        assert weight.has_fp8_rows == want
        assert weight.rearranged(torch.clone).has_fp8_rows == want

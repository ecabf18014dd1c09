"""gpt-oss: its config.json, experts in MXFP4, and speculation that changes no token."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shared.errors import CheckpointError
from shared.messages import SamplingParams, TokenTree
from shared.models.config import ModelConfig
from shared.models.experts_config import ExpertsConfig, ExpertTensors, Scoring
from shared.models.llama import CausalLM
from shared.models.quantization import read_quantization
from shared.models.rope_config import RopeKind
from shared.models.weight_memory import weight_bytes
from tests.checkpoints import Tensors, edit_checkpoint, read_tensors, write_eagle3
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
from tests.gpt_oss import NUM_EXPERTS, WIDTH, write_gpt_oss
from tests.local_pair import LocalRequest
from tests.unit.test_models_llama import Runner, tokens_of

CPU = torch.device("cpu")
EXPERTS = "model.layers.1.mlp.experts"
BLOCKS, SCALES = f"{EXPERTS}.down_proj_blocks", f"{EXPERTS}.gate_up_proj_scales"


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint whose experts are MXFP4; one of its blocks is of zeros, with scale 0."""
    directory = write_gpt_oss(tmp_path_factory.mktemp("packed"), is_mxfp4=True)

    def edit(tensors: Tensors) -> None:
        tensors[BLOCKS][2, 5, 0] = 0
        tensors[BLOCKS.replace("_blocks", "_scales")][2, 5, 0] = 0

    return edit_checkpoint(directory, tensors=edit)


def logits_of(directory: Path) -> torch.Tensor:
    """Return the logits of a text longer than the window."""
    model = CausalLM.from_checkpoint(directory, CPU, torch.float32)
    return model.logits(Runner(model).extend(tokens_of(70)).hidden)


def test_logits_in_mxfp4_are_those_of_transformers(packed: Path) -> None:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        packed,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).eval()
    want = oracle(torch.tensor([tokens_of(70)])).logits[0]
    torch.testing.assert_close(logits_of(packed), want, atol=1e-4, rtol=0)


def test_weights_in_mxfp4_are_those_that_transformers_makes_of_them(
    packed: Path, tmp_path: Path
) -> None:
    # 2 s, which processes that only collect this test need not take.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def dequantize(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_blocks")]:
            module = name.removesuffix("_blocks")
            parts = tensors.pop(name), tensors.pop(f"{module}_scales")
            tensors[module] = convert_moe_packed_tensors(*parts, dtype=torch.float32)

    dense = write_gpt_oss(tmp_path)
    edit_checkpoint(dense, tensors=lambda t: (t.clear(), t.update(read_tensors(packed))))
    edit_checkpoint(dense, tensors=dequantize)
    assert torch.equal(logits_of(packed), logits_of(dense))


def test_config(packed: Path) -> None:
    config = ModelConfig.from_checkpoint(packed)
    assert config.experts == ExpertsConfig(
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=3,
        width=WIDTH,
        scoring=Scoring.SOFTMAX_OF_CHOSEN,
        router_bias="router.bias",
        has_bias=True,
        swiglu_limit=0.7,
        swiglu_alpha=1.702,
        tensors=ExpertTensors(router="router", is_fused=True),
    )
    assert config.layer_windows == (20, 0, 20) and config.sliding_window == 0
    assert config.sinks == "sinks" and config.has_qkv_bias and config.has_o_bias
    assert config.rope.kind is RopeKind.YARN and not config.rope.is_truncated
    assert config.quantization == read_quantization(packed) == "mxfp4"


def test_absent_fields_mean_what_they_mean_to_transformers(tmp_path: Path) -> None:
    absent = ("layer_types", "rope_scaling", "rope_theta", "head_dim", "sliding_window")
    absent += ("swiglu_limit", "rms_norm_eps", "attention_bias", "torch_dtype")
    directory = write_gpt_oss(tmp_path, num_layers=4)
    edit_checkpoint(directory, config=lambda c: [c.pop(name) for name in absent])
    ours, theirs = ModelConfig.from_checkpoint(directory), transformers.GptOssConfig()
    rope = theirs.rope_parameters
    assert (ours.rope.theta, ours.rope.factor) == (rope["rope_theta"], rope["factor"])
    assert ours.rope.original_max_position == rope["original_max_position_embeddings"]
    assert ours.rope.is_truncated is rope["truncate"]
    assert (ours.head_dim, ours.rms_norm_eps) == (theirs.head_dim, theirs.rms_norm_eps)
    assert ours.has_qkv_bias is ours.has_o_bias is theirs.attention_bias
    assert ours.experts is not None
    assert ours.experts.swiglu_limit == theirs.swiglu_limit
    assert ours.experts.swiglu_alpha == theirs.swiglu_alpha
    assert ours.dtype == "bfloat16"  # of the published tensors, whose config.json does not say it
    windows = [
        theirs.sliding_window if kind == "sliding_attention" else 0
        for kind in theirs.layer_types[:4]
    ]
    assert list(ours.layer_windows) == windows


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"swiglu_limit": -7.0}, "swiglu_limit must be a finite number > 0, got -7.0"),
        ({"swiglu_alpha": "1.7"}, "swiglu_alpha must be a finite number > 0, got '1.7'"),
        ({"layer_types": ["sliding_attention"]}, "layer_types must hold"),
        ({"quantization_config": {"quant_method": "mxfp8"}}, "quant_method = 'mxfp8'"),
    ],
)
def test_fields_that_cannot_be_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    directory = edit_checkpoint(write_gpt_oss(tmp_path), config=lambda c: c.update(fields))
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_checkpoint(directory)


BREAKS: list[tuple[Callable[[Tensors], Any], str]] = [
    (lambda t: t.pop(SCALES), f"missing tensor '{SCALES}' of shape \\[6, 64, 3\\]"),
    (lambda t: t.pop(BLOCKS), f"missing tensor '{BLOCKS.removesuffix('_blocks')}'"),
    (lambda t: t.update({BLOCKS: t[BLOCKS][..., :15].contiguous()}), f"{BLOCKS}.*has shape"),
    (lambda t: t.update({BLOCKS: t[BLOCKS].float()}), f"{BLOCKS}.*is F32, expected U8"),
    (lambda t: t[SCALES][3].fill_(255), f"{SCALES}.*holds NaN"),
    (lambda t: t[SCALES][3].fill_(253), f"{SCALES}.*scales beyond float32"),
    (lambda t: t.pop(f"{EXPERTS}.down_proj_bias"), "missing tensor.*down_proj_bias"),
    (lambda t: t.pop("model.layers.0.self_attn.sinks"), "missing tensor.*sinks' of shape .6"),
    (lambda t: t.pop("model.layers.2.mlp.router.bias"), "missing tensor.*router.bias"),
]


@pytest.mark.parametrize(("change", "message"), BREAKS)
def test_broken_checkpoints_are_refused_by_tensor(
    tmp_path: Path, change: Callable[[Tensors], Any], message: str
) -> None:
    directory = edit_checkpoint(write_gpt_oss(tmp_path, is_mxfp4=True), tensors=change)
    with pytest.raises(CheckpointError, match=message):
        CausalLM.from_checkpoint(directory, CPU, torch.float32)


def test_blocks_must_be_whole(tmp_path: Path) -> None:
    directory = write_gpt_oss(tmp_path, hidden_size=96, is_mxfp4=True)
    edit_checkpoint(directory, config=lambda c: c.update(intermediate_size=24))
    edit_checkpoint(
        directory,
        tensors=lambda t: t.update(
            {
                name: value[:, :48].contiguous()
                for name, value in t.items()
                if "gate_up_proj" in name
            }
        ),
    )
    with pytest.raises(
        CheckpointError, match="down_proj' is MXFP4 with 24 inputs; .*multiple of 32"
    ):
        CausalLM.from_checkpoint(directory, CPU, torch.float32)


def test_memory_is_planned_for_4_bits(packed: Path) -> None:
    tensors = read_tensors(packed)
    num_bytes = sum(t.numel() for t in tensors.values() if t.dtype == torch.uint8)
    others = sum(t.numel() for t in tensors.values() if t.dtype != torch.uint8)
    expected = 2 * others + num_bytes * 33 / 32
    assert weight_bytes(packed, 2) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("is_self_tested", [False, True])
def test_speculation_changes_no_token(models: Models, *, is_self_tested: bool) -> None:
    """With an EAGLE-3 head, beyond the window, in batches and on pages that are NaN elsewhere."""
    path = models.get("gpt-oss-mxfp4", lambda d: write_gpt_oss(d, is_mxfp4=True))
    head = models.get("gpt-oss-eagle3", lambda d: write_eagle3(d, path))
    pairing = Pairing(target=path, draft=head, algorithm="eagle3")
    target = make_target(pairing, self_test=is_self_tested)
    assert target.info.quantization == "mxfp4"
    rng = random.Random(5)
    samplings = (SamplingParams(), SamplingParams(temperature=1.0, seed=9), SamplingParams())
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, length), max_new_tokens=14, shape=shape, sampling=sampling
        )
        for length, shape, sampling in zip((7, 33, 61), SHAPES[3:6], samplings, strict=True)
    ]
    plain = run_plain(target, requests, alone=True)
    by_id = {f"r{i + 1}": request for i, request in enumerate(plain)}
    pair = PoisonedPair(target, make_draft(pairing, page_size=4))

    def edit(tree: TokenTree) -> TokenTree:
        done = len(pair.requests[tree.request_id].output)
        return graft(tree, by_id[tree.request_id].output[done:], rng)

    pair.edit_tree = edit
    speculative = [fresh(request) for request in requests]
    pair.run(speculative)
    for got, want in zip(speculative, plain, strict=True):
        assert got.output == want.output
        assert len(set(got.output)) > 3, "the text does not wander"
    assert max(request.accept_length for request in speculative) > 1.5

"""Checkpoints of random weights are ones that both workers load, and the layer of MTP guesses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks import inflate, random_checkpoint
from benchmarks.random_checkpoint import FP8, MODELS, RandomTensor, num_parameters
from shared.messages import SamplingParams, TreeShape
from shared.models.llama import CausalLM
from tests.checkpoints import read_tensors
from tests.engines import Pairing, make_draft, make_target
from tests.local_pair import LocalPair, LocalRequest
from tests.quantized import write_dequantized
from tests.unit.test_models_llama import Runner, load_transformers, tokens_of

CPU = torch.device("cpu")
TREES = [
    TreeShape(num_steps=steps, topk=topk, num_draft_tokens=nodes)
    for steps, topk, nodes in ((1, 1, 2), (3, 1, 4), (4, 4, 16))
]


def write(directory: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> Path:
    argv = ["random_checkpoint", "--model", "small-glm", "--out", str(directory), *flags]
    monkeypatch.setattr(sys, "argv", argv)
    num_threads = torch.get_num_threads()
    random_checkpoint.main()
    torch.set_num_threads(num_threads)
    return directory


@pytest.mark.parametrize("weights", random_checkpoint.WEIGHTS)
def test_speculation_by_the_layer_of_mtp_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    directory = write(tmp_path / "glm", monkeypatch, "--weights", weights)
    pairing = Pairing(target=directory, draft=directory, algorithm="mtp")
    target = make_target(pairing)
    runs = []
    for shapes in ([None] * len(TREES), TREES):
        requests = [
            LocalRequest(
                prompt=[7 + i, 300, 12, 4000],
                max_new_tokens=24,
                shape=shape,
                sampling=SamplingParams(temperature=float(i == 0), seed=i),
            )
            for i, shape in enumerate(shapes)
        ]
        LocalPair(target, make_draft(pairing) if shapes[0] else None).run(requests)
        runs.append(requests)
    for plain, speculative in zip(*runs, strict=True):
        assert speculative.output == plain.output and len(plain.output) == 24
        assert speculative.accept_length > 1.3
        assert len(set(plain.output)) > 8, "the text wanders"


@pytest.mark.slow
@torch.inference_mode()
def test_logits_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the dequantised weights, of which some blocks are not whole."""
    directory = write(tmp_path / "glm", monkeypatch)
    ids = tokens_of(20)
    runner = Runner(CausalLM.from_checkpoint(directory, CPU, torch.float32))
    got = runner.model.logits(runner.extend(ids).hidden)
    plain = load_transformers(write_dequantized(directory, tmp_path / "plain"))
    torch.testing.assert_close(got, plain(torch.tensor([ids])).logits[0], atol=1e-3, rtol=1e-4)


def test_files_are_those_of_a_published_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = read_tensors(write(tmp_path / "one", monkeypatch))
    monkeypatch.setattr(inflate, "MAX_SHARD_BYTES", 2**20)
    sharded = write(tmp_path / "sharded", monkeypatch)
    assert len(list(sharded.glob("*.safetensors"))) > 5
    again, other = (
        read_tensors(sharded),
        read_tensors(write(tmp_path / "o", monkeypatch, "--seed=1")),
    )
    assert one.keys() == again.keys() == other.keys()
    scales = [name for name in one if name.endswith("_scale_inv")]
    assert len(scales) == 4 * 4 + 3 * 9 * 3 + 3 and len(one) > 2 * len(scales)
    for name in scales:
        values = one[name.removesuffix("_scale_inv")]
        assert values.dtype is FP8 and values.float().isfinite().all()
        assert list(one[name].shape) == [math.ceil(size / 128) for size in values.shape]
        assert one[name].unique().numel() == one[name].numel()
    for name, tensor in one.items():
        same, changed = again[name], other[name]
        assert torch.equal(tensor.view(torch.uint8), same.view(torch.uint8)), name
        is_new = not torch.equal(tensor.view(torch.uint8), changed.view(torch.uint8))
        assert is_new == ("norm" not in name), name
    layer = "model.layers.3"
    for own, copied in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert torch.equal(one[f"{layer}.{own}.weight"], one[f"{copied}.weight"])
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == one.keys()


@pytest.mark.slow
def test_glm_4_5_air_has_the_sizes_that_transformers_makes_of_its_config() -> None:
    checkpoint = random_checkpoint.random_checkpoint(MODELS["glm-4.5-air"])
    recipes = checkpoint.recipes
    numbers = {
        name: math.prod(each.shape)
        for name, each in recipes.items()
        if not name.endswith("_scale_inv")
    }
    mtp = [name for name in numbers if name.startswith("model.layers.46.")]
    fields = {
        k: v for k, v in checkpoint.fields.items() if k not in ("model_type", "architectures")
    }
    del fields["quantization_config"]
    with torch.device("meta"):
        model = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**fields))
    wanted = model.state_dict()
    assert sum(numbers.values()) == num_parameters(checkpoint)
    total = num_parameters(checkpoint) - sum(numbers[name] for name in mtp)
    assert total == sum(tensor.numel() for tensor in wanted.values())
    assert 106e9 < total < 107e9
    for name, tensor in wanted.items():
        if ".experts." not in name:
            assert recipes[name].shape == tensor.shape, name
    ragged = recipes["model.layers.0.mlp.down_proj.weight_scale_inv"]
    assert ragged.shape == (32, 86)  # 10944 = 85.5 * 128
    in_fp8 = {name.split(".")[-2] for name, each in recipes.items() if each.dtype is FP8}
    assert in_fp8 == {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    assert recipes["model.layers.46.mlp.experts.127.down_proj.weight"].shape == (4096, 1408)


def test_values_are_normal_ones_whatever_their_number() -> None:
    count = random_checkpoint.NUM_VALUES + 100
    tensor = RandomTensor(shape=(1, count), dtype=FP8, std=32.0, seed=3).make("x", CPU)
    assert tensor.float().std() == pytest.approx(32, rel=1e-2)
    assert torch.equal(tensor[:, :100].float(), tensor[:, -100:].float())

"""The inflated pair computes what the bundled pair computes, bit for bit.

Its sums are longer by zeros. That zeros change no bit is a property of elementwise products, so
these are what both pairs multiply by here; how a library adds up longer rows is the library's.

With experts it computes the same but for rounding: their weights sum to 1 in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks import inflate
from benchmarks.calibration import read_prompts
from benchmarks.inflate import inflate_bundled, write_checkpoint
from benchmarks.inflation import (
    SHAPES,
    Checkpoint,
    InflatedReader,
    feature_layers,
    inflate_pair,
    place_layers,
    unused_row,
)
from benchmarks.models import open_pair
from shared.kernels import products_cpu
from shared.kernels.expert_choice import ChosenExperts, choose_experts
from shared.messages import SamplingParams, TreeShape
from shared.models import experts
from shared.models.checkpoint import CheckpointReader
from shared.models.checkpoint_names import resolve_model
from shared.models.config import ModelConfig, feature_spec
from shared.models.digest import model_hash
from shared.models.llama import CausalLM
from tests.engines import Pairing, make_draft, make_target
from tests.local_pair import LocalPair, LocalRequest
from tests.marks import EXHAUSTIVE
from tests.paged import PagedKV

SHAPE = SHAPES["small"]
TREE = TreeShape(num_steps=3, topk=4, num_draft_tokens=8)


@pytest.fixture(scope="module")
def checkpoints() -> dict[str, Checkpoint]:
    return inflate_bundled("small")


@pytest.fixture(scope="module")
def large(checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Pairing:
    return write_pair(checkpoints, tmp_path_factory.mktemp("inflated"))


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Pairing:
    return write_pair(inflate_bundled("small-experts"), tmp_path_factory.mktemp("experts"))


def write_pair(checkpoints: dict[str, Checkpoint], directory: Path) -> Pairing:
    for role, checkpoint in checkpoints.items():
        write_checkpoint(checkpoint, directory / role)
    return Pairing(target=directory / "target", draft=directory / "eagle3", algorithm="eagle3")


@pytest.fixture(scope="module")
def small() -> Pairing:
    return Pairing(
        target=resolve_model("demo", "target"),
        draft=resolve_model("demo", "eagle3"),
        algorithm="eagle3",
    )


@pytest.fixture
def _elementwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("OneDnn", "Blas"):
        monkeypatch.setattr(products_cpu, library, products_cpu.Elementwise)
    monkeypatch.setattr(products_cpu, "BatchLibrary", products_cpu.ElementwiseBatches)


@pytest.fixture
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def forward(
    directory: Path, ids: list[int], dtype: torch.dtype, layer_ids: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a prompt, and the outputs of layers."""
    model = CausalLM.from_checkpoint(directory, torch.device("cpu"), dtype)
    kv = PagedKV(model.config.kv_layout, dtype=dtype, max_tokens=256)
    output = model.forward(kv.chain(ids), capture_layers=layer_ids)
    assert output.captured is not None
    captured = output.captured.view(len(ids), len(layer_ids), model.config.hidden_size)
    return model.logits(output.hidden), captured


@pytest.mark.slow
@pytest.mark.usefixtures("_elementwise")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=EXHAUSTIVE)])
def test_logits_and_features_are_the_small_models(
    inference: None, small: Pairing, large: Pairing, dtype: torch.dtype
) -> None:
    ids = read_prompts(small.target, 1)[0][:8]
    logits, features = forward(small.target, ids, dtype, feature_layers(12))
    large_logits, large_features = forward(
        large.target, ids, dtype, feature_layers(SHAPE.num_layers)
    )
    assert torch.equal(large_logits[:, : logits.shape[1]], logits)
    # Far below the largest logit: 10^5 such rows have no probability that float32 could add.
    unused = large_logits[:, logits.shape[1] :].amax(dim=1)
    assert (logits.logsumexp(-1) - unused > 25).all()
    assert torch.equal(large_features[..., : features.shape[-1]], features)
    assert not large_features[..., features.shape[-1] :].any()


@pytest.mark.slow
def test_engines_that_capture_the_inputs_of_those_layers_see_the_same(
    inference: None, large: Pairing
) -> None:
    first, *others = feature_layers(SHAPE.num_layers)
    layer_ids = (first, first + 1, *others, *(layer - 1 for layer in others))
    _, captured = forward(large.target, [5, 6, 7], torch.float32, layer_ids)
    assert torch.equal(captured[:, 0], captured[:, 1])
    assert torch.equal(captured[:, 2:4], captured[:, 4:6])


@pytest.mark.slow
@pytest.mark.usefixtures("_elementwise")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=EXHAUSTIVE)])
def test_outputs_trees_and_acceptance_are_the_small_pairs(
    small: Pairing, large: Pairing, dtype: str
) -> None:
    prompt = read_prompts(small.target, 1)[0][:12]
    runs = []
    for pairing in (small, large):
        requests = [
            LocalRequest(
                prompt=prompt,
                max_new_tokens=6,
                shape=TREE,
                sampling=SamplingParams(temperature=temperature, seed=5),
            )
            for temperature in (0.0, 1.0)
        ]
        target = make_target(pairing, dtype=dtype, num_pages=64, max_context_len=40)
        draft = make_draft(pairing, dtype=dtype, num_pages=512)
        LocalPair(target, draft).run(requests)
        runs.append(requests)
    for before, after in zip(*runs, strict=True):
        assert after.output == before.output
        assert after.accept_length == before.accept_length > 1
        for tree, large_tree in zip(before.trees, after.trees, strict=True):
            assert large_tree.token_ids == tree.token_ids
            assert large_tree.parent_index == tree.parent_index
            assert large_tree.cumulative_logprobs == pytest.approx(
                tree.cumulative_logprobs, abs=1e-5
            )


@pytest.mark.slow
def test_with_experts_outputs_trees_and_acceptance_are_the_small_pairs(
    small: Pairing, with_experts: Pairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.Tensor] = []

    def choose(*args: Any) -> ChosenExperts:
        choice = choose_experts(*args)
        chosen.append(choice.ids)
        return choice

    monkeypatch.setattr(experts, "choose_experts", choose)
    prompt = read_prompts(small.target, 1)[0][:12]
    runs = []
    for pairing in (small, with_experts):
        # Greedy by a tree and plain: speculation changes no token.
        requests = [
            LocalRequest(prompt=prompt, max_new_tokens=16, shape=shape) for shape in (TREE, None)
        ]
        target = make_target(pairing, dtype="float32", num_pages=64, max_context_len=48)
        draft = make_draft(pairing, dtype="float32", num_pages=512)
        LocalPair(target, draft).run(requests)
        runs.append(requests)
    (before, _), (after, plain) = runs
    assert after.output == plain.output == before.output
    assert after.accept_length == before.accept_length > 1
    for tree, large_tree in zip(before.trees, after.trees, strict=True):
        assert large_tree.token_ids == tree.token_ids
        assert large_tree.parent_index == tree.parent_index
    sizes = SHAPES["small-experts"]
    assert sizes.experts is not None
    num_experts = sizes.experts.num_experts
    for layer in range(sizes.num_layers):
        ids = torch.cat([each.flatten() for each in chosen[layer :: sizes.num_layers]])
        shares = ids[ids < num_experts].long().bincount(minlength=num_experts) / len(ids)
        assert shares.min() > 0 and shares.max() < 4 / num_experts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["large", "with_experts"])
def test_transformers_generates_the_small_models_text(
    inference: None, small: Pairing, kind: str, request: pytest.FixtureRequest
) -> None:
    ids = torch.tensor([read_prompts(small.target, 1)[0]])
    texts = []
    for pairing in (small, request.getfixturevalue(kind)):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            pairing.target, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        texts.append(output.tolist())
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_built_in_memory_it_is_what_the_files_hold(
    inference: None,
    large: Pairing,
    checkpoints: dict[str, Checkpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inflate, "MAX_SHARD_BYTES", 20 * 2**20)
    device, dtype = torch.device("cpu"), torch.float32
    for role, directory in (("target", large.target), ("eagle3", large.draft)):
        write_checkpoint(checkpoints[role], tmp_path / role, has_data=False)
        generated = InflatedReader(
            tmp_path / role, checkpoints[role].recipes, device=device, dtype=dtype
        )
        read = CheckpointReader(directory, device=device, dtype=dtype)
        assert len(list((tmp_path / role).glob("*.safetensors"))) > 1
        assert generated.names == read.names
        for name in generated.names - {"d2t", "t2d"}:
            shape = read.shape(name)
            assert torch.equal(generated.load(name, shape), read.load(name, shape)), name
    with open_pair("small") as pair:
        assert feature_spec(pair.draft, pair.target, "auto") == feature_spec(
            large.draft, large.target, "auto"
        )
        config = ModelConfig.from_checkpoint(pair.target)
        assert config == ModelConfig.from_checkpoint(large.target)
        in_memory, _ = forward(pair.target, [5, 6, 7], dtype, (1,))
        assert model_hash(pair.target)
    from_files, _ = forward(large.target, [5, 6, 7], dtype, (1,))
    assert torch.equal(in_memory, from_files)


def test_the_8b_is_an_8b() -> None:
    shape = SHAPES["llama-3.1-8b"]
    target, head = inflate_pair(
        shape, resolve_model("demo", "target"), resolve_model("demo", "eagle3")
    )
    sizes = [
        sum(r.num_bytes for name, r in checkpoint.recipes.items() if name not in ("d2t", "t2d"))
        for checkpoint in (target, head)
    ]
    assert sizes[0] == 2 * 8_030_261_248  # parameters of Llama-3.1-8B
    assert 0.8e9 < sizes[1] < 0.9e9
    assert target.fields["rms_norm_eps"] == 1e-5 / 16
    assert target.fields["rope_theta"] == 10000.0 and target.fields["head_dim"] == 128
    d2t = head.recipes["d2t"].make("d2t", torch.device("cpu"))
    target_ids = d2t + torch.arange(shape.draft_vocab_size)
    assert len(target_ids.unique()) == shape.draft_vocab_size
    assert 0 <= target_ids.min() and target_ids.max() < shape.vocab_size
    assert head.recipes["t2d"].make("t2d", torch.device("cpu")).sum() == shape.draft_vocab_size


def test_the_30b_has_the_sizes_of_qwen3_30b_a3b_without_norms_of_q_and_k() -> None:
    target = inflate_bundled("30b-a3b")["target"]
    num_bytes = sum(recipe.num_bytes for recipe in target.recipes.values())
    assert num_bytes == 2 * (30_532_122_624 - 48 * 2 * 128)
    assert target.fields["architectures"] == ["MixtralForCausalLM"]
    # 2048 is 2 * 4 * 256: the residual stream holds the small one twice.
    assert target.fields["rms_norm_eps"] == 1e-5 / 4
    alike = [
        target.recipes[f"model.layers.7.block_sparse_moe.experts.{i}.w1.weight"] for i in (0, 127)
    ]
    assert alike[0] is alike[1] and alike[0].filler


@pytest.mark.parametrize(("num_large", "last_ids"), [(32, (14, 27)), (16, (6, 11)), (80, (38, 75))])
def test_layers_keep_their_order_around_the_captured_ones(
    num_large: int, last_ids: tuple[int, int]
) -> None:
    places = place_layers(12, num_large)
    assert places == sorted(set(places)) and len(places) == 12
    assert places[:2] == [0, 1] and places[2] > 2 and places[-1] < num_large
    captured = feature_layers(num_large)
    for layer, last in zip((5, 8), last_ids, strict=True):
        assert places[layer] <= last < places[layer + 1]
        assert last + 1 in captured and last + 1 not in places


def test_shapes_that_cannot_hold_the_small_model_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        place_layers(12, 12)
    dirs = resolve_model("demo", "target"), resolve_model("demo", "eagle3")
    shape = SHAPES["small-experts"]
    for sizes, message in (
        ({"hidden_size": 768}, "hidden size"),
        ({"num_kv_heads": 4}, "share a KV head"),
        ({"intermediate_size": 512, "experts": None}, "feed-forward of 512"),
    ):
        with pytest.raises(ValueError, match=message):
            inflate_pair(dataclasses.replace(shape, **sizes), *dirs)


def test_an_unused_row_loses_everywhere() -> None:
    rows = torch.randn(500, 16, generator=torch.Generator().manual_seed(0)) + 1.0
    logits = rows @ unused_row(rows)
    assert logits.mean() == pytest.approx(-40, abs=1e-2)

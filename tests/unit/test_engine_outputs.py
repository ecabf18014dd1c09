"""Node-indexed outputs reach the reply of their own node; the self-test notices inexactness."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

from shared.kernels.linear import linear_addends
from shared.kernels.products_cpu import Weight
from shared.kernels.rope_store import rope_store
from shared.kernels.tree_attention import AttentionParams, TreeAttentionMetadata, tree_attention
from shared.messages import AcceptedPath, FeatureChunk, TokenTree
from shared.step.read_back import ReadBack
from target_service.phases import NodeOutputs
from target_service.self_test import NUM_SLOTS, _spread, run_self_test
from tests import checkpoints
from tests.engines import (
    SHAPES,
    Models,
    Pairing,
    graft,
    make_draft,
    make_target,
    random_tokens,
    run_plain,
)
from tests.local_pair import LocalPair, LocalRequest


def test_gather_reorders_everything_that_was_registered() -> None:
    outputs = NodeOutputs(5)
    for i, shape in enumerate(((5,), (5, 2), (5, 3, 4))):
        tags = torch.arange(5).view(-1, *[1] * (len(shape) - 1)).expand(shape) + 10 * i
        outputs.register(f"output{i}", tags)
    rows = torch.tensor([4, 0, 0, 3])
    read = ReadBack(torch.device("cpu"))
    outputs.read(read, rows)
    gathered = read.start().wait()
    assert list(gathered) == ["output0", "output1", "output2"]
    for i, tensor in enumerate(gathered.values()):
        assert tensor.shape == (4, *outputs[f"output{i}"].shape[1:])
        assert (tensor.reshape(4, -1) == rows.numpy()[:, None] + 10 * i).all()


def test_registering_wrong_rows_or_twice_is_our_bug() -> None:
    outputs = NodeOutputs(5)
    outputs.register("a", torch.zeros(5))
    with pytest.raises(AssertionError, match="a is registered twice"):
        outputs.register("a", torch.zeros(5))
    with pytest.raises(AssertionError, match="b has 4 rows"):
        outputs.register("b", torch.zeros(4))


class Tagged(NodeOutputs):
    """Every value but what decides about tokens is replaced by the number of its row."""

    def register(self, name: str, tensor: torch.Tensor) -> None:
        if name not in ("token_ids", "is_finite"):
            tags = torch.arange(len(tensor)).view(-1, *[1] * (tensor.dim() - 1))
            tensor = tags.expand_as(tensor).to(tensor.dtype).contiguous()
        super().register(name, tensor)


def test_every_output_of_a_reply_is_that_of_its_own_node(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairing = models.pairing("eagle3")
    target = make_target(pairing, page_size=4)
    rng = random.Random(0)
    requests = [
        LocalRequest(prompt=random_tokens(rng, 3 + 5 * i), max_new_tokens=24, shape=shape,
                     logprobs=True, top_logprobs=1 + i % 3)
        for i, shape in enumerate(SHAPES)
    ]  # fmt: skip
    plain = run_plain(target, requests)
    monkeypatch.setattr("target_service.verify.NodeOutputs", Tagged)
    first_row: dict[str, int] = {}
    start_read = target.runner.start_read

    def note_rows(batch: Any, extended: Any, verified: Any) -> Any:
        trees = batch.trees
        rows = accumulate(trees.num_nodes, initial=0)
        for request, row in zip(trees.requests, rows, strict=False):
            first_row[request.request_id] = row
        return start_read(batch, extended, verified)

    monkeypatch.setattr(target.runner, "start_read", note_rows)
    num_rows = num_moved = 0

    class Checking(LocalPair):
        def on_path(self, path: AcceptedPath) -> None:
            nonlocal num_rows, num_moved
            num_rows += len(path.token_ids)
            num_moved += path.accept_index != tuple(range(len(path.accept_index)))
            tags = [first_row[path.request_id] + node for node in path.accept_index]
            num_top = self.requests[path.request_id].top_logprobs
            assert [entry.logprob for entry in path.logprobs] == tags
            assert [entry.token_id for entry in path.logprobs] == list(path.token_ids)
            assert [entry.top for entry in path.logprobs] == [
                ((tag, tag),) * num_top for tag in tags
            ]
            self.expected[path.request_id] = (path.seq_len, tags)
            super().on_path(path)

        def on_chunk(self, chunk: FeatureChunk) -> FeatureChunk:
            end, tags = self.expected[chunk.request_id]
            rows = torch.frombuffer(bytearray(chunk.data), dtype=torch.float32).view(chunk.shape)
            if chunk.start + len(rows) == end and chunk.start > 0:
                # One path's rows; those of the prefill are no node's.
                assert (rows == torch.tensor(tags[-len(rows) :])[:, None]).all()
                self.num_feature_rows += len(rows)
            return chunk

    pair = Checking(target, make_draft(pairing))
    pair.expected: dict[str, tuple[int, list[int]]] = {}
    pair.num_feature_rows = 0
    pair.edit_chunk = pair.on_chunk

    def edit(tree: TokenTree) -> TokenTree:
        done = len(pair.requests[tree.request_id].output)
        return graft(tree, plain[int(tree.request_id[1:]) - 1].output[done:], rng)

    pair.edit_tree = edit
    pair.run(requests)
    assert [r.output for r in requests] == [r.output for r in plain]
    assert num_rows == 24 * len(SHAPES) and num_moved > 0
    assert pair.num_feature_rows > 0


def test_an_output_without_a_place_in_the_reply_raises(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever registers something new must say where it goes; it is not dropped silently."""

    class Extended(NodeOutputs):
        def register(self, name: str, tensor: torch.Tensor) -> None:
            super().register(name, tensor)
            if name == "token_ids":
                super().register("router_logits", tensor)

    monkeypatch.setattr("target_service.verify.NodeOutputs", Extended)
    target = make_target(models.pairing("standalone"))
    pair = LocalPair(target)
    pair.open(LocalRequest(prompt=[1, 2], max_new_tokens=3))
    with pytest.raises(TypeError, match="router_logits"):
        pair.finish()


# --- the self-test --------------------------------------------------------------------------------

WRITERS: dict[str, Callable[[Any], Any]] = {
    "llama": checkpoints.write_llama,
    "mistral": checkpoints.write_mistral,
    "qwen2": checkpoints.write_qwen2,
    "qwen3": checkpoints.write_qwen3,
}


def self_test_target(models: Models, family: str = "llama", **options: Any) -> Any:
    path = models.get(family, WRITERS[family])
    return make_target(Pairing(target=path, draft=path, algorithm="none"), **options)


def run(target: Any) -> Any:
    result = run_self_test(target.runner)
    assert target.load.num_free_pages == target.load.num_pages, "the self-test kept its pages"
    target.check_integrity()
    return result


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_self_test_passes_here(models: Models, family: str, page_size: int) -> None:
    result = run(self_test_target(models, family, page_size=page_size))
    assert result.is_exact
    assert (result.max_logit_difference, result.max_kv_difference) == (0.0, 0.0)


def test_it_runs_at_start_up(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    self_test_target(models, self_test=True)
    assert "prefill, decoding and trees agree bit for bit" in caplog.text
    caplog.clear()
    smallest = 1 + (NUM_SLOTS + 64) // 4
    self_test_target(models, self_test=True, page_size=4, num_pages=smallest, max_num_requests=1)
    assert "agree bit for bit" in caplog.text
    self_test_target(models, self_test=True, page_size=4, num_pages=smallest - 1)
    assert "exactness is unproven" in caplog.text


def linear_by_height(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Another order of summation for another number of rows, as a plain BLAS call has."""
    if x.shape[0] % 2:
        return linear_addends(x, weight)
    half = x.shape[1] // 2
    left, right = x.clone(), x.clone()
    left[:, half:], right[:, :half] = 0, 0
    return linear_addends(left, weight) + linear_addends(right, weight)


def attention_by_node(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: TreeAttentionMetadata,
    params: AttentionParams,
    **options: Any,
) -> torch.Tensor:
    """Rounds rows of trees otherwise than those of chains."""
    out = tree_attention(q, k, v, metadata, params, **options)
    return out if metadata.is_chain.all() else out * 3 / 3


def store_by_height(addends: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Stores K and V of single rows rounded otherwise."""
    return rope_store(addends if addends.shape[1] > 1 else addends * 7 / 7, *args, **options)


def nan_in_trees(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: TreeAttentionMetadata,
    params: AttentionParams,
    **options: Any,
) -> torch.Tensor:
    out = tree_attention(q, k, v, metadata, params, **options)
    return out if metadata.is_chain.all() else out * float("nan")


@pytest.mark.parametrize(
    ("op", "inexact"),
    [
        ("linear_addends", linear_by_height), ("tree_attention", attention_by_node),
        ("tree_attention", nan_in_trees), ("rope_store", store_by_height),
    ],
)  # fmt: skip
def test_the_self_test_notices_an_inexact_op(
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    op: str,
    inexact: Any,
) -> None:
    target = self_test_target(models)
    monkeypatch.setattr(f"shared.models.attention.{op}", inexact)
    result = run(target)
    assert not result.is_exact
    assert max(result.max_logit_difference, result.max_kv_difference) > 0
    assert "EXACTNESS IS OFF" in caplog.text


def test_a_move_to_the_wrong_slot_is_noticed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = self_test_target(models)
    monkeypatch.setattr("target_service.self_test.move_paths", lambda *_, **__: None)
    result = run(target)
    assert not result.is_exact and result.max_logit_difference == 0.0


def test_kv_that_was_never_written_is_noticed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ways use the same pages one after the other: none may live on another's KV."""
    target = self_test_target(models)
    target.runner.model.products.give_up_libraries()  # or all would be compared twice
    num_stores = 0

    def store_at_first(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal num_stores
        num_stores += 1
        if num_stores <= 3:  # the prefill at once, 3 layers
            return rope_store(*args, **options)
        *others, k_cache, v_cache, slots = args
        return rope_store(*others, k_cache.clone(), v_cache.clone(), slots, **options)

    monkeypatch.setattr("shared.models.attention.rope_store", store_at_first)
    assert not run(target).is_exact


def test_spread_counts_nan_wherever_it_is() -> None:
    one, other, nan = torch.tensor([1.0, 2]), torch.tensor([1.0, 2.5]), torch.tensor([1, torch.nan])
    assert _spread([one, one, one]) == 0.0
    assert _spread([one, one, other]) == _spread([one, other, one]) == 0.5
    infinite = float("inf")
    assert (
        _spread([one, one, nan]) == _spread([one, nan, one]) == _spread([nan, one, one]) == infinite
    )

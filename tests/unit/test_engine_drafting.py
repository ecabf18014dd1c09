"""Drafting equals an independent, unpaged reference: tree by tree and node by node."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from shared.messages import SamplingParams, TokenTree, TreeShape
from tests import checkpoints
from tests.engines import (
    KINDS,
    SHAPES,
    Models,
    Pairing,
    PoisonedPair,
    graft,
    make_draft,
    make_target,
    random_tokens,
    run_plain,
)
from tests.local_pair import LocalRequest
from tests.marks import exhaustive
from tests.reference.causal_lm import ReferenceLM
from tests.reference.drafts import (
    ReferenceDraft,
    ReferenceEagle,
    ReferenceEagle3,
    ReferenceMTP,
    ReferenceStandalone,
)
from tests.reference.trees import draft_tree

# Scores closer than this may change places with another order of summation.
SAFE_MARGIN = 2e-5


# Frozen-KV MTP is compared with transformers, in test_engine_frozen_kv.py.
REFERENCED = tuple(kind for kind in KINDS if kind != "frozen_kv_mtp")


def reference_of(pairing: Pairing, target: ReferenceLM, window: int = 0) -> ReferenceDraft:
    match pairing.algorithm:
        case "eagle3":
            return ReferenceEagle3(pairing.draft, target, window)
        case "eagle":
            return ReferenceEagle(pairing.draft, target, window)
        case "mtp":
            return ReferenceMTP(target, window)
        case _:
            return ReferenceStandalone(pairing.draft)


def compare(
    tree: TokenTree,
    request: LocalRequest,
    target: ReferenceLM,
    draft: ReferenceDraft,
) -> bool:
    """Compare a tree with the reference's; return False where rounding may decide."""
    assert request.shape is not None
    tokens = request.tokens[: tree.seq_len + 1]
    want = draft_tree(
        draft,
        tokens,
        target.forward(tokens),
        num_steps=request.shape.num_steps,
        topk=request.shape.topk,
        num_draft_tokens=request.shape.num_draft_tokens,
        temperature=request.sampling.temperature,
        seed=request.sampling.seed,
    )
    if want.margin < SAFE_MARGIN:
        return False
    assert tree.parent_index == want.parent_index
    assert tree.token_ids == want.token_ids
    assert tree.cumulative_logprobs == pytest.approx(want.scores, abs=2e-4)
    assert len(tree.token_ids) == request.shape.num_draft_tokens
    return True


def serve(
    models: Models, pairing: Pairing, requests: list[LocalRequest], **draft_options: int
) -> None:
    """Serve the requests with everything poisoned; heads that never agree are helped."""
    target = make_target(pairing, page_size=4, prefill_chunk_len=11)
    plain = run_plain(target, requests)
    draft = make_draft(pairing, **{"page_size": 2, **draft_options})
    pair = PoisonedPair(target, draft)
    rng = random.Random(0)

    def edit(tree: TokenTree) -> TokenTree:
        request = pair.requests[tree.request_id]
        truth = plain[int(tree.request_id[1:]) - 1].output[len(request.output) :]
        return graft(tree, truth, rng) if pairing.algorithm == "eagle3" else tree

    pair.edit_tree = edit
    pair.run(requests)


@pytest.mark.parametrize(
    ("kind", "page_size"),
    [*((kind, 2) for kind in REFERENCED), *exhaustive((kind, 16) for kind in REFERENCED)],
)
def test_trees_equal_the_reference(models: Models, kind: str, page_size: int) -> None:
    pairing = models.pairing(kind)
    rng = random.Random(5)
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, rng.choice([1, 2, 7, 16])),
            max_new_tokens=11,
            shape=shape,
            sampling=SamplingParams(temperature=temperature, seed=2**64 - 3 - i),
        )
        for i, shape in enumerate(SHAPES)
        for temperature in (0.0, 0.7)
    ]
    serve(models, pairing, requests, page_size=page_size)
    longest = max(path.num_accepted_drafts for request in requests for path in request.paths)
    assert longest >= 2, "no round extended several rows"
    target = ReferenceLM(pairing.target)
    draft = reference_of(pairing, target)
    num_compared = num_trees = 0
    for request in requests:
        assert len(request.trees) >= 2
        # The first or the second, and one after several rounds.
        is_hot = request.sampling.temperature > 0
        early, late = request.trees[is_hot], request.trees[-1]
        for tree in {id(tree): tree for tree in (early, late)}.values():
            num_trees += 1
            num_compared += compare(tree, request, target, draft)
    assert num_compared > 0.7 * num_trees, "too many trees were too close to call"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "eagle3-defaults", "eagle3-odd", "eagle-2-layers", "eagle-no-bias", "eagle3-own-width",
        "eagle3-full-vocabulary",
    ],
)  # fmt: skip
def test_variants_of_heads_equal_the_reference(models: Models, kind: str) -> None:
    deep = models.get("deep", lambda d: checkpoints.write_llama(
        d, shape=checkpoints.Shape(num_layers=8, hidden_size=32))
    )  # fmt: skip
    write = {
        "eagle3-defaults": lambda d: checkpoints.write_eagle3(
            d, deep, layer_ids=None, draft_vocab_size=None, has_head=False
        ),
        "eagle3-odd": lambda d: checkpoints.write_eagle3(
            d, deep, layer_ids=(5, 0, 3), has_fc_bias=True, feeds_back_norm=True,
            has_embedding=True, layer_name="layers.0",
        ),
        "eagle3-own-width": lambda d: checkpoints.write_eagle3(
            d, deep, layer_ids=(7, 7), hidden_size=64, has_embedding=True
        ),
        "eagle3-full-vocabulary": lambda d: checkpoints.write_eagle3(
            d, deep, draft_vocab_size=None
        ),
        "eagle-2-layers": lambda d: checkpoints.write_eagle(d, deep, num_layers=2),
        "eagle-no-bias": lambda d: checkpoints.write_eagle(d, deep, has_fc_bias=False),
    }[kind]  # fmt: skip
    pairing = Pairing(target=deep, draft=models.get(kind, write), algorithm=kind.partition("-")[0])
    rng = random.Random(6)
    requests = [
        LocalRequest(prompt=random_tokens(rng, length), max_new_tokens=8, shape=SHAPES[3],
                     sampling=SamplingParams(temperature=temperature, seed=4))
        for length, temperature in ((1, 0.0), (12, 1.0), (20, 0.0))
    ]  # fmt: skip
    serve(models, pairing, requests)
    target = ReferenceLM(deep)
    draft = reference_of(pairing, target)
    results = [
        compare(tree, request, target, draft) for request in requests for tree in request.trees[:3]
    ]
    assert sum(results) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp"])
def test_trees_in_a_sliding_window_equal_the_reference(models: Models, kind: str) -> None:
    pairing = models.pairing(kind)
    window = 9
    request = LocalRequest(
        prompt=random_tokens(random.Random(1), 4), max_new_tokens=40, shape=SHAPES[4],
        sampling=SamplingParams(temperature=0.6, seed=1),
    )  # fmt: skip
    serve(models, pairing, [request], window=window)
    target = ReferenceLM(pairing.target)
    draft = reference_of(pairing, target, window)
    blind = reference_of(pairing, target)
    late = [tree for tree in request.trees if tree.seq_len > 2 * window][-4:]
    assert sum(compare(tree, request, target, draft) for tree in late) >= 2

    def differs(tree: TokenTree) -> bool:
        try:
            compare(tree, request, target, blind)
        except AssertionError:
            return True
        return False

    assert any(map(differs, late)), "the window does not matter, so this proves nothing"


def test_ties_go_to_the_lower_id(models: Models) -> None:
    """Every draft logit comes 20 times: an unstable choice would show."""
    pairing = models.pairing("eagle3")

    def write(directory: Path) -> Path:
        checkpoints.write_eagle3(directory, pairing.target, draft_vocab_size=100)

        def repeat(tensors: checkpoints.Tensors) -> None:
            head = tensors["lm_head.weight"]
            tensors["lm_head.weight"] = head[torch.arange(100) % 5].contiguous()

        return checkpoints.edit_checkpoint(directory, tensors=repeat)

    tied = Pairing(
        target=pairing.target, draft=models.get("eagle3-tied", write), algorithm="eagle3"
    )
    d2t = checkpoints.read_tensors(tied.draft)["d2t"]
    draft_id_of = {int(offset) + i: i for i, offset in enumerate(d2t)}
    rng = random.Random(3)
    requests = [
        LocalRequest(prompt=random_tokens(rng, 6), max_new_tokens=6, shape=shape)
        for shape in SHAPES
    ]
    serve(models, tied, requests)
    for tree in (tree for request in requests for tree in request.trees):
        for node in range(len(tree.token_ids)):
            children = [i for i, parent in enumerate(tree.parent_index) if parent == node]
            ids = [draft_id_of[tree.token_ids[child]] for child in children]
            if ids:
                assert ids == list(range(ids[0] % 5, 100, 5))[: len(ids)]
                assert len({tree.cumulative_logprobs[child] for child in children}) == 1


def test_more_children_than_the_draft_has_words(models: Models) -> None:
    """topk above the draft vocabulary: the tree is smaller, whole and valid."""
    pairing = models.pairing("eagle3")
    few = Pairing(
        target=pairing.target,
        draft=models.get(
            "eagle3-3-words",
            lambda d: checkpoints.write_eagle3(d, pairing.target, draft_vocab_size=3),
        ),
        algorithm="eagle3",
    )
    shape = TreeShape(num_steps=2, topk=16, num_draft_tokens=64)
    request = LocalRequest(prompt=[1, 2, 3], max_new_tokens=6, shape=shape)
    serve(models, few, [request])
    target = ReferenceLM(few.target)
    for tree in request.trees:
        assert len(tree.token_ids) == 1 + 3 + 3 * 3
        tokens = request.tokens[: tree.seq_len + 1]
        want = draft_tree(
            reference_of(few, target), tokens, target.forward(tokens),
            num_steps=2, topk=16, num_draft_tokens=64,
        )  # fmt: skip
        if want.margin > SAFE_MARGIN:
            assert (tree.token_ids, tree.parent_index) == (want.token_ids, want.parent_index)


@pytest.mark.parametrize("share", [0.02, 1.0])
def test_nan_in_the_draft_costs_speculation_and_nothing_else(
    models: Models, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that break later give small or empty trees; scores stay <= 0 and never NaN."""
    monkeypatch.setattr("draft_service.engine_factory.require_finite", lambda *_, **__: None)
    pairing = models.pairing("standalone")

    def write(directory: Path) -> Path:
        checkpoints.write_standalone(directory, pairing.target)

        def spoil(tensors: checkpoints.Tensors) -> None:
            head = tensors["lm_head.weight"]
            head[: max(1, int(len(head) * share))] = float("nan")

        return checkpoints.edit_checkpoint(directory, tensors=spoil)

    broken = Pairing(
        target=pairing.target, draft=models.get(f"nan-{share}", write), algorithm="standalone"
    )
    target = make_target(broken)
    rng = random.Random(8)
    requests = [
        LocalRequest(prompt=random_tokens(rng, 5), max_new_tokens=12, shape=shape,
                     sampling=SamplingParams(temperature=i % 2, seed=i))
        for i, shape in enumerate(SHAPES)
    ]  # fmt: skip
    plain = run_plain(target, requests)
    pair = PoisonedPair(target, make_draft(broken))
    pair.run(requests)
    assert [r.output for r in requests] == [r.output for r in plain]
    for request in requests:
        for tree in request.trees:
            assert all(score <= 0 and math.isfinite(score) for score in tree.cumulative_logprobs)
            if share == 1.0:
                assert len(tree.token_ids) == 1
            else:
                assert all(token >= 5 for token in tree.token_ids[1:])


@pytest.mark.slow
def test_two_shapes_in_one_batch_do_not_mix(models: Models) -> None:
    """A request's trees do not depend on who else is grown with it."""
    pairing = models.pairing("eagle")
    rng = random.Random(9)
    requests = [
        LocalRequest(prompt=random_tokens(rng, 10 + i), max_new_tokens=8, shape=shape)
        for i, shape in enumerate(SHAPES)
    ]
    serve(models, pairing, requests)
    for i, request in enumerate(requests):
        alone = LocalRequest(prompt=request.prompt, max_new_tokens=8, shape=SHAPES[i])
        serve(models, pairing, [alone])
        assert [(t.token_ids, t.parent_index, t.cumulative_logprobs) for t in alone.trees] == [
            (t.token_ids, t.parent_index, t.cumulative_logprobs) for t in request.trees
        ]

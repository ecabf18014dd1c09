"""Trees of the real engines against the independent reference: tree by tree, node by node.

The reference is dense and unpaged and drafts every node on its own; the engines batch requests of
different shapes over paged KV, chunk prompts, and extend with ragged accepted rows between rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from shared.messages import SamplingParams, TreeShape
from tests import checkpoints
from tests.engines import Models, Pairing, make_draft, make_target, random_tokens
from tests.local_pair import LocalPair, LocalRequest
from tests.reference.causal_lm import ReferenceLM
from tests.reference.drafts import (
    ReferenceDraft,
    ReferenceEagle,
    ReferenceEagle3,
    ReferenceMTP,
    ReferenceStandalone,
)
from tests.reference.trees import draft_tree

SHAPES = [
    TreeShape(num_steps=s, topk=k, num_draft_tokens=n)
    for s, k, n in ((4, 1, 5), (3, 2, 2), (3, 2, 6), (4, 3, 12), (2, 5, 20))
]
# Scores may differ by the order of summation; a tree whose choices are this close is not compared.
TIE = 1e-4


def reference_of(pairing: Pairing, window: int = 0) -> tuple[ReferenceLM, ReferenceDraft]:
    target = ReferenceLM(pairing.target)
    match pairing.algorithm:
        case "eagle3":
            return target, ReferenceEagle3(pairing.draft, target, window)
        case "eagle":
            return target, ReferenceEagle(pairing.draft, target, window)
        case "mtp":
            return target, ReferenceMTP(target, window)
    return target, ReferenceStandalone(pairing.draft)


def assert_trees_match(
    request: LocalRequest, target: ReferenceLM, draft: ReferenceDraft, *, rounds: Sequence[int]
) -> int:
    """Compare some of a request's trees; return how many were compared."""
    assert request.shape is not None
    compared = 0
    for i in rounds:
        tree = request.trees[i]
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
        if want.margin < TIE:
            continue
        assert tree.token_ids == want.token_ids, f"round {i} of {request.shape}"
        assert tree.parent_index == want.parent_index
        assert tree.cumulative_logprobs == pytest.approx(want.scores, abs=1e-3)
        compared += 1
    return compared


def serve(
    pairing: Pairing, samplings: Sequence[SamplingParams], *, page_size: int
) -> list[LocalRequest]:
    rng = random.Random(17)
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, 3 + 5 * i),
            max_new_tokens=14,
            shape=shape,
            sampling=samplings[i % len(samplings)],
        )
        for i, shape in enumerate(SHAPES)
    ]
    target = make_target(pairing, page_size=page_size, prefill_chunk_len=7)
    LocalPair(target, make_draft(pairing, page_size=page_size)).run(requests)
    return requests


def check(
    pairing: Pairing, samplings: Sequence[SamplingParams], *, page_size: int
) -> list[LocalRequest]:
    requests = serve(pairing, samplings, page_size=page_size)
    target, draft = reference_of(pairing)
    with torch.inference_mode():
        compared = [
            assert_trees_match(
                request, target, draft, rounds=sorted({0, 1, len(request.trees) - 1})
            )
            for request in requests
        ]
    assert all(compared), f"too many ties to compare: {compared}"
    return requests


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp", "standalone"])
def test_greedy_trees_equal_the_reference(models: Models, kind: str) -> None:
    requests = check(models.pairing(kind), [SamplingParams()], page_size=2)
    if kind != "eagle3":
        longest = max(path.num_accepted_drafts for r in requests for path in r.paths)
        assert longest >= 2, "nothing was accepted: no round extended several rows"


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp", "standalone"])
def test_sampled_trees_rank_with_the_targets_noise(models: Models, kind: str) -> None:
    samplings = [
        SamplingParams(temperature=1.0, seed=2**64 - 5),
        SamplingParams(temperature=0.6, seed=77),
        SamplingParams(),
    ]
    check(models.pairing(kind), samplings, page_size=16)


VARIANTS: dict[str, Callable[[Path, Path], Path]] = {
    "own-embedding": lambda d, t: checkpoints.write_eagle3(d, t, has_embedding=True),
    "full-vocabulary": lambda d, t: checkpoints.write_eagle3(d, t, draft_vocab_size=None),
    "fc-bias-norm-output": lambda d, t: checkpoints.write_eagle3(
        d, t, has_fc_bias=True, feeds_back_norm=True
    ),
    "other-width": lambda d, t: checkpoints.write_eagle3(d, t, hidden_size=32, has_embedding=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle3_variants_equal_the_reference(models: Models, variant: str) -> None:
    target = models.llama
    draft = models.get(f"trees-{variant}", lambda d: VARIANTS[variant](d, target))
    check(Pairing(target=target, draft=draft, algorithm="eagle3"), [SamplingParams()], page_size=4)


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_trees_in_a_sliding_window_equal_the_reference(models: Models, kind: str) -> None:
    pairing = models.pairing(kind)
    window = 12
    request = LocalRequest(
        prompt=random_tokens(random.Random(3), 30), max_new_tokens=12, shape=SHAPES[3]
    )
    draft_engine = make_draft(pairing, page_size=4, window=window)
    LocalPair(make_target(pairing, page_size=4), draft_engine).run([request])
    target, draft = reference_of(pairing, window)
    with torch.inference_mode():
        rounds = range(len(request.trees))
        assert assert_trees_match(request, target, draft, rounds=rounds) >= 3
        _, unlimited = reference_of(pairing)
        with pytest.raises(AssertionError):
            assert_trees_match(request, target, unlimited, rounds=rounds)

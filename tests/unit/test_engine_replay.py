"""Drafts that join late, lose features or are replaced catch up and grow the very same trees."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shared.messages import FeatureChunk, SamplingParams, TokenTree
from tests.engines import (
    KINDS,
    SHAPES,
    Models,
    Pairing,
    PoisonedPair,
    fresh,
    make_draft,
    make_target,
    random_tokens,
    run_plain,
)
from tests.local_pair import LocalRequest
from tests.marks import exhaustive

pytestmark = pytest.mark.slow

NUM_TOKENS = 20

Trees = dict[tuple[str, int], tuple[object, ...]]


def requests_of(kind: str, joins_at: int = 0) -> list[LocalRequest]:
    rng = random.Random(KINDS.index(kind))
    return [
        LocalRequest(
            prompt=random_tokens(rng, length),
            max_new_tokens=NUM_TOKENS,
            shape=SHAPES[2 + i % 3],
            sampling=SamplingParams(temperature=0.4 * (i % 2), seed=i),
            joins_at=joins_at,
        )
        for i, length in enumerate((1, 17, 40, 64))
    ]


def trees_of(requests: list[LocalRequest]) -> Trees:
    """Return every tree by request and position, bits and all."""
    return {
        (request.request_id, tree.seq_len): (
            tree.token_ids,
            tree.parent_index,
            tree.cumulative_logprobs,
        )
        for request in requests
        for tree in request.trees
    }


def draft_only(_: TokenTree) -> None:
    """Verify no tree, so that every run has one tree per position."""


@pytest.fixture(scope="module", params=KINDS)
def pairing(request: pytest.FixtureRequest, models: Models) -> Pairing:
    return models.pairing(request.param)


@pytest.fixture(scope="module")
def from_the_start(pairing: Pairing) -> Trees:
    """The trees of a draft that was there all the time and lost nothing."""
    requests = requests_of(pairing.algorithm)
    PoisonedPair(make_target(pairing), make_draft(pairing, page_size=4), edit_tree=draft_only).run(
        requests
    )
    trees = trees_of(requests)
    assert len(trees) == 4 * (NUM_TOKENS - 1)
    return trees


@pytest.mark.parametrize(
    ("joins_at", "retain_rows"), [(2, 0), (13, 3), *exhaustive([(1, 8192), (13, 8192)])]
)
def test_a_draft_that_joins_late(
    pairing: Pairing, from_the_start: Trees, joins_at: int, retain_rows: int
) -> None:
    target = make_target(pairing, feature_retain_rows=retain_rows, prefill_chunk_len=16)
    requests = requests_of(pairing.algorithm, joins_at)
    PoisonedPair(target, make_draft(pairing), edit_tree=draft_only).run(requests)
    trees = trees_of(requests)
    assert len(trees) == 4 * (NUM_TOKENS - joins_at)
    assert trees.items() <= from_the_start.items()


def test_a_draft_that_is_replaced_twice(pairing: Pairing, from_the_start: Trees) -> None:
    target = make_target(pairing, feature_retain_rows=4, prefill_chunk_len=16)
    requests = requests_of(pairing.algorithm)
    pair = PoisonedPair(target, make_draft(pairing), edit_tree=draft_only)
    for request in requests:
        pair.open(request)
    for num_steps in (3, 7, 5):
        for _ in range(num_steps):
            assert pair.step()
        pair.replace_draft(make_draft(pairing, page_size=1))
    pair.finish()
    trees = trees_of(requests)
    # A round is lost with each draft, not more.
    assert len(trees) >= 4 * (NUM_TOKENS - 1) - 3 * 4
    assert trees.items() <= from_the_start.items()


def test_a_draft_that_dies_and_stays_away(pairing: Pairing) -> None:
    target = make_target(pairing)
    requests = [fresh(r, max_new_tokens=2 * NUM_TOKENS) for r in requests_of(pairing.algorithm)]
    plain = run_plain(target, requests)
    pair = PoisonedPair(target, make_draft(pairing))
    for request in requests:
        pair.open(request)
    for _ in range(4):
        pair.step()
    pair.replace_draft(None)
    pair.finish()
    assert [r.output for r in requests] == [r.output for r in plain]
    assert all(r.paths[-1].num_draft_tokens == 1 for r in requests)


class Weather:
    """Loses or cuts feature chunks at random, a bounded number of times."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.num_lost = 0

    def __call__(self, chunk: FeatureChunk) -> FeatureChunk | None:
        if self.num_lost > 60 or self._rng.random() < 0.6:
            return chunk
        self.num_lost += 1
        if self._rng.random() < 0.5 or chunk.shape[0] == 1:
            return None
        skipped = self._rng.randrange(1, chunk.shape[0])  # the first rows of it
        row_bytes = len(chunk.data) // chunk.shape[0]
        return replace(
            chunk,
            start=chunk.start + skipped,
            shape=(chunk.shape[0] - skipped, chunk.shape[1]),
            data=chunk.data[skipped * row_bytes :],
        )


class Reconnecting(PoisonedPair):
    """When nothing moves because rows were lost, subscribes again as a front does."""

    def step(self) -> bool:
        if super().step():
            return True
        assert self.draft is not None
        for request in list(self.draft.requests.values()):
            if request.pending is not None and request.features is not None:
                request.features.subscribe()
        return self.draft.has_work


@pytest.mark.parametrize(
    ("kind", "retain_rows"),
    [("eagle3", 0), ("eagle", 2), ("mtp", 5), ("eagle3", 8192), ("frozen_kv_mtp", 0)],
)
def test_lost_features_are_asked_for_again(models: Models, kind: str, retain_rows: int) -> None:
    pairing = models.pairing(kind)
    target = make_target(pairing, feature_retain_rows=retain_rows, prefill_chunk_len=16)
    requests = requests_of(kind)
    steady = [fresh(request) for request in requests]
    PoisonedPair(target, make_draft(pairing), edit_tree=draft_only).run(steady)
    weather = Weather(retain_rows)
    pair = Reconnecting(target, make_draft(pairing), edit_tree=draft_only, edit_chunk=weather)
    pair.run(requests)
    assert weather.num_lost > 0
    assert trees_of(requests) == trees_of(steady)


# A random EAGLE-3 head is never right; its trees are compared above.
@pytest.mark.parametrize("kind", ["eagle", "mtp", "standalone", "frozen_kv_mtp"])
def test_acceptance_recovers_after_a_late_start(models: Models, kind: str) -> None:
    """With trees verified: output is plain, and the late draft is as good as the early one."""
    pairing = models.pairing(kind)
    target = make_target(pairing, feature_retain_rows=7)
    requests = [replace(r, max_new_tokens=44) for r in requests_of(kind)]
    plain = run_plain(target, requests)
    early, late = [fresh(r) for r in requests], [fresh(r, joins_at=20) for r in requests]
    for run in (early, late):
        PoisonedPair(target, make_draft(pairing)).run(run)
        assert [r.output for r in run] == [r.output for r in plain]

    def tokens_per_tree(run: list[LocalRequest]) -> float:
        paths = [p for r in run for p in r.paths if p.num_draft_tokens > 1]
        return sum(p.num_accepted_drafts + 1 for p in paths) / len(paths)

    assert tokens_per_tree(late) - 1 > 0.5 * (tokens_per_tree(early) - 1) > 0


def test_a_slow_draft_catches_up_from_stale_orders(models: Models) -> None:
    """Root-only rounds go on while the draft sleeps; its next tree is the right one."""
    pairing = models.pairing("eagle")
    target, draft = make_target(pairing), make_draft(pairing)
    request = requests_of("eagle")[1]
    steady = fresh(request)
    PoisonedPair(target, make_draft(pairing), edit_tree=draft_only).run([steady])

    pair = PoisonedPair(target, draft, edit_tree=draft_only)
    pair.open(request)
    for num_rounds in (1, 2, 5, 3):
        while request.ordered_round < 0:
            pair.step()
        for _ in range(num_rounds):
            # Only the target steps. A round's time is up: it goes root-only, and the draft is
            # told all the same.
            request.ordered_round = -1
            pair.verify(request, None)
            while request.ordered_round < 0:
                for message in target.step():
                    pair.on_target(message)
    pair.finish()
    got, want = trees_of([request]), trees_of([steady])
    assert len(got) == NUM_TOKENS - 1 - 11
    assert got.items() <= want.items()
    assert request.output == steady.output

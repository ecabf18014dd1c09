"""Pools too small for everyone: requests wait, are retracted, come back, and lose nothing."""

from __future__ import annotations

import random

import pytest

from draft_service.engine_factory import EXTRA_SLOTS
from shared.messages import SamplingParams
from tests.engines import (
    KINDS,
    SHAPES,
    Models,
    PoisonedPair,
    fresh,
    make_draft,
    make_target,
    random_tokens,
    run_plain,
)
from tests.local_pair import LocalRequest

pytestmark = pytest.mark.slow


def requests_of(seed: int) -> list[LocalRequest]:
    rng = random.Random(seed)
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, seed=4),
        SamplingParams(temperature=1.0, top_p=0.8, seed=5),
    ]
    return [
        LocalRequest(
            prompt=random_tokens(rng, rng.choice([1, 9, 30, 50])),
            max_new_tokens=48,
            shape=SHAPES[i % len(SHAPES)],
            sampling=samplings[i % 4],
            min_new_tokens=5 * (i % 2),
            stop_token_ids=tuple(range(200, 206)) if i % 3 == 1 else (),
            logprobs=i % 3 == 0,
            top_logprobs=i % 3,
            priority=i % 2,
        )
        for i in range(8)
    ]


@pytest.mark.parametrize(
    ("kind", "page_size"), [("eagle3", 4), ("eagle", 1), ("mtp", 16), ("standalone", 16)]
)
def test_retracted_requests_go_on_exactly(models: Models, kind: str, page_size: int) -> None:
    pairing = models.pairing(kind)
    requests = requests_of(page_size)
    plain = run_plain(make_target(pairing, page_size=page_size), requests)
    target = make_target(
        pairing, page_size=page_size, num_pages=1 + 208 // page_size, prefill_chunk_len=16
    )
    pair = PoisonedPair(target, make_draft(pairing))
    pair.run(requests)
    assert pair.num_retracted >= 2, "the pool was large enough for everyone"
    assert target.counts["coppice_retractions_total"] == pair.num_retracted
    for got, want in zip(requests, plain, strict=True):
        assert got.output == want.output
        assert got.finish_reason == want.finish_reason
        assert got.logprob_rows == want.logprob_rows
        epochs = [path.target_epoch for path in got.paths]
        assert epochs == sorted(epochs)
    assert any(request.target_epoch > 1 for request in requests)


# What has no room is the draft's pool, which knows no kind.
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "eagle" else pytest.mark.exhaustive) for kind in KINDS],
)
def test_a_draft_without_room_retracts_and_recovers(models: Models, kind: str) -> None:
    pairing = models.pairing(kind)
    target = make_target(pairing)
    requests = [fresh(request, max_new_tokens=140) for request in requests_of(1)]
    plain = run_plain(target, requests)
    draft = make_draft(pairing, page_size=4, num_pages=(EXTRA_SLOTS + 160) // 4)
    pair = PoisonedPair(target, draft)
    pair.run(requests)
    assert pair.num_draft_retracted >= 2, "the pool was large enough for everyone"
    assert [r.output for r in requests] == [r.output for r in plain]
    assert all(request.trees for request in requests)


def test_the_oldest_request_is_never_retracted(models: Models) -> None:
    pairing = models.pairing("standalone")
    target = make_target(pairing, page_size=4, num_pages=1 + 300 // 4)
    requests = [
        LocalRequest(prompt=[i + 1], max_new_tokens=80, shape=SHAPES[5], request_id=f"r{i}")
        for i in range(5)
    ]
    pair = PoisonedPair(target, make_draft(pairing))
    pair.run(requests)
    assert pair.num_retracted > 0
    assert requests[0].target_epoch == 1


def test_waiting_requests_are_admitted_by_priority(models: Models) -> None:
    target = make_target(models.pairing("standalone"), max_num_requests=3)
    requests = [
        LocalRequest(prompt=[1, 2, 3], max_new_tokens=4, priority=priority, request_id=name)
        for name, priority in (("a", 0), ("b", 0), ("c", 0), ("d", 0), ("e", 2), ("f", 1))
    ]
    pair = PoisonedPair(target)
    for request in requests[:3]:
        pair.open(request)
    pair.step()
    for request in requests[3:]:
        pair.open(request)
    assert (target.load.num_running, target.load.num_waiting) == (3, 3)
    pair.finish()
    assert pair.admitted == ["a", "b", "c", "e", "f", "d"]


def test_a_long_prompt_waits_for_its_pages_and_does_not_starve(models: Models) -> None:
    """Nobody overtakes the first in line, however small."""
    pairing = models.pairing("standalone")
    target = make_target(pairing, page_size=4, num_pages=1 + 260 // 4, prefill_chunk_len=32)
    rng = random.Random(0)
    big = LocalRequest(prompt=random_tokens(rng, 150), max_new_tokens=5, request_id="big")
    small = [
        LocalRequest(prompt=random_tokens(rng, 4), max_new_tokens=20, request_id=f"s{i}")
        for i in range(6)
    ]
    pair = PoisonedPair(target)
    for request in (*small[:3], big, *small[3:]):
        pair.open(request)
    pair.finish()
    assert pair.admitted == ["s0", "s1", "s2", "big", "s3", "s4", "s5"]
    plain = run_plain(make_target(pairing), [big, *small])
    assert [r.output for r in (big, *small)] == [r.output for r in plain]

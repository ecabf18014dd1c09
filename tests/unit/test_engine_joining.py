"""Requests that begin beside others: they have a token with every step from their first one on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from shared.messages import Credit, CreditUpdate, RootOnly, SamplingParams, TreeShape
from target_service.draft_peer import Progress
from target_service.engine import TargetEngine
from tests.device_pair import BUSHY, Make, PoisonedDevicePair, check
from tests.engines import plain_of, random_tokens
from tests.local_pair import LocalPair, LocalRequest

CHUNK = 8
SAMPLED = SamplingParams(temperature=1.0, seed=5)
PENALISED = SamplingParams(repetition_penalty=1.2)


def record_steps(target: TargetEngine) -> list[set[str]]:
    """Return who is sampled in each step of a target, which grows as it steps."""
    steps: list[set[str]] = []
    pipeline: Any = target.pipeline
    launch = pipeline.launch

    def launch_and_record(*args: Any) -> Any:
        launched = launch(*args)
        if launched is not None:
            trees = launched.batch.trees
            steps.append({r.request_id for r in trees.requests} if trees is not None else set())
        return launched

    pipeline.launch = launch_and_record
    return steps


def missed(steps: Sequence[set[str]], request: LocalRequest) -> int:
    """Return in how many steps between its first and its last one a request was not sampled."""
    took_part = [request.request_id in step for step in steps]
    last = len(took_part) - 1 - took_part[::-1].index(True)
    return took_part[took_part.index(True) : last].count(False)


def newcomers(shape: TreeShape | None) -> list[LocalRequest]:
    """Return a request with a short prompt, and one whose prompt takes most of its time."""
    rng = random.Random(1)
    first = LocalRequest(prompt=random_tokens(rng, 5), max_new_tokens=24, shape=shape)
    long = LocalRequest(prompt=random_tokens(rng, 16 * CHUNK), max_new_tokens=8, shape=shape)
    return [first, long]


def run(pair: LocalPair, requests: Sequence[LocalRequest]) -> None:
    """Serve requests that have leave to go on without an order from the beginning on."""
    for request in requests:
        pair.open(request)
        credit = Credit(until_round_idx=32, trees=RootOnly())
        pair.target.submit(
            CreditUpdate(request_id=request.request_id, target_epoch=1, credit=credit)
        )
    pair.finish()


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "seeded"])
def test_a_round_follows_the_end_of_a_prompt_at_once(make: Make, sampling: SamplingParams) -> None:
    """The step behind the one in flight has the root that this one computes."""
    target, _, _ = make("eagle", prefill_chunk_len=CHUNK)
    target.scheduler.overlaps_steps = True
    requests = newcomers(None)
    requests[0].sampling = sampling
    expected = plain_of(target, requests)
    steps = record_steps(target)
    run(LocalPair(target, credit_rounds=16), requests)
    check(requests, expected)
    assert missed(steps, requests[0]) == 0


def test_sampling_by_the_tokens_before_waits_for_the_end_of_the_prompt(make: Make) -> None:
    target, _, _ = make("eagle", prefill_chunk_len=CHUNK)
    target.scheduler.overlaps_steps = True
    requests = newcomers(None)
    requests[0].sampling = PENALISED
    expected = plain_of(target, requests)
    steps = record_steps(target)
    run(LocalPair(target, credit_rounds=16), requests)
    check(requests, expected)
    assert missed(steps, requests[0]) > 0


@pytest.mark.parametrize("num_new_tokens", [1, 2])
def test_short_outputs_end_with_the_prompt_or_right_after_it(
    make: Make, num_new_tokens: int
) -> None:
    target, _, _ = make("eagle", prefill_chunk_len=CHUNK)
    target.scheduler.overlaps_steps = True
    requests = newcomers(None)
    requests[0].max_new_tokens = num_new_tokens
    expected = plain_of(target, requests)
    run(LocalPair(target, credit_rounds=16), requests)
    check(requests, expected)
    target.check_integrity()


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "standalone"])
def test_a_newcomer_has_a_token_with_every_step_until_its_draft_grows_trees(
    make: Make, kind: str
) -> None:
    target, draft, _ = make(kind, prefill_chunk_len=CHUNK)
    target.scheduler.overlaps_steps = True
    requests = newcomers(BUSHY)
    expected = plain_of(target, requests)
    steps = record_steps(target)
    pair = PoisonedDevicePair(target, draft)
    run(pair, requests)
    check(requests, expected)
    assert missed(steps, requests[0]) == 0
    device_rounds = [
        idx for request_id, idx in pair.device_trees if request_id == requests[0].request_id
    ]
    assert device_rounds and device_rounds == list(range(device_rounds[0], device_rounds[-1] + 1))
    assert device_rounds[0] <= 6, "it takes the draft a few steps to come"
    assert pair.num_overlapped > 0


def test_a_draft_that_cannot_join_is_waited_for(make: Make) -> None:
    """No path of rounds of the root alone is posted: after a few of them rounds wait for hosts."""
    target, draft, _ = make("eagle", prefill_chunk_len=CHUNK)
    target.scheduler.overlaps_steps = True
    requests = newcomers(BUSHY)
    expected = plain_of(target, requests)
    pair = PoisonedDevicePair(target, draft)
    source: Any = target.source
    source._joins_with = lambda *_: False
    seen = set()
    order = source.order

    def watch(request: Any) -> None:
        order(request)
        if request.draft is not None:
            seen.add(request.draft.progress)

    source.order = watch
    run(pair, requests)
    check(requests, expected)
    assert {Progress.JOINING, Progress.CAUGHT_UP} <= seen
    assert any(path.num_draft_tokens > 1 for path in requests[0].paths)

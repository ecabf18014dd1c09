"""Once an engine is ready nothing is captured: every step is the replay of some graph."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from triton import knobs

import draft_service.warm_up
import target_service.warm_up
from draft_service.engine import DraftEngine
from shared.kernels.dispatch import count_launch, forget_launches
from shared.messages import SamplingParams, TreeShape
from shared.step.graphs import GraphCache
from shared.step.serving_counts import ServingCounts
from target_service.engine import TargetEngine
from tests.device_pair import PoisonedDevicePair
from tests.emulated_graphs import EmulatedGraphs
from tests.engines import Models, make_draft, make_target, plain_of, random_tokens
from tests.local_pair import LocalPair, LocalRequest

SHAPES = (
    TreeShape(num_steps=3, topk=1, num_draft_tokens=4),
    TreeShape(num_steps=4, topk=3, num_draft_tokens=12),
)
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=30, seed=2),
    SamplingParams(temperature=0.7, repetition_penalty=1.2, seed=3),
    SamplingParams(logit_bias=((3, 1.5), (8, -2.0))),
)


def ready_target(
    models: Models, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[TargetEngine, list[Hashable]]:
    """Return a target that emulates graphs and is ready, and the keys of what it captures next."""
    keys: list[Hashable] = []
    graphs = EmulatedGraphs(keys)
    monkeypatch.setattr("target_service.runner.GraphCache", lambda _: graphs)
    target = make_target(models.pairing("eagle"), max_batch_rows=192, **options)
    target_service.warm_up.warm_up(target)
    target.serving.begin()
    keys.clear()
    return target, keys


def ready_draft(
    models: Models, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[DraftEngine, list[Hashable]]:
    """Return a draft likewise; its trees are those of SHAPES."""
    keys: list[Hashable] = []
    graphs = EmulatedGraphs(keys)
    monkeypatch.setattr("draft_service.runner.GraphCache", lambda _: graphs)
    draft = make_draft(models.pairing("eagle"), max_batch_rows=192, max_num_requests=6, **options)
    draft_service.warm_up.warm_up(draft, shapes=SHAPES, dtype=torch.float32, max_num_requests=6)
    draft.serving.begin()
    keys.clear()
    return draft, keys


def requests_of(count: int, *, samplings: tuple[SamplingParams, ...]) -> list[LocalRequest]:
    """Return requests that arrive one after the other, of all kinds, some with long prompts."""
    rng = random.Random(count)
    return [
        LocalRequest(
            prompt=random_tokens(rng, 3 + 47 * i),
            max_new_tokens=12 + i,
            sampling=samplings[i % len(samplings)],
            shape=(*SHAPES, None, TreeShape(num_steps=2, topk=2, num_draft_tokens=5))[i % 4],
            joins_at=2 * i,
        )
        for i in range(count)
    ]


def check(requests: list[LocalRequest], expected: list[LocalRequest]) -> None:
    for request, plain in zip(requests, expected, strict=True):
        assert request.output == plain.output


def test_everything_is_a_replay(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beside trees, requests that come and go, mixed shapes, filters: same output."""
    expected = plain_of(
        make_target(models.pairing("eagle")), requests_of(6, samplings=SAMPLINGS[:3])
    )
    target, captured = ready_target(models, monkeypatch)
    draft, captured_of_draft = ready_draft(models, monkeypatch)
    requests = requests_of(6, samplings=SAMPLINGS[:3])
    LocalPair(target, draft).run(requests)
    check(requests, expected)
    assert captured == [] and captured_of_draft == []
    assert target.load.num_captures == draft.load.num_captures == 0
    assert any(len(path.token_ids) > 1 for request in requests for path in request.paths[1:])


def test_what_is_rare_captures_nothing_either(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(5, samplings=SAMPLINGS)
    for i, request in enumerate(requests):
        request.logprobs, request.top_logprobs = i % 2 == 0, 2 * i
    expected = plain_of(make_target(models.pairing("eagle")), requests)
    target, captured = ready_target(models, monkeypatch)
    draft, captured_of_draft = ready_draft(models, monkeypatch)
    LocalPair(target, draft).run(requests)
    check(requests, expected)
    for request, plain in zip(requests, expected, strict=True):
        assert request.logprob_rows == plain.logprob_rows
    assert captured == [] and captured_of_draft == []


def test_device_rounds_are_replays(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    from draft_service.device_rounds.rounds import DeviceRounds

    target, captured = ready_target(models, monkeypatch, has_mailbox=True)
    draft, captured_of_draft = ready_draft(models, monkeypatch, make_source=DeviceRounds)
    requests = requests_of(5, samplings=SAMPLINGS[:2])
    expected = plain_of(make_target(models.pairing("eagle")), requests)
    pair = PoisonedDevicePair(target, draft)
    pair.run(requests)
    check(requests, expected)
    assert pair.num_device_trees > 3
    assert captured == [] and captured_of_draft == []


def test_counts_begin_when_they_are_told_to() -> None:
    graphs = EmulatedGraphs([])
    counts = ServingCounts(graphs)

    def load() -> None:
        hook: Any = knobs.runtime.kernel_load_start_hook
        hook(None, None, "some_kernel", {}, "0")

    def found() -> tuple[int, int, int]:
        return counts.num_compiles, counts.num_captures, counts.num_eager_launches

    load()
    count_launch("op")
    graphs.run("a", lambda: None, [])
    assert found() == (0, 0, 0)
    counts.begin()
    graphs.run("a", lambda: None, [])
    assert found() == (0, 0, 0)
    load()
    graphs.run("b", lambda: None, [])
    count_launch("op")
    count_launch("op")
    count_launch("op", is_single=True)
    assert found() == (1, 1, 2)
    forget_launches({"op": 2})
    assert found() == (1, 1, 0)


def test_a_cpu_captures_nothing() -> None:
    graphs = GraphCache(torch.device("cpu"))
    graphs.run("a", lambda: None, [])
    assert graphs.num_captures == 0

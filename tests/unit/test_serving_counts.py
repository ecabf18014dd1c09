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
from tests.device_pair import PoisonedDevicePair, device_engines
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


OPTIONS = {"max_batch_rows": 192}
DRAFT_OPTIONS = {"max_batch_rows": 192, "max_num_requests": 6}


class Captures:
    """Lets engines emulate graphs, and holds the keys of those captured since both were ready."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[Hashable] = []
        for service in ("target", "draft"):
            monkeypatch.setattr(
                f"{service}_service.runner.GraphCache", lambda _: EmulatedGraphs(self.keys)
            )

    def get_ready(self, target: TargetEngine, draft: DraftEngine) -> None:
        """Do what engines on a GPU do before they are ready."""
        target_service.warm_up.warm_up(target)
        draft_service.warm_up.warm_up(draft, shapes=SHAPES, dtype=torch.float32, max_num_requests=6)
        for engine in (target, draft):
            engine.serving.begin()
        self.keys.clear()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return Captures(monkeypatch)


def ready_pair(models: Models, captures: Captures) -> tuple[TargetEngine, DraftEngine]:
    """Return a target and a draft that are ready."""
    pairing = models.pairing("eagle")
    target, draft = make_target(pairing, **OPTIONS), make_draft(pairing, **DRAFT_OPTIONS)
    captures.get_ready(target, draft)
    return target, draft


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


def unpadded(models: Models, requests: list[LocalRequest]) -> list[LocalRequest]:
    """Return the requests as served one by one by a target that emulates no graphs."""
    target = make_target(models.pairing("eagle"))
    target.runner.pads_rows = False
    return plain_of(target, requests)


def check(requests: list[LocalRequest], expected: list[LocalRequest]) -> None:
    for request, plain in zip(requests, expected, strict=True):
        assert request.output == plain.output


def test_everything_is_a_replay(models: Models, captures: Captures) -> None:
    """Prompts beside trees, requests that come and go, mixed shapes, filters: same output."""
    target, draft = ready_pair(models, captures)
    requests = requests_of(6, samplings=SAMPLINGS[:3])
    LocalPair(target, draft).run(requests)
    assert captures.keys == []
    assert target.load.num_captures == draft.load.num_captures == 0
    assert any(len(path.token_ids) > 1 for request in requests for path in request.paths[1:])
    check(requests, unpadded(models, requests))


def test_what_is_rare_captures_nothing_either(models: Models, captures: Captures) -> None:
    target, draft = ready_pair(models, captures)
    requests = requests_of(5, samplings=SAMPLINGS)
    for i, request in enumerate(requests):
        request.logprobs, request.top_logprobs = i % 2 == 0, 2 * i
    LocalPair(target, draft).run(requests)
    assert captures.keys == []
    expected = unpadded(models, requests)
    check(requests, expected)
    for request, plain in zip(requests, expected, strict=True):
        assert request.logprob_rows == plain.logprob_rows


def test_device_rounds_are_replays(models: Models, captures: Captures) -> None:
    with device_engines(models) as make:
        target, draft, _ = make("eagle", draft=DRAFT_OPTIONS, **OPTIONS)
        captures.get_ready(target, draft)
        requests = requests_of(5, samplings=SAMPLINGS[:2])
        pair = PoisonedDevicePair(target, draft)
        pair.run(requests)
        assert captures.keys == []
        assert pair.num_device_trees > 3
        check(requests, unpadded(models, requests))


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

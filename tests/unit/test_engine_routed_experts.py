"""The experts that a target names are those that the rows of its tokens were routed to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared.messages import RequestFailure
from shared.messages.routed_experts import RoutedExperts, join_routed
from shared.models.attention import Rows
from shared.step.read_back import ReadBack
from target_service.engine import TargetEngine
from tests.device_pair import DevicePair, Make, check, requests_of
from tests.engines import Models, PoisonedPair, fresh, make_draft, make_target, plain_of
from tests.local_pair import LocalPair, LocalRequest
from tests.peer_pair import PeerPair, close_channels, peer_rounds


def asking(count: int, seed: int) -> list[LocalRequest]:
    """Return requests of several samplings; all but the last one ask for their experts."""
    requests = requests_of(count, seed)
    return [replace(r, wants_routed_experts=i < count - 1) for i, r in enumerate(requests)]


def experts_of(request: LocalRequest) -> RoutedExperts | None:
    """Return the experts of a request's rows, once per output token."""
    for path in request.paths:
        assert (path.routed_experts is not None) is request.wants_routed_experts
    return join_routed(path.routed_experts for path in request.paths)


def check_experts(requests: Sequence[LocalRequest], expected: Sequence[LocalRequest]) -> None:
    """Check outputs and experts; those of the last request, which does not ask, are not said."""
    check(requests, expected)
    for request, plain in zip(requests, expected, strict=True):
        found = experts_of(request)
        assert found == experts_of(plain)
        if found is not None:
            assert found.shape == (len(request.output), 3, 2)
    assert experts_of(requests[-1]) is None
    drafts = [path.num_accepted_drafts for request in requests[:-1] for path in request.paths]
    assert sum(drafts) > 10, "hardly a draft was accepted: the comparison proves little"


@pytest.fixture
def target(models: Models) -> TargetEngine:
    return make_target(models.pairing("experts"), feature_ring_mb=1)


def test_those_of_relayed_rounds_are_those_of_plain_ones(
    models: Models, target: TargetEngine
) -> None:
    requests = asking(4, 1)
    expected = plain_of(target, requests)
    LocalPair(target, make_draft(models.pairing("experts"))).run(requests)
    check_experts(requests, expected)
    paths = [[*path.accept_index] for request in requests for path in request.paths]
    moved = [path for path in paths if path != [*range(len(path))]]
    assert moved, "no path but the first nodes of its tree"


def test_those_of_padded_steps_are_those_of_others(models: Models, target: TargetEngine) -> None:
    requests = asking(4, 1)
    expected = plain_of(target, requests)
    target.runner.pads_rows = True
    LocalPair(target, make_draft(models.pairing("experts"))).run(requests)
    check_experts(requests, expected)


def test_those_of_peer_rounds(models: Models, target: TargetEngine) -> None:
    requests = asking(3, 2)
    expected = plain_of(target, requests)
    draft = make_draft(models.pairing("experts"))
    pair = PeerPair(target, draft)
    pair.run(requests)
    check_experts(requests, expected)
    assert sum([peer_rounds(pair, request) for request in requests[:-1]]) > 6
    close_channels(target, draft)


@pytest.mark.parametrize("overlaps", [False, True])
def test_those_of_device_rounds(make: Make, *, overlaps: bool) -> None:
    target, draft, _ = make("experts")
    target.scheduler.overlaps_steps = overlaps
    requests = asking(3, 3)
    expected = plain_of(target, requests)
    pair = DevicePair(target, draft)
    pair.run(requests)
    check_experts(requests, expected)
    assert pair.num_device_trees > 6


def test_each_token_has_them_once_though_its_request_is_retracted(models: Models) -> None:
    pairing = models.pairing("experts")
    changes = {"max_new_tokens": 60, "stop_token_ids": ()}
    requests = [replace(r, prompt=[i + 1], **changes) for i, r in enumerate(asking(4, 4))]
    expected = plain_of(make_target(pairing), requests)
    target = make_target(pairing, page_size=4, num_pages=1 + 130 // 4)
    pair = PoisonedPair(target, make_draft(pairing))
    pair.run(requests)
    assert pair.num_retracted >= 2, "the pool was large enough for everyone"
    assert any(request.target_epoch > 1 for request in requests[:-1])
    check_experts(requests, expected)


def test_nothing_is_kept_or_read_where_nobody_asks(
    target: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = set()
    kept: list[bool] = []
    add, init = ReadBack.add, Rows.__init__

    def note(read: ReadBack, name: str, source: torch.Tensor, *rows: torch.Tensor) -> None:
        names.add(name)
        add(read, name, source, *rows)

    def note_rows(rows: Rows, **fields: Any) -> None:
        kept.append(fields.get("expert_ids") is not None)
        init(rows, **fields)

    monkeypatch.setattr(ReadBack, "add", note)
    monkeypatch.setattr(Rows, "__init__", note_rows)
    (request,) = requests_of(1, 0)
    for asks in (False, True):
        names.clear()
        kept.clear()
        LocalPair(target).run([fresh(request, shape=None, wants_routed_experts=asks)])
        assert ("routed_experts" in names) is asks
        assert any(kept) is asks


def test_a_model_without_experts_refuses(models: Models) -> None:
    target = make_target(models.pairing("standalone"))
    pair = LocalPair(target)
    pair.open(LocalRequest(prompt=[1, 2], max_new_tokens=4, wants_routed_experts=True))
    (failure,) = target.step()
    assert isinstance(failure, RequestFailure)
    assert (failure.reason, failure.field) == ("NO_EXPERTS", "wants_routed_experts")
    assert "no experts" in failure.message

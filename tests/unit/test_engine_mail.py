"""Rounds that devices run by themselves, through a mailbox: their output is the plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from draft_service.engine import DraftEngine
from shared.mailbox import Mailbox
from target_service.engine import TargetEngine
from tests.engines import KINDS, SHAPES, Models, make_draft, make_target, run_plain
from tests.linked_pair import unlink
from tests.local_pair import LocalRequest
from tests.mailed_pair import MailedPair, give_mailbox
from tests.unit.test_engine_direct import PAGE_SIZES, requests_of

pytestmark = pytest.mark.timeout(60)

Engines = tuple[TargetEngine, DraftEngine, Mailbox]
Make = Callable[..., Engines]


@pytest.fixture
def make(models: Models) -> Iterator[Make]:
    """Return what makes a target with a mailbox and a draft."""
    made: list[Engines] = []

    def build(kind: str, page_sizes: tuple[int, int] = (16, 16), **options: Any) -> Engines:
        pairing = models.pairing(kind)
        target_page, draft_page = page_sizes
        target = make_target(pairing, feature_ring_mb=1, page_size=target_page, **options)
        mailbox = give_mailbox(target)
        draft = make_draft(pairing, page_size=draft_page)
        made.append((target, draft, mailbox))
        return made[-1]

    yield build
    for target, draft, mailbox in made:
        unlink(target, draft)
        mailbox.close()


def same_shape(requests: list[LocalRequest]) -> list[LocalRequest]:
    return [replace(request, shape=SHAPES[2]) for request in requests]


@pytest.mark.parametrize("kind", KINDS)
def test_output_equals_the_plain_run(make: Make, kind: str) -> None:
    target, draft, _ = make(kind, PAGE_SIZES[kind])
    for seed, count in enumerate([1, 3, 3]):
        requests = same_shape(requests_of(count, seed))
        expected = run_plain(target, requests, alone=True)
        pair = MailedPair(target, draft)
        pair.run(requests)
        for request, plain in zip(requests, expected, strict=True):
            assert request.output == plain.output
            assert request.logprob_rows == plain.logprob_rows
            assert request.finish_reason == plain.finish_reason
        if not any(request.sampling.has_penalties for request in requests):
            num_rounds = sum(len(request.paths) for request in requests)
            assert pair.num_awaited > num_rounds // 2
            assert pair.num_ahead > num_rounds // 3

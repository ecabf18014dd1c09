"""Targets whose rows see a window: pages behind it are freed, and no bit of any output changes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from shared.kv.pool import KVPool
from shared.messages import MAX_TREE_NODES, SamplingParams
from target_service.engine import TargetEngine
from tests import checkpoints
from tests.device_pair import Make, PoisonedDevicePair
from tests.engines import (
    SHAPES,
    Models,
    Pairing,
    PoisonedPair,
    fresh,
    make_draft,
    make_target,
    pool_of,
    random_tokens,
)
from tests.local_pair import LocalPair, LocalRequest
from tests.peer_pair import PeerPair, close_channels

WINDOW = 40
CHUNK = 32


def requests_of(*lengths: int, max_new_tokens: int = 50) -> list[LocalRequest]:
    """Return requests that outgrow the window, sampled and greedy."""
    rng = random.Random(7)
    return [
        LocalRequest(
            prompt=random_tokens(rng, length),
            max_new_tokens=max_new_tokens,
            shape=SHAPES[2 + i % 3],
            sampling=SamplingParams(temperature=0.7 * (i % 2), seed=i),
            logprobs=i == 1,
        )
        for i, length in enumerate(lengths)
    ]


def served_with_all_pages(
    pairing: Pairing, requests: Sequence[LocalRequest], monkeypatch: pytest.MonkeyPatch
) -> list[LocalRequest]:
    """Return copies that were served without speculation by a target that frees nothing."""
    copies = [fresh(request, shape=None) for request in requests]
    with monkeypatch.context() as patch:
        patch.setattr(KVPool, "drop_before", lambda *_: None)
        LocalPair(make_target(pairing)).run(copies)
    return copies


def check(requests: Sequence[LocalRequest], expected: Sequence[LocalRequest]) -> None:
    for request, plain in zip(requests, expected, strict=True):
        assert request.output == plain.output
        assert request.logprob_rows == plain.logprob_rows


def most_held(target: TargetEngine, pair: LocalPair) -> tuple[int, int]:
    """Step until all is done; return the most pages of a request in its prefill, and later."""
    pool, most = pool_of(target), [0, 0]
    num_later = 0
    while pair.step():
        for request in target.scheduler.held:
            is_later = request.round_idx > 1
            num_later += is_later
            held = pool.num_held_pages(request.req_idx)
            most[is_later] = max(most[is_later], held)
    assert num_later > 20
    pair.finish()
    return most[0], most[1]


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_behind_the_window_are_freed_and_nothing_changes(
    models: Models, monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    """Pages are NaN once they are freed."""
    pairing = models.pairing("window")
    requests = requests_of(3, 150, 41, 97)
    expected = served_with_all_pages(pairing, requests, monkeypatch)
    target = make_target(pairing, page_size=page_size, prefill_chunk_len=CHUNK)
    pair = PoisonedPair(target, make_draft(pairing))
    for request in requests:
        pair.open(request)
    prefill, later = most_held(target, pair)
    check(requests, expected)
    assert (WINDOW + CHUNK - 1) // page_size <= prefill <= (WINDOW + CHUNK) // page_size + 2
    tree = max(shape.num_draft_tokens for shape in SHAPES[2:5])
    assert WINDOW // page_size <= later <= (WINDOW + tree) // page_size + 2
    late = [path for r in requests for path in r.paths if path.seq_len > 2 * WINDOW]
    assert sum(path.num_accepted_drafts for path in late) > len(late) / 2
    assert target.load.num_moved_rounds > 0


def test_plain_rounds_by_credit_hold_no_more_than_the_window(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairing = models.pairing("window")
    requests = [fresh(r, shape=None) for r in requests_of(5, 60, max_new_tokens=80)]
    expected = served_with_all_pages(pairing, requests, monkeypatch)
    target = make_target(pairing, page_size=4)
    target.runner.pads_rows = True
    pair = PoisonedPair(target, credit_rounds=30)
    for request in requests:
        pair.open(request)
    _, later = most_held(target, pair)
    check(requests, expected)
    assert later <= WINDOW // 4 + 2


def test_peer_rounds(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    pairing = models.pairing("window")
    requests = requests_of(9, 70, 44)
    expected = served_with_all_pages(pairing, requests, monkeypatch)
    target, draft = make_target(pairing, page_size=4), make_draft(pairing)
    PeerPair(target, draft).run(requests)
    check(requests, expected)
    close_channels(target, draft)


@pytest.mark.parametrize("overlaps", [False, True])
def test_device_rounds(
    models: Models, make: Make, monkeypatch: pytest.MonkeyPatch, *, overlaps: bool
) -> None:
    """A step in flight sees what it saw when it was planned."""
    requests = requests_of(9, 70, 44)
    expected = served_with_all_pages(models.pairing("window"), requests, monkeypatch)
    target, draft, _ = make("window", (4, 16))
    target.scheduler.overlaps_steps = overlaps
    pair = PoisonedDevicePair(target, draft)
    pair.run(requests)
    check(requests, expected)
    assert pair.num_device_trees > 10


def test_long_requests_share_a_pool_that_could_not_hold_them_whole(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of 300 tokens in 500: all are admitted at once and none is retracted."""
    pairing = models.pairing("window")
    requests = requests_of(200, 210, 220, 230)
    expected = served_with_all_pages(pairing, requests, monkeypatch)
    target = make_target(pairing, page_size=4, num_pages=1 + 800 // 4, prefill_chunk_len=16)
    pair = PoisonedPair(target, make_draft(pairing))
    for request in requests:
        pair.open(request)
    pair.step()
    assert target.load.num_running == 4
    pair.finish()
    assert pair.num_retracted == 0
    check(requests, expected)


def test_a_request_that_is_retracted_is_rebuilt_exactly(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairing = models.pairing("window")
    requests = requests_of(2, 3, 4, 5, max_new_tokens=70)
    expected = served_with_all_pages(pairing, requests, monkeypatch)
    target = make_target(pairing, page_size=4, num_pages=1 + 140 // 4, prefill_chunk_len=16)
    pair = PoisonedPair(target, make_draft(pairing))
    pair.run(requests)
    assert pair.num_retracted > 0
    check(requests, expected)


def test_pages_are_kept_while_a_draft_may_ask_for_their_rows(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that comes late gets rows from the first one on, most of them computed again."""
    path = models.pairing("window").target
    head = models.get("window-eagle", lambda d: checkpoints.write_eagle(d, path))
    pairing = Pairing(target=path, draft=head, algorithm="eagle")
    reading, plain = requests_of(90, 100)
    requests = [fresh(reading, joins_at=30), fresh(plain, shape=None)]
    expected = served_with_all_pages(pairing, requests, monkeypatch)
    target = make_target(pairing, page_size=4, feature_retain_rows=8)
    pool = pool_of(target)
    pair = PoisonedPair(target, make_draft(pairing))
    for request in requests:
        pair.open(request)
    while len(requests[1].output) < 45:
        assert pair.step()
    held = {r.request_id: pool.num_held_pages(r.req_idx) for r in target.scheduler.held}
    assert held["r1"] >= (len(requests[0].tokens) - 1) // 4
    assert held["r2"] <= (WINDOW + MAX_TREE_NODES) // 4 + 2
    pair.finish()
    check(requests, expected)
    assert requests[0].trees, "the head never caught up"

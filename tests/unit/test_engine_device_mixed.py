"""Device rounds of requests that differ: in shape, target, and in what their hosts must do."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from draft_service.device_rounds.mailbox_io import MailboxPaths
from draft_service.device_rounds.rounds import DeviceRounds
from draft_service.engine import DraftEngine
from shared.messages import SamplingParams, TreeShape
from tests.device_pair import (
    BUSHY,
    DevicePair,
    Make,
    PoisonedDevicePair,
    check,
    num_rounds,
    requests_of,
)
from tests.engines import SHAPES, fresh, plain_of, random_tokens
from tests.local_pair import LocalRequest
from tests.marks import exhaustive, first_fast


def launched_together(draft: DraftEngine, monkeypatch: pytest.MonkeyPatch) -> list[set[TreeShape]]:
    """Return, as they come, the shapes of the trees that one launch of the draft's device grows."""
    assert isinstance(draft.source, DeviceRounds)
    overlap = draft.source.overlap
    found: list[set[TreeShape]] = []
    launch = overlap.launch

    def note(requests: Any, trees: Any, *rest: Any) -> None:
        found.append({tree.shape for tree in trees})
        launch(requests, trees, *rest)

    monkeypatch.setattr(overlap, "launch", note)
    return found


@pytest.mark.parametrize("overlaps", first_fast([True, False]))
def test_trees_of_several_shapes_grow_in_one_launch(
    make: Make, monkeypatch: pytest.MonkeyPatch, *, overlaps: bool
) -> None:
    target, draft, _ = make("eagle", (4, 16))
    target.scheduler.overlaps_steps = overlaps
    shapes = [BUSHY, SHAPES[3], SHAPES[1]]
    pairs = zip(requests_of(3, 0), shapes, strict=True)
    requests = [replace(request, shape=shape) for request, shape in pairs]
    expected = plain_of(target, requests)
    found = launched_together(draft, monkeypatch)
    pair = PoisonedDevicePair(target, draft)
    pair.run(requests)
    check(requests, expected)
    assert set(shapes) in found
    assert pair.num_overlapped > num_rounds(requests) // 2


@pytest.mark.parametrize("kind", first_fast(["eagle", "standalone"]))
def test_a_draft_goes_ahead_for_several_targets(make: Make, kind: str) -> None:
    target, draft, _ = make(kind)
    other, _, _ = make(kind)
    pairs = [DevicePair(target, draft), DevicePair(other, draft)]
    num_mailboxes: set[int] = set()

    def on_draft(message: Any) -> None:
        for pair in pairs:
            DevicePair.on_draft(pair, message)

    def note(paths: MailboxPaths) -> None:
        num_mailboxes.add(len(paths.mailboxes))

    requests = []
    for i, pair in enumerate(pairs):
        pair.on_draft = on_draft  # type: ignore[method-assign]
        pair.edit_paths = note
        for j, request in enumerate(requests_of(2, i)):
            requests.append(replace(request, request_id=f"{i} {j}"))
            pair.open(requests[-1])
    while any([pair.step() for pair in pairs]):
        pass
    check(requests, plain_of(target, requests))
    for pair in pairs:
        pair.check_idle()
        assert pair.num_device_trees > 0
    assert num_mailboxes == {1, 2}
    assert pairs[1].num_overlapped > num_rounds(requests) // 3, "of both"


@pytest.mark.parametrize("ends_with", ["an order", "time"])
def test_work_of_others_waits_for_a_device_round_and_not_for_long(
    make: Make, monkeypatch: pytest.MonkeyPatch, ends_with: str
) -> None:
    """What is launched while the draft's device waits for paths would wait with it."""
    target, draft, _ = make("standalone")
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    pair = DevicePair(target, draft)
    request, late = (replace(r, max_new_tokens=40) for r in requests_of(2, 0))
    late.prompt = random_tokens(random.Random(1), 50)
    expected = plain_of(target, [request, late])
    pair.open(request)
    while not pair.num_overlapped:
        pair.step()
    assert pair.draft_device.is_running and not draft.has_work
    pair.open(late)
    assert not draft.has_work
    in_s = draft.has_work_in_s
    assert in_s is not None and 0 < in_s < 0.1
    if ends_with == "time":
        now_s += in_s
    else:
        pair.step_target()
        pair.pump()
    assert draft.has_work and draft.has_work_in_s is None
    before = pair.num_overlapped
    pair.step_draft()
    assert pair.num_overlapped == before + (ends_with == "an order")
    assert draft.requests[late.request_id].kv_len >= 50, "its prompt is read"
    assert pair.draft_device.is_running, "and the next round is launched"
    now_s += 1000.0  # from now on nothing waits
    while pair.step():
        now_s += 1.0
    pair.check_idle()
    check([request, late], expected)


@pytest.mark.parametrize("round_s", [0.004, 0.03])
def test_work_of_others_is_done_at_once_where_the_next_path_is_far_away(
    make: Make, monkeypatch: pytest.MonkeyPatch, round_s: float
) -> None:
    """As while a target's steps have many rows of prompts."""
    target, draft, _ = make("standalone")
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    pair = DevicePair(target, draft)
    requests = [replace(r, max_new_tokens=60) for r in requests_of(3, 0)]
    expected = plain_of(target, requests)
    request, late, later = requests
    pair.open(request)
    while pair.num_overlapped < 3:
        pair.step()
        now_s += round_s
    assert pair.draft_device.is_running and not draft.has_work
    pair.open(late)
    assert draft.has_work == (round_s > 0.01)
    if draft.has_work:  # and after that the path is no further away than before
        now_s += round_s / 2
        pair.step_draft()
        assert pair.draft_device.is_running
        now_s += round_s / 3
        pair.open(later)
        assert not draft.has_work
    else:
        pair.open(later)
    while pair.step():
        now_s += 1.0
    pair.check_idle()
    check(requests, expected)


def test_a_long_prompt_is_read_in_pieces_beside_device_rounds(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, _ = make("standalone", draft={"max_batch_rows": 512})
    monkeypatch.setattr("draft_service.pipeline.CHUNK_ROWS", 16)
    pair = DevicePair(target, draft)
    request, late = (replace(r, max_new_tokens=60) for r in requests_of(2, 0))
    late.prompt = random_tokens(random.Random(1), 90)
    expected = plain_of(target, [request, late])
    pair.open(request)
    while not pair.num_overlapped:
        pair.step()
    pair.open(late)
    read = [0]
    while read[-1] < 90:
        before = pair.num_overlapped
        pair.step()
        read.append(draft.requests[late.request_id].kv_len)
        assert pair.num_overlapped > before, "a round of the other in every step"
    assert max(b - a for a, b in itertools.pairwise(read)) == 16
    pair.finish()
    check([request, late], expected)


NEIGHBOURS = [
    LocalRequest(
        prompt=[3, 1, 4],
        max_new_tokens=30,
        shape=BUSHY,
        sampling=SamplingParams(temperature=1.0, repetition_penalty=1.2, seed=5),
    ),
    LocalRequest(prompt=random_tokens(random.Random(2), 40), max_new_tokens=12),
    LocalRequest(
        prompt=[2, 7, 1, 8],
        max_new_tokens=30,
        shape=SHAPES[3],
        min_new_tokens=10,
        stop_token_ids=tuple(range(0, 256, 3)),
    ),
    LocalRequest(prompt=[5], max_new_tokens=25, shape=BUSHY, joins_at=8),
]


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [*exhaustive([False]), True])
def test_neighbours_of_all_kinds_that_come_and_go_in_every_round_change_nothing(
    make: Make, *, overlaps: bool
) -> None:
    """Prompts in chunks, replays, penalties, root-only rounds; one is cancelled in the midst."""
    target, draft, _ = make(
        "eagle", (4, 4), prefill_chunk_len=7, max_num_requests=8, feature_retain_rows=16
    )
    target.scheduler.overlaps_steps = overlaps
    streams = [replace(request, max_new_tokens=150) for request in requests_of(2, 1)]
    expected = plain_of(target, streams)
    plain = plain_of(target, NEIGHBOURS)
    pair = PoisonedDevicePair(target, draft, credit_rounds=6)
    for stream in streams:
        pair.open(stream)
    rng, came = random.Random(1), []
    for i in itertools.count():
        if all(stream.finish_reason for stream in streams):
            break
        if len(pair.target.requests) < 6:
            kind = rng.randrange(len(NEIGHBOURS))
            came.append((fresh(NEIGHBOURS[kind], request_id=f"n{i}"), plain[kind]))
            pair.open(came[-1][0])
        if rng.random() < 0.1 and not came[-1][0].finish_reason:
            pair.cancel(came.pop()[0])
        pair.step()
    of_streams = num_rounds(streams)
    names = {stream.request_id for stream in streams}
    assert sum(name in names for name, _ in pair.device_trees) > of_streams * 2 // 3
    pair.finish()
    check([*streams, *[one for one, _ in came]], [*expected, *[one for _, one in came]])
    assert len(came) > 8 and pair.num_overlapped > of_streams // 2


@pytest.mark.parametrize("kind", first_fast(["eagle", "standalone"]))
def test_every_step_has_a_round_of_every_request(make: Make, kind: str) -> None:
    """A step is launched while the one before is in flight, for whose paths nobody waits."""
    target, draft, _ = make(kind)
    target.scheduler.overlaps_steps = True
    requests = [replace(request, max_new_tokens=70) for request in requests_of(3, 0)]
    expected = plain_of(target, requests)
    pair = PoisonedDevicePair(target, draft)
    for request in requests:
        pair.open(request)
    for _ in range(200):
        before = pair.num_device_trees
        pair.step()
        if pair.num_device_trees == before + 3:
            break
    num_steps = target.load.num_steps
    for count in range(1, 6):
        pair.step()
        assert target.pipeline.in_flight is not None
        assert target.load.num_steps == num_steps + count
        assert pair.num_device_trees == before + 3 + 3 * count
    assert not any(request.finish_reason for request in requests)
    pair.finish()
    check(requests, expected)


def test_a_request_that_has_ended_does_not_end_the_wait_for_others(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last path stays in the mailbox until its draft is closed."""
    target, draft, _ = make("eagle")
    requests = [
        LocalRequest(prompt=[3, 1, 4 + i], max_new_tokens=count, shape=BUSHY)
        for i, count in enumerate((24, 120))
    ]
    pair = DevicePair(target, draft)
    launches: list[set[str]] = []
    overlap = pair.draft_device.overlap
    launch = overlap.launch

    def note(ahead: Any, *rest: Any) -> None:
        launches.append({request.open.request_id for request in ahead})
        launch(ahead, *rest)

    monkeypatch.setattr(overlap, "launch", note)
    for request in requests:
        pair.open(request)
    ended, stays = requests
    to_close: list[LocalRequest] = []
    with monkeypatch.context() as patch:
        patch.setattr(pair, "close_draft", to_close.append)
        while not to_close:
            pair.step()
        del launches[:]
        for _ in range(6):
            pair.step()
        assert len(draft.requests) == 2 and not stays.finish_reason
    assert len(launches) > 4 and launches == [{stays.request_id}] * len(launches)
    pair.close_draft(ended)
    pair.finish()
    check(requests, plain_of(target, requests))

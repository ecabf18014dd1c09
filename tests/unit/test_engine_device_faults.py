"""Device rounds while requests, drafts, pages, channels and credits come and go."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from draft_service.device_rounds.mailbox_io import MailboxPaths
from draft_service.engine_factory import EXTRA_SLOTS
from shared.messages import FinishReason, VerifyRound
from target_service.engine import TargetEngine
from target_service.phases import MailboxTrees
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
from tests.marks import EXHAUSTIVE, exhaustive, first_fast
from tests.unit.test_engine_device_rounds import WRONG_PATHS, WRONG_TREES, EditWords, words_of
from tests.unit.test_engine_peer_rounds import (
    KINDS_AND_PACES,
    Chaos,
    close_late,
    cut_by_draft,
    cut_by_target,
    is_attached_again,
    moments,
    order_again,
    renew_credit,
    retract,
)


def step_device_rounds(pair: DevicePair, count: int) -> None:
    """Step until the target took so many more trees from the mailbox."""
    wanted = pair.num_device_trees + count
    for _ in range(1000):
        if pair.num_device_trees >= wanted:
            return
        pair.step()
    raise AssertionError("no tree is taken")


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [False, True])
def test_device_rounds_go_on_while_a_prompt_is_read(make: Make, *, overlaps: bool) -> None:
    target, draft, _ = make("eagle", prefill_chunk_len=16)
    target.scheduler.overlaps_steps = overlaps
    requests = [replace(request, max_new_tokens=60) for request in requests_of(3, 0)]
    late = replace(requests.pop(), prompt=random_tokens(random.Random(1), 60))
    expected = plain_of(target, [*requests, late])
    pair = PoisonedDevicePair(target, draft)
    for request in requests:
        pair.open(request)
    step_device_rounds(pair, 6)
    pair.open(late)
    before, overlapped, rounds = pair.num_device_trees, pair.num_overlapped, num_rounds(requests)
    while not late.paths:
        pair.step()
    num_new = num_rounds(requests) - rounds
    assert num_new > 4
    assert pair.num_device_trees >= before + num_new, "all of them"
    assert pair.num_overlapped >= overlapped + num_new - 4
    while late.request_id not in {request_id for request_id, _ in pair.device_trees}:
        pair.step()
    assert not any(request.finish_reason for request in (*requests, late)), "it joined them"
    pair.finish()
    check([*requests, late], expected)


def moments_of(pair: DevicePair, *, overlaps: bool) -> list[Callable[[], object]]:
    """Return what happens in a device round, in order, while nobody hears the answers."""

    def draft() -> None:
        assert pair.draft is not None
        for message in pair.draft.step():
            pair.on_draft(message)

    def verify() -> None:
        for message in pair.target.step():
            pair.on_target(message)

    return [
        verify,
        pair.run_draft_device,
        *[verify] * overlaps,
        pair.to_target,
        pair.hear_late,
        pair.to_draft,
        draft,
    ]


def reopen(pair: DevicePair, request: LocalRequest) -> None:
    """A newer draft state takes the request over, in the midst of a round."""
    pair.open_draft(request)
    pair.miss(request)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disturb", "overlaps"),
    [
        pytest.param(order_again, False, marks=EXHAUSTIVE),
        (order_again, True),
        pytest.param(cut_by_draft, True, marks=EXHAUSTIVE),
        (cut_by_draft, False),
        (cut_by_target, False),
        (retract, False),
        (close_late, True),
        (renew_credit, False),
        (reopen, False),
    ],
)
def test_a_device_round_that_is_given_up_at_any_moment_is_answered_once(
    make: Make, *, disturb: Callable[[Any, LocalRequest], None], overlaps: bool
) -> None:
    """Its tree may be ordered, in the mailbox, in flight, or answered."""
    target, draft, _ = make("eagle")
    target.scheduler.overlaps_steps = overlaps
    request = LocalRequest(prompt=[3, 1, 4, 1, 5], max_new_tokens=34, shape=BUSHY)
    (plain,) = plain_of(target, [request])
    answered = set()
    for moment in moments(6 + overlaps):
        pair = DevicePair(target, draft)
        served = fresh(request)
        pair.open(served)
        step_device_rounds(pair, 2)
        while not (pair.has_device_trees and pair.draft_device.is_running):
            pair.step()
        pair.is_deaf = True
        ways = moments_of(pair, overlaps=overlaps)
        for way in itertools.islice(itertools.cycle(ways), moment):
            way()
        answered.add(len(pair.unheard))
        last = served.paths[-1].round_idx
        disturb(pair, served)
        while pair.step():
            pass
        pair.hear()
        assert served.paths[-1].round_idx > last, f"nothing came of the order at moment {moment}"
        before = pair.num_device_trees
        pair.finish()
        assert served.output == plain.output
        assert pair.detached == [served.request_id] or is_attached_again(disturb)
        assert pair.num_device_trees > before + 2 or not is_attached_again(disturb), (
            "device rounds again"
        )
    assert answered >= {0, 1, 2}


@pytest.mark.parametrize("cut", first_fast([cut_by_draft, cut_by_target]))
def test_nobody_waits_for_the_device_behind_a_lost_channel(
    make: Make, cut: Callable[[Any, LocalRequest], None]
) -> None:
    target, draft, _ = make("eagle")
    pair = DevicePair(target, draft)
    request = LocalRequest(prompt=[3, 1, 4], max_new_tokens=40, shape=BUSHY)
    pair.open(request)
    step_device_rounds(pair, 3)
    while not (pair.has_device_trees and pair.draft_device.is_running):
        pair.step()
    cut(pair, request)
    before = pair.num_device_trees
    pair.pump()
    pair.pump()
    assert not pair.has_device_trees
    assert not pair.draft_device.is_running and not pair.draft_device.overlap.is_deferred
    pair.finish()
    assert pair.num_device_trees == before
    check([request], plain_of(target, [request]))


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [pytest.param(False, marks=EXHAUSTIVE), True])
def test_a_cancelled_request_leaves_its_place_to_another_at_any_moment(
    make: Make, *, overlaps: bool
) -> None:
    """Its slot, page-table rows and pages are another's while devices still work on it."""
    num_pages = 1 + 200 // 4
    target, draft, _ = make("eagle", (4, 4), num_pages=num_pages, max_num_requests=2)
    target.scheduler.overlaps_steps = overlaps
    requests = [replace(request, max_new_tokens=24) for request in requests_of(2, 0)]
    other = replace(requests_of(1, 3)[0], max_new_tokens=14)
    expected = plain_of(target, [*requests, other])
    for moment in moments(6 + overlaps):
        pair = DevicePair(target, draft)
        gone, stays, joins = [fresh(request) for request in (*requests, other)]
        for served in (gone, stays):
            pair.open(served)
        step_device_rounds(pair, 4)
        ways = moments_of(pair, overlaps=overlaps)
        for way in itertools.islice(itertools.cycle(ways), moment):
            way()
        slot = target.requests[gone.request_id].req_idx
        pair.cancel(gone)
        joins.request_id = f"new{moment}"
        pair.open(joins)
        while joins.request_id not in pair.admitted:
            pair.step_target()
        assert target.requests[joins.request_id].req_idx == slot
        step_device_rounds(pair, 2)
        pair.finish()
        check([stays, joins], expected[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scarce", "num_slots", "count", "length", "overlaps"),
    [
        ("target", 232, 3, 10, True),
        ("draft", EXTRA_SLOTS + 160, 5, 120, False),
        *exhaustive([("target", 232, 3, 10, False), ("draft", EXTRA_SLOTS + 160, 5, 120, True)]),
    ],
)
def test_retraction_ends_device_rounds_and_they_come_back(
    make: Make, *, scarce: str, num_slots: int, count: int, length: int, overlaps: bool
) -> None:
    rng = random.Random(2)
    few = {"num_pages": 1 + num_slots // 4}
    options = few if scarce == "target" else {"draft": few}
    target, draft, _ = make("eagle", (4, 4), **options)
    target.scheduler.overlaps_steps = overlaps
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, length),
            max_new_tokens=75 if scarce == "target" else 30,
            shape=BUSHY,
        )
        for _ in range(count)
    ]
    expected = plain_of(target, requests)
    pair = PoisonedDevicePair(target, draft)
    pair.run(requests)
    assert (pair.num_retracted if scarce == "target" else pair.num_draft_retracted) > 0
    assert [r.output for r in requests] == [plain.output for plain in expected]
    assert pair.num_device_trees > 0 and pair.num_overlapped > 0


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_context_that_fills_up(make: Make, page_size: int) -> None:
    few = {"max_context_len": 60}
    target, draft, _ = make("standalone", (page_size, page_size), draft=few, **few)
    pair = PoisonedDevicePair(target, draft)
    request = LocalRequest(prompt=[3, 1, 4, 1, 5], max_new_tokens=100, shape=SHAPES[3])
    expected = plain_of(target, [request])
    pair.run([request])
    check([request], expected)
    assert request.finish_reason is FinishReason.CONTEXT_LENGTH
    assert pair.num_device_trees > 0


@pytest.mark.parametrize(("credit_rounds", "margin"), [(1, 0), (2, 0), (3, 3)])
@pytest.mark.slow
def test_credits_that_end_and_are_renewed(make: Make, credit_rounds: int, margin: int) -> None:
    target, draft, _ = make("eagle")
    requests = requests_of(3, 0)
    expected = plain_of(target, requests)
    pair = PoisonedDevicePair(target, draft, credit_rounds=credit_rounds, margin=margin)
    pair.run(requests)
    check(requests, expected)
    assert pair.num_device_trees > 0 or credit_rounds == 1


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [False, True])
def test_trees_from_the_device_wait_for_no_others(make: Make, *, overlaps: bool) -> None:
    """A step with an answer to give and nothing else known; a prompt must not get in between."""
    target, draft, _ = make("eagle")
    target.scheduler.overlaps_steps = overlaps
    pair = DevicePair(target, draft)
    requests = [replace(request, max_new_tokens=60) for request in requests_of(3, 0)]
    for request in requests[:2]:
        pair.open(request)
    step_device_rounds(pair, 4)
    while not pair.has_device_trees:
        pair.step()
    wait_s, target.source.window.wait_s = target.source.window.wait_s, lambda num_rows: 10.0
    before = pair.num_device_trees
    stray = VerifyRound(request_id="", target_epoch=1, round_idx=1, seq_len=1, root_token_id=1)
    target.submit(stray)
    assert target.has_work
    pair.step_target()
    assert pair.num_device_trees == before + 2
    pair.failures.clear()
    target.source.window.wait_s = wait_s
    pair.open(requests[2])
    pair.finish()
    check(requests, plain_of(target, requests))


# --- times ---------------------------------------------------------------------------------------


def hear_while_reading(target: TargetEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages of drafts come to a step only while it waits for its result."""
    finish, finish_read, receive = (
        target.pipeline.finish,
        target.runner.finish_read,
        target.channels.receive,
    )
    is_deaf = False

    def finish_deaf(launched: Any) -> None:
        nonlocal is_deaf
        is_deaf = True
        finish(launched)

    def read_and_listen(*args: Any) -> Any:
        nonlocal is_deaf
        is_deaf = False
        return finish_read(*args)

    monkeypatch.setattr(target.pipeline, "finish", finish_deaf)
    monkeypatch.setattr(target.runner, "finish_read", read_and_listen)
    monkeypatch.setattr(target.channels, "receive", lambda: [] if is_deaf else receive())


DRAFT_STAGES = ["draft: channel", "draft: extend", "draft: grow"]


@pytest.mark.slow
@pytest.mark.parametrize("is_first_timed", [False, True])
@pytest.mark.parametrize("is_heard_late", [False, True])
def test_a_timed_round_of_the_devices_says_what_both_did(
    make: Make, monkeypatch: pytest.MonkeyPatch, *, is_first_timed: bool, is_heard_late: bool
) -> None:
    """Of a round whose tree the target's host heard of before the step was committed."""
    target, draft, _ = make("eagle")
    pair = DevicePair(target, draft)
    if is_heard_late:  # as on a GPU, where the host waits before the draft has grown the tree
        hear_while_reading(target, monkeypatch)
    requests = [
        LocalRequest(prompt=[3, 1, 4 + i], max_new_tokens=40, shape=BUSHY, is_timed=i == 1)
        for i in range(2)
    ]
    for request in requests:
        pair.open(request)
    step_device_rounds(pair, 4)
    timed, last = requests[1], requests[1].paths[-1].round_idx
    earliest_ns = time.monotonic_ns()
    while not timed.finish_reason:
        pair.to_draft()
        pair.step_draft()
        draft.channels.flush()
        if is_first_timed:  # as on a GPU, whose steps end when the device says so
            target.pipeline.times.device_free_ns = earliest_ns
        pair.step_target()
    rounds = timed.paths[last + 2 :]  # the tree before was on its way already
    assert len(rounds) > 5 and all(path.times is None for path in requests[0].paths)
    for path in rounds:
        assert path.times is not None
        names = [stage.name for stage in path.times.stages]
        assert names == [*DRAFT_STAGES, "channel", "forward", "sample"]
        ends = [path.times.begin_ns, *(stage.end_ns for stage in path.times.stages)]
        assert ends == sorted(ends) and ends[0] >= earliest_ns
        assert (ends[0] == earliest_ns) is is_first_timed
    pair.finish()
    check(requests, plain_of(target, requests))


def test_a_timed_round_whose_tree_no_host_has_seen_says_what_the_target_did(make: Make) -> None:
    target, draft, _ = make("eagle")
    pair = DevicePair(target, draft)
    request = LocalRequest(prompt=[3, 1, 4], max_new_tokens=30, shape=BUSHY, is_timed=True)
    pair.run([request])
    assert pair.num_device_trees > 0
    times_of = [path.times for path in request.paths[-pair.num_device_trees :]]
    for times in times_of:
        assert times is not None
        ends = [times.begin_ns, *(stage.end_ns for stage in times.stages)]
        assert [stage.name for stage in times.stages] == ["channel", "forward", "sample"]
        assert ends == sorted(ends) and ends[0] > 0


# --- everything at once --------------------------------------------------------------------------


class DeviceChaos(Chaos):
    """Beside what goes wrong with channels: wrong words, overlapping devices, requests that go."""

    pair: DevicePair

    def __init__(self, pair: DevicePair, rng: random.Random) -> None:
        super().__init__(pair, rng)
        self.num_wrong = self.num_joined = 0
        self._to_draft = pair.to_draft
        pair.to_draft = self.go_on  # type: ignore[method-assign]
        pair.edit_trees, pair.edit_paths = self.spoil_trees, self.spoil_paths

    def go_on(self) -> bool:
        """Let devices work and hosts hear of it in any order; carry what is on the channels."""
        if self.rng.random() < 0.5:
            self.pair.run_draft_device()
        if self.rng.random() < 0.3:
            self.pair.step_target()
        if self.rng.random() < 0.5:
            self.pair.hear_late()
        return self._to_draft()

    def spoil_trees(self, trees: MailboxTrees) -> None:
        for words, tag in words_of(trees):
            self.spoil_words(WRONG_TREES, words, tag)

    def spoil_paths(self, paths: MailboxPaths) -> None:
        for slot, tag in zip(paths.slot[0].tolist(), paths.round_tag.tolist(), strict=True):
            self.spoil_words(WRONG_PATHS, paths.mailboxes[0].paths[slot], tag)
        if paths.mailboxes[0].rows is not None and self.rng.random() < 0.1:
            paths.mailboxes[0].rows.normal_()

    def spoil_words(self, ways: Sequence[EditWords], words: torch.Tensor, tag: int) -> None:
        if self.rng.random() < 0.2:
            self.rng.choice(ways)(words, tag, self.rng)
            self.num_wrong += 1

    def disturb(self, request: LocalRequest) -> None:
        fate = self.rng.choice(["nothing"] * 8 + ["channel", "channel", "join", "reopen", "cancel"])
        if fate == "nothing":
            return
        is_running = request.target_epoch in {path.target_epoch for path in request.paths}
        if fate == "join" and len(self.pair.requests) < 6:
            self.num_joined += 1
            self.pair.open(fresh(request, request_id=f"late {self.num_joined}"))
        elif fate == "cancel" and len(self.pair.requests) > 3:
            self.pair.cancel(request)
        elif fate == "reopen" and request.has_draft and is_running:
            reopen(self.pair, request)
        else:
            super().disturb(request)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "overlaps"), KINDS_AND_PACES)
def test_no_mix_of_faults_changes_the_output(make: Make, kind: str, *, overlaps: bool) -> None:
    target, draft, _ = make(kind, (4, 16), num_pages=1 + 70, max_num_requests=8)
    target.scheduler.overlaps_steps = overlaps
    num_wrong = num_device_trees = num_overlapped = 0
    for seed in range(2):
        requests = [replace(request, max_new_tokens=40) for request in requests_of(3, seed)]
        plain = {tuple(one.prompt): one for one in plain_of(target, requests)}
        pair = DevicePair(target, draft, credit_rounds=5, margin=seed % 3)
        for request in requests:
            pair.open(request)
        chaos = DeviceChaos(pair, random.Random(seed))
        chaos.run()
        served = list(pair.requests.values())
        check(served, [plain[tuple(one.prompt)] for one in served])
        num_wrong += chaos.num_wrong
        num_device_trees += pair.num_device_trees
        num_overlapped += pair.num_overlapped
    # How often each happens follows from the texts, and those from the processor's bits.
    assert min(num_wrong, num_device_trees, num_overlapped) > 0

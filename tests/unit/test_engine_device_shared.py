"""Device rounds of a target and a draft on one GPU, whose streams wait: their output is the plain
one, however soon a wait is given up.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from numpy.typing import NDArray

import draft_service.device_rounds.rounds as draft_rounds
from draft_service.path_source import PathSource
from draft_service.runner import DraftRunner
from shared.peer import mailbox as mailbox_module
from shared.peer import stream_waits
from shared.peer.channel import PeerChannel
from shared.peer.mailbox import MailboxEnd, open_mailbox
from shared.peer.shared_files import RING_DIR
from shared.peer.stream_waits import NO_TREE
from target_service.device_rounds.rounds import DeviceRounds
from tests.checkpoints import VOCAB_SIZE
from tests.device_pair import DevicePair, Make, check, device_engines, requests_of
from tests.engines import SHAPES, Models, make_draft, make_target, plain_of
from tests.marks import EXHAUSTIVE

WRITE_VALUE_64 = 5  # CU_STREAM_MEM_OP_WRITE_VALUE_64


class Gpu:
    """The one of both, which is a CPU here, and waits for nothing.

    Attributes:
        hurry: Chance that a wait is over before its word comes.
        num_waits: That streams were asked for.
        num_early: Of these, those that were over before.
    """

    def __init__(self) -> None:
        self.hurry, self.num_waits, self.num_early = 0.0, 0, 0
        self._rng = random.Random(VOCAB_SIZE)

    def submit(self, operations: NDArray[Any]) -> None:
        for kind, address, value, *_ in operations.tolist():
            word = ctypes.c_int64.from_address(address)
            if kind == WRITE_VALUE_64:
                word.value = value
                continue
            self.num_waits += 1
            if self._rng.random() < self.hurry:
                self.num_early += 1
                word.value = max(word.value, value | NO_TREE << 32)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    def open_shared(*args: Any, **options: Any) -> MailboxEnd:
        return replace(open_mailbox(*args, **options), streams_wait=True)

    gpu = Gpu()
    monkeypatch.setattr(draft_rounds, "open_mailbox", open_shared)
    monkeypatch.setattr(draft_rounds, "check_stream_waits", lambda _: None)
    monkeypatch.setattr(stream_waits, "submit_operations", gpu.submit)
    return gpu


@pytest.fixture
def make(gpu: Gpu, models: Models) -> Iterator[Make]:
    with device_engines(models) as make:
        yield make


@pytest.mark.parametrize("hurry", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=EXHAUSTIVE)])
def test_output_equals_the_plain_run(make: Make, gpu: Gpu, hurry: float, seed: int) -> None:
    target, draft, _ = make("eagle3", (4, 16))
    requests = requests_of(4, seed, SHAPES[3])
    expected = plain_of(target, requests)
    gpu.hurry = hurry
    pair = DevicePair(target, draft)
    pair.run(requests)
    check(requests, expected)
    assert pair.num_device_trees > 0 < gpu.num_waits
    assert (gpu.num_early == gpu.num_waits) == (hurry == 1.0)
    if not hurry:
        assert pair.num_overlapped > 0


def test_who_is_cancelled_holds_nobody_up(make: Make, gpu: Gpu) -> None:
    target, draft, mailbox = make("eagle3")
    requests = requests_of(3, 1, SHAPES[3])
    expected = plain_of(target, requests)
    pair = DevicePair(target, draft)
    for request in requests:
        pair.open(request)
    while not pair.device_trees:
        pair.step()
    assert isinstance(target.source, DeviceRounds)
    held = target.requests[requests[0].request_id]
    use = held.draft.mailbox if held.draft is not None else None
    assert use is not None and use.streams_wait
    pair.cancel(requests[0])
    while pair.step():
        pass
    check(requests[1:], expected[1:])


def test_tags_count_up_from_a_clean_slot(make: Make) -> None:
    """A word of a request before, of a later round than any of this one's, would end every wait."""
    target, draft, mailbox = make("eagle3")
    requests = requests_of(2, 1, SHAPES[3])
    expected = plain_of(target, requests)
    last = (1 << 23) - 1
    mailbox.trees.fill_(last << 40 | NO_TREE << 32)
    mailbox.paths.fill_(last << 40)
    pair = DevicePair(target, draft)
    pair.run(requests)
    check(requests, expected)
    assert pair.num_device_trees > 0
    used = mailbox.trees[:, 1] >> 40 != last
    assert used.any() and ((mailbox.paths[:, 0] >> 40 != last) == used).all()


@pytest.mark.parametrize("is_shared", [False, True])
def test_engines_know_that_their_gpu_is_shared(
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    is_shared: bool,  # noqa: FBT001
) -> None:
    """The target says it by its mailbox, the draft when it opens one."""
    pairing = models.pairing("eagle3")
    target = make_target(pairing, has_mailbox=True, gpu_is_shared=is_shared)
    assert isinstance(target.source, DeviceRounds)
    fd = os.open(RING_DIR / target.source.mailbox.name, os.O_RDONLY)
    assert mailbox_module._read_header(fd).gpu_is_shared is is_shared
    os.close(fd)
    target.source.mailbox.close()
    said: list[bool] = []
    sources: list[draft_rounds.DeviceRounds] = []

    def make_source(runner: DraftRunner, *, gpu_is_shared: bool) -> PathSource:
        sources.append(draft_rounds.DeviceRounds(runner, gpu_is_shared=gpu_is_shared))
        return sources[0]

    def open_none(*_: Any, gpu_is_shared: bool, **options: Any) -> MailboxEnd:
        said.append(gpu_is_shared)
        raise FileNotFoundError

    make_draft(pairing, make_source=make_source, gpu_is_shared=is_shared)
    monkeypatch.setattr(draft_rounds, "open_mailbox", open_none)
    sources[0].connect("nobody", cast(PeerChannel, None))
    assert said == [is_shared]


def test_targets_take_turns_where_a_stream_can_wait_for_one_of_them(make: Make) -> None:
    target, draft, _ = make("eagle3")
    other, _, _ = make("eagle3")
    pairs = [DevicePair(target, draft), DevicePair(other, draft)]

    def on_draft(message: Any) -> None:
        for pair in pairs:
            DevicePair.on_draft(pair, message)

    launched: list[set[int]] = []
    launch = pairs[0].draft_device.overlap.launch

    def note(requests: Any, *rest: Any) -> None:
        launched.append({int(request.request_id[0]) for request in requests})
        launch(requests, *rest)

    pairs[0].draft_device.overlap.launch = note  # type: ignore[method-assign]
    requests = []
    for i, pair in enumerate(pairs):
        pair.on_draft = on_draft  # type: ignore[method-assign]
        for j, request in enumerate(requests_of(2, i, SHAPES[3])):
            requests.append(replace(request, request_id=f"{i} {j}"))
            pair.open(requests[-1])
    while any([pair.step() for pair in pairs]):
        pass
    check(requests, plain_of(target, requests))
    assert all(len(targets) == 1 for targets in launched), "a stream waits for one"
    counts = [launched.count({i}) for i in range(2)]
    assert min(counts) > len(launched) // 3, counts

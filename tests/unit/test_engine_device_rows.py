"""Feature rows that go straight into memory of the draft's device, or, if they cannot, do not."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from coppice.v1 import peer_pb2
from draft_service.device_rounds.mailbox_io import MailboxPaths
from draft_service.device_rounds.rounds import DeviceRounds
from draft_service.device_rounds.rows_memory import LentRows
from draft_service.engine import DraftEngine
from shared.errors import InvalidArgumentError
from shared.kernels.mailbox_words import MAX_PATH
from shared.messages import RowsAnswer, RowsOffer, from_proto
from shared.peer.mailbox import Mailbox, open_mailbox
from shared.peer.shared_files import RING_DIR
from shared.rpc.engine import will_have_work
from target_service.device_rounds.draft_rows import DraftRows
from target_service.device_rounds.rounds import DeviceRounds as TargetDeviceRounds
from target_service.engine import TargetEngine
from tests.device_pair import DevicePair, Make, PoisonedDevicePair, check, num_rounds, requests_of
from tests.engines import plain_of
from tests.local_pair import LocalRequest
from tests.peer_memory import FakeLent, FakeMemory, pretend_gpu
from tests.peer_pair import close_channels

TARGET_GPU, DRAFT_GPU = "GPU-target", "GPU-draft"
REFUSAL = "no way"
LINK = "coppice-channel-" + "a" * 32


class Apart:
    """Makes engines whose devices are apart; all have the same `lent`."""

    def __init__(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        self._make = make
        self._monkeypatch = monkeypatch
        self.lent: list[FakeLent] = []

    def __call__(
        self, kind: str = "eagle", *, refusal: str = ""
    ) -> tuple[TargetEngine, DraftEngine]:
        pretend_gpu(self._monkeypatch, TARGET_GPU)
        target, draft, mailbox = self._make(kind)
        pretend_gpu(self._monkeypatch, DRAFT_GPU)
        memory = FakeMemory(TARGET_GPU, self.lent, refusal=refusal)
        source_of(target).draft_rows = DraftRows(mailbox, memory)
        draft_source_of(draft).lent_rows = LentRows(FakeMemory(DRAFT_GPU, self.lent))
        return target, draft


@pytest.fixture
def apart(make: Make, monkeypatch: pytest.MonkeyPatch) -> Apart:
    return Apart(make, monkeypatch)


def source_of(target: TargetEngine) -> TargetDeviceRounds:
    assert isinstance(target.source, TargetDeviceRounds)
    return target.source


def draft_source_of(draft: DraftEngine) -> DeviceRounds:
    assert isinstance(draft.source, DeviceRounds)
    return draft.source


def rows_of(target: TargetEngine) -> torch.Tensor:
    rows = source_of(target).mailbox.rows
    assert rows is not None
    return rows


def forget(rows: torch.Tensor) -> None:
    """Fill rows with what nobody computes."""
    rows.fill_(7.0)


def is_untouched(rows: torch.Tensor) -> bool:
    return bool((rows == 7.0).all())


def cut_off(engine: TargetEngine | DraftEngine, pair: DevicePair) -> None:
    """Close an engine's ends of all channels; both engines hear of it."""
    for channel in engine.channels:
        channel.close()
    pair.pump()
    pair.pump()


def drafts_of(requests: list[LocalRequest]) -> list[list[int]]:
    return [[path.num_accepted_drafts for path in request.paths] for request in requests]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("refusal", ["", REFUSAL])
def test_rows_are_read_where_they_are_written(
    apart: Apart, caplog: pytest.LogCaptureFixture, refusal: str, *, overlaps: bool
) -> None:
    caplog.set_level(logging.INFO)
    target, draft = apart(refusal=refusal)
    target.scheduler.overlaps_steps = overlaps
    forget(rows_of(target))
    requests = requests_of(3, 0)
    expected = plain_of(target, requests)
    places: set[int] = set()

    def note(paths: MailboxPaths) -> None:
        places.update(own.rows.data_ptr() for own in paths.mailboxes if own.rows is not None)

    pair = PoisonedDevicePair(target, draft, edit_paths=note)
    pair.run(requests)
    check(requests, expected)
    assert pair.num_overlapped > num_rounds(requests) // 2
    assert max(map(max, drafts_of(requests))) > 0
    (lent,) = apart.lent
    assert lent.data.nbytes == rows_of(target).nbytes
    if refusal:
        assert not is_untouched(rows_of(target)) and not lent.data.any() and lent.is_free
        assert len(places) == 1 and lent.data.data_ptr() not in places
    else:
        assert is_untouched(rows_of(target)) and lent.data.any() and lent.num_mapped == 1
        assert places == {lent.data.data_ptr()}
    assert caplog.text.count(f"through the host's memory: {REFUSAL}") == bool(refusal)
    assert caplog.text.count("straight into") == 2 * (not refusal)


def test_trees_are_as_good_as_with_rows_in_the_mailbox(apart: Apart) -> None:
    """Rows of another place would cost accepted drafts and nothing else."""
    found = []
    for refusal in ("", REFUSAL):
        target, draft = apart("eagle3", refusal=refusal)
        requests = requests_of(3, 1)
        pair = DevicePair(target, draft)
        pair.run(requests)
        assert pair.num_overlapped > num_rounds(requests) // 2
        found.append(drafts_of(requests))
    assert found[0] == found[1]


def join(pairs: list[DevicePair]) -> None:
    """Let pairs that have an engine in common hear what it says to each."""

    def on_any(kind: str) -> Callable[[Any], None]:
        def take(message: Any) -> None:
            for pair in pairs:
                getattr(DevicePair, kind)(pair, message)

        return take

    for pair in pairs:
        pair.on_target = on_any("on_target")  # type: ignore[assignment, method-assign]
        pair.on_draft = on_any("on_draft")  # type: ignore[assignment, method-assign]


def step_target_of(pairs: list[DevicePair]) -> bool:
    """Step the one target of pairs, then their drafts; return whether anything is left to do."""

    def pump() -> None:
        for pair in pairs:
            pair.pump()

    pump()
    pairs[0].step_target()
    for pair in pairs:
        pair.hear_late()
    pump()
    for pair in pairs:
        pair.step_draft()
    pump()
    is_late = any([pair.late for pair in pairs])
    return is_late or any([will_have_work(p.target) or p.draft_has_work for p in pairs])


def open_all(pairs: list[DevicePair]) -> list[LocalRequest]:
    requests = []
    for i, pair in enumerate(pairs):
        for j, request in enumerate(requests_of(2, i)):
            requests.append(replace(request, request_id=f"{i} {j}"))
            pair.open(requests[-1])
    return requests


def test_each_request_has_its_rows_at_its_own_draft(apart: Apart) -> None:
    """Of two drafts of one target, in the same steps."""
    target, draft = apart()
    _, other = apart()
    forget(rows_of(target))
    pairs = [DevicePair(target, draft), DevicePair(target, other)]
    steps: list[set[int]] = []
    place_paths = source_of(target).place_paths

    def note(*arguments: Any) -> Any:
        paths = place_paths(*arguments)
        assert paths is not None and paths.rows is not None
        steps.append({*paths.rows[paths.slot >= 0].tolist()})
        return paths

    source_of(target).place_paths = note  # type: ignore[assignment, method-assign]
    join(pairs)
    requests = open_all(pairs)
    while step_target_of(pairs):
        pass
    check(requests, plain_of(target, requests))
    assert len(apart.lent) == 2 and all(lent.data.any() for lent in apart.lent)
    assert {lent.data.data_ptr() for lent in apart.lent} in steps, "of both in one launch"
    assert is_untouched(rows_of(target))
    assert all(pair.num_overlapped > num_rounds(requests) // 6 for pair in pairs)
    close_channels(other)


def test_a_draft_lends_to_several_targets(apart: Apart) -> None:
    """One takes it, the other does not: each has its place in the same launch."""
    target, draft = apart()
    other, _ = apart(refusal=REFUSAL)
    pairs = [DevicePair(target, draft), DevicePair(other, draft)]
    join(pairs)
    requests = open_all(pairs)
    while any([pair.step() for pair in pairs]):
        pass
    check(requests, plain_of(target, requests))
    assert [lent.num_mapped for lent in apart.lent] == [1, 0]
    assert [lent.is_free for lent in apart.lent] == [False, True]
    assert pairs[1].num_overlapped > num_rounds(requests) // 3, "of both"


def test_what_was_lent_is_unmapped_with_its_channel_and_lent_again(apart: Apart) -> None:
    target, draft = apart()
    pair = DevicePair(target, draft)
    first, second = requests_of(2, 0)
    pair.run([first])
    (lent,) = apart.lent
    assert lent.num_mapped == 1
    cut_off(draft, pair)
    assert lent.num_mapped == 1, "others may wait for something of this step"
    pair.run([second])
    check([first, second], plain_of(target, [first, second]))
    assert apart.lent == [lent] and lent.num_mapped == 1 and not lent.is_free
    cut_off(draft, pair)
    source_of(target).learn()  # as at the end of a step
    assert lent.num_mapped == 0 and not lent.is_free, "a target that lives may have it mapped"


def test_what_was_lent_to_a_target_that_died_is_freed(apart: Apart) -> None:
    target, draft = apart()
    pair = DevicePair(target, draft)
    (request,) = requests_of(1, 0)
    pair.run([request])
    (lent,) = apart.lent
    source_of(target).mailbox.close()
    other, _ = apart()
    another = DevicePair(other, draft)
    another.run(requests_of(1, 1))
    assert not lent.is_free, "paths that were posted before may still come"
    cut_off(target, pair)
    source_of(target).draft_rows.unmap_unused()  # as its death does
    cut_off(other, another)
    another.run(requests_of(1, 2))
    assert lent.is_free and apart.lent[1].num_mapped == 1


# --- each end ------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=RING_DIR) as name:
        yield Path(name)


class Said:
    """A channel to a draft that takes note of what is said on it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def put(self, message: Any) -> None:
        self.messages.append(message)


class Ends:
    """A mailbox of 3 slots, 40 values of bf16 in each row, and what both ends lend of it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, width: int = 40) -> None:
        pretend_gpu(monkeypatch, TARGET_GPU)
        dtype, cpu = torch.bfloat16, torch.device("cpu")
        self.mailbox = Mailbox(
            LINK, num_slots=3, width=width, dtype=dtype, device=cpu, directory=folder
        )
        pretend_gpu(monkeypatch, DRAFT_GPU)
        self.end = open_mailbox(LINK, width=width, device=cpu, directory=folder)
        self.lent: list[FakeLent] = []
        self.draft_memory = FakeMemory(DRAFT_GPU, self.lent)
        self.draft = LentRows(self.draft_memory, folder)
        self.target = DraftRows(self.mailbox, FakeMemory(TARGET_GPU, self.lent))

    def take(self, offer: RowsOffer) -> tuple[Any, list[Any]]:
        """Return a channel on which the target took an offer, and its answers."""
        channel: Any = Said()
        self.target.take(channel, offer)
        return channel, channel.messages


@pytest.fixture
def ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    made = Ends(folder, monkeypatch)
    yield made
    made.mailbox.close()


def test_an_offer_says_what_it_is_and_is_the_same_again(ends: Ends) -> None:
    offer = ends.draft.offer(LINK, ends.end)
    assert offer == RowsOffer(handle=bytes(64), gpu=DRAFT_GPU, num_bytes=2 * 3 * MAX_PATH * 40 * 2)
    assert ends.draft.offer(LINK, ends.end) == offer and len(ends.lent) == 1
    assert not ends.lent[0].is_free, "its target lives"
    ends.mailbox.close()
    assert ends.draft.offer(LINK, replace(ends.end, rows=None)) is None
    assert not ends.lent[0].is_free, "its channel is still there"
    ends.draft.leave(LINK)
    assert ends.draft.offer(LINK, replace(ends.end, rows=None)) is None
    assert ends.lent[0].is_free


def test_nothing_is_offered_where_rows_are_none_or_at_hand(ends: Ends) -> None:
    assert ends.draft.offer(LINK, replace(ends.end, rows=None)) is None
    near = replace(ends.end, may_lend_rows=False, streams_wait=True)
    assert ends.draft.offer(LINK, near) is None and ends.lent == []


def test_without_memory_nothing_is_offered(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def lend(num_bytes: int) -> FakeLent:
        raise OSError("out of memory")

    monkeypatch.setattr(ends.draft_memory, "lend", lend)
    assert ends.draft.offer(LINK, ends.end) is None
    assert "host's memory: out of memory" in caplog.text


def test_rows_that_are_taken_lie_in_what_was_lent(ends: Ends) -> None:
    offer = ends.draft.offer(LINK, ends.end)
    assert offer is not None
    channel, answers = ends.take(offer)
    assert answers == [RowsAnswer(is_taken=True)]
    end = ends.draft.in_use(LINK, ends.end)
    assert end.rows is not None and end.trees is ends.end.trees and end.paths is ends.end.paths
    assert end.rows.shape == (2, 3, MAX_PATH, 40) and end.rows.dtype == torch.bfloat16
    assert ends.target.address_of(channel) == end.rows.data_ptr()
    ends.target.lose(channel)
    assert ends.lent[0].num_mapped == 1
    ends.target.unmap_unused()
    assert ends.lent[0].num_mapped == 0
    assert ends.mailbox.rows is not None
    places = {ends.target.address_of(who) for who in (channel, None, cast(Any, Said()))}
    assert places == {ends.mailbox.rows.data_ptr()}
    ends.target.lose(channel)


@pytest.mark.parametrize("num_bytes", [1, 2 * 3 * MAX_PATH * 40 * 2 + 1, 2**63 - 1])
def test_memory_of_another_size_is_refused(
    ends: Ends, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    offer = ends.draft.offer(LINK, ends.end)
    assert offer is not None
    channel, answers = ends.take(replace(offer, num_bytes=num_bytes))
    assert answers == [RowsAnswer(is_taken=False)] and ends.lent[0].num_mapped == 0
    assert f"num_bytes is {num_bytes}, expected {2 * 3 * MAX_PATH * 40 * 2}" in caplog.text
    ends.draft.refused(LINK)
    assert ends.lent[0].is_free
    ends.target.lose(channel)


def test_only_the_first_offer_of_a_channel_counts(ends: Ends) -> None:
    """A second one could change the place of rows that are on their way."""
    offer = ends.draft.offer(LINK, ends.end)
    assert offer is not None
    channel, answers = ends.take(offer)
    ends.target.take(channel, offer)
    assert len(answers) == 1 and ends.lent[0].num_mapped == 1


def test_a_target_without_rows_takes_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(folder, monkeypatch, width=0)
    _, answers = ends.take(RowsOffer(handle=bytes(64), gpu=DRAFT_GPU, num_bytes=8))
    assert answers == [RowsAnswer(is_taken=False)] and ends.target.address_of(None) == 0
    ends.mailbox.close()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"handle": bytes(63)}, "handle has 63 bytes, expected 64"),
        ({"handle": b""}, "handle has 0 bytes, expected 64"),
        ({"gpu": ""}, "gpu has 0 characters"),
        ({"gpu": "G" * 65}, "gpu has 65 characters"),
        ({"num_bytes": 0}, "num_bytes is 0"),
        ({"num_bytes": -1}, "num_bytes is -1"),
    ],
)
def test_an_offer_that_cannot_be_is_refused_by_its_field(wrong: dict[str, Any], text: str) -> None:
    message = {"handle": bytes(64), "gpu": DRAFT_GPU, "num_bytes": 1, **wrong}
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        from_proto(peer_pb2.RowsOffer(**message))
    assert [caught.value.field] == list(wrong)


def test_an_answer_that_nobody_asked_for_changes_nothing(apart: Apart) -> None:
    target, draft = apart(refusal=REFUSAL)
    pair = DevicePair(target, draft)
    (request,) = requests_of(1, 0)
    pair.run([request])
    (channel,) = draft.channels
    mailbox = draft_source_of(draft)._mailboxes[channel]
    draft.submit_peer(channel, RowsAnswer(is_taken=True))
    assert draft_source_of(draft)._mailboxes[channel] is mailbox

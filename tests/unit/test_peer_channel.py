"""Channels between engines: whole frames in order, or the channel is cut; nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coppice.v1 import peer_pb2
from shared.messages import DraftRound, FeatureChunk, PeerDetach, TreeBatch, TreeShape
from shared.messages.batches import pack_to_target, unpack_to_draft
from shared.peer import channel as channel_module
from shared.peer.channel import (
    PeerChannel,
    PeerChannels,
    PeerListener,
    PeerLost,
    connect,
    is_socket_name,
    remove_stale_sockets,
    target_end,
)
from shared.peer.ring import RING_DIR


def trees(round_idx: int) -> TreeBatch:
    return TreeBatch(
        request_ids=["r", "s"], target_epochs=[1, 2], draft_epochs=[1, 3],
        round_idx=[round_idx, 5], seq_lens=[7, 9], num_nodes=[3, 1],
        token_ids=[0, 1, 2, 4], parent_index=[-1, 0, 1, -1],
    )  # fmt: skip


def order(round_idx: int) -> DraftRound:
    return DraftRound(
        request_id="r", target_epoch=1, draft_epoch=1, round_idx=round_idx, seq_len=7,
        token_offset=5, token_ids=(1, 2, 3),
        shape=TreeShape(num_steps=3, topk=2, num_draft_tokens=6),
    )  # fmt: skip


def rows(num_bytes: int) -> FeatureChunk:
    shape = (num_bytes // 4, 1)
    return FeatureChunk(
        request_id="r", target_epoch=1, start=0, shape=shape, dtype="float32", data=bytes(num_bytes)
    )


def wire_of(channel: PeerChannel) -> socket.socket:
    """Return another descriptor of the channel's socket, to send what no channel would."""
    return socket.socket(fileno=os.dup(channel.fd))


class Ends:
    """A target's set of channels and a draft's, with one channel between them."""

    def __init__(self, directory: Path) -> None:
        self.listener = PeerListener(directory)
        self.target, self.draft = PeerChannels(self.listener), PeerChannels()
        self.near = connect(self.listener.name, directory=directory)
        """The draft's end."""
        self.draft.add(self.near)
        assert self.target.receive() == []
        (self.far,) = self.target
        """The target's end."""

    def close(self) -> None:
        self.near.close()
        self.far.close()
        self.listener.close()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir=RING_DIR) as name:
        yield Path(name)


@pytest.fixture
def ends(place: Path) -> Iterator[Ends]:
    ends = Ends(place)
    yield ends
    ends.close()


def wakes(channels: PeerChannels) -> bool:
    poller = select.poll()
    for fd, events in channels.events.items():
        poller.register(fd, events)
    return bool(poller.poll(0))


def test_messages_go_both_ways_in_order_and_only_when_flushed(ends: Ends) -> None:
    for round_idx in range(3):
        ends.near.put(trees(round_idx))
        ends.far.put(order(round_idx))
    assert not wakes(ends.target) and not wakes(ends.draft)
    ends.draft.flush()
    ends.target.flush()
    assert wakes(ends.target) and wakes(ends.draft)
    assert ends.target.receive() == [(ends.far, trees(i)) for i in range(3)]
    assert ends.draft.receive() == [(ends.near, order(i)) for i in range(3)]
    assert not wakes(ends.target) and not wakes(ends.draft)
    assert ends.target.receive() == []


def test_a_frame_may_come_in_any_pieces(ends: Ends) -> None:
    ours, theirs = socket.socketpair()
    aside = PeerChannel(
        ours, pack=pack_to_target, unpack=unpack_to_draft, frame=peer_pb2.PeerToDraft
    )
    for batch in ([trees(1), trees(2)], [trees(3)]):
        for message in batch:
            aside.put(message)
        aside.flush()
    sent = theirs.recv(1 << 16)
    aside.close()
    theirs.close()
    received: list[Any] = []
    with wire_of(ends.near) as wire:
        for value in sent:
            wire.send(bytes([value]))
            received += ends.far.receive()
    assert received == [trees(1), trees(2), trees(3)]


def test_what_the_socket_does_not_take_follows_when_it_does(ends: Ends) -> None:
    count, size = 40, 1 << 20
    for _ in range(count):
        ends.far.put(rows(size))
    ends.far.put(order(9))
    ends.target.flush()
    assert ends.far.events & select.POLLOUT
    assert not ends.near.events & select.POLLOUT
    received: list[Any] = []
    while len(received) <= count:
        received += [message for _, message in ends.draft.receive()]
        if ends.far.events & select.POLLOUT:
            assert wakes(ends.target)
        ends.target.flush()
    assert received == [rows(size)] * count + [order(9)]
    assert not ends.far.events & select.POLLOUT


def test_rows_of_a_long_prompt_pass_however_many_they_are(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No frame may be as large as what one step can queue."""
    monkeypatch.setattr(channel_module, "_MAX_FRAME_BYTES", 40 << 20)
    count = 100
    for _ in range(count):
        ends.far.put(rows(1 << 20))
    received = 0
    while received < count:
        ends.target.flush()
        messages = ends.draft.receive()
        assert ends.near.is_open
        received += len(messages)


def frame(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


REJECTED = peer_pb2.PeerToTarget()
REJECTED.trees.add(request_ids=["r"], num_nodes=[2], token_ids=[1, 2], parent_index=[-1])
BREAKS = {
    "end of file": b"",
    "half a frame": frame(b"abc")[:-1],
    "garbage": frame(b"\xff" * 9),
    "too long": struct.pack("<I", (64 << 20) + 1),
    "rejected": frame(REJECTED.SerializeToString()),
}


@pytest.mark.parametrize("data", BREAKS.values(), ids=BREAKS.keys())
def test_a_channel_that_breaks_says_so_once_and_last(ends: Ends, data: bytes) -> None:
    ends.near.put(trees(1))
    ends.near.flush()
    with wire_of(ends.near) as wire:
        wire.send(data) if data else None
        wire.shutdown(socket.SHUT_WR)
    received = [message for _ in range(3) for message in ends.target.receive()]
    assert received == [(ends.far, trees(1)), (ends.far, PeerLost())]
    assert list(ends.target) == [] and not ends.far.is_open
    ends.far.put(order(1))  # whoever does not know yet
    ends.far.flush()
    assert [m for _ in range(2) for m in ends.draft.receive()] == [(ends.near, PeerLost())]


def test_an_end_that_is_gone_is_noticed_when_something_is_sent(ends: Ends) -> None:
    ends.near.close()
    ends.far.put(order(1))
    ends.target.flush()
    assert wakes(ends.target)
    assert ends.target.receive() == [(ends.far, PeerLost())]


def test_an_end_that_does_not_read_is_cut_off(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory is bounded, and whoever waits in `poll` learns of it."""
    monkeypatch.setattr(channel_module, "_MAX_BACKLOG_BYTES", 10 << 20)
    monkeypatch.setattr(channel_module, "_MAX_SILENCE_S", 0.01)
    ends.far.put(rows(20 << 20))
    ends.target.flush()
    time.sleep(0.02)
    for _ in range(10):
        ends.far.put(rows(1 << 20))
        ends.target.flush()
    assert not ends.far.is_open and ends.far.events == select.POLLIN, "nothing is kept"
    assert "does not read" in caplog.text
    assert wakes(ends.target)
    assert ends.target.receive() == [(ends.far, PeerLost())]


def test_an_end_that_is_behind_keeps_its_channel(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that joins many long requests gets their rows faster than it can read them."""
    monkeypatch.setattr(channel_module, "_MAX_BACKLOG_BYTES", 1 << 20)
    monkeypatch.setattr(channel_module, "_MAX_SILENCE_S", 600.0)  # this process may stand still
    count = 40
    received = 0
    for _ in range(count):
        ends.far.put(rows(1 << 20))
        ends.target.flush()
    while received < count:
        assert ends.far.is_open
        received += len(ends.draft.receive())
        ends.target.flush()


def test_a_cut_channel_costs_no_other_one(ends: Ends, place: Path) -> None:
    other = connect(ends.listener.name, directory=place)
    with wire_of(ends.near) as wire:
        wire.send(frame(b"\xff"))
    other.put(trees(4))
    other.flush()
    ends.target.receive()
    (far,) = ends.target
    assert far is not ends.far
    other.put(trees(5))
    other.flush()
    assert ends.target.receive() == [(far, trees(5))]
    other.close()
    assert ends.target.receive() == [(far, PeerLost())]


def test_no_damage_to_a_frame_does_more_than_break_the_channel() -> None:
    whole = pack_to_target([trees(1), PeerDetach(request_id="r", target_epoch=1, draft_epoch=1)])
    data, rng = whole.SerializeToString(), random.Random(3)
    num_broken = 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        ours, theirs = socket.socketpair()
        channel = target_end(ours)
        with theirs:
            theirs.send(frame(bytes(damaged[: rng.choice([len(damaged), rng.randrange(99)])])))
            channel.receive()
        num_broken += not channel.is_open
        channel.close()
    assert 50 < num_broken < 400


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_target_without_descriptors_says_so_once_until_a_draft_can_connect(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener = PeerListener(place)
    targets, drafts = PeerChannels(listener), []
    for num_logged in (1, 2):
        drafts.append(connect(listener.name, directory=place))
        with no_descriptors():
            for _ in range(5):
                assert targets.receive() == []
        assert caplog.text.count("a draft cannot open a peer channel") == num_logged
        targets.receive()
        assert len(list(targets)) == num_logged, "it waits until there is a descriptor"
    for channel in (*drafts, *targets):
        channel.close()
    listener.close()


def test_no_descriptor_is_left_of_channels_that_end(place: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for data in BREAKS.values():
        ends = Ends(place)
        ends.near.put(PeerDetach(request_id="r", target_epoch=1, draft_epoch=1))
        ends.near.flush()
        with wire_of(ends.near) as wire:
            wire.send(data) if data else None
            wire.shutdown(socket.SHUT_WR)
        for channels in (ends.target, ends.target, ends.draft):
            channels.receive()
        ends.listener.close()
    assert count() == before
    with pytest.raises(OSError):
        connect(f"coppice-channel-{'0' * 32}", directory=place)
    assert count() == before
    assert list(place.iterdir()) == []


# --- files ---------------------------------------------------------------------------------------


def test_the_socket_is_for_its_owner_and_goes_with_the_listener(place: Path) -> None:
    listener = PeerListener(place)
    (path,) = place.iterdir()
    assert path.name == listener.name and is_socket_name(listener.name)
    assert path.stat().st_mode & 0o777 == 0o600
    assert PeerChannels(listener).has_sources and not PeerChannels().has_sources
    listener.close()
    assert list(place.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        connect(listener.name, directory=place)


def test_without_a_directory_nothing_is_left_open(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        PeerListener(place / "none")
    assert len(os.listdir("/proc/self/fd")) == before


def dead_socket(directory: Path, prefix: str = "coppice-channel-") -> Path:
    """Return the file of a target that was killed."""
    path = directory / (prefix + "d" * 32)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))
    return path


def test_only_sockets_where_nobody_listens_are_stale(place: Path) -> None:
    live, dead = PeerListener(place), dead_socket(place)
    other = place / "coppice-unborn-1"
    other.touch()
    remove_stale_sockets(place)
    assert not dead.exists()
    assert {path.name for path in place.iterdir()} == {live.name, other.name}
    channels = PeerChannels(live)
    assert [type(message) for _ in range(2) for _, message in channels.receive()] == [PeerLost]
    live.close()


@pytest.mark.parametrize("listens", [False, True])
def test_a_socket_whose_target_was_killed_at_its_birth_is_stale_once_it_is_old(
    place: Path, *, listens: bool
) -> None:
    path = dead_socket(place, "coppice-unborn-")
    remove_stale_sockets(place)
    assert path.exists(), "its target may be about to listen"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        if listens:
            path.unlink()
            sock.bind(str(path))
            sock.listen()
        os.utime(path, (time.time() - 61.0,) * 2)
        remove_stale_sockets(place)
    assert path.exists() == listens


def test_a_target_that_is_too_busy_to_accept_is_not_stale(place: Path) -> None:
    """Its backlog is full: whoever looks is not held up, and leaves the socket alone."""
    listener = PeerListener(place)
    waiting = []
    while True:
        try:
            waiting.append(connect(listener.name, directory=place))
        except BlockingIOError:
            break
    remove_stale_sockets(place)
    assert [path.name for path in place.iterdir()] == [listener.name]
    for channel in waiting:
        channel.close()
    listener.close()


@pytest.mark.parametrize(
    "name",
    ["", "coppice-channel-", "../coppice-channel-" + "0" * 32, "coppice-channel-" + "0" * 32 + "/x",
     "coppice-channel-" + "0" * 31, "coppice-channel-" + "G" * 32,
     "coppice-channel-" + "0" * 32 + "\n"],
)  # fmt: skip
def test_names_of_other_files_are_refused(place: Path, name: str) -> None:
    assert not is_socket_name(name)
    with pytest.raises(FileNotFoundError, match="no name of a channel"):
        connect(name, directory=place)

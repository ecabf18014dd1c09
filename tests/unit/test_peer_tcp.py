"""Channels over TCP: whom they are opened to, what is refused, and that they are channels then."""

from __future__ import annotations

import gc
import hmac
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from shared.config.exposure import is_loopback
from shared.peer import tcp
from shared.peer.channel import PeerChannel, PeerChannels, PeerLost
from shared.peer.tcp import PeerAddress, TcpDialer, TcpListener
from tests.scrape import free_ports
from tests.unit.test_peer_channel import BREAKS, order, rows, trees, wire_of

SECRET = b"0123456789abcdef"
MAGIC = b"coppice peer v2\n"
REFUSAL = "refused a peer connection from 127.0.0.1"


def wait_until(is_done: Callable[[], bool], *channels: PeerChannels) -> None:
    """Wait as an engine's loop does: for the descriptors of its channels."""
    deadline = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < deadline
        poller = select.poll()
        for one in channels:
            for fd, events in one.events.items():
                poller.register(fd, events)
        poller.poll(20)


class Ends:
    """A target that listens and a draft that dials.

    Args:
        theirs: The draft's secret.
    """

    def __init__(self, host: str = "127.0.0.1", *, theirs: bytes = SECRET) -> None:
        self.listener = TcpListener(host, 0, (SECRET,))
        self.dialled: list[PeerChannel | None] = []
        """How dials have ended."""
        self.dialer = TcpDialer((theirs,), lambda _, channel: self.dialled.append(channel))
        self.target, self.draft = PeerChannels(self.listener), PeerChannels(self.dialer)
        self.address = PeerAddress.parse(self.listener.address, worker_address="")

    def open(self) -> tuple[PeerChannel, PeerChannel]:
        """Return the ends of a new channel: the draft's, the target's."""
        before = len(list(self.target))
        near = self.dial(self.address)
        assert near is not None
        wait_until(lambda: self.target.receive() == [] and len(list(self.target)) > before)
        return near, list(self.target)[-1]

    def dial(self, address: PeerAddress) -> PeerChannel | None:
        """Dial, and return what comes of it."""
        self.dialled.clear()
        assert self.dialer.dial(address)
        wait_until(lambda: self.draft.receive() == [] and bool(self.dialled), self.draft)
        (channel,) = self.dialled
        return channel

    def connect(self) -> socket.socket:
        """Return a connection of somebody who is no draft."""
        return socket.create_connection((self.address.host, self.address.port), timeout=60)

    def close(self) -> None:
        self.target.receive()
        self.draft.receive()
        for channel in (*self.target, *self.draft):
            channel.close()
        self.listener.close()
        self.dialer.close()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave both ends time: they may have to wait for a core for seconds."""
    monkeypatch.setattr(tcp, "_DIAL_TIMEOUT_S", 60.0)
    monkeypatch.setattr(tcp, "_HANDSHAKE_TIMEOUT_S", 60.0)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_messages_go_both_ways_and_at_once(host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    ends = Ends(host)
    near, far = ends.open()
    for channel in (near, far):
        assert not channel.shares_memory
        with wire_of(channel) as wire:
            assert wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert wire.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    near.put(trees(1))
    far.put(order(2))
    ends.draft.flush()
    ends.target.flush()
    wait_until(lambda: ends.target.receive() == [(far, trees(1))], ends.target)
    wait_until(lambda: ends.draft.receive() == [(near, order(2))], ends.draft)
    ends.close()


def test_what_the_network_does_not_take_follows_when_it_does(ends: Ends) -> None:
    near, far = ends.open()
    count = 40
    for _ in range(count):
        far.put(rows(1 << 20))
    far.put(order(9))
    ends.target.flush()
    assert far.events & select.POLLOUT
    received = []
    while len(received) <= count:
        received += [message for _, message in ends.draft.receive()]
        ends.target.flush()
    assert received == [rows(1 << 20)] * count + [order(9)]
    assert near.is_open and not far.events & select.POLLOUT


@pytest.mark.parametrize("data", BREAKS.values(), ids=BREAKS.keys())
def test_a_channel_that_breaks_says_so_once_and_last(ends: Ends, data: bytes) -> None:
    near, far = ends.open()
    near.put(trees(1))
    near.flush()
    with wire_of(near) as wire:
        wire.send(data) if data else None
        wire.shutdown(socket.SHUT_WR)
    received = []

    def is_lost() -> bool:
        received.extend(ends.target.receive())
        return (far, PeerLost()) in received

    wait_until(is_lost, ends.target)
    assert received == [(far, trees(1)), (far, PeerLost())]
    wait_until(lambda: (near, PeerLost()) in ends.draft.receive(), ends.draft)
    ends.open()


def proof(role: bytes, token: bytes, nonces: bytes, secret: bytes = SECRET) -> bytes:
    return hmac.digest(secret, MAGIC + role + token + nonces, "sha256")


class Stranger:
    """Talks to a target without knowing the secret, or not as a draft would."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        self.sock, self.token = sock, token

    def nothing(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def http(self) -> None:
        self.sock.sendall(b"GET / HTTP/1.1\r\nHost: target\r\n\r\n" * 9)

    def half_a_hello(self) -> None:
        self.sock.sendall(MAGIC + self.token)
        self.sock.shutdown(socket.SHUT_WR)

    def another_token(self) -> None:
        self.sock.sendall(MAGIC + bytes(16) + bytes(32))

    def no_proof(self) -> None:
        self.greet()
        self.sock.shutdown(socket.SHUT_WR)

    def another_secret(self) -> None:
        self.sock.sendall(proof(b"draft\0", self.token, self.greet()[:32], b"x" * 16))

    def the_targets_own_proof(self) -> None:
        self.sock.sendall(self.greet()[32:])

    def greet(self) -> bytes:
        """Return nonce and proof of the target."""
        self.sock.sendall(MAGIC + self.token + bytes(32))
        return self.sock.recv(64, socket.MSG_WAITALL)


STRANGERS = [name for name in vars(Stranger) if not name.startswith("_") and name != "greet"]


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_shown_out_and_no_draft_is_harmed(
    ends: Ends, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = ends.open()
    for _ in range(3):
        with ends.connect() as sock:
            getattr(Stranger(sock, ends.address.token), name)()
            try:
                assert sock.recv(1) == b"", "the target hangs up"
            except ConnectionResetError:
                pass
    assert ends.target.receive() == [] and list(ends.target) == [far]
    wait_until(lambda: REFUSAL in caplog.text)
    assert caplog.text.count(REFUSAL) == 1, "whoever knocks writes no log"
    near.put(trees(1))
    near.flush()
    wait_until(lambda: ends.target.receive() == [(far, trees(1))], ends.target)
    ends.open()


def test_whoever_says_nothing_is_shown_out_after_a_while(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp, "_HANDSHAKE_TIMEOUT_S", 0.05)
    with ends.connect() as sock:
        assert sock.recv(1) == b""
    wait_until(lambda: f"{REFUSAL}: it does not answer in time" in caplog.text)


def test_many_who_say_nothing_keep_no_draft_out(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_MAX_HANDSHAKES", 4)
    silent = [ends.connect() for _ in range(12)]
    ends.open()
    for sock in silent[:8]:
        assert sock.recv(1) == b"", "the oldest have made room"
    for sock in silent:
        sock.close()


def test_a_draft_with_another_secret_is_told_so_and_tells_no_proof(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends = Ends(theirs=b"another secret 1")
    assert ends.dial(ends.address) is None
    assert "rounds go through the orchestrator: no peer channel to 127.0.0.1 port" in caplog.text
    assert "it has another secret, or none" in caplog.text
    wait_until(lambda: REFUSAL in caplog.text)
    assert list(ends.target) == []
    for secret in (SECRET, b"another secret 1"):
        assert secret.decode() not in caplog.text and secret.hex() not in caplog.text
    ends.close()


def test_a_draft_that_reaches_another_target_goes_away(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    """One that has the place of the right one by now, or that a loopback address means here."""
    assert ends.dial(ends.address._replace(token=bytes(16))) is None
    assert "it is another target by now, or none" in caplog.text
    wait_until(lambda: f"{REFUSAL}: it looks for another target" in caplog.text)
    ends.open()


@pytest.mark.parametrize("answer", [b"", b"220 mail ready\r\n", bytes(64)])
def test_a_draft_proves_nothing_to_who_is_no_target(ends: Ends, answer: bytes) -> None:
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                heard.extend(sock.recv(64, socket.MSG_WAITALL))
                sock.sendall(answer)
                sock.shutdown(socket.SHUT_WR)
                while data := sock.recv(64):
                    heard.extend(data)

        thread = threading.Thread(target=serve)
        thread.start()
        assert ends.dial(PeerAddress("127.0.0.1", server.getsockname()[1], bytes(16))) is None
        thread.join()
    assert len(heard) == 64 and heard[:16] == MAGIC


def test_dials_that_fail_become_rare(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: now_s))
    address = PeerAddress("127.0.0.1", free_ports(1), bytes(16))
    for _ in range(4):
        assert ends.dial(address) is None
        assert not ends.dialer.dial(address)
        now_s += tcp._RETRY_S[1]
    assert ends.dialer.dial(address) and ends.dialer.dial(address)
    ends.dialled.clear()
    wait_until(lambda: ends.draft.receive() == [] and bool(ends.dialled), ends.draft)
    assert ends.dialled == [None], "one dial at a time"
    ends.open()


def test_nothing_is_left_of_channels_that_end(caplog: pytest.LogCaptureFixture) -> None:
    def left() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    caplog.set_level(logging.ERROR)
    gc.collect()
    before = left()
    for data in BREAKS.values():
        ends = Ends()
        near, _ = ends.open()
        with wire_of(near) as wire:
            wire.send(data) if data else None
            wire.shutdown(socket.SHUT_WR)
        with ends.connect():  # in the middle of its handshake
            ends.dialer.dial(ends.address)  # and nobody asks what came of it
            ends.close()
    # What other tests have left may end meanwhile.
    assert all(now <= then for now, then in zip(left(), before, strict=True)), (left(), before)


@pytest.mark.parametrize(
    "address", ["10.0.0.7:50062", "[fe80::1]:50062", "gpu-7.local:1", ":50062"]
)
def test_addresses_are_read_as_written(address: str) -> None:
    text = f"{address}/{'0a' * 16}"
    parsed = PeerAddress.parse(text, worker_address="[::2]:7")
    assert parsed.token == b"\n" * 16
    assert str(parsed) == (f"[::2]{text}" if address.startswith(":") else text)


@pytest.mark.parametrize(
    "text",
    ["", "host:1", f"host/{'0' * 32}", f"host:1/{'0' * 31}", f"host:1/{'G' * 32}",
     f"host:0/{'0' * 32}", f"host:65536/{'0' * 32}", f"a b:1/{'0' * 32}", f"host:1/{'0' * 32}\n",
     f"[::1:1/{'0' * 32}", f"::1:1/{'0' * 32}"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no HOST:PORT/TOKEN|no port"):
        PeerAddress.parse(text, worker_address="host:7")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.7", False), ("gpu-7", False), ("", False)],
)  # fmt: skip
def test_loopback(host: str, *, expected: bool) -> None:
    assert is_loopback(host) is expected

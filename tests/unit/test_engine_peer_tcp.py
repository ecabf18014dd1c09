"""Peer rounds between hosts: rows in messages, equal outputs, nothing lost with a channel."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draft_service.engine import DraftEngine
from shared.errors import ConfigError
from shared.messages import (
    DraftOpen,
    DraftRound,
    FeatureChunk,
    PathBatch,
    SamplingParams,
    TokenTree,
)
from shared.peer import tcp
from shared.peer.channel import PeerChannel
from target_service.engine import TargetEngine
from tests.engines import KINDS, SHAPES, Models, make_draft, make_target, plain_of, random_tokens
from tests.local_pair import LocalRequest
from tests.marks import first_fast
from tests.peer_pair import close_channels, peer_rounds
from tests.scrape import free_ports
from tests.tcp_pair import ACROSS_HOSTS, TcpPeerPair, wait_for

Engines = tuple[TargetEngine, DraftEngine]
Make = Callable[..., Engines]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave both ends time: they may have to wait for a core for seconds."""
    monkeypatch.setattr(tcp, "_DIAL_TIMEOUT_S", 60.0)
    monkeypatch.setattr(tcp, "_HANDSHAKE_TIMEOUT_S", 60.0)


@pytest.fixture
def make(models: Models) -> Iterator[Make]:
    """Return what makes a target and a draft that have no socket in common."""
    made: list[TargetEngine | DraftEngine] = []

    def build(
        kind: str = "eagle3",
        target: dict[str, Any] | None = None,
        draft: dict[str, Any] | None = None,
    ) -> Engines:
        pairing = models.pairing(kind)
        options = {"feature_ring_mb": 1, **ACROSS_HOSTS, **(target or {})}
        engines = make_target(pairing, **options), make_draft(pairing, **draft or {})
        made.extend(engines)
        return engines

    yield build
    for engine in made:
        engine.channels.receive()  # what was opened and nobody has asked for
    close_channels(*made)


def requests_of(count: int = 3, max_new_tokens: int = 30) -> list[LocalRequest]:
    rng = random.Random(7)
    return [
        LocalRequest(
            prompt=random_tokens(rng, 1 + 17 * i),
            max_new_tokens=max_new_tokens,
            shape=SHAPES[2],
            sampling=SamplingParams(temperature=0.6 * (i % 2), seed=i),
        )
        for i in range(count)
    ]


class Carried(TcpPeerPair):
    """Notes the rows that come to the draft, and how."""

    def __init__(self, *engines: Any, **options: Any) -> None:
        super().__init__(*engines, **options)
        self.inline: list[int] = []
        """Rows of each PathBatch."""

    def tell_draft(self, channel: PeerChannel, message: Any) -> None:
        assert not channel.shares_memory
        match message:
            case PathBatch() if message.rows is not None:
                assert isinstance(message.rows.data, bytes)
                self.inline.append(message.rows.shape[0])
            case FeatureChunk():
                assert isinstance(message.data, bytes)
        super().tell_draft(channel, message)


@pytest.mark.parametrize("kind", first_fast(KINDS))
def test_output_equals_the_plain_run(make: Make, kind: str) -> None:
    target, draft = make(kind)
    assert target.info.peer_socket == ""
    assert bool(target.info.feature_ring) == (kind != "standalone"), "nothing but TCP is missing"
    requests = requests_of()
    expected = plain_of(target, requests)
    pair = Carried(target, draft)
    pair.run(requests)
    for request, plain in zip(requests, expected, strict=True):
        assert request.output == plain.output
        assert request.trees == [], "no round is relayed"
        assert peer_rounds(pair, request) >= len(request.paths) - 3
    assert bool(pair.inline) == (kind != "standalone")
    assert len(list(draft.channels)) == 1, "requests share the channel"


@pytest.mark.parametrize("is_here", [True, False])
def test_a_socket_that_can_be_opened_is_preferred(make: Make, *, is_here: bool) -> None:
    """A draft on another host is told of the socket too."""
    target, draft = make(target={"peer_socket": True})
    pair = TcpPeerPair(target, draft)
    if not is_here:
        pair.target_socket = f"coppice-channel-{'0' * 32}"
    (request,) = requests_of(1)
    pair.run([request])
    assert peer_rounds(pair, request) > 3
    (channel,) = draft.channels
    assert channel.shares_memory == is_here


def test_rows_that_fit_into_no_message_are_spread_over_several(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = make()
    requests = requests_of(4)
    expected = plain_of(target, requests)
    for most in (1, 3):  # rows: of no path with a draft in it; of one path or two
        monkeypatch.setattr(target.features, "rows_per_chunk", most)
        pair = Carried(target, draft)
        again = requests_of(4)
        pair.run(again)
        assert [request.output for request in again] == [plain.output for plain in expected]
        assert pair.inline and max(pair.inline) <= most
        assert all(peer_rounds(pair, request) > 3 for request in again)


@pytest.mark.parametrize("end", ["target", "draft", "half open"])
def test_a_channel_that_drops_costs_no_token_and_the_next_request_dials_again(
    make: Make, end: str
) -> None:
    target, draft = make()
    requests = requests_of()
    expected = plain_of(target, requests)
    pair = TcpPeerPair(target, draft)
    for request in requests:
        pair.open(request)
    while min(len(request.output) for request in requests) < 8:
        assert pair.step()
    assert all(peer_rounds(pair, request) for request in requests)
    (channel,) = target.channels if end == "target" else draft.channels
    if end == "half open":  # only one direction ends
        with socket.socket(fileno=os.dup(channel.fd)) as wire:
            wire.shutdown(socket.SHUT_WR)
    else:
        channel.close()
    pair.finish()
    for request, plain in zip(requests, expected, strict=True):
        assert request.output == plain.output
        assert request.trees, "rounds are relayed"
    assert sorted(pair.detached) == sorted(request.request_id for request in requests)
    (late,) = requests_of(1)
    pair.run([late])
    assert late.output == expected[0].output and late.trees == []
    assert len(list(target.channels)) == len(list(draft.channels)) == 1


def opened(request_id: str, target: TargetEngine, address: str) -> list[DraftOpen | DraftRound]:
    """Return what an orchestrator tells a draft that may attach itself, or not."""
    epochs = {"request_id": request_id, "target_epoch": 1, "draft_epoch": 1}
    return [
        DraftOpen(
            **epochs, target_address="127.0.0.1:1", target_peer_address=address,
            token_ids=(1, 2, 3), sampling=SamplingParams(),
        ),
        DraftRound(
            **epochs, round_idx=1, seq_len=3, token_offset=3, token_ids=(4,), shape=SHAPES[2],
            unless_attached=True,
        ),
    ]  # fmt: skip


def run_until_dialled(draft: DraftEngine) -> list[Any]:
    """Step until no request waits for a channel, and then until nothing is left to do."""
    answers = []
    while any(request.dial for request in draft.requests.values()):
        while draft.has_work:
            answers += draft.step()
        assert answers == [], "nobody knows yet who orders the tree"
        assert wait_for(draft.channels)
        draft.channels.receive()
    while draft.has_work:
        answers += draft.step()
    return answers


def test_an_order_waits_until_it_is_known_who_orders(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orchestrator's is followed by a draft that could not be attached, and by no other."""
    monkeypatch.setattr(tcp, "_RETRY_S", (300.0, 300.0))
    target, draft = make("standalone")
    for message in opened("attached", target, target.info.peer_address):
        draft.submit(message)
    assert run_until_dialled(draft) == []
    port = free_ports(1)
    for message in opened("relayed", target, f"127.0.0.1:{port}/{'0' * 32}"):
        draft.submit(message)
    (tree,) = run_until_dialled(draft)
    assert isinstance(tree, TokenTree)
    assert (tree.request_id, tree.round_idx, tree.token_ids[0]) == ("relayed", 1, 4)
    for message in opened("soon after", target, f"127.0.0.1:{port}/{'0' * 32}"):
        draft.submit(message)
    assert draft.requests["soon after"].dial is None, "it was tried just now"
    (tree,) = run_until_dialled(draft)
    assert tree.request_id == "soon after"


def secret_file(directory: Path, text: str) -> str:
    path = directory / f"secret-{len(list(directory.iterdir()))}"
    path.write_text(text + "\n")
    return str(path)


@pytest.mark.parametrize("drafts", ["the same", "another", "none"])
def test_a_draft_without_the_secret_has_its_rounds_relayed(
    make: Make, tmp_path: Path, drafts: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "0123456789abcdef" * 2
    own = {"the same": secret, "another": "x" * 32, "none": ""}[drafts]
    draft_options = {"secret_file": secret_file(tmp_path, own)} if own else {}
    target, draft = make(target={"secret_file": secret_file(tmp_path, secret)}, draft=draft_options)
    requests = requests_of(2)
    expected = plain_of(target, requests)
    pair = TcpPeerPair(target, draft)
    pair.run(requests)
    assert [request.output for request in requests] == [plain.output for plain in expected]
    is_attached = drafts == "the same"
    for request in requests:
        assert bool(request.trees) != is_attached
        assert bool(peer_rounds(pair, request)) == is_attached
    assert ("rounds go through the orchestrator" in caplog.text) != is_attached
    assert ("it has another secret" in caplog.text) != is_attached
    assert secret not in caplog.text and "x" * 32 not in caplog.text


def test_a_target_that_does_not_answer_holds_up_nobody(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While a channel is dialled in vain, that request's rounds go on, and others' have trees."""
    monkeypatch.setattr(tcp, "_DIAL_TIMEOUT_S", 400.0)
    target, draft = make()
    served, lonely = requests_of(2)
    expected = plain_of(target, [served, lonely])
    pair = TcpPeerPair(target, draft)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        pair.open(served)
        pair.target_peer_address = f"127.0.0.1:{deaf.getsockname()[1]}/{'0' * 32}"
        pair.waits_for_dials = False
        pair.open(lonely)
        pair.finish()
        assert "no peer channel" not in caplog.text, "the dial went on all the time"
    assert peer_rounds(pair, served) > 3 and lonely.trees == []
    assert [served.output, lonely.output] == [plain.output for plain in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peer_host": "0.0.0.0"}, "needs a secret"),
        ({"peer_host": "192.0.2.1", "secret_file": "good"}, "cannot listen on --peer-host"),
        ({"secret_file": "none"}, "cannot read --secret-file"),
        ({"secret_file": "short"}, "has 5 bytes, expected 16 or more"),
    ],
)
def test_a_target_that_others_could_attach_to_is_refused(
    models: Models, tmp_path: Path, options: dict[str, str], message: str
) -> None:
    (tmp_path / "good").write_text("0" * 32)
    (tmp_path / "short").write_text("short\n")
    if "secret_file" in options:
        options = {**options, "secret_file": str(tmp_path / options["secret_file"])}
    with pytest.raises(ConfigError, match=message):
        make_target(models.pairing("eagle3"), **options)


def test_the_secret_may_be_a_variable(
    models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COPPICE_SECRET", "0123456789abcdef")
    target = make_target(models.pairing("eagle3"), peer_host="0.0.0.0", peer_socket=False)
    assert target.info.peer_address.startswith(":"), "at whatever address the worker has"
    monkeypatch.setenv("COPPICE_SECRET", "short")
    with pytest.raises(ConfigError, match="COPPICE_SECRET has 5 bytes"):
        make_target(models.pairing("eagle3"))

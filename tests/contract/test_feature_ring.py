"""Feature rows through shared memory: to whoever proves to share it, and as bytes to all others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from draft_service.feature_client import FeatureClient
from shared.messages import (
    AcceptedPath,
    FeatureAck,
    FeatureChunk,
    FeatureCommand,
    FeatureSubscribe,
    RingSpan,
)
from shared.peer.ring import RING_DIR, FeatureRing, RingReader
from tests.contract.driver import Listener, Peer, target_open, verify_after
from tests.fakes import FakeTarget, eventually, fake_target, feature_rows
from tests.scrape import free_ports

pytestmark = pytest.mark.asyncio

PROMPT = tuple(range(100, 140))


@pytest.fixture
def ring() -> Iterator[FeatureRing]:
    ring = FeatureRing(1 << 16)
    yield ring
    ring.close()


@pytest.fixture(autouse=True)
def _logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


async def test_rows_come_through_the_ring_round_after_round(
    ring: FeatureRing, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeTarget(ring=ring)
    async with fake_target(engine) as target, Peer(target.address) as peer, Listener() as listener:
        session = peer.target_session()
        await session.send(target_open(prompt=PROMPT))
        path = await session.next(AcceptedPath)
        listener.subscribe(target.address, from_position=3)
        await eventually(lambda: listener.end == 40)
        tokens = [*PROMPT, *path.token_ids]
        for count in range(41, 44):
            await session.send(verify_after(path))
            path = await session.next(AcceptedPath)
            tokens += path.token_ids
            await eventually(lambda count=count: listener.end == count)  # type: ignore[misc]
        assert listener.data == feature_rows(tokens, 3, 43)
        assert set(listener.rings) == {ring.name}
        listener.tell(target.address, FeatureAck(request_id="a", target_epoch=1, position=43))
        await eventually(lambda: engine.requests["a"].acknowledged == 43)
    assert f"features from {target.address} come through shared memory" in caplog.text


async def test_a_draft_that_does_not_share_the_memory_gets_bytes(
    ring: FeatureRing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in another container or on another host; a neighbour of the target is not affected."""
    async with (
        fake_target(FakeTarget(ring=ring)) as target,
        Peer(target.address) as peer,
        Listener(ring_dir=tmp_path) as far,
        Listener() as near,
    ):
        session = peer.target_session()
        await session.send(target_open(prompt=PROMPT))
        far.subscribe(target.address)
        await eventually(lambda: far.end == 40)
        assert set(far.rings) == {""}
        near.subscribe(target.address)
        await eventually(lambda: near.end == 40)
        assert set(near.rings) == {ring.name}
        assert near.data == far.data == feature_rows(PROMPT, 0, 40)
    assert f"features from {target.address} come as bytes: its memory is elsewhere" in caplog.text


async def test_a_target_without_a_ring_sends_bytes(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_target() as target, Peer(target.address) as peer, Listener() as listener:
        await peer.target_session().send(target_open(prompt=PROMPT))
        listener.subscribe(target.address)
        await eventually(lambda: listener.end == 40)
        assert set(listener.rings) == {""}
    assert "come as bytes: it has no ring" in caplog.text


async def test_a_draft_that_was_too_slow_for_the_ring_goes_on_with_bytes(ring: FeatureRing) -> None:
    engine = FakeTarget(ring=ring)
    async with fake_target(engine) as target, Peer(target.address) as peer, Listener() as listener:
        session = peer.target_session()
        await session.send(target_open(prompt=PROMPT))
        path = await session.next(AcceptedPath)
        listener.subscribe(target.address)
        await eventually(lambda: listener.end == 40)
        listener.chunks.clear()
        listener.subscribe(target.address, from_position=16, avoids_ring=True)
        await eventually(lambda: listener.end == 40)
        await session.send(verify_after(path))
        await eventually(lambda: listener.end == 41)
        assert listener.data == feature_rows([*PROMPT, *path.token_ids], 16, 41)
        assert set(listener.rings) == {""}


async def test_a_restarted_target_is_read_through_its_new_ring(ring: FeatureRing) -> None:
    async with Listener() as listener:
        port, engine = free_ports(1), FakeTarget(ring=ring)
        async with fake_target(engine, port=port) as target, Peer(target.address) as peer:
            session = peer.target_session()
            await session.send(target_open(prompt=PROMPT))
            path = await session.next(AcceptedPath)
            listener.subscribe(target.address)
            await eventually(lambda: listener.end == 40)
            assert listener.data == feature_rows(PROMPT, 0, 40)
        listener.chunks.clear()
        successor = FeatureRing(1 << 16)
        tokens = (*PROMPT, *path.token_ids)
        async with (
            fake_target(FakeTarget(ring=successor), port=port) as target,
            Peer(target.address) as peer,
        ):
            await peer.target_session().send(target_open(prompt=tokens))
            await eventually(lambda: listener.end == 41)
            assert listener.data == feature_rows(tokens, 40, 41)
            assert listener.rings == [successor.name]
            received = target.engine.received
            (subscription,) = [m for m in received if isinstance(m, FeatureSubscribe)]
            assert subscription.ring_nonce == successor.nonce != ring.nonce


async def test_a_ring_that_was_removed_is_not_used(ring: FeatureRing) -> None:
    """New subscriptions find nothing to prove; who has mapped it goes on."""
    async with (
        fake_target(FakeTarget(ring=ring)) as target,
        Peer(target.address) as peer,
        Listener() as listener,
    ):
        session = peer.target_session()
        await session.send(target_open(prompt=PROMPT))
        listener.subscribe(target.address)
        await eventually(lambda: listener.end == 40)
        assert listener.data == feature_rows(PROMPT, 0, 40)
        (RING_DIR / ring.name).unlink()
        listener.chunks.clear()
        listener.subscribe(target.address, from_position=5)
        await eventually(lambda: listener.end == 40)
        assert set(listener.rings) == {""}
        assert listener.data == feature_rows(PROMPT, 5, 40)


async def test_what_is_asked_before_the_stream_is_up_is_asked_once(ring: FeatureRing) -> None:
    """The nonce is read after the target has named its ring, not before."""
    async with fake_target(FakeTarget(ring=ring)) as target:
        delivered: list[object] = []
        client = FeatureClient(delivered.extend)
        for epoch in (1, 2, 3):
            command = FeatureSubscribe(request_id="a", target_epoch=epoch, from_position=0)
            client.handle(FeatureCommand(target_address=target.address, command=command))
        await eventually(lambda: bool(target.engine.received))
        (subscription,) = target.engine.received
        assert (subscription.target_epoch, subscription.ring_nonce) == (3, ring.nonce)
        await client.close()


async def test_part_of_a_chunk_is_that_part_of_its_rows(ring: FeatureRing) -> None:
    rows = feature_rows(PROMPT, 0, 8)
    engine = FakeTarget(ring=ring)
    inline = FeatureChunk(
        request_id="a", target_epoch=1, start=0, shape=(8, 6), dtype="float32", data=rows
    )
    by_ring = FeatureChunk(
        request_id="a",
        target_epoch=1,
        start=0,
        shape=(8, 6),
        dtype="float32",
        data=engine.to_ring(rows),
    )
    assert (inline.num_inline_bytes, by_ring.num_inline_bytes) == (8 * 24, 0)
    for first, stop in ((0, 8), (3, 8), (2, 5)):
        want = inline.rows(first, stop)
        got = by_ring.rows(first, stop)
        assert want.data == rows[24 * first : 24 * stop]
        assert isinstance(got.data, RingSpan)
        data = RingReader().read(got.data)
        assert data is not None and data.tobytes() == want.data
        assert (got.start, got.shape) == (want.start, want.shape) == (first, (stop - first, 6))

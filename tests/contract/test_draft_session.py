"""DraftService.Session and GetInfo over real gRPC, with a fake engine behind them."""

from __future__ import annotations

from typing import Any

import pytest

from coppice.v1 import draft_pb2
from shared.errors import StatusCode
from shared.messages import (
    DraftClose,
    DraftRound,
    RequestRetracted,
    TokenTree,
    TreeShape,
    from_proto,
)
from shared.messages.batches import pack_draft_request
from tests.contract.driver import Peer, draft_open, failure
from tests.fakes import FakeDraft, eventually, fake_draft, next_token

pytestmark = pytest.mark.asyncio

PROMPT = (1, 2, 3, 4, 5)
NOWHERE = "127.0.0.1:1"


def first_round(request_id: str = "a", **changes: Any) -> DraftRound:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "target_epoch": 1,
        "draft_epoch": 1,
        "round_idx": 1,
        "seq_len": len(PROMPT),
        "token_offset": len(PROMPT),
        "token_ids": (next_token(PROMPT),),
        "shape": TreeShape(num_steps=3, topk=2, num_draft_tokens=6),
    }
    return DraftRound(**(fields | changes))


def standalone() -> FakeDraft:
    return FakeDraft(needs_features=False)


async def test_round_is_answered_by_a_tree_under_its_root() -> None:
    async with fake_draft(standalone()) as draft, Peer(draft.address) as peer:
        session = peer.draft_session()
        await session.send(draft_open(NOWHERE), first_round())
        tree = await session.next(TokenTree)
        assert (tree.request_id, tree.round_idx, tree.seq_len) == ("a", 1, 5)
        assert (tree.target_epoch, tree.draft_epoch) == (1, 1)
        assert tree.token_ids[0] == next_token(PROMPT)
        assert len(tree.token_ids) == len(tree.parent_index) == len(tree.cumulative_logprobs) == 5
        assert session.load.num_running == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 17}, "num_steps"),
        ({"topk": 0}, "topk"),
        ({"num_draft_tokens": 65}, "num_draft_tokens"),
        ({"num_steps": 1, "num_draft_tokens": 5}, "num_draft_tokens"),
        ({"seq_len": -1}, "seq_len"),
    ],
)
async def test_bad_round_fails_alone(changes: dict[str, int], field: str) -> None:
    async with fake_draft(standalone()) as draft, Peer(draft.address) as peer:
        session = peer.draft_session()
        await session.send(draft_open(NOWHERE))
        batch = pack_draft_request([first_round()])
        for name, value in changes.items():
            setattr(batch.rounds[0], name, value)
        await session.call.write(batch)
        refused = await failure(session)
        assert (refused.code, refused.field) == (StatusCode.INVALID_ARGUMENT, field)
        assert (refused.draft_epoch, refused.round_idx) == (1, 1)
        await session.send(first_round())
        assert (await session.next(TokenTree)).round_idx == 1


async def test_round_without_an_open_is_not_found() -> None:
    async with fake_draft(standalone()) as draft, Peer(draft.address) as peer:
        session = peer.draft_session()
        await session.send(first_round())
        refused = await failure(session)
        assert (refused.code, refused.round_idx) == (StatusCode.NOT_FOUND, 1)
        assert draft.engine.received == []


async def test_open_that_the_engine_refuses_is_gone_from_the_front() -> None:
    async with fake_draft(standalone()) as draft, Peer(draft.address) as peer:
        session = peer.draft_session()
        await session.send(draft_open(NOWHERE, prompt=(512,)))
        assert (await failure(session)).field == "token_ids"
        assert draft.worker.servicer.sessions.num_requests == 0
        await session.send(draft_open(NOWHERE, draft_epoch=2), first_round(draft_epoch=2))
        assert (await session.next(TokenTree)).draft_epoch == 2


@pytest.mark.parametrize("how", ["close_message", "half_close", "cancel"])
async def test_close_frees_the_request(how: str) -> None:
    async with fake_draft(standalone()) as draft, Peer(draft.address) as peer:
        session = peer.draft_session()
        await session.send(draft_open(NOWHERE), first_round())
        await session.next(TokenTree)
        if how == "close_message":
            await session.send(DraftClose(request_id="a", draft_epoch=1))
        elif how == "half_close":
            await session.close()
        else:
            session.call.cancel()
        await eventually(lambda: draft.engine.requests == {})
        assert draft.worker.servicer.sessions.num_requests == 0


async def test_retraction_reaches_the_orchestrator() -> None:
    async with fake_draft(standalone()) as draft, Peer(draft.address) as peer:
        session = peer.draft_session()
        await session.send(draft_open(NOWHERE), first_round())
        await session.next(TokenTree)
        draft.engine.retract("a")
        draft.handle.wake()
        retracted = await session.next(RequestRetracted)
        assert retracted == RequestRetracted(request_id="a", target_epoch=1, draft_epoch=1)


async def test_get_info_says_what_the_draft_needs() -> None:
    async with fake_draft() as draft, Peer(draft.address) as peer:
        reply = await peer.draft.GetInfo(draft_pb2.DraftServiceGetInfoRequest())
        info = from_proto(reply.info)
        assert (info.kind, info.incarnation) == ("eagle3", "fake-draft")
        assert info.features == draft.engine.info.features and info.features.width > 0


async def test_a_target_that_the_draft_may_not_connect_to_is_refused_by_name() -> None:
    """And requests of others on the same stream are served."""
    engine = standalone()
    async with (
        fake_draft(engine, targets="127.0.0.1:7000,localhost:7001") as draft,
        Peer(draft.address) as peer,
    ):
        session = peer.draft_session()
        await session.send(draft_open(NOWHERE), draft_open("127.0.0.1:7000", request_id="b"))
        refused = await failure(session)
        assert (refused.request_id, refused.draft_epoch) == ("a", 1)
        assert (refused.reason, refused.field) == ("TARGET_NOT_ALLOWED", "target_address")
        assert NOWHERE in refused.message and "--targets" in refused.message
        await session.send(first_round("b"))
        assert (await session.next(TokenTree)).request_id == "b"
        assert list(engine.requests) == ["b"]

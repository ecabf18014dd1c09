"""Whole rounds across both workers: draft, verify, commit, features, many requests at once."""

from __future__ import annotations

import asyncio

import pytest

from shared.messages import (
    AcceptedPath,
    DraftClose,
    DraftRound,
    FinishReason,
    SamplingParams,
    TargetOpen,
    TokenTree,
    TreeShape,
)
from tests.contract.driver import Peer, Stream, draft_open, target_open, verify_after
from tests.fakes import FakeWorker, eventually, fake_draft, fake_target, generate

pytestmark = pytest.mark.asyncio

SHAPE = TreeShape(num_steps=4, topk=2, num_draft_tokens=8)


class Rounds:
    """Runs one request to its end over streams that requests share."""

    def __init__(self, target: FakeWorker, to_target: Stream, to_draft: Stream) -> None:
        self.target = target
        self.to_target = to_target
        self.to_draft = to_draft

    async def run(
        self, request_id: str, prompt: list[int], count: int, sampling: SamplingParams
    ) -> tuple[list[int], int]:
        """Return the output and the number of rounds."""
        opened = target_open(request_id, prompt=prompt, max_new_tokens=count, sampling=sampling)
        await self.to_target.send(opened)
        await self.to_draft.send(
            draft_open(self.target.address, request_id, prompt=prompt, sampling=sampling)
        )
        path = await self.to_target.next(AcceptedPath, request_id)
        tokens = [*prompt, *path.token_ids]
        while path.finish_reason is FinishReason.NONE:
            num_new = len(path.token_ids)
            order = DraftRound(
                request_id=request_id,
                target_epoch=1,
                draft_epoch=1,
                round_idx=path.round_idx + 1,
                seq_len=path.seq_len,
                token_offset=len(tokens) - num_new,
                token_ids=path.token_ids,
                shape=SHAPE,
            )
            await self.to_draft.send(order)
            tree = await self.to_draft.next(TokenTree, request_id)
            await self.to_target.send(verify_after(path, tree))
            path = await self.to_target.next(AcceptedPath, request_id)
            tokens += path.token_ids
        await self.to_draft.send(DraftClose(request_id=request_id, draft_epoch=1))
        return tokens[len(prompt) :], path.round_idx


async def test_speculation_gives_the_plain_output_in_fewer_rounds() -> None:
    async with fake_target() as target, fake_draft() as draft:
        async with Peer(target.address) as target_peer, Peer(draft.address) as draft_peer:
            rounds = Rounds(target, target_peer.target_session(), draft_peer.draft_session())
            for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=2**63 + 5)):
                prompt = list(range(50, 90))
                name = f"t{sampling.temperature}"
                output, num_rounds = await rounds.run(name, prompt, 100, sampling)
                assert output == generate(prompt, 100, sampling)
                assert num_rounds < 50
        assert target.engine.load.num_moved_rounds > 0
        await eventually(lambda: not draft.engine.requests and not target.engine.requests)
        await eventually(lambda: target.worker.servicer.features.num_subscriptions == 0)
        assert draft.worker.servicer.sessions.num_requests == 0


async def test_many_requests_on_their_own_streams_do_not_mix() -> None:
    async with fake_target() as target, fake_draft() as draft:
        async with Peer(target.address) as target_peer, Peer(draft.address) as draft_peer:

            async def one(index: int) -> None:
                rounds = Rounds(target, target_peer.target_session(), draft_peer.draft_session())
                prompt = [index, *range(index + 1)]
                sampling = SamplingParams(temperature=float(index % 2), seed=index)
                output, _ = await rounds.run(f"r{index}", prompt, 40, sampling)
                assert output == generate(prompt, 40, sampling)
                await rounds.to_target.close()
                await rounds.to_draft.close()

            target.handle.pause()
            requests = asyncio.gather(*(one(index) for index in range(16)))
            await eventually(lambda: target.handle.num_waiting(TargetOpen) == 16)
            target.handle.resume()
            await requests
        assert target.worker.servicer.sessions.num_sessions == 0
        load = target.engine.load
        assert load.num_request_steps >= load.num_steps + 15, "those that are there share a step"


async def test_rows_may_come_long_before_the_tokens_that_they_belong_to() -> None:
    """They come on a stream of their own; the draft has a use for them when it hears the tokens."""
    prompt = [3, 1, 4, 1, 5]
    async with (
        fake_target() as target,
        fake_draft() as draft,
        Peer(target.address) as target_peer,
        Peer(draft.address) as draft_peer,
    ):
        to_target, to_draft = target_peer.target_session(), draft_peer.draft_session()
        await to_target.send(target_open(prompt=prompt))
        path = await to_target.next(AcceptedPath)
        while path.round_idx < 40:
            await to_target.send(verify_after(path))
            path = await to_target.next(AcceptedPath)
        await to_draft.send(draft_open(target.address, prompt=prompt))
        request = target.engine.requests["a"]
        await eventually(lambda: request.acknowledged == path.seq_len, what="every row is there")
        await to_draft.send(
            DraftRound(
                request_id="a",
                target_epoch=1,
                draft_epoch=1,
                round_idx=path.round_idx + 1,
                seq_len=path.seq_len,
                token_offset=len(prompt),
                token_ids=tuple(generate(prompt, path.round_idx + 1)),
                shape=SHAPE,
            )
        )
        tree = await to_draft.next(TokenTree)
        assert tree.token_ids[0] == path.token_ids[-1]
        await to_draft.send(DraftClose(request_id="a", draft_epoch=1))
        await eventually(lambda: not draft.engine.requests)

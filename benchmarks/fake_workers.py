"""A target and a draft without models, for benchmarks of an orchestrator: paths at any speed.

Every step commits a path for each request that has an order or credit, and answers all of them in
one message, as a real target does. Rounds have trees as soon as there is credit for them: a draft
that is attached to its target's engine has nothing to tell the orchestrator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from coppice.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from shared.messages import (
    AcceptedPath,
    Credit,
    CreditUpdate,
    FeatureSpec,
    FinishReason,
    PeerTrees,
    TargetAdmitted,
    TargetClose,
    TargetOpen,
    VerifyRound,
    WorkerInfo,
    WorkerLoad,
    batches,
    to_proto,
)
from shared.rpc.channel import server_options

VOCAB_SIZE = 512
_OPENING_STEP_S = 0.02
_LOAD = WorkerLoad(num_free_pages=1_000_000, num_pages=1_000_000)


def worker_info(kind: str) -> WorkerInfo:
    """Return the identity of a worker without a model; kind "standalone" needs no features."""
    return WorkerInfo(
        incarnation=f"fake-{kind}",
        model="fake",
        model_hash="f" * 64,
        tokenizer_hash="",
        vocab_size=VOCAB_SIZE,
        max_context_len=1 << 24,
        page_size=16,
        dtype="float32",
        device="cpu",
        features=FeatureSpec(),
        kind=kind,
        load=_LOAD,
        peer_socket="fake",
    )


@dataclass(slots=True)
class _Request:
    """A request as the fake target holds it; `until` is the last round that may run."""

    request_id: str
    target_epoch: int
    num_tokens: int
    token_limit: int
    until: int = 0
    round_idx: int = -1
    has_trees: bool = False

    def take_credit(self, credit: Credit) -> None:
        self.until = max(self.until, credit.until_round_idx)
        self.has_trees = isinstance(credit.trees, PeerTrees)

    def next_path(self, path_len: int) -> AcceptedPath:
        """Commit a round: `path_len` tokens if it has a tree, one otherwise."""
        self.round_idx += 1
        is_tree = self.has_trees and self.round_idx > 0
        count = min(path_len if is_tree else 1, self.token_limit - self.num_tokens)
        self.num_tokens += count
        is_over = self.num_tokens >= self.token_limit
        return AcceptedPath(
            request_id=self.request_id,
            target_epoch=self.target_epoch,
            round_idx=self.round_idx,
            seq_len=self.num_tokens - 1,
            accept_index=tuple(range(count)),
            token_ids=tuple(range(97, 97 + count)),
            num_accepted_drafts=count - 1,
            num_draft_tokens=path_len + 1 if is_tree else 1,
            finish_reason=FinishReason.LENGTH if is_over else FinishReason.NONE,
        )


class FakeTarget(target_pb2_grpc.TargetServiceServicer):
    """Answers paths once per `step_s`, or as fast as each session takes them.

    Args:
        path_len: Tokens per round with a tree, bonus included.
        step_s: Least time from step to step, seconds; 0: none.
        num_streams: Until so many requests are open, steps take their time.
    """

    def __init__(self, *, path_len: int, step_s: float, num_streams: int) -> None:
        self._path_len = path_len
        self._step_s = step_s
        self._num_streams = num_streams
        self._num_opened = 0

    async def GetInfo(self, request: Any, context: Any) -> Any:
        """Return identity, limits and load."""
        return target_pb2.TargetServiceGetInfoResponse(info=to_proto(worker_info("target")))

    async def Session(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Run steps for one orchestrator."""
        held: dict[str, _Request] = {}
        news: list[Any] = []
        has_news = asyncio.Event()

        async def read() -> None:
            async for request in requests:
                news.extend(batches.unpack_target_request(request).messages)
                has_news.set()

        reader = asyncio.create_task(read())
        loop = asyncio.get_running_loop()
        try:
            while not reader.done():
                began = loop.time()
                self._num_opened += sum(isinstance(message, TargetOpen) for message in news)
                replies = [reply for message in news for reply in _take(held, message)]
                news.clear()
                has_news.clear()
                replies += self._step(held)
                if replies:
                    await context.write(batches.pack_target_response(replies, _LOAD))
                    await asyncio.sleep(max(0.0, began + self._pace_s - loop.time()))
                else:
                    await has_news.wait()
        finally:
            reader.cancel()

    @property
    def _pace_s(self) -> float:
        is_complete = self._num_opened >= self._num_streams
        return self._step_s if is_complete else max(self._step_s, _OPENING_STEP_S)

    def _step(self, held: dict[str, _Request]) -> list[Any]:
        runnable = [r for r in held.values() if r.round_idx < r.until]
        paths = [request.next_path(self._path_len) for request in runnable]
        for path in paths:
            if path.finish_reason is not FinishReason.NONE:
                del held[path.request_id]
        return paths


def _take(held: dict[str, _Request], message: Any) -> list[Any]:
    """Take what the orchestrator says; return what is answered at once."""
    match message:
        case TargetOpen():
            num_tokens = len(message.token_ids)
            held[message.request_id] = request = _Request(
                request_id=message.request_id,
                target_epoch=message.target_epoch,
                num_tokens=num_tokens,
                token_limit=num_tokens + message.stopping.max_new_tokens,
            )
            if message.credit is not None:
                request.take_credit(message.credit)
            return [
                TargetAdmitted(request_id=message.request_id, target_epoch=message.target_epoch)
            ]
        case VerifyRound() if message.request_id in held:
            request = held[message.request_id]
            request.has_trees = message.tree is not None
            request.until = max(request.round_idx, message.round_idx)
        case CreditUpdate() if message.request_id in held:
            held[message.request_id].take_credit(message.credit)
        case TargetClose():
            held.pop(message.request_id, None)
    return []


class FakeDraft(draft_pb2_grpc.DraftServiceServicer):
    """Leaves all orders to the target that it is attached to."""

    async def GetInfo(self, request: Any, context: Any) -> Any:
        """Return identity, limits and load."""
        return draft_pb2.DraftServiceGetInfoResponse(info=to_proto(worker_info("standalone")))

    async def Session(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Read what one orchestrator says."""
        async for _ in requests:
            pass


def run_fake_workers(ports: Sequence[int], path_len: int, step_s: float, num_streams: int) -> None:
    """Serve a target on the first port and, if there is a second one, a draft on it; for ever."""
    target = FakeTarget(path_len=path_len, step_s=step_s, num_streams=num_streams)
    asyncio.run(_serve(ports, target))


async def _serve(ports: Sequence[int], target: FakeTarget) -> None:
    server = grpc.aio.server(options=server_options())
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    server.add_insecure_port(f"127.0.0.1:{ports[0]}")
    await server.start()
    if len(ports) > 1:
        drafts = grpc.aio.server(options=server_options())
        draft_pb2_grpc.add_DraftServiceServicer_to_server(FakeDraft(), drafts)
        drafts.add_insecure_port(f"127.0.0.1:{ports[1]}")
        await drafts.start()
    await server.wait_for_termination()

"""Orchestrated requests among fake workers in memory, in virtual time, with scripted faults.

The target's next token is a hash of the tokens so far, so any token lost, repeated or changed shows
in everything after it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from orchestrator.pool import WorkerPool
from orchestrator.request_log import RequestLog, logged_end
from orchestrator.rounds import Generation
from orchestrator.validation import GenerationRequest
from shared.config import OrchestratorConfig
from shared.errors import StatusCode
from shared.messages import (
    FinishInfo,
    GenerateEvent,
    PromptInfo,
    RequestFailure,
    TokenDelta,
    TokenTree,
    TreeShape,
)
from tests.fakes import VOCAB_SIZE, FakeDraft, FakeTarget
from tests.fakes.in_memory import ROUND_S, Fault, InMemoryWorker, pass_on

CONFIG = OrchestratorConfig(
    targets="t:1",
    drafts="d:1",
    draft_timeout_ms=20.0,
    draft_open_timeout_ms=200.0,
    step_timeout_s=2.0,
)
FAULTS = ("none", "target lost", "retracted", "draft lost")
PROMPT = (5, 6, 7)
SHAPE = TreeShape(num_steps=4, topk=2, num_draft_tokens=8)


class Scene:
    """Workers around one pool, and requests served by them.

    Args:
        has_peer: Targets and drafts are on one host.
        round_s: Of a round of the root alone by credit.
        num_experts: Of the targets that are started from now on.
    """

    def __init__(
        self,
        config: OrchestratorConfig = CONFIG,
        *,
        has_peer: bool = False,
        round_s: float = ROUND_S,
        num_experts: int = 0,
    ) -> None:
        self.config = config
        self.num_experts = num_experts
        self.round_s = round_s
        self.has_peer = has_peer
        self.pool = WorkerPool()
        self.targets: list[InMemoryWorker] = []
        self.drafts: list[InMemoryWorker] = []

    def add_target(self, address: str = "", **options: Any) -> InMemoryWorker:
        """Start a target; options are faults."""
        index = len(self.targets)
        target = InMemoryWorker(
            FakeTarget(
                incarnation=f"target-{index}",
                has_features=False,
                peer_socket=f"socket-{index}" if self.has_peer else "",
                clock=asyncio.get_running_loop().time,
                round_s=self.round_s,
                num_experts=self.num_experts,
            ),
            self.pool,
            address=address or f"t:{index}",
            peers=self.drafts,
            **options,
        )
        self.targets.append(target)
        return target

    def add_draft(self, **options: Any) -> InMemoryWorker:
        """Start a draft; options are faults."""
        index = len(self.drafts)
        draft = InMemoryWorker(
            FakeDraft(incarnation=f"draft-{index}", needs_features=False),
            self.pool,
            address=f"d:{index}",
            peers=self.targets,
            **options,
        )
        self.drafts.append(draft)
        return draft

    def generation(
        self, request_id: str = "r", log: RequestLog | None = None, **fields: Any
    ) -> Generation:
        """Return a request, ready to run."""
        fields = {"prompt_ids": PROMPT, "max_new_tokens": 40, "shape": SHAPE, **fields}
        model = self.pool.model
        return Generation(
            GenerationRequest(request_id=request_id, **fields),
            worker_request_id=f"test.{request_id}",
            model=model or FakeTarget(has_features=False).info,
            pool=self.pool,
            config=self.config,
            tokenizer=None,
            log=log,
        )

    async def serve(self, request_id: str = "r", **fields: Any) -> list[GenerateEvent]:
        """Run a request to its end, with a client that reads; return its events."""
        with logged_end(request_id, lambda: None) as log:
            generation = self.generation(request_id, log, **fields)
            events, _ = await asyncio.gather(read(generation), generation.run())
        return events

    async def serve_through(self, fault: str, **fields: Any) -> list[GenerateEvent]:
        """Serve 200 tokens by a new target and draft, with one of `FAULTS` on the way."""
        target, draft = self.add_target(), self.add_draft()
        serving = asyncio.create_task(self.serve(max_new_tokens=200, **fields))
        await asyncio.sleep(0.03 if self.has_peer else 0.1)
        match fault:
            case "target lost":
                self.add_target()
                target.lose()
            case "retracted":
                target.engine.retract("test.r")
                target.step()
            case "draft lost":
                draft.lose()
        return await serving

    async def check_free(self) -> None:
        """Check that nothing of any request is left anywhere."""
        await asyncio.sleep(5.0)
        for worker in (*self.targets, *self.drafts):
            assert worker.engine.requests == {}
            assert worker.worker.num_own_requests == 0
        assert self.pool.num_waiting == 0


async def read(generation: Generation) -> list[GenerateEvent]:
    events: list[GenerateEvent] = []
    while taken := await generation.events.take():
        events += taken
    return events


def tokens_of(events: list[GenerateEvent]) -> list[int]:
    return [t for event in events if isinstance(event, TokenDelta) for t in event.token_ids]


def finish_of(events: list[GenerateEvent]) -> FinishInfo:
    assert isinstance(events[-1], FinishInfo)
    return events[-1]


def check_stream(events: list[GenerateEvent], expected: list[int]) -> FinishInfo:
    """Check everything that must hold of any stream, and that it is the fault-free output."""
    assert [type(event) for event in events].count(PromptInfo) == 1
    assert isinstance(events[0], PromptInfo)
    finish = finish_of(events)
    assert tokens_of(events) == expected
    offset = 0
    for event in events:
        if isinstance(event, TokenDelta):
            assert event.token_offset == offset
            offset += len(event.token_ids)
    stats = finish.speculation
    assert finish.usage.num_output_tokens == len(expected)
    assert sum(stats.accept_length_histogram) == stats.num_rounds
    assert stats.num_accepted_drafts == sum(
        drafts * rounds for drafts, rounds in enumerate(stats.accept_length_histogram)
    )
    assert stats.num_root_only_rounds <= stats.num_rounds
    return finish


def scripted(script: Iterator[Fault], *, only: type[Any]) -> Fault:
    """Apply one fault after the other to messages of one type; then let everything pass."""

    def fault(message: Any) -> list[tuple[float, Any]]:
        if not isinstance(message, only):
            return pass_on(message)
        return next(script, pass_on)(message)

    return fault


def delayed(seconds: float) -> Fault:
    return lambda message: [(seconds, message)]


def failed(code: StatusCode, reason: str = "TEST") -> Fault:
    def fault(message: Any) -> list[tuple[float, Any]]:
        failure = RequestFailure(
            request_id=message.request_id,
            code=int(code),
            reason=reason,
            message="as the test wants it",
            target_epoch=message.target_epoch,
            draft_epoch=getattr(message, "draft_epoch", 0),
            round_idx=message.round_idx,
        )
        return [(0.0, failure)]

    return fault


BAD_TREES = {
    "wrong root": lambda tree: {"token_ids": (tree.token_ids[0] ^ 1, *tree.token_ids[1:])},
    "parent after child": lambda tree: {"parent_index": (-1, 2, *tree.parent_index[2:])},
    "no root": lambda tree: {"parent_index": (0, *tree.parent_index[1:])},
    "out of vocabulary": lambda tree: {"token_ids": (*tree.token_ids[:-1], VOCAB_SIZE)},
    "too many nodes": lambda tree: {
        "token_ids": (*tree.token_ids, *[1] * 20),
        "parent_index": (*tree.parent_index, *[0] * 20),
    },
    "lengths differ": lambda tree: {"parent_index": tree.parent_index[:-1]},
    "another seq_len": lambda tree: {"seq_len": tree.seq_len + 1},
    "score is NaN": lambda tree: {"cumulative_logprobs": (0.0, float("nan"))},
}


def spoiled(change: Callable[[TokenTree], dict[str, Any]]) -> Fault:
    return lambda tree: [(0.0, dataclasses.replace(tree, **change(tree)))]

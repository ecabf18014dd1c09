"""Workers and servers that die, hang, move or come late: clients see a pause, or nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from coppice import (
    AsyncClient,
    Client,
    Completion,
    DeadlineExceededError,
    FinishInfo,
    PromptInfo,
    TokenDelta,
)
from coppice.v1 import generation_pb2 as pb
from coppice.v1 import generation_pb2_grpc as pb_grpc
from shared.errors import StaleStateError, UnavailableError
from shared.messages import GenerateEvent, TargetOpen
from tests.contract.serving import closed, freed, serving, write_model
from tests.fakes import (
    FakeDraft,
    FakeTarget,
    FakeWorker,
    eventually,
    fake_draft,
    fake_target,
    generate,
)
from tests.scrape import free_ports

pytestmark = pytest.mark.asyncio

PROMPT = [3, 1, 4, 1, 5]
LONG = 400
STEP_S = 0.003


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint directory with a tokenizer of the fakes' vocabulary."""
    return write_model(tmp_path_factory.mktemp("model"))


def target(name: str = "t", *, port: int = 0) -> contextlib.AbstractAsyncContextManager[FakeWorker]:
    return fake_target(FakeTarget(incarnation=name), step_s=STEP_S, port=port)


def draft(name: str = "d", *, port: int = 0) -> contextlib.AbstractAsyncContextManager[FakeWorker]:
    return fake_draft(FakeDraft(incarnation=name), port=port)


class Received:
    """What has come of a stream so far; its deltas must go on from each other."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.seed = 0
        self.finish: FinishInfo

    def take(self, event: GenerateEvent) -> None:
        match event:
            case PromptInfo():
                self.seed = event.seed
            case TokenDelta():
                assert event.token_offset == len(self.token_ids)
                self.token_ids += event.token_ids
                self.text += event.text
            case FinishInfo():
                self.finish = event


class Long:
    """A long request, and how much of it has come."""

    def __init__(self, client: AsyncClient) -> None:
        self._received = Received()
        self._events = client.stream(token_ids=PROMPT, max_new_tokens=LONG)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async for event in self._events:
            self._received.take(event)

    async def reaches(self, num_tokens: int) -> None:
        """Wait until so many tokens have come."""
        await eventually(lambda: len(self._received.token_ids) >= num_tokens)

    async def check(self) -> FinishInfo:
        """Wait for the end and check the output."""
        await asyncio.wait_for(self.task, 60)
        assert self._received.token_ids == generate(PROMPT, LONG)
        return self._received.finish


@contextlib.asynccontextmanager
async def long_request(client: AsyncClient) -> AsyncIterator[Long]:
    """Run a long request, and end it with the block."""
    request = Long(client)
    try:
        yield request
    finally:
        await closed(request.task)


@contextlib.contextmanager
def slow(worker: FakeWorker) -> Iterator[None]:
    """Let each step take long for the length of the block."""
    worker.handle.step_s = 30 * STEP_S
    try:
        yield
    finally:
        worker.handle.step_s = STEP_S


async def kill(worker: FakeWorker) -> None:
    """Die as a process does when its engine dies."""
    worker.handle.kill()
    await asyncio.gather(worker.running, return_exceptions=True)


async def test_a_killed_draft_costs_rounds_and_its_successor_catches_up(model: Path) -> None:
    """Same address, new incarnation, features replayed."""
    async with contextlib.AsyncExitStack() as stack:
        a_target = await stack.enter_async_context(target())
        first = await stack.enter_async_context(draft("first", port=free_ports(1)))
        server = await stack.enter_async_context(serving(model, [a_target], [first]))
        client = await stack.enter_async_context(AsyncClient(server.address))
        request = await stack.enter_async_context(long_request(client))
        await request.reaches(60)
        await kill(first)
        port = int(first.address.rpartition(":")[2])
        await request.reaches(100)
        second = await stack.enter_async_context(draft("second", port=port))
        with slow(a_target):  # the output does not end before the draft is found
            await eventually(lambda: bool(second.engine.received))
        done = await request.check()
        assert done.retries >= 1
        assert second.engine.received
        stats = done.speculation
        assert 0 < stats.num_root_only_rounds < stats.num_rounds
        await freed(a_target, second)


async def test_who_comes_while_the_only_target_is_away_waits_for_it(model: Path) -> None:
    """As those do that ran there. The server is not ready meanwhile."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(target("first", port=free_ports(1)))
        server = await stack.enter_async_context(serving(model, [first], step_timeout_s=60.0))
        client = await stack.enter_async_context(AsyncClient(server.address, max_retries=0))
        request = await stack.enter_async_context(long_request(client))
        await request.reaches(20)
        await kill(first)
        await eventually(lambda: server.orchestrator.pool.model is None)
        late = asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=9))
        await eventually(lambda: server.orchestrator.pool.num_waiting == 2)
        port = int(first.address.rpartition(":")[2])
        await stack.enter_async_context(target("second", port=port))
        assert list((await asyncio.wait_for(late, 60)).token_ids) == generate(PROMPT, 9)
        await request.check()


async def test_who_was_not_sent_to_the_only_target_yet_waits_for_it_too(model: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(target("first", port=free_ports(1)))
        server = await stack.enter_async_context(serving(model, [first], step_timeout_s=60.0))
        client = await stack.enter_async_context(AsyncClient(server.address, max_retries=0))
        first.handle.pause()
        asked = [
            asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=4))
            for _ in range(20)  # of which 16 are opened at once
        ]
        await eventually(lambda: server.orchestrator.pool.num_waiting == 4)
        await kill(first)
        await eventually(lambda: server.orchestrator.pool.num_waiting == 20)
        port = int(first.address.rpartition(":")[2])
        await stack.enter_async_context(target("second", port=port))
        for done in await asyncio.wait_for(asyncio.gather(*asked), 60):
            assert list(done.token_ids) == generate(PROMPT, 4)


async def test_another_model_in_the_place_of_the_only_target_ends_the_wait(model: Path) -> None:
    """Who comes anew finds it."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(target("first", port=free_ports(1)))
        server = await stack.enter_async_context(serving(model, [first], step_timeout_s=600.0))
        client = await stack.enter_async_context(AsyncClient(server.address, max_retries=0))
        await kill(first)
        await eventually(lambda: server.orchestrator.pool.model is None)
        late = asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=4))
        await eventually(lambda: server.orchestrator.pool.num_waiting == 1)
        other = FakeTarget(incarnation="other", logits_hash="b" * 64)
        port = int(first.address.rpartition(":")[2])
        await stack.enter_async_context(fake_target(other, step_s=STEP_S, port=port))
        with pytest.raises(UnavailableError) as caught:
            await asyncio.wait_for(late, 60)
        assert caught.value.reason == "NO_TARGET"
        done = await client.generate(token_ids=PROMPT, max_new_tokens=4)
        assert list(done.token_ids) == generate(PROMPT, 4)


async def test_who_comes_while_the_only_target_is_away_waits_no_longer_than_a_step_may_take(
    model: Path,
) -> None:
    async with target() as only, serving(model, [only], step_timeout_s=0.3) as server:
        await kill(only)
        await eventually(lambda: server.orchestrator.pool.model is None)
        async with AsyncClient(server.address, max_retries=0) as client:
            for _ in range(2):  # the second one comes too late to wait
                with pytest.raises(UnavailableError) as caught:
                    await asyncio.wait_for(client.generate(token_ids=PROMPT), 60)
                assert caught.value.reason == "NO_TARGET"


async def test_a_killed_target_costs_a_pause(model: Path) -> None:
    """Another target takes over; no token is lost, repeated or changed."""
    async with contextlib.AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(target(name)) for name in ("t0", "t1")]
        a_draft = await stack.enter_async_context(draft())
        server = await stack.enter_async_context(serving(model, targets, [a_draft]))
        client = await stack.enter_async_context(AsyncClient(server.address))
        request = await stack.enter_async_context(long_request(client))
        await request.reaches(60)
        (used,) = [worker for worker in targets if worker.engine.requests]
        (other,) = [worker for worker in targets if worker is not used]
        await kill(used)
        done = await request.check()
        assert done.retries == 1
        (opened,) = [m for m in other.engine.received if isinstance(m, TargetOpen)]
        assert opened.target_epoch == 2 and len(opened.token_ids) >= 60
        assert done.speculation.num_root_only_rounds < done.speculation.num_rounds
        await freed(other, a_draft)


async def test_a_killed_target_that_comes_back_is_enough(model: Path) -> None:
    """With one target the request waits for its successor at the same address."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(target("first", port=free_ports(1)))
        server = await stack.enter_async_context(serving(model, [first], step_timeout_s=20.0))
        client = await stack.enter_async_context(AsyncClient(server.address))
        request = await stack.enter_async_context(long_request(client))
        await request.reaches(60)
        await kill(first)
        port = int(first.address.rpartition(":")[2])
        await asyncio.sleep(0.5)
        second = await stack.enter_async_context(target("second", port=port))
        done = await request.check()
        assert done.retries == 1
        await freed(second)


async def test_a_hung_target_is_given_up_after_the_step_timeout(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket lives and its health is green: only time tells."""
    # Where this process itself stands still for so long, the other target looks hung as well.
    monkeypatch.setattr("orchestrator.suspicion.MAX_KILLS", 9)
    async with contextlib.AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(target(name)) for name in ("t0", "t1")]
        server = await stack.enter_async_context(serving(model, targets, step_timeout_s=4.0))
        client = await stack.enter_async_context(AsyncClient(server.address))
        request = await stack.enter_async_context(long_request(client))
        await request.reaches(60)
        (used,) = [worker for worker in targets if worker.engine.requests]
        used.handle.pause()
        done = await request.check()
        assert done.retries >= 1
        used.handle.resume()
        await freed(*targets)


async def test_a_hung_draft_costs_one_wait(model: Path) -> None:
    """Rounds go on root-only, and the draft is used again once it answers."""
    async with contextlib.AsyncExitStack() as stack:
        a_target = await stack.enter_async_context(target())
        a_draft = await stack.enter_async_context(draft())
        server = await stack.enter_async_context(
            serving(model, [a_target], [a_draft], draft_timeout_ms=500.0)
        )
        client = await stack.enter_async_context(AsyncClient(server.address))
        request = await stack.enter_async_context(long_request(client))
        await request.reaches(60)
        a_draft.handle.pause()
        await request.reaches(120)
        a_draft.handle.resume()
        done = await request.check()
        stats = done.speculation
        assert 10 < stats.num_root_only_rounds < stats.num_rounds
        assert done.retries == 0
        await freed(a_target, a_draft)


async def test_retracted_requests_come_back(model: Path) -> None:
    """By target and by draft: the client sees nothing."""
    async with contextlib.AsyncExitStack() as stack:
        a_target = await stack.enter_async_context(target())
        a_draft = await stack.enter_async_context(draft())
        server = await stack.enter_async_context(serving(model, [a_target], [a_draft]))
        client = await stack.enter_async_context(AsyncClient(server.address))
        request = await stack.enter_async_context(long_request(client))
        for num_tokens, worker in ((50, a_target), (100, a_draft), (150, a_target)):
            await request.reaches(num_tokens)
            await eventually(lambda worker=worker: bool(worker.engine.requests))  # type: ignore[misc]
            worker.engine.retract(next(iter(worker.engine.requests)))
            worker.handle.wake()
        done = await request.check()
        assert done.retries == 3
        await freed(a_target, a_draft)


async def test_two_targets_and_two_drafts_share_the_load(model: Path) -> None:
    """A pair per request, by load."""
    async with contextlib.AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(target(name)) for name in ("t0", "t1")]
        drafts = [await stack.enter_async_context(draft(name)) for name in ("d0", "d1")]
        server = await stack.enter_async_context(serving(model, targets, drafts))
        client = await stack.enter_async_context(AsyncClient(server.address))
        for worker in targets:
            worker.handle.pause()
        requests = asyncio.gather(
            *(client.generate(token_ids=[i, 7], max_new_tokens=200) for i in range(8))
        )
        # None ends before all have come.
        await eventually(lambda: sum(t.handle.num_waiting(TargetOpen) for t in targets) == 8)
        for worker in targets:
            worker.handle.resume()
        completions = await requests
        for i, done in enumerate(completions):
            assert list(done.token_ids) == generate([i, 7], 200)
        # Of any one a slow machine may have no tree before the target is done with it.
        assert any(done.speculation.num_draft_tokens for done in completions)
        for worker in (*targets, *drafts):
            opened = {
                message.request_id
                for message in worker.engine.received
                if type(message).__name__ in ("TargetOpen", "DraftOpen")
            }
            assert len(opened) == 4
        await freed(*targets, *drafts)


async def test_a_name_that_changes_its_addresses_is_followed(model: Path) -> None:
    """Scale up, then down: `docker compose --scale` changes nothing but DNS."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(target("first"))
        second = await stack.enter_async_context(target("second"))
        addresses = {first.address}

        async def lookup(host: str, port: int) -> set[str]:
            assert (host, port) == ("target_service", 50061)
            return set(addresses)

        server = await stack.enter_async_context(
            serving(model, ["target_service:50061"], lookup=lookup)
        )
        client = await stack.enter_async_context(AsyncClient(server.address))
        addresses.add(second.address)
        await server.sees(targets=2, drafts=0)
        for worker in (first, second):
            worker.handle.pause()
        short = asyncio.gather(
            *(client.generate(token_ids=PROMPT, max_new_tokens=30) for _ in range(4))
        )
        for worker in (first, second):
            await eventually(lambda worker=worker: worker.handle.num_waiting(TargetOpen) == 2)  # type: ignore[misc]
        for worker in (first, second):
            worker.handle.resume()
        await short

        request = await stack.enter_async_context(long_request(client))
        await request.reaches(30)
        (used,) = [worker for worker in (first, second) if worker.engine.requests]
        other = second if used is first else first
        addresses.remove(used.address)
        with slow(used):  # the request does not end before others have come
            pool = server.orchestrator.pool
            await eventually(lambda: any(worker.is_vanished for worker in pool.targets))
            (held,) = used.engine.requests.values()
            num_before = len(held.tokens)
            opens = len([m for m in used.engine.received if isinstance(m, TargetOpen)])
            await client.generate(token_ids=PROMPT, max_new_tokens=10)
            assert len([m for m in used.engine.received if isinstance(m, TargetOpen)]) == opens
            await eventually(lambda: len(held.tokens) > num_before)
            assert server.num_targets == 2  # a running request may end where it is
        done = await request.check()
        assert done.retries == 0
        await server.sees(targets=1, drafts=0)
        assert server.orchestrator.pool.targets[0].address == other.address


async def test_a_lost_orchestrator_is_resumed_by_both_clients(model: Path) -> None:
    """The same seed and the tokens received: the output goes on exactly after them."""
    sampled = {"token_ids": PROMPT, "max_new_tokens": LONG, "temperature": 1.0}
    async with target() as a_target, draft() as a_draft:
        async with contextlib.AsyncExitStack() as first_life:
            served = serving(model, [a_target], [a_draft], port=free_ports(1))
            server = await first_life.enter_async_context(served)
            streamed = Received()
            streaming = asyncio.create_task(collect(server.address, sampled, streamed))
            blocking = asyncio.create_task(
                asyncio.to_thread(collect_blocking, server.address, {**sampled, "request_id": "b"})
            )
            await eventually(lambda: len(streamed.token_ids) > 60)
            port = server.port
        async with serving(model, [a_target], [a_draft], port=port):
            await streaming
            assert streamed.finish.usage.num_output_tokens == LONG
            blocked = await blocking
            assert blocked.usage.num_output_tokens == LONG
            for done in (streamed, blocked):
                assert len(done.token_ids) == LONG
                async with AsyncClient(f"127.0.0.1:{port}") as client:
                    again = await client.generate(**sampled, seed=done.seed)  # type: ignore[arg-type]
                assert list(again.token_ids) == list(done.token_ids)
                assert again.text == done.text
        await freed(a_target, a_draft)


async def test_a_failover_never_goes_to_a_target_that_computes_otherwise(model: Path) -> None:
    """The request waits for its like, and then says that there is none."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(target("first"))
        other = await stack.enter_async_context(
            fake_target(FakeTarget(incarnation="other", logits_hash="b" * 64), step_s=STEP_S)
        )
        server = await stack.enter_async_context(
            serving(model, [first, other], waits=False, step_timeout_s=4.0)
        )
        await server.sees(targets=1, drafts=0)
        (used,) = server.orchestrator.pool.targets
        lost, kept = (first, other) if used.address == first.address else (other, first)
        client = await stack.enter_async_context(AsyncClient(server.address, max_retries=0))
        request = await stack.enter_async_context(long_request(client))
        await request.reaches(60)
        await kill(lost)
        await server.sees(targets=1, drafts=0)  # the other one serves new requests now
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(request.task, 60)
        assert not any(isinstance(m, TargetOpen) for m in kept.engine.received)
        done = await client.generate(token_ids=PROMPT, max_new_tokens=5)
        assert list(done.token_ids) == generate(PROMPT, 5)


async def test_a_server_that_computes_otherwise_is_not_resumed(model: Path) -> None:
    """Neither by the client by itself nor by hand; a request without output begins anew."""
    async with target("first") as first, contextlib.AsyncExitStack() as later:
        async with contextlib.AsyncExitStack() as first_life:
            served = serving(model, [first], port=free_ports(1))
            server = await first_life.enter_async_context(served)
            client = await later.enter_async_context(AsyncClient(server.address, max_retries=10))
            request = await later.enter_async_context(long_request(client))
            begun = client.stream(token_ids=PROMPT, max_new_tokens=8)
            info = await anext(begun)
            assert isinstance(info, PromptInfo) and info.model_fingerprint
            await begun.aclose()
            await request.reaches(20)
            port = server.port
        other = await later.enter_async_context(
            fake_target(FakeTarget(incarnation="other", logits_hash="b" * 64), step_s=STEP_S)
        )
        await later.enter_async_context(serving(model, [other], port=port))
        with pytest.raises(StaleStateError) as caught:
            await asyncio.wait_for(request.task, 60)
        assert (caught.value.reason, caught.value.field) == ("MODEL_CHANGED", "resume_fingerprint")
        output = generate(PROMPT, 8)
        resumed = {"token_ids": PROMPT, "resume_token_ids": output[:3], "max_new_tokens": 8}
        with pytest.raises(StaleStateError):
            await client.generate(**resumed, resume_fingerprint=info.model_fingerprint)  # type: ignore[arg-type]
        done = await client.generate(**resumed)  # type: ignore[arg-type]
        assert list(done.token_ids) == output[3:]  # an old client that sends none


async def collect(address: str, options: dict[str, object], received: Received) -> None:
    """Stream with the asyncio client."""
    async with AsyncClient(address, max_retries=10) as client:
        async for event in client.stream(**options):  # type: ignore[arg-type]
            received.take(event)


def collect_blocking(address: str, options: dict[str, object]) -> Completion:
    """Generate with the blocking client."""
    with Client(address, max_retries=10) as client:
        return client.generate(**options)  # type: ignore[arg-type]


async def test_a_draining_target_keeps_what_it_has_and_gets_nothing_new(model: Path) -> None:
    """Health NOT_SERVING says so before its stream ends."""
    async with contextlib.AsyncExitStack() as stack:
        leaving = await stack.enter_async_context(
            fake_target(FakeTarget(incarnation="t0"), step_s=STEP_S, drain_timeout_s=300.0)
        )
        server = await stack.enter_async_context(serving(model, [leaving]))
        client = await stack.enter_async_context(AsyncClient(server.address))
        request = await stack.enter_async_context(long_request(client))
        await request.reaches(30)
        leaving.worker.server.request_stop()
        with slow(leaving):  # the request does not end before that is heard of
            await eventually(lambda: server.orchestrator.pool.targets[0].is_draining)
            assert not server.orchestrator.pool.is_ready
        done = await request.check()
        assert done.retries == 0
        await server.sees(targets=0, drafts=0)


class ComputesOtherwise(pb_grpc.GenerationServiceServicer):
    """A server that ignores resume_fingerprint, and is another one at each attempt.

    Args:
        fingerprints: What it says of itself, attempt by attempt.
        num_tokens: What the first attempt sends before it breaks off.
    """

    def __init__(self, fingerprints: list[str], num_tokens: int) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self._fingerprints = fingerprints
        self._num_tokens = num_tokens

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:
        self.requests.append(request)
        fingerprint = self._fingerprints[len(self.requests) - 1]
        yield pb.GenerateResponse(prompt_info=pb.PromptInfo(model_fingerprint=fingerprint))
        if len(self.requests) == 1:
            if self._num_tokens:
                delta = pb.TokenDelta(token_ids=[7] * self._num_tokens)
                yield pb.GenerateResponse(delta=delta)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server ends")
        yield pb.GenerateResponse(
            finish=pb.FinishInfo(reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage())
        )


class EndsTwice(pb_grpc.GenerationServiceServicer):
    """A server that fails after it has sent the whole output."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:
        self.num_calls += 1
        yield pb.GenerateResponse(prompt_info=pb.PromptInfo())
        yield pb.GenerateResponse(delta=pb.TokenDelta(token_ids=[7, 8]))
        yield pb.GenerateResponse(
            finish=pb.FinishInfo(reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage())
        )
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server ends")


async def test_an_output_that_is_whole_stays_so_however_its_call_ends() -> None:
    service = EndsTwice()
    server = grpc.aio.server()
    pb_grpc.add_GenerationServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    def events() -> list[GenerateEvent]:
        with Client(address, max_retries=0) as client:
            return list(client.stream(token_ids=PROMPT))

    try:
        async with AsyncClient(address, max_retries=0) as client:
            received = [event async for event in client.stream(token_ids=PROMPT)]
        blocking = await asyncio.to_thread(events)
    finally:
        await server.stop(None)
    for each in (received, blocking):
        assert [type(event) for event in each] == [PromptInfo, TokenDelta, FinishInfo]
    assert service.num_calls == 2


@pytest.mark.parametrize(
    ("num_tokens", "after", "is_mixed"), [(0, "b", False), (2, "a", False), (2, "b", True)]
)
async def test_the_client_itself_compares_what_goes_on_with_what_began(
    num_tokens: int, after: str, *, is_mixed: bool
) -> None:
    """A server that ignores resume_fingerprint must not mix the output of two models."""
    service = ComputesOtherwise(["a", after], num_tokens)
    server = grpc.aio.server()
    pb_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            generating = client.generate(token_ids=PROMPT)
            if is_mixed:
                with pytest.raises(StaleStateError) as caught:
                    await generating
                assert caught.value.reason == "MODEL_CHANGED"
            else:
                assert list((await generating).token_ids) == [7] * num_tokens
    finally:
        await server.stop(None)
    assert service.requests[1].resume_fingerprint == ("a" if num_tokens else "")


class Away(pb_grpc.GenerationServiceServicer):
    """A server that breaks its first stream off, and is away for a number of attempts after it.

    Args:
        begins: The first attempt is told that it is served, and gets a token.
    """

    def __init__(self, num_away: int, *, begins: bool) -> None:
        self.num_requests = 0
        self._num_away = num_away
        self._begins = begins

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:
        self.num_requests += 1
        if self.num_requests == 1 and self._begins:
            yield pb.GenerateResponse(prompt_info=pb.PromptInfo(seed=5))
            yield pb.GenerateResponse(delta=pb.TokenDelta(token_ids=[7]))
        if self.num_requests <= 1 + self._num_away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server ends")
        yield pb.GenerateResponse(prompt_info=pb.PromptInfo(seed=5))
        yield pb.GenerateResponse(
            finish=pb.FinishInfo(reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage())
        )


@pytest.mark.parametrize(
    ("max_retries", "begins", "budget_s", "num_requests"),
    [
        (2, True, 3600.0, 22),  # resumed until the server is back
        (2, True, 0.0, 3),
        (2, False, 3600.0, 3),  # nobody served it yet
        (0, True, 3600.0, 1),
        (30, True, 0.0, 22),
    ],
)
async def test_a_stream_that_was_served_is_resumed_for_a_time_and_not_a_number_of_times(
    max_retries: int,
    budget_s: float,
    num_requests: int,
    *,
    begins: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A killed orchestrator's successor takes longer than a few retries."""
    monkeypatch.setattr("coppice.retries.RESUME_BUDGET_S", budget_s)
    monkeypatch.setattr("coppice.retries._MOST_WAIT_S", 0.0)
    monkeypatch.setattr("coppice.retries._JITTER_S", 0.0)
    service = Away(20, begins=begins)
    server = grpc.aio.server()
    pb_grpc.add_GenerationServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}", max_retries=max_retries) as client:
            if num_requests == 22:
                assert (await client.generate(token_ids=PROMPT)).token_ids == (7,)
            else:
                with pytest.raises(UnavailableError):
                    await client.generate(token_ids=PROMPT)
    finally:
        await server.stop(None)
    assert service.num_requests == num_requests


async def test_the_deadline_ends_a_stream_that_cannot_be_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long the next wait would be."""
    monkeypatch.setattr("coppice.retries._FIRST_WAIT_S", 3600.0)
    monkeypatch.setattr("coppice.retries._MOST_WAIT_S", 3600.0)
    server = grpc.aio.server()
    pb_grpc.add_GenerationServiceServicer_to_server(Away(20, begins=True), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(DeadlineExceededError):
                await asyncio.wait_for(client.generate(token_ids=PROMPT, timeout_s=2.0), 600)
    finally:
        await server.stop(None)

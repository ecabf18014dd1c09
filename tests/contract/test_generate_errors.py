"""Every declared error of Generate on the wire, and that the service goes on after it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from coppice import (
    AsyncClient,
    CancelledError,
    Client,
    CoppiceError,
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    TokenDelta,
    UnavailableError,
)
from coppice.v1 import generation_pb2 as pb
from coppice.v1 import generation_pb2_grpc as pb_grpc
from shared.errors import StatusCode
from shared.messages import AcceptedPath
from tests.contract.serving import Serving, drafted, freed, serving, write_model
from tests.fakes import (
    FakeDraft,
    FakeTarget,
    FakeWorker,
    eventually,
    fake_draft,
    fake_target,
    generate,
)

pytestmark = pytest.mark.asyncio

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint directory with a tokenizer of the fakes' vocabulary."""
    return write_model(tmp_path_factory.mktemp("model"))


def ask(**fields: Any) -> pb.GenerateRequest:
    """Return a small good request with some fields replaced."""
    if "text" not in fields:
        fields.setdefault("token_ids", pb.TokenIds(ids=PROMPT))
    fields.setdefault("stopping", pb.StoppingCriteria(max_new_tokens=4))
    return pb.GenerateRequest(**fields)


async def refusal(address: str, request: pb.GenerateRequest) -> tuple[str, dict[str, Message]]:
    """Send a request that must fail; return its code and its details by name."""
    async with grpc.aio.insecure_channel(
        address, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(request):
                pass
    details: dict[str, Message] = {}
    for key, value in caught.value.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            assert status.code == caught.value.code().value[0]
            for packed in status.details:
                name = packed.TypeName().removeprefix("google.rpc.")
                details[name] = getattr(error_details_pb2, name)()
                packed.Unpack(details[name])
    return caught.value.code().name, details


async def check_serves(server: Serving) -> None:
    """Check that a plain request still works."""
    async with AsyncClient(server.address, max_retries=0) as client:
        done = await client.generate(token_ids=PROMPT, max_new_tokens=8)
    assert list(done.token_ids) == generate(PROMPT, 8)


@contextlib.asynccontextmanager
async def pair(model: Path, **fields: Any) -> AsyncIterator[tuple[Serving, FakeWorker, FakeWorker]]:
    """Serve with one target and one draft."""
    async with (
        fake_target(FakeTarget(max_context_len=64)) as target,
        fake_draft() as draft,
        serving(model, [target], [draft], **fields) as server,
    ):
        yield server, target, draft


BAD = {
    "no prompt": (pb.GenerateRequest(), "prompt", "INVALID_ARGUMENT"),
    "empty text": (ask(text=""), "text", "INVALID_ARGUMENT"),
    "empty ids": (ask(token_ids=pb.TokenIds()), "token_ids", "INVALID_ARGUMENT"),
    "id": (ask(token_ids=pb.TokenIds(ids=[512])), "token_ids", "TOKEN_OUT_OF_VOCABULARY"),
    "NaN": (
        ask(sampling=pb.SamplingParams(temperature=math.nan)),
        "sampling.temperature",
        "INVALID_ARGUMENT",
    ),
    "top_p": (ask(sampling=pb.SamplingParams(top_p=0)), "sampling.top_p", "INVALID_ARGUMENT"),
    "enum": (
        ask(speculation=pb.SpeculationOptions(mode=77)),  # type: ignore[arg-type]
        "speculation.mode",
        "INVALID_ARGUMENT",
    ),
    "tree": (
        ask(speculation=pb.SpeculationOptions(num_steps=2, topk=2, num_draft_tokens=8)),
        "speculation.num_draft_tokens",
        "INVALID_TREE_SHAPE",
    ),
    "long prompt": (ask(token_ids=pb.TokenIds(ids=[1] * 64)), "token_ids", "PROMPT_TOO_LONG"),
    "long text": (ask(text="x" * 100), "text", "PROMPT_TOO_LONG"),
}


async def test_bad_requests_name_the_field_in_bad_request(model: Path) -> None:
    """INVALID_ARGUMENT with ErrorInfo and BadRequest; the workers never hear of it."""
    async with pair(model) as (server, target, draft):
        for name, (request, field, reason) in BAD.items():
            code, details = await refusal(server.address, request)
            assert code == "INVALID_ARGUMENT", name
            info, bad = details["ErrorInfo"], details["BadRequest"]
            assert isinstance(info, error_details_pb2.ErrorInfo)
            assert isinstance(bad, error_details_pb2.BadRequest)
            assert (info.domain, info.reason) == ("coppice", reason), name
            assert [v.field for v in bad.field_violations] == [field], name
            assert bad.field_violations[0].description
        assert target.engine.received == draft.engine.received == []
        await check_serves(server)


async def test_a_100_mb_message_is_refused_and_the_server_goes_on(model: Path) -> None:
    """gRPC itself refuses it; the client gives it a reason, and does not try again."""
    async with pair(model) as (server, target, draft):
        text = "x" * (100 * 1024 * 1024)
        code, _ = await refusal(server.address, ask(text=text))
        assert code == "RESOURCE_EXHAUSTED"

        def send_too_much() -> None:
            with Client(server.address) as client:
                client.generate("x" * (17 * 1024 * 1024))

        with pytest.raises(ResourceExhaustedError) as caught:
            await asyncio.to_thread(send_too_much)
        assert caught.value.reason == "MESSAGE_TOO_LARGE"
        await check_serves(server)
        await freed(target, draft)


async def test_a_running_request_id_cannot_be_used_twice(model: Path) -> None:
    """It can once the first one has ended."""
    async with pair(model) as (server, target, _), AsyncClient(server.address) as client:
        target.handle.pause()
        first = asyncio.create_task(
            client.generate(token_ids=PROMPT, max_new_tokens=4, request_id="x")
        )
        await eventually(lambda: server.orchestrator.admission.num_requests == 1)
        code, details = await refusal(server.address, ask(request_id="x"))
        assert code == "INVALID_ARGUMENT"
        assert details["ErrorInfo"].reason == "DUPLICATE_REQUEST_ID"  # type: ignore[attr-defined]
        target.handle.resume()
        await first
        await client.generate(token_ids=PROMPT, max_new_tokens=4, request_id="x")


async def test_too_many_requests_are_refused_with_a_delay(model: Path) -> None:
    """RESOURCE_EXHAUSTED with RetryInfo; those that run go on running."""
    async with pair(model, max_num_requests=2) as (server, target, _):
        async with AsyncClient(server.address) as client:
            target.handle.pause()
            running = [
                asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=4))
                for _ in range(2)
            ]
            await eventually(lambda: server.orchestrator.admission.num_requests == 2)
            code, details = await refusal(server.address, ask())
            assert code == "RESOURCE_EXHAUSTED"
            assert details["ErrorInfo"].reason == "OVERLOADED"  # type: ignore[attr-defined]
            retry = details["RetryInfo"]
            assert isinstance(retry, error_details_pb2.RetryInfo)
            assert 0 < retry.retry_delay.ToSeconds() + retry.retry_delay.nanos <= 30e9
            async with AsyncClient(server.address, max_retries=0) as impatient:
                with pytest.raises(ResourceExhaustedError) as caught:
                    await impatient.generate(token_ids=PROMPT)
            assert caught.value.retry_after_s > 0
            with pytest.MonkeyPatch.context() as patch:  # there is no time to come again
                patch.setattr("orchestrator.virtual_queue._LEAST_S", 60.0)
                with pytest.raises(ResourceExhaustedError):
                    await client.generate(token_ids=PROMPT, timeout_s=30.0)
            patient = asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=4))
            await asyncio.sleep(0.05)
            target.handle.resume()
            for done in await asyncio.gather(*running, patient):
                assert list(done.token_ids) == generate(PROMPT, 4)


async def test_without_a_target_it_is_unavailable(model: Path) -> None:
    """NO_TARGET at once; the client gives up after its retries."""
    async with serving(model, ["127.0.0.1:1"], waits=False) as server:
        code, details = await refusal(server.address, ask())
        assert code == "UNAVAILABLE"
        assert details["ErrorInfo"].reason == "NO_TARGET"  # type: ignore[attr-defined]
        async with AsyncClient(server.address, max_retries=1) as client:
            with pytest.raises(UnavailableError) as caught:
                await client.generate(token_ids=PROMPT)
        assert caught.value.reason == "NO_TARGET"


async def test_speculation_on_needs_a_draft_that_fits(model: Path) -> None:
    """AUTO goes on without one; ON says what is wrong, and is not tried again."""
    request = ask(speculation=pb.SpeculationOptions(mode=pb.SPECULATION_MODE_ON))
    unfit = FakeDraft(incarnation="unfit")
    unfit.width = 7
    async with fake_target() as target, fake_draft(unfit) as draft:
        async with serving(model, [target]) as server:
            code, details = await refusal(server.address, request)
            assert (code, details["ErrorInfo"].reason) == ("UNAVAILABLE", "NO_DRAFT")  # type: ignore[attr-defined]
            async with AsyncClient(server.address) as client:
                with pytest.raises(UnavailableError, match="no draft worker") as caught:
                    await client.generate(token_ids=PROMPT, speculation=True)
            assert caught.value.field == "speculation.mode"
            await check_serves(server)
        async with serving(model, [target], [draft]) as server:
            async with AsyncClient(server.address) as client:
                with pytest.raises(UnavailableError, match="7"):
                    await client.generate(token_ids=PROMPT, speculation=True)
    async with (
        fake_target(step_s=0.005) as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
        AsyncClient(server.address) as client,
    ):
        await drafted(client, token_ids=PROMPT, max_new_tokens=200, speculation=True)


async def test_experts_of_a_model_that_has_none_are_refused(model: Path) -> None:
    """NO_EXPERTS."""
    async with fake_target() as target, serving(model, [target]) as server:
        request = ask(output=pb.OutputOptions(routed_experts=True))
        code, details = await refusal(server.address, request)
        assert code == "INVALID_ARGUMENT"
        assert details["ErrorInfo"].reason == "NO_EXPERTS"  # type: ignore[attr-defined]
        bad = details["BadRequest"]
        assert isinstance(bad, error_details_pb2.BadRequest)
        assert bad.field_violations[0].field == "output.routed_experts"
        await check_serves(server)


async def test_a_model_without_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    """NO_TOKENIZER for text and stop strings."""
    (tmp_path / "config.json").write_text("{}")
    async with fake_target() as target, serving(tmp_path, [target]) as server:
        async with AsyncClient(server.address) as client:
            (card,) = await client.models()
            assert not card.has_tokenizer and card.chat_templates == {}
            for asked in (client.tokenize("x"), client.detokenize([1])):
                with pytest.raises(InvalidArgumentError) as caught:
                    await asked
                assert caught.value.reason == "NO_TOKENIZER"
        for request, field in (
            (ask(text="x"), "text"),
            (ask(stopping=pb.StoppingCriteria(stop_strings=["x"])), "stopping.stop_strings"),
        ):
            code, details = await refusal(server.address, request)
            assert code == "INVALID_ARGUMENT"
            assert details["ErrorInfo"].reason == "NO_TOKENIZER"  # type: ignore[attr-defined]
            bad = details["BadRequest"]
            assert isinstance(bad, error_details_pb2.BadRequest)
            assert bad.field_violations[0].field == field
        await check_serves(server)


async def test_a_draining_server_refuses_new_requests_and_ends_the_running_ones(
    model: Path,
) -> None:
    """SIGTERM: health first, then no new requests, then the end."""
    async with (
        fake_target(step_s=0.005) as target,
        serving(model, [target], drain_timeout_s=300.0) as server,
        AsyncClient(server.address, max_retries=0) as client,
    ):
        serve = asyncio.create_task(server.orchestrator.serve_until_stopped())
        running = asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=300))
        await eventually(lambda: bool(target.engine.requests))
        target.handle.pause()  # it does not end before another one has come
        server.orchestrator.request_stop()
        await eventually(lambda: server.orchestrator.is_draining)
        code, details = await refusal(server.address, ask())
        assert (code, details["ErrorInfo"].reason) == ("UNAVAILABLE", "DRAINING")  # type: ignore[attr-defined]
        target.handle.resume()
        assert list((await running).token_ids) == generate(PROMPT, 300)
        await asyncio.wait_for(serve, 60)


async def test_a_deadline_frees_both_workers(model: Path) -> None:
    """DEADLINE_EXCEEDED for the client; also while the request still waits."""
    async with (
        fake_target(step_s=0.005) as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
        AsyncClient(server.address) as client,
    ):
        with pytest.raises(DeadlineExceededError) as caught:
            await client.generate(token_ids=PROMPT, max_new_tokens=4000, timeout_s=0.3)
        assert caught.value.code is StatusCode.DEADLINE_EXCEEDED
        assert isinstance(caught.value, TimeoutError)
        await freed(target, draft)
        target.handle.pause()
        with pytest.raises(DeadlineExceededError):
            await client.generate(token_ids=PROMPT, max_new_tokens=4000, timeout_s=0.2)
        target.handle.resume()
        await freed(target, draft)
        await check_serves(server)


async def test_cancelling_frees_both_workers(model: Path) -> None:
    """Whether a task is cancelled, an iterator closed, or the connection goes away."""
    async with (
        fake_target(step_s=0.005) as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
    ):
        async with AsyncClient(server.address) as client:
            task = asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=4000))
            await eventually(lambda: bool(draft.engine.requests))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await freed(target, draft)

            events = client.stream(token_ids=PROMPT, max_new_tokens=4000)
            async for _ in events:
                if draft.engine.requests:
                    break
            await events.aclose()
            await freed(target, draft)

        client = AsyncClient(server.address, max_retries=0)
        task = asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=4000))
        await eventually(lambda: bool(draft.engine.requests))
        await client.close()
        with pytest.raises((asyncio.CancelledError, CancelledError)):
            await task
        await freed(target, draft)
        await check_serves(server)


@pytest.mark.parametrize(("moment_s", "num_killed"), [(0.0, 2), (1e9, 3)])
async def test_a_request_that_kills_targets_is_refused(
    model: Path, moment_s: float, num_killed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INTERNAL, not UNAVAILABLE: a client must not send it again."""
    monkeypatch.setattr("orchestrator.suspicion.MOMENT_S", moment_s)

    @dataclass(eq=False)
    class Mortal(FakeTarget):
        """Dies of the first round after a prompt."""

        die: Callable[[], None] | None = None

        def step(self) -> list[Any]:
            answers = super().step()
            is_due = any(
                isinstance(answer, AcceptedPath) and answer.round_idx for answer in answers
            )
            if is_due and self.die is not None:
                self.die()
                return []
            return answers

    async with contextlib.AsyncExitStack() as stack:
        targets = []
        for index in range(4):
            engine = Mortal(incarnation=f"t{index}")
            targets.append(await stack.enter_async_context(fake_target(engine, step_s=0.005)))
            engine.die = targets[index].handle.kill
        server = await stack.enter_async_context(serving(model, targets))
        client = await stack.enter_async_context(AsyncClient(server.address))
        with pytest.raises(CoppiceError) as caught:
            await client.generate(token_ids=PROMPT, max_new_tokens=4000)
        assert caught.value.reason == "REQUEST_KILLED_WORKERS"
        spared = [target for target in targets if not target.engine.received]
        assert len(spared) == len(targets) - num_killed
        for target in spared:
            target.engine.die = None
        await check_serves(server)


async def test_the_client_refuses_what_no_message_can_hold() -> None:
    """Before anything is sent: nobody listens at this address."""
    async with AsyncClient("127.0.0.1:1") as client:
        for keywords in (
            {},
            {"prompt": "x", "token_ids": [1]},
            {"token_ids": [2**31]},
            {"prompt": "x", "temperature": "hot"},
            {"prompt": "x", "seed": -1},
        ):
            with pytest.raises(InvalidArgumentError):
                await client.generate(**keywords)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="temprature"):
            await client.generate("x", temprature=1.0)  # type: ignore[call-arg]


def lines_of(caplog: pytest.LogCaptureFixture, request_id: str) -> list[str]:
    """Return what the orchestrator logged about a request."""
    texts = [r.getMessage() for r in caplog.records if r.name.startswith("orchestrator.")]
    return [text for text in texts if text.startswith(f"[{request_id} ")]


async def late_with_output(client: AsyncClient, **request: Any) -> str:
    """Let the deadline of a request pass after it has had output; return its id.

    Its output may begin too late for that: then another one is sent.
    """
    for name in map("late-{}".format, range(10)):
        has_output = False
        with pytest.raises(DeadlineExceededError, match="timeout_s is 2"):
            async for event in client.stream(**request, timeout_s=2.0, request_id=name):
                has_output = has_output or isinstance(event, TokenDelta)
        if has_output:
            return name
    raise AssertionError("no output begins within 2 s")


async def test_every_request_leaves_one_line_in_the_log(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        fake_target(step_s=0.005) as target,
        fake_draft() as draft,
        serving(model, [target], [draft]) as server,
        AsyncClient(server.address, max_retries=0) as client,
    ):
        long = {"token_ids": PROMPT, "max_new_tokens": 4000}
        await client.generate(token_ids=PROMPT, max_new_tokens=4, request_id="finished")
        late = await late_with_output(client, **long)
        await freed(target, draft)
        task = asyncio.create_task(client.generate(**long, request_id="cancelled"))  # type: ignore[arg-type]
        await eventually(lambda: bool(draft.engine.requests))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(InvalidArgumentError):
            await client.generate(token_ids=PROMPT, temperature=-1.0, request_id="refused")
        with pytest.raises(UnavailableError):
            async with serving(model, ["127.0.0.1:1"], waits=False) as alone:
                async with AsyncClient(alone.address, max_retries=0) as other:
                    await other.generate(token_ids=PROMPT, request_id="failed")
        with pytest.raises(InvalidArgumentError):
            await client.generate(token_ids=PROMPT, request_id="two\nlines")
        await freed(target, draft)
    said = {
        "finished": "finished by LENGTH: 4 tokens",
        late: "its deadline passed after ",
        "cancelled": "cancelled after ",
        "refused": "ended by INVALID_ARGUMENT (sampling.temperature): temperature is -1",
        "failed": "ended by NO_TARGET: no target worker is ready",
        r"'two\nlines'": "ended by INVALID_ARGUMENT (request_id): ",
    }
    for request_id, text in said.items():
        lines = lines_of(caplog, request_id)
        assert len(lines) == 1 and text in lines[0], (request_id, lines)
        assert "\n" not in lines[0]
    assert not lines_of(caplog, late)[0].startswith(f"[{late} round 0]"), "it says how far it came"

"""Errors over real gRPC: status codes with google.rpc details, there and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from coppice.v1 import generation_pb2, generation_pb2_grpc, target_pb2, target_pb2_grpc
from shared import errors
from shared.rpc import interceptors
from shared.rpc.channel import open_channel
from shared.rpc.server import RpcServer
from shared.rpc.status import error_of, failure_of, from_rpc_error, make_error
from tests.fakes import eventually
from tests.scrape import num_refused

pytestmark = pytest.mark.asyncio

ERRORS: list[errors.CoppiceError] = [
    errors.InvalidArgumentError("top_p is 7", field="sampling.top_p"),
    errors.InvalidArgumentError("too long", reason="PROMPT_TOO_LONG", field="text"),
    errors.InvalidTreeError("parent_index[1] is 4", field="tree.parent_index"),
    errors.NotFoundError("no such request", field="request_id"),
    errors.StaleStateError("another seq_len", field="seq_len"),
    errors.ResourceExhaustedError("full", retry_after_s=2.5),
    errors.UnavailableError("draining", reason="DRAINING"),
    errors.InternalError("a bug of ours"),
]
WIRE_CODES = {
    errors.StatusCode.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StatusCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    errors.StatusCode.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StatusCode.FAILED_PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StatusCode.INTERNAL: grpc.StatusCode.INTERNAL,
    errors.StatusCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}


class Failing(target_pb2_grpc.TargetServiceServicer, generation_pb2_grpc.GenerationServiceServicer):
    """Raises what a test puts in, in every kind of handler that Coppice has."""

    error: Exception

    async def GetInfo(self, request: Any, context: Any) -> Any:
        raise self.error

    async def Session(self, request_iterator: Any, context: Any) -> None:
        raise self.error

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield generation_pb2.GenerateResponse()
        raise self.error


class Reading(target_pb2_grpc.TargetServiceServicer, generation_pb2_grpc.GenerationServiceServicer):
    """Notes every message that reaches a handler."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    async def GetInfo(self, request: Any, context: Any) -> Any:
        self.received.append(request)

    async def Session(self, request_iterator: Any, context: Any) -> None:
        async for request in request_iterator:
            self.received.append(request)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.received.append(request)
        yield generation_pb2.GenerateResponse()


@pytest_asyncio.fixture
async def failing() -> AsyncIterator[tuple[Failing, dict[str, Any]]]:
    server = RpcServer(services=[], host="127.0.0.1", port=0)
    servicer = Failing()
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc_server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server.grpc_server)
    await server.start()
    async with open_channel(server.address) as channel:
        target = target_pb2_grpc.TargetServiceStub(channel)
        generation = generation_pb2_grpc.GenerationServiceStub(channel)

        async def unary() -> None:
            await target.GetInfo(target_pb2.TargetServiceGetInfoRequest())

        async def stream() -> None:
            async for _ in target.Session():
                pass

        async def generator() -> None:
            async for _ in generation.Generate(generation_pb2.GenerateRequest()):
                pass

        yield servicer, {"unary": unary, "stream": stream, "generator": generator}
    await server.stop(grace_s=0)


async def call(make_call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await make_call()
    return caught.value


@pytest.mark.parametrize("kind", ["unary", "stream", "generator"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.reason)
async def test_error_survives_the_wire(failing: Any, kind: str, error: Any) -> None:
    servicer, calls = failing
    servicer.error = error
    caught = await call(calls[kind])
    assert caught.code() is WIRE_CODES[error.code]
    assert caught.details() == error.message
    back = from_rpc_error(caught)
    assert type(back) is type(error)
    assert (back.message, back.reason, back.field) == (error.message, error.reason, error.field)
    if isinstance(error, errors.ResourceExhaustedError):
        assert isinstance(back, errors.ResourceExhaustedError)
        assert back.retry_after_s == error.retry_after_s


async def test_details_are_the_standard_ones(failing: Any) -> None:
    servicer, calls = failing
    servicer.error = errors.ResourceExhaustedError("full", field="prompt", retry_after_s=0.25)
    caught = await call(calls["unary"])
    status = rpc_status.from_call(caught)
    by_type = {}
    for detail in status.details:
        for kind in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.BadRequest,
            error_details_pb2.RetryInfo,
        ):
            if detail.Is(kind.DESCRIPTOR):
                by_type[kind] = kind.FromString(detail.value)
    info = by_type[error_details_pb2.ErrorInfo]
    assert (info.domain, info.reason) == ("coppice", "OVERLOADED")
    (violation,) = by_type[error_details_pb2.BadRequest].field_violations
    assert violation.field == "prompt"
    assert by_type[error_details_pb2.RetryInfo].retry_delay.ToMilliseconds() == 250


@pytest.mark.parametrize("kind", ["unary", "stream", "generator"])
async def test_any_other_exception_is_internal_and_tells_nothing(
    failing: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    servicer, calls = failing
    servicer.error = KeyError("secret")
    caught = await call(calls[kind])
    assert caught.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.details() or "")
    assert from_rpc_error(caught).reason == "INTERNAL"
    assert "secret" in caplog.text, "the log has the traceback"


async def test_long_message_still_fits_into_the_trailers(failing: Any) -> None:
    servicer, calls = failing
    servicer.error = errors.InvalidArgumentError("x" * 100_000, field="text")
    caught = await call(calls["unary"])
    assert caught.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc_error(caught).field == "text"


async def test_status_of_somebody_else_keeps_its_name() -> None:
    def foreign(code: grpc.StatusCode, details: str = "") -> errors.CoppiceError:
        empty = grpc.aio.Metadata()
        return from_rpc_error(grpc.aio.AioRpcError(code, empty, empty, details=details))

    unavailable = foreign(grpc.StatusCode.UNAVAILABLE, "connection refused")
    assert isinstance(unavailable, errors.UnavailableError)
    assert unavailable.message == "connection refused"
    expired = foreign(grpc.StatusCode.DEADLINE_EXCEEDED)
    assert (type(expired), expired.reason) == (errors.InternalError, "DEADLINE_EXCEEDED")
    assert foreign(grpc.StatusCode.UNIMPLEMENTED).reason == "UNIMPLEMENTED"
    large = foreign(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max")
    assert large.reason == "MESSAGE_TOO_LARGE"


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.reason)
async def test_error_survives_as_a_request_failure(error: errors.CoppiceError) -> None:
    failure = failure_of(error, request_id="a", target_epoch=1, draft_epoch=2, round_idx=3)
    assert (failure.request_id, failure.target_epoch) == ("a", 1)
    assert (failure.draft_epoch, failure.round_idx) == (2, 3)
    back = error_of(failure)
    assert type(back) is type(error)
    assert (back.message, back.reason, back.field) == (error.message, error.reason, error.field)


async def test_reason_of_a_tree_makes_a_tree_error() -> None:
    assert isinstance(make_error(3, "m", reason="INVALID_TREE"), errors.InvalidTreeError)
    assert not isinstance(make_error(3, "m", reason="OTHER"), errors.InvalidTreeError)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("TargetService/GetInfo", b"\xff\xff\xff\xff"),
        ("TargetService/Session", b"\xff\xff\xff\xff"),
        ("GenerationService/Generate", b"\xff\xff\xff\xff"),
        ("GenerationService/Generate", b"\x12\x02\xff\xfe"),  # text that is not UTF-8
    ],
)
async def test_unreadable_bytes_are_the_senders_fault(
    name: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Without this gRPC says UNKNOWN, and the server's log fills with tracebacks."""
    server = RpcServer(services=[], host="127.0.0.1", port=0)
    servicer = Reading()
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc_server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server.grpc_server)
    await server.start()
    async with open_channel(server.address) as channel:
        raw = channel.stream_stream(f"/coppice.v1.{name}")

        async def send() -> None:
            async for _ in raw(iter([data])):
                pass

        caught = await call(send)
    await server.stop(grace_s=0)
    assert caught.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc_error(caught).reason == "MALFORMED_MESSAGE"
    assert not servicer.received
    assert num_refused(server.samples, "MALFORMED_MESSAGE") == num_refused(server.samples) == 1
    (line,) = caplog.records
    assert line.exc_info is None and f"/coppice.v1.{name} from ipv4:127.0.0.1" in line.getMessage()


class CutOff(generation_pb2_grpc.GenerationServiceServicer):
    """Is cancelled while it writes its first message, as big as the request says, and fails."""

    async def Generate(self, request: Any, context: Any) -> None:
        message = generation_pb2.GenerateResponse()
        message.delta.text = "x" * request.stopping.max_new_tokens
        try:
            async with asyncio.timeout(0):
                await context.write(message)
        except TimeoutError:
            raise errors.UnavailableError("cut off", reason="SLOW_READER") from None


@pytest_asyncio.fixture
async def cut_off() -> AsyncIterator[Any]:
    server = RpcServer(services=[], host="127.0.0.1", port=0)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(CutOff(), server.grpc_server)
    await server.start()
    options = [("grpc.http2.bdp_probe", 0)]  # the window stays at 64 KiB
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel).Generate
    await server.stop(grace_s=0)


def of_size(num_bytes: int) -> generation_pb2.GenerateRequest:
    stopping = generation_pb2.StoppingCriteria(max_new_tokens=num_bytes)
    return generation_pb2.GenerateRequest(stopping=stopping)


async def read_out(stream: Any) -> tuple[list[int], str]:
    sizes = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(30):
            async for message in stream:
                sizes.append(len(message.delta.text))
    return sizes, from_rpc_error(caught.value).reason


async def test_a_call_that_is_cut_off_in_its_first_write_ends_with_its_error(cut_off: Any) -> None:
    for size in range(1, 30):
        assert await read_out(cut_off(of_size(size))) == ([size], "SLOW_READER")


async def test_a_client_that_reads_late_hears_of_the_end_too(
    cut_off: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptors, "_LINGER_S", 0.05)
    stream = cut_off(of_size(1 << 20))
    await eventually(lambda: bool(interceptors._ENDING))
    await asyncio.sleep(0.2)
    assert await read_out(stream) == ([1 << 20], "SLOW_READER")
    await eventually(lambda: not interceptors._ENDING)


async def test_nothing_waits_for_a_client_that_goes_away_unread(cut_off: Any) -> None:
    stream = cut_off(of_size(1 << 20))
    await eventually(lambda: bool(interceptors._ENDING))
    stream.cancel()
    await eventually(lambda: not interceptors._ENDING)

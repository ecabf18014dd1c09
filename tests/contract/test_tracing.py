"""Traces of requests, as an OpenTelemetry collector in this process gets them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from coppice import AsyncClient
from coppice.v1 import generation_pb2 as pb
from coppice.v1 import generation_pb2_grpc as pb_grpc
from shared.messages import TargetOpen
from shared.request_ids import parse_worker_id
from shared.rpc.channel import open_channel
from tests.contract.serving import serving, write_model
from tests.fakes import eventually, fake_draft, fake_target, generate

pytestmark = pytest.mark.asyncio

PROMPT = [5, 6, 7]
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class Collector(otlp_grpc.TraceServiceServicer):
    """Keeps the spans that it gets."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    async def Export(
        self, request: otlp.ExportTraceServiceRequest, context: grpc.aio.ServicerContext
    ) -> otlp.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return otlp.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: Span) -> list[Span]:
        """Return the spans below another one, by when they began."""
        below = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(below, key=lambda span: span.start_time_unix_nano)


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """Serve a collector; yields it and its endpoint."""
    collector, server = Collector(), grpc.aio.server()
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orchestrator.tracing.EXPORT_TIMEOUT_S", 60.0)  # it has time, on any machine
        try:
            yield collector, f"http://127.0.0.1:{port}"
        finally:
            await server.stop(0)


async def ask(address: str, num_tokens: int, **metadata: str) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(
        request_id="traced",
        token_ids=pb.TokenIds(ids=PROMPT),
        stopping=pb.StoppingCriteria(max_new_tokens=num_tokens),
    )
    async with open_channel(address) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        return [r async for r in stub.Generate(request, metadata=tuple(metadata.items()))]


def attributes_of(span: Span) -> dict[str, object]:
    def value(each: object) -> object:
        kind = each.WhichOneof("value")  # type: ignore[attr-defined]
        return getattr(each, kind)

    return {each.key: value(each.value) for each in span.attributes}


async def test_a_trace_goes_on_with_the_clients_and_says_where_the_time_went(model: Path) -> None:
    """Rate 0: what is traced is what the client asks for; output and FinishInfo stay the same."""
    async with collecting() as (collector, endpoint):
        async with (
            fake_target(step_s=0.01) as target,
            fake_draft() as draft,
            serving(
                model, [target], [draft], otlp_endpoint=endpoint, trace_sample_rate=0.0
            ) as server,
        ):
            await ask(server.address, 20)
            untraced = f"00-{TRACE_ID}-{PARENT_ID}-00"
            await ask(server.address, 20, traceparent=untraced)
            answers = await ask(server.address, 100, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01")
        # The orchestrator has stopped: everything is here.
        (request,) = collector.named("coppice.generate")
    ids = [i for answer in answers for i in answer.delta.token_ids]
    assert ids == generate(PROMPT, 100)
    finish = answers[-1].finish
    assert not finish.round_times, "the client did not ask"
    assert request.trace_id.hex() == TRACE_ID and request.parent_span_id.hex() == PARENT_ID
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    attributes = attributes_of(request)
    assert attributes["coppice.request_id"] == "traced"
    assert attributes["rpc.response.status_code"] == "OK"
    assert attributes["gen_ai.usage.output_tokens"] == 100
    assert attributes["coppice.num_rounds"] == finish.speculation.num_rounds
    queue, prefill, *rounds = collector.children(request)
    assert (queue.name, prefill.name) == ("queue", "prefill")
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert 1 <= len(rounds) <= 32 and {span.name for span in rounds} == {"round"}
    names = set()
    for span in (queue, prefill, *rounds):
        assert request.start_time_unix_nano <= span.end_time_unix_nano + 50_000_000
        parts = collector.children(span)
        names |= {part.name for part in parts}
        for part in parts:
            assert span.start_time_unix_nano <= part.start_time_unix_nano
            assert part.end_time_unix_nano <= span.end_time_unix_nano
        for first, second in zip(parts, parts[1:], strict=False):
            assert first.end_time_unix_nano <= second.start_time_unix_nano
    assert {"verify", "commit"} <= names <= {"draft", "verify", "commit"}


async def test_requests_that_end_otherwise_have_a_trace_as_well(model: Path) -> None:
    async with collecting() as (collector, endpoint):
        async with (
            fake_target(step_s=0.01) as target,
            serving(model, [target], otlp_endpoint=endpoint, trace_sample_rate=1.0) as server,
            AsyncClient(server.address, max_retries=0) as client,
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(server.address, -1)
            task = asyncio.create_task(client.generate(token_ids=PROMPT, max_new_tokens=4000))
            await eventually(lambda: bool(target.engine.requests))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await eventually(lambda: not target.engine.requests)
        requests = collector.named("coppice.generate")
    codes = {attributes_of(span)["rpc.response.status_code"]: span for span in requests}
    assert set(codes) == {"INVALID_ARGUMENT", "CANCELLED"}
    assert all(span.status.code == 2 for span in requests)
    assert not collector.children(codes["INVALID_ARGUMENT"])
    assert collector.children(codes["CANCELLED"])[0].name == "queue"


async def test_log_lines_of_all_processes_name_the_trace(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That of the client, or a sampled one; without either, none."""
    caplog.set_level(logging.INFO)
    async with (
        collecting() as (collector, endpoint),
        fake_target() as target,
        serving(model, [target], otlp_endpoint=endpoint, trace_sample_rate=0.0) as server,
    ):
        for flags in ("00", "01"):
            await ask(server.address, 5, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-{flags}")
        await ask(server.address, 5)
        opened = [m.request_id for m in target.engine.received if isinstance(m, TargetOpen)]
    assert [parse_worker_id(each)[1] for each in opened] == [TRACE_ID, TRACE_ID, ""]
    ends = [r for r in caplog.records if getattr(r, "event", "") == "request_end"]
    assert [getattr(end, "trace_id", "") for end in ends] == [TRACE_ID, TRACE_ID, ""]
    named = [f"trace {TRACE_ID}]" in end.getMessage() for end in ends]
    assert named == [True, True, False]


async def test_a_collector_that_is_not_there_harms_no_request(model: Path) -> None:
    async with fake_target() as target:
        async with serving(
            model, [target], otlp_endpoint="http://127.0.0.1:1", trace_sample_rate=1.0
        ) as server:
            answers = await ask(server.address, 20)
        assert [i for a in answers for i in a.delta.token_ids] == generate(PROMPT, 20)

"""Traces of requests for OpenTelemetry: what a client's own trace goes on with.

    coppice.generate                 from the message to the end
    ├── queue                        until a target has a place
    ├── prefill                      until the first output
    └── round                        some of the rounds, spread evenly over the request
        ├── draft, verify, commit    whose time it was, in turn

A request that is sampled is timed as one that asks for its round_times; the spans are made of that
when it has ended. Of any other request nothing is measured. Whether it is sampled its client says
by a W3C `traceparent`, or else chance.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from orchestrator.metrics import RequestEnd
from orchestrator.reply import Reply
from shared.errors import ConfigError
from shared.messages import RoundTimes, StageTime

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

MAX_ROUND_SPANS = 32
"""Spans of rounds that a trace has at most."""

EXPORT_TIMEOUT_S = 2.0
"""For spans on their way; then they are lost: nothing waits for a collector."""

_SERVICE_NAME = "coppice-orchestrator"
# The answer's way back included.
_COMMIT_STAGES = frozenset(
    {
        *("target: commit", "target: answer", "target: hop back"),
        *("orchestrator: commit", "orchestrator: order"),
    }
)

Metadata = Iterable[tuple[str, str | bytes]]


class Part(NamedTuple):
    """A part of a round; times of the monotonic clock."""

    name: str
    begin_ns: int
    end_ns: int


class RequestTrace(Protocol):
    """The trace of one request."""

    trace_id: str
    """32 hexadecimal digits; "": the request belongs to no trace."""
    is_sampled: bool
    """Whether the request is to be timed."""

    def watch(self, request_id: str, reply: Reply) -> None:
        """Take note that the request is served from now on."""

    def end(self, end: RequestEnd) -> None:
        """Take note of the end of the request."""


class Untraced:
    """A request of which no spans are made; its log lines name its client's trace."""

    is_sampled = False

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id

    def watch(self, request_id: str, reply: Reply) -> None:
        """Do nothing."""

    def end(self, end: RequestEnd) -> None:
        """Do nothing."""


class Tracing:
    """Makes the traces of a process's requests; off without an endpoint.

    Args:
        endpoint: Of an OTLP collector, http(s)://HOST:PORT of its gRPC; empty: no spans are made.
        sample_rate: Share of the requests without a traceparent that are sampled, 0..1.
    Raises: ConfigError if the packages are missing.
    """

    def __init__(self, endpoint: str, *, sample_rate: float) -> None:
        self._provider: Any = None
        if not endpoint:
            return
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

            exporter = _exporter(endpoint)
        except ImportError as error:
            raise ConfigError(
                f"--otlp-endpoint needs the package of {error.name}; "
                "pip install 'coppice[tracing]' brings all that it takes"
            ) from None
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": _SERVICE_NAME}),
            sampler=ParentBased(TraceIdRatioBased(sample_rate)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("coppice")

    def begin(self, metadata: Metadata | None) -> RequestTrace:
        """Begin the trace of a request.

        Args:
            metadata: Of its call.
        """
        carrier = {
            key: value
            for key, value in metadata or ()
            if key in ("traceparent", "tracestate") and isinstance(value, str)
        }
        clients = _trace_id_of(carrier.get("traceparent", ""))
        if self._provider is None:
            return Untraced(clients)
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span("coppice.generate", context=context, kind=SpanKind.SERVER)
        if not span.is_recording():
            return Untraced(clients)
        return _Traced(self._tracer, span, f"{span.get_span_context().trace_id:032x}")

    def close(self) -> None:
        """Send what is left; takes as long as the collector does, up to some seconds."""
        if self._provider is not None:
            self._provider.shutdown()


class _Traced:
    """A sampled request."""

    is_sampled = True

    def __init__(self, tracer: Any, span: Span, trace_id: str) -> None:
        self.trace_id = trace_id
        self._tracer = tracer
        self._span = span
        self._reply: Reply | None = None

    def watch(self, request_id: str, reply: Reply) -> None:
        """Take note that the request is served from now on."""
        self._span.set_attribute("coppice.request_id", request_id)
        self._reply = reply

    def end(self, end: RequestEnd) -> None:
        """Make the spans, and hand them to the exporter's thread."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        context = set_span_in_context(self._span)
        epoch_ns = time.time_ns() - time.monotonic_ns()

        def add(name: str, begin_ns: int, end_ns: int, context: Any, **attributes: Any) -> Any:
            span = self._tracer.start_span(
                name, context=context, start_time=begin_ns + epoch_ns, attributes=attributes
            )
            span.end(end_time=max(begin_ns, end_ns) + epoch_ns)
            return span

        self._span.set_attributes(_end_attributes(end, self._reply))
        if self._reply is not None:
            for name, begin_ns, end_ns in _phases(self._reply, time.monotonic_ns()):
                add(name, begin_ns, end_ns, context)
            rounds, stride = sampled_rounds(self._reply.timeline.rounds)
            for times in rounds:
                end_ns = times.stages[-1].end_ns
                number = {"coppice.round_idx": times.round_idx, "coppice.rounds_per_span": stride}
                span = add("round", times.begin_ns, end_ns, context, **number)
                within = set_span_in_context(span)
                for part in parts_of(times):
                    add(part.name, part.begin_ns, part.end_ns, within)
        if end.code != "OK":
            self._span.set_status(Status(StatusCode.ERROR, end.code))
        self._span.end()


def sampled_rounds(rounds: Sequence[RoundTimes]) -> tuple[Sequence[RoundTimes], int]:
    """Return some of the rounds, spread evenly, and how many each of them stands for."""
    stride = max(1, -(-len(rounds) // MAX_ROUND_SPANS))
    return [times for times in rounds[::stride] if times.stages], stride


def parts_of(times: RoundTimes) -> Iterator[Part]:
    """Yield whose time a round was, in turn: the draft's, the target's, or the commit's."""
    begin_ns = times.begin_ns
    for name, stages in itertools.groupby(times.stages, key=_part_name):
        end_ns = [stage.end_ns for stage in stages][-1]
        if end_ns > begin_ns:
            yield Part(name, begin_ns, end_ns)
        begin_ns = max(begin_ns, end_ns)


def _part_name(stage: StageTime) -> str:
    if stage.name in _COMMIT_STAGES:
        return "commit"
    return "draft" if stage.name.startswith("draft: ") else "verify"


def _phases(reply: Reply, now_ns: int) -> Iterator[Part]:
    """Yield the queue and the prefill of a request, as far as it came."""
    moments = reply.meter.moments
    admitted_ns = moments.admitted_ns or now_ns
    yield Part("queue", moments.started_ns, admitted_ns)
    if moments.admitted_ns:
        yield Part("prefill", admitted_ns, moments.first_token_ns or now_ns)


def _end_attributes(end: RequestEnd, reply: Reply | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {"rpc.system": "grpc", "rpc.response.status_code": end.code}
    if end.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = (end.finish_reason,)
    if end.refused_by:
        attributes["coppice.refused_by"] = end.refused_by
    if reply is not None:
        stats = reply.speculation
        attributes |= {
            "gen_ai.usage.input_tokens": reply.num_prompt_tokens,
            "gen_ai.usage.output_tokens": reply.num_output_tokens,
            "coppice.num_rounds": stats.num_rounds,
            "coppice.accept_length": stats.accept_length,
        }
    return attributes


def _trace_id_of(traceparent: str) -> str:
    """Return the trace that a W3C traceparent names; "" if it is none."""
    parts = traceparent.split("-")
    is_known = len(parts) >= 4 and len(parts[1]) == 32
    return parts[1] if is_known and not set(parts[1]) - set("0123456789abcdef") else ""


def _exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=EXPORT_TIMEOUT_S
    )

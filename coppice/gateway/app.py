"""The endpoints: OpenAI's, /tokenize and /detokenize, and what operators look at.

Each request is read, checked, handed to an orchestrator and answered here; nothing is kept between
two requests but what orchestrators say of their models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coppice.client import AsyncClient
from coppice.gateway.access import caller_of, json_body, num_refusals, passed_on, request_id_of
from coppice.gateway.counts import HttpCounts
from coppice.gateway.errors import CLIENT_CLOSED, ApiError, api_error, bad_request
from coppice.gateway.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    GenerationFields,
    TokenizeFields,
    parse_fields,
)
from coppice.gateway.outputs import all_parts
from coppice.gateway.prompts import (
    Job,
    Parsers,
    chat_job,
    check_template_options,
    completion_job,
    render,
    template_of,
)
from coppice.gateway.replies import (
    ClientGoneError,
    EventStream,
    send_json,
    send_stream,
    unless_gone,
)
from coppice.gateway.upstreams import Model, Upstreams
from coppice.model import ServedModel
from shared.access.tokens import TokenCheck
from shared.config import GatewayConfig
from shared.errors import CoppiceError, ResourceExhaustedError, UnavailableError
from shared.logs import log_request
from shared.metrics.exposition import Exposition

logger = logging.getLogger(__name__)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_OPEN_PATHS = frozenset({"/", "/health"})
_OTHER = "other"
_RETRY_S = 1.0

Headers = list[tuple[bytes, bytes]]
Handler = Callable[["Exchange"], Awaitable[None]]


@dataclass(kw_only=True)
class Exchange:
    """One HTTP request and its answer.

    Args:
        caller: Name of who asks, "" if nobody is asked.
        status: That was answered; 499: the client went away before.
        ending: Why a stream ended early; "": it did not.
    """

    request: Request
    receive: Receive
    send: Send
    request_id: str
    caller: str = ""
    status: int = 0
    num_tokens: int = 0
    ending: str = ""
    user: str = ""
    has_begun: bool = False
    extra_headers: dict[str, str] = field(default_factory=dict)

    @property
    def headers(self) -> Headers:
        """Return those of every answer."""
        found = {"x-request-id": self.request_id, **self.extra_headers}
        return [
            (name.encode(), value.encode("latin-1", "replace")) for name, value in found.items()
        ]

    def begin(self) -> None:
        """Note that the head of the answer is sent."""
        self.status, self.has_begun = 200, True

    async def reply(self, value: Any, status: int = 200) -> None:
        """Answer with JSON."""
        self.status, self.has_begun = status, True
        await send_json(self.send, value, status=status, headers=self.headers)

    async def reply_bytes(self, body: bytes, content_type: str) -> None:
        """Answer with a text."""
        self.status, self.has_begun = 200, True
        head = [
            (b"content-type", content_type.encode()),
            (b"content-length", str(len(body)).encode()),
            *self.headers,
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": head})
        await self.send({"type": "http.response.body", "body": body})


class Gateway:
    """Answers HTTP requests.

    Args:
        check: Asks clients for tokens; None: the orchestrators do, if anybody does.
    """

    def __init__(
        self, config: GatewayConfig, upstreams: Upstreams, check: TokenCheck | None = None
    ) -> None:
        self._config = config
        self._upstreams = upstreams
        self._check = check
        self._parsers = Parsers(
            tool_calls=config.tool_call_parser, reasoning=config.reasoning_parser
        )
        self.counts = HttpCounts()
        self.is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._running: set[asyncio.Task[Any]] = set()
        self._metrics = Exposition("gateway", self.samples, lambda: None)
        self._paths: frozenset[str] = frozenset()

    @property
    def app(self) -> ASGIApp:
        """Return the application that a server runs."""
        endpoints: list[tuple[str, str, Handler]] = [
            ("POST", CHAT, self._chat),
            ("POST", COMPLETIONS, self._completions),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._model),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics_text),
            ("GET", "/", self._page),
        ]
        self._paths = frozenset(path for _, path, _ in endpoints)
        routes = [
            Route(path, self._endpoint(path, handler), methods=[method])
            for method, path, handler in endpoints
        ]
        handlers = {404: self._not_found, 405: self._not_found}
        return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]

    def samples(self) -> dict[str, float]:
        """Return what /metrics says."""
        return self.counts.samples(is_ready=self.is_ready)

    @property
    def is_ready(self) -> bool:
        """Return whether it takes requests, and an orchestrator does."""
        return self._upstreams.is_ready and not self.is_draining

    async def drain(self) -> None:
        """Take no new requests and let running ones end within the budget; then end them."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._is_idle.wait()
        for task in self._running:
            task.cancel("the gateway shuts down")

    # --- one request -----------------------------------------------------------------------------

    def _endpoint(self, path: str, handler: Handler) -> Callable[[Request], Awaitable[ASGIApp]]:
        async def endpoint(request: Request) -> ASGIApp:
            async def respond(scope: Scope, receive: Receive, send: Send) -> None:
                await self._respond(path, handler, Request(scope, receive), receive, send)

            return respond

        return endpoint

    async def _respond(
        self, path: str, handler: Handler, request: Request, receive: Receive, send: Send
    ) -> None:
        exchange = Exchange(
            request=request,
            receive=receive,
            send=self._timed(send),
            request_id=request_id_of(request),
        )
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with self._counted():
            try:
                await self._answer(path, handler, exchange)
            finally:
                self.counts.note_end(
                    path,
                    exchange.status,
                    num_tokens=exchange.num_tokens,
                    duration_s=loop.time() - began_s,
                )
                self._log(path, exchange, loop.time() - began_s)

    def _timed(self, send: Send) -> Send:
        """Return what sends, and gives up on a client that reads nothing: TimeoutError."""

        async def timed_send(message: Message) -> None:
            async with asyncio.timeout(self._config.read_timeout_s):
                await send(message)

        return timed_send

    async def _answer(self, path: str, handler: Handler, exchange: Exchange) -> None:
        """Answer a request, whatever happens."""
        try:
            if path not in _OPEN_PATHS:
                exchange.caller = caller_of(exchange.request, self._check)
                self._check_room(path)
            await handler(exchange)
        except ApiError as error:
            await self._fail(exchange, error)
        except CoppiceError as error:
            await self._fail(exchange, api_error(error))
        except (ClientGoneError, ClientDisconnect):
            exchange.status, exchange.ending = CLIENT_CLOSED, "the client went away"
        except TimeoutError:  # without a whole answer the server closes the connection
            exchange.status, exchange.ending = CLIENT_CLOSED, "the client read nothing"
        except asyncio.CancelledError:
            if not self.is_draining:
                raise
            exchange.ending = "the gateway shut down"
            await self._fail(exchange, api_error(_draining()))
        except Exception:
            logger.exception("%s %s failed", exchange.request.method, path)
            message = "the gateway failed; its log says why"
            await self._fail(exchange, api_error(CoppiceError(message)))

    async def _fail(self, exchange: Exchange, error: ApiError) -> None:
        exchange.ending = error.code or ""
        if exchange.has_begun:
            return
        exchange.extra_headers.update(error.headers)
        await exchange.reply(error.body, error.status)

    def _check_room(self, path: str) -> None:
        if path in (CHAT, COMPLETIONS) and self.is_draining:
            raise _draining()
        most = self._config.max_num_requests
        if self.counts.num_running > most and path != "/metrics":
            raise ResourceExhaustedError(
                f"the gateway answers {most} requests at once; try again later",
                reason="TOO_MANY_CALLS",
                retry_after_s=_RETRY_S,
            )

    @contextlib.contextmanager
    def _counted(self) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self.counts.num_running += 1
        self._running.add(task)
        self._is_idle.clear()
        try:
            yield
        finally:
            self.counts.num_running -= 1
            self._running.discard(task)
            if not self._running:
                self._is_idle.set()

    def _log(self, path: str, exchange: Exchange, duration_s: float) -> None:
        is_work = path in (CHAT, COMPLETIONS) or exchange.status >= 500
        log_request(
            logger,
            logging.INFO if is_work else logging.DEBUG,
            exchange.request_id,
            "%s %s: %d after %.0f ms, %d tokens%s",
            exchange.request.method,
            path,
            exchange.status,
            duration_s * 1e3,
            exchange.num_tokens,
            f", {exchange.ending}" if exchange.ending else "",
            tenant=exchange.caller,
            user=exchange.user,
        )

    async def _not_found(self, request: Request, error: Exception) -> ASGIApp:
        """Say what there is, as OpenAI's API says errors."""
        status = int(getattr(error, "status_code", 404))

        async def handler(exchange: Exchange) -> None:
            known = ", ".join(sorted(self._paths))
            message = f"no such endpoint: {request.method} {request.url.path}; there are {known}"
            raise bad_request(message, param=None, code="unknown_url", status=status)

        return await self._endpoint(_OTHER, handler)(request)

    async def _fields(self, kind: Any, exchange: Exchange) -> Any:
        config = self._config
        body = await json_body(
            exchange.request,
            max_bytes=config.max_body_mb << 20,
            timeout_s=config.read_timeout_s,
        )
        return parse_fields(kind, body)

    # --- generation ------------------------------------------------------------------------------

    async def _completions(self, exchange: Exchange) -> None:
        fields: CompletionFields = await self._fields(CompletionFields, exchange)

        async def make_job(model: Model, client: AsyncClient) -> Job:
            return await completion_job(
                fields,
                model,
                client,
                answer_id=exchange.request_id,
                max_choices=self._config.max_choices,
            )

        await self._generate(exchange, fields, make_job)

    async def _chat(self, exchange: Exchange) -> None:
        fields: ChatFields = await self._fields(ChatFields, exchange)
        exchange.user = fields.safety_identifier

        async def make_job(model: Model, client: AsyncClient) -> Job:
            del client
            return await chat_job(
                fields,
                model,
                self._parsers,
                answer_id=exchange.request_id,
                max_choices=self._config.max_choices,
            )

        await self._generate(exchange, fields, make_job)

    async def _generate(
        self,
        exchange: Exchange,
        fields: GenerationFields,
        make_job: Callable[[Model, AsyncClient], Awaitable[Job]],
    ) -> None:
        exchange.user = exchange.user or fields.user
        if fields.stream_options is not None and not fields.stream:
            raise bad_request("stream_options needs stream; set it as well", param="stream_options")
        metadata = passed_on(exchange.request)
        upstream, model = await self._upstreams.find(
            fields.model, metadata, session_id=fields.session_id
        )
        client = upstream.client(metadata, num_refusals=num_refusals(exchange.request))
        with upstream.counted():
            job = await make_job(model, client)
            try:
                await unless_gone(
                    exchange.receive, self._send_answer(exchange, fields, job, client)
                )
            finally:
                exchange.num_tokens = job.answer.num_output_tokens

    async def _send_answer(
        self, exchange: Exchange, fields: GenerationFields, job: Job, client: AsyncClient
    ) -> None:
        parts = all_parts(job.outputs, client)
        if fields.stream:
            stream = EventStream(
                exchange.send,
                headers=exchange.headers,
                on_start=exchange.begin,
                ending=lambda: _draining() if self.is_draining else None,
            )
            exchange.ending = await send_stream(
                stream, parts, job.answer, has_usage=fields.wants_usage
            )
            return
        async with contextlib.aclosing(parts):
            async for part in parts:
                job.answer.note(part)
        await exchange.reply(job.answer.whole())

    # --- models and tokenizers -------------------------------------------------------------------

    async def _models(self, exchange: Exchange) -> None:
        models = await self._upstreams.models(passed_on(exchange.request))
        cards = [_model_object(model.card) for model in models]
        await exchange.reply({"object": "list", "data": cards})

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.request.path_params["name"]
        _, model = await self._upstreams.find(name, passed_on(exchange.request))
        await exchange.reply(_model_object(model.card))

    async def _tokenize(self, exchange: Exchange) -> None:
        fields: TokenizeFields = await self._fields(TokenizeFields, exchange)
        if (fields.prompt is None) == (fields.messages is None):
            raise bad_request("give either a prompt or messages", param="prompt")
        metadata = passed_on(exchange.request)
        upstream, model = await self._upstreams.find(fields.model, metadata)
        adds_special = fields.add_special_tokens
        text = fields.prompt
        if text is None:
            text = await _rendered(fields, model)
            adds_special = bool(adds_special)
        client = upstream.client(metadata)
        ids = await client.tokenize(
            text, add_special_tokens=True if adds_special is None else adds_special
        )
        answer: dict[str, Any] = {
            "tokens": list(ids),
            "count": len(ids),
            "max_model_len": model.card.max_context_len,
        }
        if fields.return_token_strs:
            await model.tokens.learn(iter(ids), client)
            answer["token_strs"] = [model.tokens[i].decode(errors="replace") for i in ids]
        await exchange.reply(answer)

    async def _detokenize(self, exchange: Exchange) -> None:
        fields: DetokenizeFields = await self._fields(DetokenizeFields, exchange)
        metadata = passed_on(exchange.request)
        upstream, _ = await self._upstreams.find(fields.model, metadata)
        found = await upstream.client(metadata).detokenize(fields.tokens)
        await exchange.reply({"prompt": found.text})

    # --- operators -------------------------------------------------------------------------------

    async def _health(self, exchange: Exchange) -> None:
        status = "ready" if self.is_ready else "draining" if self.is_draining else "not ready"
        await exchange.reply({"status": status}, 200 if self.is_ready else 503)

    async def _metrics_text(self, exchange: Exchange) -> None:
        accept = exchange.request.headers.get("accept", "")
        body, content_type = self._metrics.text(accept)
        await exchange.reply_bytes(body, content_type)

    async def _page(self, exchange: Exchange) -> None:
        body = resources.files("coppice.gateway").joinpath("page.html").read_bytes()
        await exchange.reply_bytes(body, "text/html; charset=utf-8")


async def _rendered(fields: TokenizeFields, model: Model) -> str:
    """Return the prompt of messages. Raises: ApiError."""
    assert fields.messages is not None
    if not fields.messages:
        raise bad_request("messages is empty", param="messages")
    check_template_options(fields.chat_template_kwargs)
    return await render(
        template_of(model),
        fields.messages,
        tools=fields.tools,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        options=fields.chat_template_kwargs,
    )


def _model_object(card: ServedModel) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.started_s,
        "owned_by": "coppice",
        "max_model_len": card.max_context_len,
        "model_fingerprint": card.fingerprint,
        "can_speculate": card.can_speculate,
        "has_chat_template": bool(card.chat_templates),
    }


def _draining() -> UnavailableError:
    return UnavailableError("the gateway shuts down; send the request again", reason="DRAINING")

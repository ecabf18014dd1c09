"""The endpoints: OpenAI's, /tokenize and /detokenize, and what operators look at.

Each request is read, checked, handed to an orchestrator and answered here; nothing is kept between
two requests but what orchestrators say of their models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from coppice.client import AsyncClient
from coppice.gateway.access import json_body, num_refusals, passed_on
from coppice.gateway.errors import api_error, bad_request
from coppice.gateway.exchange import CHAT, COMPLETIONS, Exchange, Exchanges, Handler
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
from coppice.gateway.replies import EventStream, send_stream, unless_gone
from coppice.gateway.upstreams import QUESTION_TIMEOUT_S, Model, Upstreams
from coppice.model import ServedModel
from shared.access.tokens import TokenCheck
from shared.config import GatewayConfig
from shared.errors import InvalidArgumentError
from shared.metrics.exposition import Exposition

_OTHER = "other"
# The page holds a client's token: it runs its own script, and calls nobody else.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)


class Gateway:
    """Answers HTTP requests.

    Args:
        check: Asks clients for tokens; None: the orchestrators do, if anybody does.
    """

    def __init__(
        self, config: GatewayConfig, upstreams: Upstreams, check: TokenCheck | None
    ) -> None:
        self._config = config
        self._upstreams = upstreams
        self._exchanges = Exchanges(config, check)
        self._parsers = Parsers(
            tool_calls=config.tool_call_parser, reasoning=config.reasoning_parser
        )
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
            Route(path, self._exchanges.endpoint(path, handler), methods=[method])
            for method, path, handler in endpoints
        ]
        handlers = {404: self._not_found, 405: self._other_method}
        return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]

    def samples(self) -> dict[str, float]:
        """Return what /metrics says."""
        return self._exchanges.counts.samples(is_ready=self.is_ready)

    @property
    def is_ready(self) -> bool:
        """Return whether it takes requests, and an orchestrator does."""
        return self._upstreams.is_ready and not self.is_draining

    @property
    def is_draining(self) -> bool:
        """Return whether it lets running requests end and takes no new ones."""
        return self._exchanges.is_draining

    async def drain(self) -> None:
        """Take no new requests and let running ones end within the budget; then end them."""
        await self._exchanges.drain()

    async def _not_found(self, request: Request, error: Exception) -> ASGIApp:
        """Say what there is, as OpenAI's API says errors."""

        async def handler(exchange: Exchange) -> None:
            known = ", ".join(sorted(self._paths)).replace("{name:path}", "NAME")
            message = f"no such endpoint: {request.method} {request.url.path}; there are {known}"
            raise bad_request(message, param=None, code="unknown_url", status=404)

        return await self._exchanges.endpoint(_OTHER, handler)(request)

    async def _other_method(self, request: Request, error: Exception) -> ASGIApp:
        """Say which methods an endpoint takes."""
        headers = getattr(error, "headers", None) or {}
        methods = ", ".join(sorted(headers.get("Allow", "").split(", ")))

        async def handler(exchange: Exchange) -> None:
            exchange.extra_headers["allow"] = methods
            message = f"{request.url.path} takes {methods}, not {request.method}"
            raise bad_request(message, param=None, code="method_not_allowed", status=405)

        return await self._exchanges.endpoint(_OTHER, handler)(request)

    async def _fields(self, kind: Any, exchange: Exchange) -> Any:
        config = self._config
        body = await json_body(
            exchange.request,
            max_bytes=config.max_body_mb << 20,
            timeout_s=config.read_timeout_s,
        )
        return parse_fields(kind, body)

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
                ending=self._exchanges.ending,
            )
            exchange.ending = await send_stream(
                stream, parts, job.answer, has_usage=fields.wants_usage
            )
            return
        async with contextlib.aclosing(parts):
            async for part in parts:
                job.answer.note(part)
        await exchange.reply(job.answer.whole())

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
            text,
            add_special_tokens=True if adds_special is None else adds_special,
            timeout_s=QUESTION_TIMEOUT_S,
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
        client = upstream.client(metadata)
        try:
            found = await client.detokenize(fields.tokens, timeout_s=QUESTION_TIMEOUT_S)
        except InvalidArgumentError as error:
            raise api_error(error, params={"token_ids": "tokens"}) from error
        await exchange.reply({"prompt": found.text})

    async def _health(self, exchange: Exchange) -> None:
        status = "ready" if self.is_ready else "draining" if self.is_draining else "not ready"
        await exchange.reply({"status": status}, 200 if self.is_ready else 503)

    async def _metrics_text(self, exchange: Exchange) -> None:
        accept = exchange.request.headers.get("accept", "")
        body, content_type = self._metrics.text(accept)
        await exchange.reply_bytes(body, content_type)

    async def _page(self, exchange: Exchange) -> None:
        body = resources.files("coppice.gateway").joinpath("page.html").read_bytes()
        exchange.extra_headers["content-security-policy"] = _PAGE_POLICY
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

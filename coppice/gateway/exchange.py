"""HTTP requests while they are answered: admitted, counted, logged, failed, ended by a drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from coppice.gateway.access import caller_of, request_id_of
from coppice.gateway.counts import HttpCounts
from coppice.gateway.errors import CLIENT_CLOSED, ApiError, api_error
from coppice.gateway.replies import ClientGoneError, encode
from shared.access.tokens import TokenCheck
from shared.config import GatewayConfig
from shared.errors import CoppiceError, ResourceExhaustedError, UnavailableError
from shared.logs import log_request

logger = logging.getLogger(__name__)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_GENERATION_PATHS = frozenset({COMPLETIONS, CHAT})
_OPEN_PATHS = frozenset({"/", "/health"})
_UNLIMITED_PATHS = _OPEN_PATHS | {"/metrics"}
_RETRY_S = 1.0

Headers = list[tuple[bytes, bytes]]


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

    @property
    def address(self) -> str:
        """Return the client's: a trusted proxy says whose request it passes on."""
        return self.request.client.host if self.request.client is not None else ""

    def begin(self) -> None:
        """Note that the head of the answer is sent."""
        self.status, self.has_begun = 200, True

    async def reply(self, value: Any, status: int = 200) -> None:
        """Answer with JSON."""
        await self.reply_bytes(encode(value), "application/json", status)

    async def reply_bytes(self, body: bytes, content_type: str, status: int = 200) -> None:
        """Answer with a text."""
        self.status, self.has_begun = status, True
        head = [
            (b"content-type", content_type.encode()),
            (b"content-length", str(len(body)).encode()),
            *self.headers,
        ]
        await self.send({"type": "http.response.start", "status": status, "headers": head})
        await self.send({"type": "http.response.body", "body": body})

    async def fail(self, error: ApiError) -> None:
        """Answer with an error, unless the head of another answer is sent."""
        self.ending = error.code or ""
        if self.has_begun:
            return
        self.extra_headers.update(error.headers)
        await self.reply(error.body, error.status)


Handler = Callable[[Exchange], Awaitable[None]]


class Exchanges:
    """All requests that are being answered.

    Args:
        check: Asks clients for tokens; None: the orchestrators do, if anybody does.
    """

    def __init__(self, config: GatewayConfig, check: TokenCheck | None) -> None:
        self._config = config
        self._check = check
        self.counts = HttpCounts()
        self.is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._running: set[asyncio.Task[Any]] = set()
        self._num_of_address: Counter[str] = Counter()

    def endpoint(self, path: str, handler: Handler) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Return what answers requests of a path.

        Args:
            path: As it is counted.
        """

        async def endpoint(request: Request) -> ASGIApp:
            async def respond(scope: Scope, receive: Receive, send: Send) -> None:
                await self._respond(path, handler, Request(scope, receive), receive, send)

            return respond

        return endpoint

    async def drain(self) -> None:
        """Take no new requests and let running ones end within the budget; then end them."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._is_idle.wait()
        for task in self._running:
            task.cancel("the gateway shuts down")

    def ending(self) -> CoppiceError | None:
        """Return what the clients of cancelled requests are told; None: nothing."""
        if not self.is_draining:
            return None
        return UnavailableError("the gateway shuts down; send the request again", reason="DRAINING")

    async def _respond(
        self, path: str, handler: Handler, request: Request, receive: Receive, send: Send
    ) -> None:
        exchange = Exchange(
            request=request,
            receive=receive,
            send=send,
            request_id=request_id_of(request),
        )
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with self._counted(exchange.address):
            try:
                await self._answer(path, handler, exchange)
            finally:
                duration_s = loop.time() - began_s
                self.counts.note_end(
                    path, exchange.status, num_tokens=exchange.num_tokens, duration_s=duration_s
                )
                _log(path, exchange, duration_s)

    async def _answer(self, path: str, handler: Handler, exchange: Exchange) -> None:
        """Answer a request, whatever happens."""
        try:
            self._admit(path, exchange)
            await handler(exchange)
        except ApiError as error:
            await exchange.fail(error)
        except CoppiceError as error:
            await exchange.fail(api_error(error))
        except (ClientGoneError, ClientDisconnect):
            exchange.status, exchange.ending = CLIENT_CLOSED, "the client went away"
        except asyncio.CancelledError:
            reason = self.ending()
            if reason is None:
                raise
            await exchange.fail(api_error(reason))
        except Exception:
            logger.exception("%s %s failed", exchange.request.method, path)
            message = "the gateway failed; its log says why"
            await exchange.fail(api_error(CoppiceError(message)))

    def _admit(self, path: str, exchange: Exchange) -> None:
        """Find out who asks, and whether there is room.

        Raises: UnauthenticatedError, UnavailableError, ResourceExhaustedError.
        """
        if path not in _OPEN_PATHS:
            exchange.caller = caller_of(exchange.request, self._check)
        if path in _GENERATION_PATHS and (reason := self.ending()) is not None:
            raise reason
        if path not in _UNLIMITED_PATHS:
            self._check_room(exchange.address)

    def _check_room(self, address: str) -> None:
        most = self._config.max_num_requests
        if self.counts.num_running > most:
            raise _too_many(f"the gateway answers {most} requests at once")
        # Without proxies an address has its share of the connections.
        share = max(1, most // 2)
        if self._config.trusted_proxies and self._num_of_address[address] > share:
            raise _too_many(f"the gateway answers {share} requests of one address at once")

    @contextlib.contextmanager
    def _counted(self, address: str) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self.counts.num_running += 1
        self._num_of_address[address] += 1
        self._running.add(task)
        self._is_idle.clear()
        try:
            yield
        finally:
            self.counts.num_running -= 1
            self._num_of_address[address] -= 1
            if not self._num_of_address[address]:
                del self._num_of_address[address]
            self._running.discard(task)
            if not self._running:
                self._is_idle.set()


def _too_many(why: str) -> ResourceExhaustedError:
    message = f"{why}; try again later"
    return ResourceExhaustedError(message, reason="TOO_MANY_CALLS", retry_after_s=_RETRY_S)


def _log(path: str, exchange: Exchange, duration_s: float) -> None:
    is_work = path in _GENERATION_PATHS or exchange.status >= 500
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

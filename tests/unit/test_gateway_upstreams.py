"""What a gateway makes of its orchestrators: their errors, and what it must ask them for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from coppice.client import AsyncClient, CancelledError, DeadlineExceededError
from coppice.gateway import upstreams as upstreams_module
from coppice.gateway.errors import api_error
from coppice.gateway.upstreams import TokenTexts, Upstream
from coppice.model import TokenText
from shared.errors import CoppiceError, InternalError, StatusCode, UnavailableError
from shared.rpc.status import from_rpc_error

# As google.rpc.Code says it, but for what OpenAI's API calls otherwise.
STATUSES = {
    "CANCELLED": 499,
    "UNKNOWN": 500,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "UNIMPLEMENTED": 501,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "UNAUTHENTICATED": 401,
}


@pytest.mark.parametrize(("name", "status"), STATUSES.items())
def test_a_status_of_grpc_is_one_of_http(name: str, status: int) -> None:
    failed = grpc.aio.AioRpcError(
        grpc.StatusCode[name], grpc.aio.Metadata(), grpc.aio.Metadata(), details="as it was said"
    )
    error = api_error(from_rpc_error(failed))
    assert (error.status, error.message) == (status, "as it was said")
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    usual = "server_error" if status >= 500 else "invalid_request_error"
    assert error.kind == {**kinds, 429: "rate_limit_error"}.get(status, usual)


@pytest.mark.parametrize("name", [code.name for code in StatusCode])
def test_every_code_of_ours_is_one_of_grpc_with_a_status_of_http(name: str) -> None:
    """Whatever the reason."""
    error = CoppiceError("x", reason="OTHER")
    error.code = StatusCode[name]
    assert error.code == grpc.StatusCode[name].value[0]
    assert api_error(error).status == STATUSES[name]


@pytest.mark.parametrize("kind", [DeadlineExceededError, CancelledError])
def test_what_the_client_says_itself_has_a_code_of_ours(kind: type[CoppiceError]) -> None:
    error = kind("x")
    assert error.code is StatusCode[error.reason]
    assert api_error(error).status == STATUSES[error.reason]


class Speller:
    """A client whose server spells tokens after it has failed so often.

    Args:
        error: As which it fails.
    """

    def __init__(self, error: CoppiceError, *, num_failures: int) -> None:
        self._error = error
        self._num_failures = num_failures
        self.asked: list[list[int]] = []
        self.timeouts: list[float | None] = []

    async def detokenize(
        self, token_ids: Sequence[int], *, timeout_s: float | None = None
    ) -> TokenText:
        self.asked.append(list(token_ids))
        self.timeouts.append(timeout_s)
        if len(self.asked) <= self._num_failures:
            raise self._error
        return TokenText(text="", token_bytes=tuple(b"%d" % token_id for token_id in token_ids))

    async def learn(self, tokens: TokenTexts, *token_ids: int) -> None:
        await tokens.learn(iter(token_ids), cast(AsyncClient, cast(Any, self)))


@pytest.mark.asyncio
async def test_tokens_are_asked_for_once_and_never_without_a_deadline() -> None:
    tokens, client = TokenTexts(), Speller(InternalError("x"), num_failures=0)
    await client.learn(tokens, 7, 3, 7)
    await client.learn(tokens, 3, 5)
    assert client.asked == [[3, 7], [5]] and tokens[7] == b"7"
    assert all(timeout_s is not None for timeout_s in client.timeouts)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "is_tried_again"), [(UnavailableError("x"), True), (InternalError("x"), False)]
)
async def test_an_orchestrator_that_is_just_away_is_asked_again(
    error: CoppiceError, *, is_tried_again: bool
) -> None:
    """A stream with logprobs needs them to go on."""
    tokens, client = TokenTexts(), Speller(error, num_failures=1)
    if not is_tried_again:
        with pytest.raises(InternalError):
            await client.learn(tokens, 7)
        return
    await client.learn(tokens, 7)
    assert tokens[7] == b"7" and len(client.asked) == 2


@pytest.mark.asyncio
async def test_why_an_orchestrator_is_not_ready_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start on: nobody may ever have answered there."""
    monkeypatch.setattr(upstreams_module, "_HEALTH_INTERVAL_S", 0.01)
    caplog.set_level("INFO", logger=upstreams_module.__name__)
    upstream = Upstream("127.0.0.1:1", tls=None, num_connections=1)
    following = asyncio.create_task(upstream.follow_health())
    async with asyncio.timeout(20):
        while not caplog.messages:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await upstream.close()
    (said,) = caplog.messages
    assert said.startswith("127.0.0.1:1 is not ready: UNAVAILABLE: ") and "refused" in said

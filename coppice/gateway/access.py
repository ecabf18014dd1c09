"""What comes with an HTTP request: who asks, its body, and how it is passed on."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from typing import Any, NoReturn

from starlette.requests import Request

from coppice.gateway.errors import bad_request
from coppice.gateway.upstreams import Metadata
from shared.access.tokens import TokenCheck
from shared.errors import UnauthenticatedError

_PASSED_ON = ("authorization", "traceparent", "tracestate")
_RETRY_HEADER = "x-stainless-retry-count"
_REQUEST_ID_HEADER = "x-request-id"
_MAX_REQUEST_ID_CHARS = 100
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def caller_of(request: Request, check: TokenCheck | None) -> str:
    """Return the name of who asks, "" if nobody is asked.

    Raises: UnauthenticatedError.
    """
    values = request.headers.getlist("authorization")
    if check is None:
        return ""
    return check.check(request.url.path, values[0] if len(values) == 1 else None)


def passed_on(request: Request) -> Metadata:
    """Return the metadata of calls to orchestrators: who asks, and the trace it belongs to.

    A trace that gRPC does not carry is left out.

    Raises: UnauthenticatedError for a token that it does not carry.
    """
    found = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    fine = {name: value for name, value in found.items() if _is_metadata(value)}
    if "authorization" in found.keys() - fine.keys():
        raise UnauthenticatedError("this is no token of any server", reason="WRONG_IDENTITY")
    return tuple(fine.items())


def num_refusals(request: Request) -> int:
    """Return how often the same request was sent before, as OpenAI's client says it."""
    text = request.headers.get(_RETRY_HEADER, "")
    return min(int(text), 1000) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def request_id_of(request: Request) -> str:
    """Return the id that the client has chosen in a header, or a new one."""
    given = request.headers.get(_REQUEST_ID_HEADER, "")
    is_fine = given and len(given) <= _MAX_REQUEST_ID_CHARS and given.isprintable()
    return given if is_fine else uuid.uuid4().hex


async def json_body(request: Request, *, max_bytes: int, timeout_s: float) -> Any:
    """Read the JSON of a request.

    A type other than JSON is refused: what a page of another site can have a browser send without
    asking is no JSON by its type.

    Raises: ApiError.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise bad_request(
            "the body must be JSON, with content-type: application/json", param=None, status=415
        )
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise bad_request("the body did not come in time", param=None, status=408) from None
    try:
        return _loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(
            f"the body is no JSON: {error}", param=None, code="invalid_json"
        ) from None


def _loads(body: bytes) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises: ValueError, RecursionError if it is none, or has half of a surrogate pair: no text.
    """
    value = json.loads(body.decode("utf-8-sig"), parse_constant=_no_number)
    if _SURROGATE.search(body):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _is_metadata(value: str) -> bool:
    """Return whether gRPC carries a text in its metadata."""
    return value.isascii() and value.isprintable()


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise bad_request(
                f"the body has more than {max_bytes} bytes, the most that is read",
                param=None,
                code="request_too_large",
                status=413,
            )
        chunks.append(chunk)
    return b"".join(chunks)

"""Streams end with an event and [DONE], whatever goes wrong behind them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coppice.gateway.answers import Answer
from coppice.gateway.outputs import Part
from coppice.gateway.replies import EventStream, send_stream
from shared.errors import AbortedError

pytestmark = pytest.mark.asyncio


class Sent:
    """What an application sends."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def __call__(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()


async def broken(error: Exception, *, num_parts: int) -> AsyncGenerator[Part, None]:
    for index in range(num_parts):
        yield Part(index=index)
    raise error


def answer(*, usage: Exception | None = None) -> Answer:
    def usage_chunk() -> Any:
        if usage is not None:
            raise usage
        return {"usage": 1}

    found = SimpleNamespace(
        note=lambda _: None,
        chunk=lambda part, **_: {"index": part.index},
        usage_chunk=usage_chunk,
    )
    return cast(Answer, found)


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyError("x"), "internal"), (TypeError("x"), "internal"), (AbortedError("x"), "aborted")],
)
async def test_any_error_after_the_head_is_an_event(error: Exception, code: str) -> None:
    sent = Sent()
    stream = EventStream(sent, headers=[])
    parts = broken(error, num_parts=1)
    assert await send_stream(stream, parts, answer(), has_usage=False) == code
    first, failed, done, rest = sent.text.split("\n\n")
    assert json.loads(first.removeprefix("data: ")) == {"index": 0}
    assert json.loads(failed.removeprefix("data: "))["error"]["code"] == code
    assert (done, rest) == ("data: [DONE]", "")
    assert [message.get("more_body") for message in sent.messages] == [None, True, True, False]


async def test_an_error_of_the_usage_is_one_too() -> None:
    async def parts() -> AsyncGenerator[Part, None]:
        yield Part(index=0)

    sent = Sent()
    stream = EventStream(sent, headers=[])
    own = answer(usage=ValueError("x"))
    assert await send_stream(stream, parts(), own, has_usage=True) == "internal"
    assert sent.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("kind", [KeyError, AbortedError])
async def test_an_error_before_the_head_has_a_status_of_its_own(kind: type[Exception]) -> None:
    sent = Sent()
    with pytest.raises(kind):
        await send_stream(
            EventStream(sent, headers=[]),
            broken(kind("x"), num_parts=0),
            answer(),
            has_usage=False,
        )
    assert not sent.messages

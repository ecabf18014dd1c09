"""Messages that wait for what is prepared beside the steps of an engine."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

from shared.rpc.held_messages import HeldMessages


class Message(NamedTuple):
    request_id: str
    what: str


class Preparations:
    """Openings of requests in `slow` need something; `done` is what they need no more."""

    def __init__(self, *slow: str) -> None:
        self.futures: dict[str, Future[None]] = {name: Future() for name in slow}

    def prepare(self, message: Any) -> Future[None] | None:
        future = self.futures.get(message.request_id) if message.what == "open" else None
        return None if future is None or future.done() else future

    def end(self, name: str) -> None:
        self.futures[name].set_result(None)


def test_what_is_said_of_a_request_waits_behind_its_opening() -> None:
    preparations = Preparations("a", "b")
    held = HeldMessages(preparations.prepare)
    of_a = [Message("a", what) for what in ("open", "credit", "close", "open")]
    assert all(held.takes(message) for message in of_a)
    assert held.takes(Message("b", "open"))
    assert not held.takes(Message("c", "open")) and not held.takes(Message("c", "close"))
    assert held.released() == []

    preparations.end("a")
    assert held.released() == of_a and held
    assert not any(held.takes(message) for message in of_a)
    preparations.end("b")
    assert held.released() == [Message("b", "open")] and not held


def test_messages_of_no_request_are_not_held() -> None:
    preparations = Preparations("a")
    held = HeldMessages(lambda message: None if message == "go" else preparations.prepare(message))
    assert held.takes(Message("a", "open"))
    assert not held.takes("go")


def test_what_is_needed_again_is_waited_for_again() -> None:
    preparations = Preparations("a")
    held = HeldMessages(preparations.prepare)
    opening, closing = Message("a", "open"), Message("a", "close")
    assert held.takes(opening) and held.takes(closing)
    preparations.end("a")
    (first, second) = held.released()
    preparations.futures["a"] = Future()  # what was prepared is gone
    assert held.takes(first) and held.takes(second)
    assert held.released() == []
    preparations.end("a")
    assert held.released() == [opening, closing]

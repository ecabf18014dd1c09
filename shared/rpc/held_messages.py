"""Messages that wait for something which is prepared beside the steps of an engine.

A message that opens a request may need what takes long, such as a large grammar. The other requests
go on meanwhile; what the front says of this one waits behind its opening, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _Held:
    preparation: Future[Any]
    messages: list[Any] = field(default_factory=list)


class HeldMessages:
    """Holds messages back by their request.

    Args:
        prepare: Begins what a message needs; returns None if that is nothing.
    """

    def __init__(self, prepare: Callable[[Any], Future[Any] | None]) -> None:
        self._prepare = prepare
        self._by_request: dict[str, _Held] = {}

    def __bool__(self) -> bool:
        """Return whether any message is held."""
        return bool(self._by_request)

    def takes(self, message: Any) -> bool:
        """Return whether a message is held from now on; else it may be submitted."""
        held = None
        if self._by_request:
            held = self._by_request.get(getattr(message, "request_id", ""))
        if held is None:
            preparation = self._prepare(message)
            if preparation is None:
                return False
            held = self._by_request[message.request_id] = _Held(preparation)
        held.messages.append(message)
        return True

    def released(self) -> list[Any]:
        """Stop to hold the messages of requests for which all is prepared; return them, in order.

        Each may need something again: it is to be taken like one that has just come.
        """
        done = [name for name, held in self._by_request.items() if held.preparation.done()]
        return [message for name in done for message in self._by_request.pop(name).messages]

"""What a draft's engine has to say to its front, collected until the end of a step."""

from __future__ import annotations

from typing import Any


class Front:
    """Messages to the front, in order.

    They are TokenTree, RequestFailure and RequestRetracted, which go to the orchestrator, and
    FeatureCommand, which goes to a target.
    """

    def __init__(self) -> None:
        self._messages: list[Any] = []

    @property
    def has_messages(self) -> bool:
        """Return whether `take` would return anything."""
        return bool(self._messages)

    def put(self, message: Any) -> None:
        """Add a message."""
        self._messages.append(message)

    def take(self) -> list[Any]:
        """Return the messages, and forget them."""
        messages, self._messages = self._messages, []
        return messages

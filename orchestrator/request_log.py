"""Log records of one request: request_id and round_idx in every one."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any


class RequestLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that says which request and which round it speaks of.

    Args:
        request_id: As the client knows it.
    """

    def __init__(self, logger: logging.Logger, request_id: str) -> None:
        super().__init__(logger, {})
        self.request_id = request_id
        self.round_idx = 0

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Put both into the record, and in front of its message."""
        kwargs["extra"] = {"request_id": self.request_id, "round_idx": self.round_idx}
        return f"[{self.request_id} round {self.round_idx}] {msg}", kwargs

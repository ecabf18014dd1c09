"""Log records of one request: request_id and round_idx in every one, one of them at its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from shared.errors import CoppiceError, StatusCode

logger = logging.getLogger(__name__)

DEADLINE_SLACK_S = 0.1
"""A client's deadline passes a little before the server's."""
_OUR_FAULT = (StatusCode.INTERNAL, StatusCode.UNAVAILABLE)


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


@contextlib.contextmanager
def logged_end(request_id: str, time_remaining: Callable[[], float | None]) -> Iterator[RequestLog]:
    """Yield a request's log, and log one line if it is refused, cancelled, late or fails.

    One that finishes says so itself, with its figures; a bug is logged where it becomes INTERNAL.

    Args:
        request_id: As the client said it, which is not checked yet; empty: it said none.
        time_remaining: Returns the seconds to the deadline; None: there is no deadline.
    """
    name = request_id if request_id.isprintable() else repr(request_id)
    log = RequestLog(logger, name[:128] or "no request_id")
    began = time.monotonic()
    try:
        yield log
    except asyncio.CancelledError:
        left_s = time_remaining()
        is_late = left_s is not None and left_s < DEADLINE_SLACK_S
        what = "its deadline passed" if is_late else "cancelled"
        log.info("%s after %.1f s", what, time.monotonic() - began)
        raise
    except CoppiceError as error:
        level = logging.WARNING if error.code in _OUR_FAULT else logging.INFO
        where = f" ({error.field})" if error.field else ""
        log.log(level, "ended by %s%s: %s", error.reason, where, " ".join(error.message.split()))
        raise

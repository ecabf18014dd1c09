"""Log records of one request: request_id and round_idx in every one, one of them at its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc.aio

from orchestrator.metrics import RequestEnd
from shared.errors import CoppiceError, StatusCode
from shared.logs import log_request
from shared.messages import FinishInfo

logger = logging.getLogger(__name__)

DEADLINE_SLACK_S = 0.1
"""A client's deadline passes a little before the server's."""
_OUR_FAULT = (StatusCode.INTERNAL, StatusCode.UNAVAILABLE)


class RequestLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that says which request, whose, which round and which trace it speaks of.

    Args:
        request_id: As the client knows it.
    """

    def __init__(self, logger: logging.Logger, request_id: str) -> None:
        super().__init__(logger, {})
        self.request_id = request_id
        self.tenant = ""
        self.round_idx = 0
        self.trace_id = ""
        self.is_admitted = False
        """Whether work has begun: what ends it from now on is no refusal."""
        self.finish: FinishInfo | None = None
        """How the request finished; None: it did not, or not yet."""
        self.is_finish_sent = False
        """Whether the client was sent `finish`: it need not wait for the end of the call."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Put all of that in front of the message, and into the record.

        Args:
            kwargs: `fields`, a mapping, goes into the record as well.
        """
        fields: Mapping[str, object] = kwargs.pop("fields", {})
        whose = f" of {self.tenant}" if self.tenant else ""
        trace = f" trace {self.trace_id}" if self.trace_id else ""
        log_request(
            self.logger,
            level,
            self.request_id,
            msg,
            *args,
            prefix=f"[{self.request_id}{whose} round {self.round_idx}{trace}] ",
            round_idx=self.round_idx,
            trace_id=self.trace_id,
            tenant=self.tenant,
            **fields,
        )

    def log_finish(self, finish: FinishInfo) -> None:
        """Log the end of a request that has finished, with its figures."""
        usage, stats, timings = finish.usage, finish.speculation, finish.timings
        self.info(
            "finished by %s: %d tokens in %d rounds, accept_length %.2f",
            finish.reason.name,
            usage.num_output_tokens,
            stats.num_rounds,
            stats.accept_length,
            fields={
                "event": "request_end",
                "code": "OK",
                "finish_reason": finish.reason.name.lower(),
                "num_prompt_tokens": usage.num_prompt_tokens,
                "num_output_tokens": usage.num_output_tokens,
                "num_rounds": stats.num_rounds,
                "accept_length": round(stats.accept_length, 3),
                "queue_ms": round(timings.queue_ms, 1),
                "time_to_first_token_ms": round(timings.time_to_first_token_ms, 1),
                "total_ms": round(timings.total_ms, 1),
                "retries": finish.retries,
            },
        )


class _End:
    """The end of a request: one line in its log, and what is counted of it.

    Args:
        time_remaining: Returns the seconds to the deadline; None: there is no deadline.
        on_end: Takes how the request ended.
    """

    def __init__(
        self,
        log: RequestLog,
        time_remaining: Callable[[], float | None],
        on_end: Callable[[RequestEnd], None],
    ) -> None:
        self._log = log
        self._time_remaining = time_remaining
        self._on_end = on_end
        self._began = time.monotonic()

    def finish(self) -> None:
        """Log the end of a request that has finished, if it has."""
        if self._log.finish is not None:
            self._log.log_finish(self._log.finish)
            self._on_end(_finished(self._log.finish))

    def cancel(self) -> None:
        """Log that the client is gone, or was told that it waited too long."""
        left_s = self._time_remaining()
        is_late = left_s is not None and left_s < DEADLINE_SLACK_S
        what = "its deadline passed" if is_late else "cancelled"
        code = "DEADLINE_EXCEEDED" if is_late else "CANCELLED"
        self._log_end(logging.INFO, code, "%s after %.1f s", what, time.monotonic() - self._began)

    def refuse(self, error: CoppiceError) -> None:
        """Log an error that the client is told."""
        level = logging.WARNING if error.code in _OUR_FAULT else logging.INFO
        where = f" ({error.field})" if error.field else ""
        message = " ".join(error.message.split())
        self._log_end(
            *(level, error.code.name, "ended by %s%s: %s", error.reason, where, message),
            reason=error.reason,
        )

    def fail(self, error: Exception) -> None:
        """Log a bug; its traceback is logged where it becomes INTERNAL."""
        name = type(error).__name__
        self._log_end(logging.ERROR, "INTERNAL", "failed: %s", name, reason="INTERNAL")

    def _log_end(
        self, level: int, code: str, message: str, *args: object, reason: str = ""
    ) -> None:
        took_s = time.monotonic() - self._began
        fields = {"event": "request_end", "code": code, "total_ms": round(took_s * 1e3, 1)}
        if reason:
            fields["reason"] = reason
        self._log.log(level, message, *args, fields=fields)
        self._on_end(RequestEnd(code=code, refused_by="" if self._log.is_admitted else reason))


@contextlib.contextmanager
def logged_end(
    request_id: str,
    time_remaining: Callable[[], float | None],
    on_end: Callable[[RequestEnd], None] = lambda _: None,
) -> Iterator[RequestLog]:
    """Yield a request's log, and log one line however it ends.

    A request has finished when its client was sent the end of the output; until then its client
    may go, or may be ended because it does not read.

    Args:
        request_id: As the client said it, which is not checked yet; empty: it said none.
        time_remaining: Returns the seconds to the deadline; None: there is no deadline.
        on_end: Takes how it ended.
    """
    name = request_id if request_id.isprintable() else repr(request_id)
    log = RequestLog(logger, name[:128] or "no request_id")
    end = _End(log, time_remaining, on_end)
    try:
        yield log
    except (asyncio.CancelledError, grpc.aio.InternalError):  # the latter: of a write to nobody
        if log.is_finish_sent:
            end.finish()
        else:
            end.cancel()
        raise
    except CoppiceError as error:
        end.refuse(error)
        raise
    except Exception as error:
        end.fail(error)
        raise
    else:
        end.finish()


def _finished(finish: FinishInfo) -> RequestEnd:
    return RequestEnd(
        code="OK",
        finish_reason=finish.reason.name.lower(),
        timings=finish.timings,
        speculation=finish.speculation,
    )

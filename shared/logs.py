"""One format of log lines for every process of Coppice: text, or an object of JSON per line.

    {"ts": "2026-03-01T12:00:00.123456Z", "level": "info", "logger": "orchestrator.request_log",
     "role": "orchestrator", "pid": 4711, "request_id": "r1", "round_idx": 12, "message": ...}

A record is about a request if `log_request` logged it: then `request_id` is the client's, in every
process. Prompts and outputs are never logged.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

from shared.request_ids import parse_worker_id

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_level(logger: str, level: str) -> None:
    """Set the least severity that a logger of this process logs.

    Args:
        logger: Its name; empty: the root, whose level holds where none is set.
        level: One of LEVELS.
    """
    logging.getLogger(logger or None).setLevel(level.upper())


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """How a process logs; picklable, so that the processes it starts log alike.

    Args:
        level: Least severity that is logged: one of logging's numbers, or of LEVELS.
        format: One of FORMATS.
        role: orchestrator, target, draft; with "-engine" after it, of an engine.
    """

    level: int | str = logging.INFO
    format: str = "text"
    role: str = ""


class _Handler(logging.StreamHandler[Any]):
    """Writes to standard error, and remembers what it was set up with."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__(sys.stderr)
        self.settings = settings
        is_json = settings.format == "json"
        self.setFormatter(JsonFormatter(settings.role) if is_json else logging.Formatter(TEXT))


class JsonFormatter(logging.Formatter):
    """Makes one line of JSON of a record.

    Args:
        role: Of the process.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self.worker_id = ""
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        about: dict[str, object] = getattr(record, "about", {})
        prefix: str = getattr(record, "prefix", "")
        entry = {
            **json_head(record.levelname.lower(), record.name, role=self._role, at=record.created),
            **({"worker_id": self.worker_id} if self.worker_id else {}),
            **about,
            "message": record.getMessage().removeprefix(prefix),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure_logging(settings: LogSettings) -> None:
    """Log to standard error from now on; warnings of Python are log records like any other."""
    level = settings.level
    logging.basicConfig(
        level=level.upper() if isinstance(level, str) else level, handlers=[_Handler(settings)]
    )
    logging.captureWarnings(capture=True)
    logging.getLogger("grpc").setLevel(logging.WARNING)  # below, it tells of every call's steps
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def log_settings(*, suffix: str = "") -> LogSettings:
    """Return how this process logs at present, for a process that it starts.

    Args:
        suffix: What that one's role has after this one's.
    """
    root = logging.getLogger()
    known = next((h.settings for h in root.handlers if isinstance(h, _Handler)), LogSettings())
    return LogSettings(
        level=root.getEffectiveLevel(), format=known.format, role=known.role + suffix
    )


def log_request(
    logger: logging.Logger,
    level: int,
    request_id: str,
    message: object,
    *args: object,
    prefix: str = "",
    **fields: object,
) -> None:
    """Log a record about a request.

    Args:
        request_id: The client's.
        message: With a place for each of `args`, as logging has it.
        prefix: What the text says of the request, which JSON says in its fields; by default its id.
        fields: More of what JSON says; empty ones are left out.
    """
    if not logger.isEnabledFor(level):
        return
    prefix = prefix or f"[{request_id}] "
    present = {name: value for name, value in fields.items() if value != ""}
    about = {"request_id": request_id, **present}
    extra = {**about, "about": about, "prefix": prefix}
    head = prefix.replace("%", "%%") if args else prefix
    logger.log(level, f"{head}{message}", *args, extra=extra)


def log_worker_request(
    logger: logging.Logger, level: int, worker_id: str, message: object, *args: object
) -> None:
    """Log a record about a request, given its id on the workers, which may be anything."""
    request_id, trace_id = parse_worker_id(worker_id)
    name = (request_id if request_id.isprintable() else repr(request_id))[:128]
    prefix = f"[{name} trace {trace_id}] " if trace_id else ""
    log_request(logger, level, name, message, *args, prefix=prefix, trace_id=trace_id)


def note_worker_id(incarnation: str) -> None:
    """Let every line of JSON from now on say which worker it comes from."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.worker_id = incarnation


def json_head(level: str, logger: str, *, role: str, at: float) -> dict[str, object]:
    """Return the fields that every line of JSON begins with.

    Args:
        at: Seconds since 1970.
    """
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC).replace(tzinfo=None)
    return {
        "ts": f"{moment.isoformat(timespec='microseconds')}Z",
        "level": level,
        "logger": logger,
        "role": role,
        "pid": os.getpid(),
    }

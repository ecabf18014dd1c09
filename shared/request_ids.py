"""The id of a request on the workers, unique in the world; the client's id and the trace are in it.

0123abcd.7.r1                                     request r1
0123abcd.8-4bf92f3577b34da6a3ce929d0e0e4736.r1    request r1, which belongs to a trace
"""

from __future__ import annotations

import re

_WORKER_ID = re.compile(r"[0-9a-f]{8}\.\d+(?:-([0-9a-f]{32}))?\.(.*)", re.DOTALL)


def worker_request_id(incarnation: str, serial: int, request_id: str, *, trace_id: str = "") -> str:
    """Return the id of a request on the workers.

    Args:
        incarnation: Of the orchestrator process, 8 hexadecimal digits.
        serial: Of the request there.
        request_id: As the client knows it.
        trace_id: Of its trace, 32 hexadecimal digits; empty: it belongs to none.
    """
    trace = f"-{trace_id}" if trace_id else ""
    return f"{incarnation}.{serial}{trace}.{request_id}"


def parse_worker_id(worker_id: str) -> tuple[str, str]:
    """Return the client's id of a request and its trace ("": none), given its id on the workers."""
    match = _WORKER_ID.fullmatch(worker_id)
    return (worker_id, "") if match is None else (match[2], match[1] or "")

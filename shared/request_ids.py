"""The id of a request on the workers, which is unique in the world, and the client's id in it."""

from __future__ import annotations

import re

_WORKER_ID = re.compile(r"[0-9a-f]{8}\.\d+\.(.*)", re.DOTALL)


def worker_request_id(incarnation: str, serial: int, request_id: str) -> str:
    """Return the id of a request on the workers.

    Args:
        incarnation: Of the orchestrator process, 8 hexadecimal digits.
        serial: Of the request there.
        request_id: As the client knows it.
    """
    return f"{incarnation}.{serial}.{request_id}"


def client_request_id(worker_id: str) -> str:
    """Return the client's id of a request, given its id on the workers."""
    match = _WORKER_ID.fullmatch(worker_id)
    return worker_id if match is None else match[1]

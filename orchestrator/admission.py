"""How many requests may be here at once; what is too many is refused before work starts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError

_EWMA_WEIGHT = 0.2
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 30.0


class Admission:
    """Counts the requests that are served or wait for a target.

    Args:
        max_num_requests: Waiting ones included.
    """

    def __init__(self, max_num_requests: int) -> None:
        self._max_num_requests = max_num_requests
        self._request_ids: set[str] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_closed = False
        self._mean_duration_s = 1.0

    @property
    def num_requests(self) -> int:
        """Return the requests admitted and not ended yet."""
        return len(self._request_ids)

    @contextmanager
    def admit(self, request_id: str) -> Iterator[None]:
        """Hold a place for a request while it is served.

        Raises: UnavailableError while draining, InvalidArgumentError if the id is in use,
            ResourceExhaustedError if there is no place; it says when to try again.
        """
        if self._is_closed:
            raise UnavailableError(
                "the server is shutting down; try another one", reason="DRAINING"
            )
        if request_id in self._request_ids:
            raise InvalidArgumentError(
                f"a request {request_id!r} is running; choose another request_id, or none",
                reason="DUPLICATE_REQUEST_ID",
                field="request_id",
            )
        if len(self._request_ids) >= self._max_num_requests:
            raise ResourceExhaustedError(
                f"{len(self._request_ids)} requests are being served, the limit of this server; "
                "try again later",
                retry_after_s=self._retry_after_s,
            )
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._request_ids.add(request_id)
        self._is_idle.clear()
        try:
            yield
        finally:
            self._request_ids.discard(request_id)
            if not self._request_ids:
                self._is_idle.set()
            duration = loop.time() - started
            self._mean_duration_s += _EWMA_WEIGHT * (duration - self._mean_duration_s)

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones to end."""
        self._is_closed = True
        await self._is_idle.wait()

    @property
    def _retry_after_s(self) -> float:
        """Return the time until a place should become free: one ends every duration / places."""
        wait_s = self._mean_duration_s / self._max_num_requests
        return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)

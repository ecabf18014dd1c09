"""How many requests may be here at once; what is too many is refused before work starts.

A request has a *place* until its text is generated, however late its client reads that.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orchestrator.siblings import Siblings
from orchestrator.virtual_queue import VirtualQueue
from shared.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError

_LATELY_S = 5.0


class Place:
    """What an admitted request holds; it is given back once.

    Args:
        began_s: When the request was admitted, loop time.
    """

    def __init__(
        self, request_id: str, tenant: str, began_s: float, give_back: Callable[[Place], None]
    ) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.began_s = began_s
        self._give_back = give_back
        self.is_held = True
        """Whether it was not given back yet."""

    def release(self) -> None:
        """Give the place back; nothing happens the second time."""
        if self.is_held:
            self.is_held = False
            self._give_back(self)


class Admission:
    """Counts the requests that are served or wait for a target.

    Args:
        max_num_requests: Waiting ones included.
        siblings: Processes that share the limit, which it may exceed by one request of each when
            several come in the same moment; None: there are none.
    """

    def __init__(self, max_num_requests: int, siblings: Siblings | None = None) -> None:
        self._max_num_requests = max_num_requests
        self._siblings = siblings
        self._places: dict[str, Place] = {}
        self._sum_began_s = 0.0
        self._num_open = 0  # also those that are generated and not read yet
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_closed = False
        self._queue = VirtualQueue()
        self.num_by_tenant: Counter[str] = Counter()
        """Requests that have a place, by tenant."""
        self._refused_s = -math.inf

    @property
    def num_requests(self) -> int:
        """Return the requests that have a place."""
        return len(self._places)

    @property
    def is_crowded(self) -> bool:
        """Return whether a request was refused lately for want of a place."""
        return asyncio.get_running_loop().time() - self._refused_s < _LATELY_S

    @contextmanager
    def admit(
        self, request_id: str, *, tenant: str = "", comes_again: bool = False
    ) -> Iterator[Place]:
        """Hold a place for a request while it is served, or until it is given back before.

        Args:
            comes_again: It was refused before.
        Raises: UnavailableError while draining, InvalidArgumentError if the id is in use,
            ResourceExhaustedError if there is no place; it says when to try again.
        """
        if self._is_closed:
            raise UnavailableError(
                "the server is shutting down; try another one", reason="DRAINING"
            )
        if request_id in self._places:
            raise InvalidArgumentError(
                f"a request {request_id!r} is running; choose another request_id, or none",
                reason="DUPLICATE_REQUEST_ID",
                field="request_id",
            )
        now_s = asyncio.get_running_loop().time()
        self._check_room(now_s, comes_again=comes_again)
        place = Place(request_id, tenant, now_s, self._give_back)
        self._places[request_id] = place
        self._sum_began_s += now_s
        self.num_by_tenant[tenant] += 1
        self._tell_siblings()
        self._num_open += 1
        self._is_idle.clear()
        try:
            yield place
        finally:
            place.release()
            self._num_open -= 1
            if not self._num_open:
                self._is_idle.set()

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones to end, and to be read."""
        self._is_closed = True
        await self._is_idle.wait()

    def _check_room(self, now_s: float, *, comes_again: bool) -> None:
        """Raise unless there is a place."""
        num_requests = len(self._places)
        if self._siblings is not None:
            num_requests += self._siblings.num_others
        num_reserved = 0
        if comes_again:
            self._queue.take_turn(now_s)
        else:
            num_reserved = self._queue.num_reserved(now_s)
        if num_requests + num_reserved < self._max_num_requests:
            return
        self._refused_s = now_s
        num_places = max(1, len(self._places))  # of this process, whose clients come back to it
        mean_age_s = now_s - self._sum_began_s / num_places if self._places else 0.0
        raise ResourceExhaustedError(
            f"{num_requests} requests are being served and {num_reserved} are due, the limit of "
            f"this server is {self._max_num_requests}; try again later",
            retry_after_s=self._queue.refuse(now_s, num_places=num_places, mean_age_s=mean_age_s),
        )

    def _give_back(self, place: Place) -> None:
        del self._places[place.request_id]
        self._sum_began_s -= place.began_s
        self.num_by_tenant[place.tenant] -= 1
        if not self.num_by_tenant[place.tenant]:
            del self.num_by_tenant[place.tenant]
        self._tell_siblings()
        self._queue.note_end(asyncio.get_running_loop().time() - place.began_s)

    def _tell_siblings(self) -> None:
        if self._siblings is not None:
            self._siblings.note(len(self._places))

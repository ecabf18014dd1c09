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
from orchestrator.tenants import TenantLimits
from orchestrator.virtual_queue import VirtualQueue
from shared.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError

_LATELY_S = 5.0


class Place:
    """What an admitted request holds; it is given back once.

    Args:
        began_s: When the request was admitted, loop time.
        place_idx: Among those of this process.
    """

    def __init__(
        self,
        request_id: str,
        tenant: str,
        began_s: float,
        give_back: Callable[[Place], None],
        place_idx: int,
    ) -> None:
        self.place_idx = place_idx
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
        siblings: Processes that share the limits, which they may exceed by one request of each when
            several come in the same moment; None: there are none.
        tenants: Limits of each tenant; None: there are none.
    """

    def __init__(
        self,
        max_num_requests: int,
        siblings: Siblings | None = None,
        tenants: TenantLimits | None = None,
    ) -> None:
        self._max_num_requests = max_num_requests
        self._siblings = siblings
        self._tenants = tenants or TenantLimits()
        self._free = list(range(max_num_requests))
        self._places: dict[str, Place] = {}
        self._sum_began_s = 0.0
        self._num_open = 0  # also those that are generated and not read yet
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_closed = False
        self._queue = VirtualQueue()
        self._queue_of_tenant: dict[str, VirtualQueue] = {}  # of those that have a limit
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
        self._check_tenant(tenant, now_s, comes_again=comes_again)
        self._check_room(now_s, comes_again=comes_again)
        place = Place(request_id, tenant, now_s, self._give_back, self._free.pop())
        self._places[request_id] = place
        self._sum_began_s += now_s
        self.num_by_tenant[tenant] += 1
        self._tell_siblings(place.place_idx, tenant)
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

    def _check_tenant(self, tenant: str, now_s: float, *, comes_again: bool) -> None:
        """Raise unless the tenant may have one more request here."""
        most = self._tenants.of(tenant)
        if not most:
            return
        queue = self._queue_of_tenant.setdefault(tenant, VirtualQueue())
        num_requests = self.num_by_tenant[tenant]
        if self._siblings is not None:
            num_requests += self._siblings.num_others_of(tenant)
        num_reserved = _take_turn(queue, now_s, comes_again=comes_again)
        if num_requests + num_reserved < most:
            return
        ages_s = [now_s - own.began_s for own in self._places.values() if own.tenant == tenant]
        num_places = max(1, len(ages_s))
        raise ResourceExhaustedError(
            f"{num_requests} requests of {tenant or 'callers without a name'} are here and "
            f"{num_reserved} are due, the limit is {most}; try again when one of them has ended",
            reason="TENANT_LIMIT",
            retry_after_s=queue.refuse(
                now_s, num_places=num_places, mean_age_s=sum(ages_s) / num_places
            ),
        )

    def _check_room(self, now_s: float, *, comes_again: bool) -> None:
        """Raise unless there is a place."""
        num_requests = len(self._places)
        if self._siblings is not None:
            num_requests += self._siblings.num_others
        num_reserved = _take_turn(self._queue, now_s, comes_again=comes_again)
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
        self._free.append(place.place_idx)
        self._tell_siblings(place.place_idx, None)
        held_s = asyncio.get_running_loop().time() - place.began_s
        self._queue.note_end(held_s)
        if queue := self._queue_of_tenant.get(place.tenant):
            queue.note_end(held_s)

    def _tell_siblings(self, place_idx: int, tenant: str | None) -> None:
        if self._siblings is not None:
            self._siblings.note(len(self._places))
            self._siblings.note_holder(place_idx, tenant)


def _take_turn(queue: VirtualQueue, now_s: float, *, comes_again: bool) -> int:
    """Return how many free places are for others than who comes now."""
    if comes_again:
        queue.take_turn(now_s)
        return 0
    return queue.num_reserved(now_s)

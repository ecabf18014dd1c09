"""Many more requests than places, in virtual time: nobody asks often, and no place stays empty."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.admission import Admission
from orchestrator.tenants import TenantLimits
from shared.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from tests.fakes.in_memory import run_virtual, virtual
from tests.siblings import some_siblings

pytestmark = pytest.mark.usefixtures("repeatable_turns")

NUM_PLACES = 60
HOP_S = 0.003
Durations = Callable[[random.Random], float]
DURATIONS: dict[str, Durations] = {
    "alike": lambda _: 2.0,
    "any": lambda rng: rng.expovariate(0.5),
    "long": lambda rng: rng.uniform(10.0, 30.0),
}


@pytest.fixture
def repeatable_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the queue draw the same delays each time: how many requests a client has is chance."""
    monkeypatch.setattr("orchestrator.virtual_queue.random", random.Random(11))


@dataclass
class Crowd:
    """Clients of one server, which come again when they are told to.

    Args:
        says_so: They say that they come again.
        patience_s: After which they give up.
    """

    durations: Durations
    says_so: bool = True
    patience_s: float = 1e9
    admission: Admission = field(default_factory=lambda: Admission(NUM_PLACES))
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    num_refusals: list[int] = field(default_factory=list)  # of each request that ended
    num_served: Counter[int] = field(default_factory=Counter)  # by client
    served_s: float = 0.0
    ended_s: float = 0.0

    async def request(self, client: int) -> None:
        """Ask until there is a place, and hold it."""
        loop = asyncio.get_running_loop()
        began_s, num_refusals = loop.time(), 0
        while True:
            await asyncio.sleep(HOP_S * self.rng.uniform(0.5, 1.5))
            try:
                with self.admission.admit(
                    f"{client}", comes_again=self.says_so and num_refusals > 0
                ):
                    took_s = self.durations(self.rng)
                    await asyncio.sleep(took_s)
                break
            except ResourceExhaustedError as error:
                num_refusals += 1
                wait_s = error.retry_after_s
            if loop.time() + wait_s > began_s + self.patience_s:
                self.num_refusals.append(num_refusals)
                return
            await asyncio.sleep(wait_s)
        self.num_refusals.append(num_refusals)
        self.num_served[client] += 1
        self.served_s += took_s
        self.ended_s = loop.time()

    async def forever(self, client: int) -> None:
        """Send one request after the other."""
        while True:
            await self.request(client)

    @property
    def mean_refusals(self) -> float:
        return sum(self.num_refusals) / len(self.num_refusals)

    def goodput(self, duration_s: float) -> float:
        """Return the share of the places that were used."""
        return self.served_s / (NUM_PLACES * duration_s)


async def for_a_while(*tasks: Coroutine[Any, Any, None], duration_s: float) -> None:
    running = [asyncio.create_task(task) for task in tasks]
    await asyncio.sleep(duration_s)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize("durations", DURATIONS)
@virtual
async def test_six_hundred_requests_on_sixty_places(durations: str, *, says_so: bool) -> None:
    """They all come in the same moment."""
    crowd = Crowd(DURATIONS[durations], says_so)
    await asyncio.gather(*[crowd.request(client) for client in range(10 * NUM_PLACES)])
    assert sum(crowd.num_served.values()) == 10 * NUM_PLACES
    assert crowd.mean_refusals <= 5
    assert max(crowd.num_refusals) <= 20
    if durations == "alike":  # else the end waits for the longest one
        assert crowd.goodput(crowd.ended_s) >= 0.88
    assert crowd.admission.num_requests == 0


@pytest.mark.parametrize(("durations", "duration_s"), [("alike", 100), ("any", 100), ("long", 500)])
def test_at_ten_times_the_load_goodput_stays_and_everybody_gets_on(
    durations: str, duration_s: float
) -> None:
    """Each client sends its next request as soon as the one before has ended."""

    async def main() -> list[Crowd]:
        crowds = []
        for load in (1, 10):
            crowd = Crowd(DURATIONS[durations])
            clients = [crowd.forever(client) for client in range(load * NUM_PLACES)]
            await for_a_while(*clients, duration_s=duration_s)
            crowds.append(crowd)
        return crowds

    usual, crowded = run_virtual(main())
    assert crowded.goodput(duration_s) >= 0.9 * usual.goodput(duration_s)
    assert crowded.mean_refusals <= 5
    fair_share = duration_s * NUM_PLACES / 20 / 600 if durations == "long" else duration_s / 20
    assert max(crowded.num_served.values()) <= 4 * fair_share + 2
    assert len(crowded.num_served) >= 0.95 * 10 * NUM_PLACES, "some were never served"


@virtual
async def test_clients_that_never_come_again_leave_no_place_empty() -> None:
    crowd = Crowd(DURATIONS["any"], patience_s=0.0)
    loop, arrivals = asyncio.get_running_loop(), []
    while loop.time() < 100:
        await asyncio.sleep(crowd.rng.expovariate(10 * NUM_PLACES / 2))
        arrivals.append(asyncio.create_task(crowd.request(len(arrivals))))
    await asyncio.gather(*arrivals)
    assert crowd.goodput(100) >= 0.9


@virtual
async def test_a_delay_grows_with_the_number_that_wait() -> None:
    """And is never the same twice."""
    admission = Admission(2)
    told = []
    with admission.admit("a"), admission.admit("b"):
        await asyncio.sleep(3.0)
        for _ in range(20):
            with pytest.raises(ResourceExhaustedError) as caught, admission.admit("c"):
                pass
            told.append(caught.value.retry_after_s)
    assert len(set(told)) == len(told)
    assert told[0] < 10 and 20 < told[-1] < 40
    assert admission.is_crowded


@virtual
async def test_a_place_is_free_before_its_request_is_read() -> None:
    """But its server waits for that when it drains."""
    admission = Admission(1)
    with admission.admit("a") as place:
        with pytest.raises(InvalidArgumentError), admission.admit("a"):
            pass
        place.release()
        place.release()
        assert admission.num_requests == 0
        with admission.admit("a", tenant="x"):
            assert admission.num_by_tenant == {"x": 1}
        draining = asyncio.create_task(admission.drain())
        await asyncio.sleep(1.0)
        assert not draining.done()
        with pytest.raises(UnavailableError), admission.admit("b"):
            pass
    await draining
    assert not admission.num_by_tenant


@virtual
async def test_a_tenant_has_no_more_requests_than_it_may_and_others_do_not_notice() -> None:
    admission = Admission(10, tenants=TenantLimits("2,batch=1"))
    with admission.admit("a", tenant="batch"), admission.admit("b", tenant="alice"):
        with (
            pytest.raises(ResourceExhaustedError) as caught,
            admission.admit("c", tenant="batch"),
        ):
            pass
        assert caught.value.reason == "TENANT_LIMIT" and caught.value.retry_after_s > 0
        assert "1 requests of batch" in caught.value.message
        assert not admission.is_crowded, "no reader is hurried for that"
        with admission.admit("d", tenant="alice"), admission.admit("e", tenant="bob"):
            assert admission.num_by_tenant == {"batch": 1, "alice": 2, "bob": 1}
    with admission.admit("c", tenant="batch", comes_again=True):
        pass


def test_many_more_requests_of_a_tenant_than_it_may_have_are_all_served() -> None:
    """They are told their turns among themselves, as all are where the server is full."""
    most = 6

    async def main() -> None:
        admission = Admission(NUM_PLACES, tenants=TenantLimits(f"{most}"))
        crowd = Crowd(DURATIONS["alike"], admission=admission)
        requests = [asyncio.create_task(crowd.request(client)) for client in range(10 * most)]
        while not all(request.done() for request in requests):
            assert admission.num_requests <= most
            await asyncio.sleep(0.1)
        assert sum(crowd.num_served.values()) == 10 * most
        assert crowd.mean_refusals <= 5
        assert crowd.goodput(crowd.ended_s) >= 0.5 * most / NUM_PLACES

    run_virtual(main())


@virtual
async def test_processes_that_share_a_port_share_the_limit_of_a_tenant() -> None:
    siblings = some_siblings(3, num_places=4)
    one, two, _ = [Admission(4, each, TenantLimits("2")) for each in siblings]
    with one.admit("a", tenant="alice"), two.admit("b", tenant="alice"):
        for admission in (one, two):
            with pytest.raises(ResourceExhaustedError), admission.admit("c", tenant="alice"):
                pass
            with admission.admit("c", tenant="bob"):
                pass
        siblings[1].forget()  # it has died
        with one.admit("c", tenant="alice"):
            pass

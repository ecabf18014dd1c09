"""Whose turn it is: priority, age and tenant, where requests wait, and where one must go."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest

from orchestrator.pool import Need, WorkerPool
from orchestrator.tenants import TenantLimits, Tenants
from orchestrator.validation import GenerationRequest
from orchestrator.workers import WorkerSession
from shared.errors import ConfigError
from shared.messages import TargetOpen
from shared.priority import LEVEL_S
from target_service.request import Phase, TargetRequest
from tests.fakes import generate
from tests.fakes.in_memory import virtual
from tests.unit.scene import PROMPT, Scene, check_stream
from tests.unit.test_orchestrator_pool import target
from tests.unit.test_scheduler import World

SERVICE_S = 1.0


class Server:
    """A pool with one target that serves one request after the other."""

    def __init__(self) -> None:
        self.num_by_tenant: Counter[str] = Counter()
        self.pool = WorkerPool(num_by_tenant=self.num_by_tenant)
        self.worker = target("t")
        self.pool.open_target(self.worker)
        self.worker.opening.update(f"busy {i}" for i in range(15))  # room for one more
        self.names = itertools.count()
        self.served: list[tuple[str, int]] = []

    async def request(self, *, priority: int = 0, tenant: str = "") -> float:
        """Be served; return how long that took to begin."""
        loop = asyncio.get_running_loop()
        arrived_s, name = loop.time(), f"{next(self.names)}"
        self.num_by_tenant[tenant] += 1
        need = Need(
            request_id=name, num_tokens=10, context_len=20, priority=priority, tenant=tenant,
            arrived_s=arrived_s,
        )  # fmt: skip
        worker: WorkerSession = await self.pool.acquire_target(need, patience_s=1e9)
        began_s = loop.time()
        self.served.append((tenant, priority))
        await asyncio.sleep(SERVICE_S)
        worker.withdraw(name)
        self.num_by_tenant[tenant] -= 1
        self.num_by_tenant += Counter()  # forget those of nobody
        worker.on_load()
        return began_s - arrived_s

    async def forever(self, *, priority: int = 0, tenant: str = "") -> None:
        while True:
            await self.request(priority=priority, tenant=tenant)


@pytest.mark.parametrize("priority", [1, 3])
@virtual
async def test_priority_0_waits_so_many_seconds_per_level_behind_a_flood(priority: int) -> None:
    """Thirty clients, each with its next request at once: more than can ever be served."""
    server = Server()
    flood = [asyncio.create_task(server.forever(priority=priority)) for _ in range(30)]
    await asyncio.sleep(40.0)
    waited_s = await server.request()
    # Those who were there before, and those who come within the time that a level stands for.
    assert waited_s <= 30 * SERVICE_S + LEVEL_S * priority + 2 * SERVICE_S
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


@virtual
async def test_priority_comes_first_among_those_who_came_together() -> None:
    server = Server()
    await asyncio.gather(*[server.request(priority=p) for p in (0, 0, 2, 1, 5)])
    assert [priority for _, priority in server.served] == [0, 5, 2, 1, 0]


@virtual
async def test_a_tenant_with_many_requests_leaves_room_for_one_with_few() -> None:
    server = Server()
    flood = [asyncio.create_task(server.forever(tenant="many")) for _ in range(40)]
    await asyncio.sleep(45.0)
    waits = [await server.request(tenant="few") for _ in range(3)]
    # By itself, in order of arrival, each of them would wait for all of the forty.
    assert max(waits) <= 5 * SERVICE_S
    assert len([tenant for tenant, _ in server.served if tenant == "many"]) > 40
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


def test_priorities_are_limited_by_tenant() -> None:
    tenants = Tenants("10, batch=0,web=20")
    request = GenerationRequest(request_id="r", priority=50)
    assert tenants.own(request, "").priority == 10
    assert tenants.own(request, "batch").priority == 0
    web = tenants.own(request, "web")
    assert (web.priority, web.tenant) == (20, "web")
    low = GenerationRequest(request_id="r", priority=-(2**31))
    assert tenants.own(low, "web").priority == -100
    for wrong in ("high", "web=", "1000", "=x"):
        with pytest.raises(ConfigError, match="--max-priority"):
            Tenants(wrong)


def test_limits_of_requests_are_read_as_those_of_priorities_are() -> None:
    limits = TenantLimits("64, batch=16,root=0")
    assert [limits.of(name) for name in ("alice", "", "batch", "root")] == [64, 64, 16, 0]
    assert TenantLimits().of("alice") == 0
    for wrong in ("many", "batch=", "-1", "batch=1000001"):
        with pytest.raises(ConfigError, match="--max-requests-per-tenant"):
            TenantLimits(wrong)


def test_a_target_admits_by_age_as_well() -> None:
    world = World(max_num_requests=1)
    low = world.open("low", 2)
    admitted: list[str] = []
    for index in range(20):
        world.now = index * 1.0
        world.open(f"high {index}", 2, priority=2)
        [request] = world.step().admitted
        admitted.append(request.request_id)
        world.scheduler.remove(request)
        if request is low:
            break
    assert admitted[:-1] == [f"high {i}" for i in range(len(admitted) - 1)]
    assert admitted[-1] == "low"
    assert abs(world.now - 2 * LEVEL_S) <= 1.0


def tight_world() -> World:
    return World(num_pages=47, page_size=4, max_batch_rows=128)


def grow(request: TargetRequest, num_tokens: int) -> None:
    """Let a request have more output."""
    request.tokens.extend([0] * num_tokens)
    request.launched_len += num_tokens
    request.committed_len += num_tokens


def test_a_new_request_of_higher_priority_is_not_retracted_for_an_older_one() -> None:
    world = tight_world()
    low, high = world.open("low", 20), world.open("high", 20, priority=1)
    world.step()
    world.step()
    grow(high, 36)
    world.queue(low, 64)
    world.queue(high, 64)
    plan = world.step()
    assert plan.retracted == [low] and low.phase is Phase.WAITING
    assert plan.verifies == [high]


def test_age_outweighs_priority_when_somebody_must_go() -> None:
    world = tight_world()
    low = world.open("low", 20)
    world.now = LEVEL_S + 1.0
    high = world.open("high", 20, priority=1)
    world.step()
    world.step()
    grow(low, 36)
    world.queue(high, 64)
    world.queue(low, 64)
    plan = world.step()
    assert plan.retracted == [high] and plan.verifies == [low]


@virtual
async def test_a_request_that_was_retracted_comes_back_as_old_as_it_is() -> None:
    """To the target that opens it anew, its age is priority."""
    scene = Scene(round_s=0.1)
    first = scene.add_target()
    generation = asyncio.create_task(scene.serve(max_new_tokens=200, priority=1))
    await asyncio.sleep(2.5 * LEVEL_S)
    scene.add_target()
    first.lose()
    events = await generation
    check_stream(events, generate(PROMPT, 200))
    opens = [
        message
        for worker in scene.targets
        for message in worker.engine.received
        if isinstance(message, TargetOpen)
    ]
    assert [message.priority for message in opens] == [1, 3]

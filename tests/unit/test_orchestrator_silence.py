"""Which workers operators see as silent: those that requests wait for in vain, and no others."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from orchestrator.rounds import Generation
from orchestrator.silence import SUSPECT_S, Silence, silence_of
from orchestrator.workers import SILENCE_S, WorkerSession
from shared.messages import TokenTree, WorkerLoad
from shared.messages.batches import Batch
from tests.fakes import generate
from tests.fakes.in_memory import InMemoryWorker, virtual
from tests.unit.scene import CONFIG, PROMPT, Scene, check_stream, read
from tests.unit.test_orchestrator_pool import draft

PATIENT = dataclasses.replace(
    CONFIG, draft_timeout_ms=200.0, draft_open_timeout_ms=20_000.0, step_timeout_s=30.0
)
ROUND_S = 0.02


class Waiter:
    """A request that waits for an answer, or for none."""

    def __init__(self, waits_since: float | None) -> None:
        self.waits_since = waits_since

    def receive(self, message: Any) -> None:
        raise AssertionError(message)


def silence(worker: WorkerSession | InMemoryWorker) -> Silence | None:
    session = worker.worker if isinstance(worker, InMemoryWorker) else worker
    return silence_of(session, PATIENT, now_s=asyncio.get_running_loop().time())


def until(when_s: float) -> Any:
    """Lose everything that a worker says after a time; before, it takes as long as a round."""

    def pass_until(message: Any) -> list[tuple[float, Any]]:
        return [(ROUND_S, message)] if asyncio.get_running_loop().time() < when_s else []

    return pass_until


async def seen_over(
    generation: Generation, worker: InMemoryWorker, seconds: int
) -> list[Silence | None]:
    """Return how a worker is seen each second, with a client that reads."""
    tasks = [asyncio.create_task(generation.run()), asyncio.create_task(read(generation))]
    seen = []
    for _ in range(seconds):
        await asyncio.sleep(1.0)
        seen.append(silence(worker))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seen


@pytest.mark.parametrize("has_peer", [False, True])
@pytest.mark.parametrize("stops_s", [0.0, 3.5])
@virtual
async def test_a_draft_that_stops_is_silent_while_requests_wait_for_it(
    stops_s: float, *, has_peer: bool
) -> None:
    """Whether it has begun or not, and whoever takes its trees."""
    scene = Scene(PATIENT, has_peer=has_peer, round_s=ROUND_S)
    target = scene.add_target()
    stops = until(stops_s)
    worker = scene.add_draft(on_reply=stops, on_channel=stops)
    generation = scene.generation(max_new_tokens=5000)
    seen = await seen_over(generation, worker, 8)
    num_well = sum(silence is None for silence in seen)
    assert seen[:num_well] == [None] * num_well
    assert stops_s + SUSPECT_S - 1 <= num_well <= stops_s + SUSPECT_S + 1.5
    lengths = [silence.for_s for silence in seen if silence is not None]
    assert lengths == pytest.approx([lengths[0] + i for i in range(len(lengths))])
    assert seen[-1] is not None and "after 20 s (--draft-open-timeout-ms)" in seen[-1].problem
    assert silence(target) is None, "its rounds go on"
    assert silence(worker) is None, "nobody waits for it any more"


@virtual
async def test_a_target_that_stops_is_silent_and_its_draft_is_not() -> None:
    scene = Scene(PATIENT, has_peer=True, round_s=ROUND_S)
    stops = until(2.5)
    target = scene.add_target(on_reply=stops, on_channel=stops)
    worker = scene.add_draft()
    generation = scene.generation(max_new_tokens=5000)
    running = asyncio.create_task(generation.run())
    reading = asyncio.create_task(read(generation))
    await asyncio.sleep(2.5 + 5.0)
    seen = silence(target)
    assert seen is not None and seen.for_s == pytest.approx(5.0, abs=0.3)
    assert "they leave it after 30 s (--step-timeout-s)" in seen.problem
    assert silence(worker) is None
    running.cancel()
    reading.cancel()
    await asyncio.gather(running, reading, return_exceptions=True)


@pytest.mark.parametrize("has_peer", [False, True])
@virtual
async def test_workers_that_serve_are_not_silent_nor_are_idle_ones(*, has_peer: bool) -> None:
    scene = Scene(PATIENT, has_peer=has_peer, round_s=ROUND_S)
    workers = [scene.add_target(), scene.add_draft()]
    serving = asyncio.create_task(scene.serve(max_new_tokens=1000))
    while not serving.done():
        await asyncio.sleep(0.1)
        assert [silence(worker) for worker in workers] == [None, None]
    check_stream(serving.result(), generate(PROMPT, 1000))
    await asyncio.sleep(60.0)
    assert [silence(worker) for worker in workers] == [None, None]


@virtual
async def test_a_client_that_does_not_read_makes_no_worker_silent() -> None:
    """Nor a draft that has yet to catch up: the target asks it for nothing meanwhile."""
    scene = Scene(PATIENT, has_peer=True)
    lost = [0]

    def lose_trees(message: Any) -> list[tuple[float, Any]]:
        lost[0] += isinstance(message, TokenTree)
        return [] if isinstance(message, TokenTree) else [(0.0, message)]

    workers = [scene.add_target(), scene.add_draft(on_channel=lose_trees)]
    generation = scene.generation(max_new_tokens=50_000)
    running = asyncio.create_task(generation.run())
    await asyncio.sleep(30.0)
    assert not running.done() and not generation.events.has_room and lost[0]
    assert [silence(worker) for worker in workers] == [None, None]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@virtual
async def test_progress_of_an_engine_ends_its_silence() -> None:
    """For whomever it works: what is counted is what it says of itself."""
    worker = draft("d")
    await asyncio.sleep(100.0)
    assert silence(worker) is None
    waiter, other = Waiter(100.0), Waiter(None)
    worker.attach("a", waiter)
    worker.attach("b", other)
    await asyncio.sleep(SUSPECT_S + 1)
    seen = silence(worker)
    assert seen is not None and seen.for_s == pytest.approx(SUSPECT_S + 1)
    worker.receive(Batch(messages=[], load=worker.load))
    assert silence(worker) == seen, "it says something, and its engine has done nothing"
    worker.receive(Batch(messages=[], load=WorkerLoad(num_steps=1)))
    assert silence(worker) is None
    await asyncio.sleep(SUSPECT_S + 1)
    seen = silence(worker)
    assert seen is not None and seen.for_s == pytest.approx(SUSPECT_S + 1), "since the step"
    waiter.waits_since = None
    assert silence(worker) is None


@virtual
async def test_a_worker_that_says_nothing_is_silent_whether_or_not_anybody_waits() -> None:
    worker = draft("d")
    worker.silent_s = SUSPECT_S - 0.5
    assert silence(worker) is None
    worker.silent_s = SUSPECT_S
    assert silence(worker) == Silence(
        problem=f"it says nothing; its session ends after {SILENCE_S:g} s", for_s=SUSPECT_S
    )

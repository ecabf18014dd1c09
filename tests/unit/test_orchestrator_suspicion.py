"""Who is blamed when workers die: the request that the deaths have in common, and no other."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from orchestrator.suspicion import Suspicion
from orchestrator.workers import WorkerSession
from shared.errors import InternalError
from shared.messages import AcceptedPath, TargetOpen
from tests.fakes import FakeTarget, generate
from tests.fakes.in_memory import InMemoryWorker, pass_on, run_virtual
from tests.unit.scene import PROMPT, Scene, check_stream, delayed

minutes = itertools.count(0.0, 60.0)
"""Moments so far apart that deaths have nothing but requests in common."""


def dead(incarnation: str, *suspects: str) -> WorkerSession:
    worker = WorkerSession(
        address=f"{incarnation}:1", info=FakeTarget(incarnation=incarnation).info
    )
    worker.suspects.update(suspects)
    return worker


def test_one_incarnation_dies_once() -> None:
    suspicion = Suspicion("r")
    for _ in range(5):
        suspicion.note_death(dead("a"), now_s=next(minutes))
    assert (suspicion.num_kills, suspicion.is_guilty) == (1, False)
    suspicion.note_death(dead("b"), now_s=next(minutes))
    assert suspicion.is_guilty


def test_two_deaths_with_another_request_in_common_prove_nothing() -> None:
    suspicion = Suspicion("r")
    suspicion.note_death(dead("a", "r", "other", "third"), now_s=next(minutes))
    suspicion.note_death(dead("b", "r", "other"), now_s=next(minutes))
    assert suspicion.needs_trial and not suspicion.is_guilty
    suspicion.note_death(dead("c", "r"), now_s=next(minutes))
    assert suspicion.is_guilty


def test_deaths_within_a_moment_prove_nothing() -> None:
    """Both hosts lost power, and one request had moved between them by then."""
    suspicion, now_s = Suspicion("r"), next(minutes)
    suspicion.note_death(dead("a", "r"), now_s=now_s)
    suspicion.note_death(dead("b", "r"), now_s=now_s + 0.07)
    assert suspicion.needs_trial and not suspicion.is_guilty
    suspicion.note_death(dead("c", "r"), now_s=now_s + 0.14)
    assert suspicion.is_guilty


def test_who_ran_elsewhere_is_acquitted_and_leaves_the_other_alone() -> None:
    mine, others = Suspicion("r"), Suspicion("other")
    first, second = dead("a", "r", "other"), dead("b", "r", "other")
    for suspicion in (mine, others):
        suspicion.note_death(first, now_s=next(minutes))
        suspicion.note_death(second, now_s=next(minutes))
    assert not mine.is_guilty and not others.is_guilty
    others.acquit(dead("c"))
    assert mine.is_guilty
    assert (others.num_kills, others.needs_trial) == (0, False)


def test_a_failure_that_names_the_request_counts_each_time() -> None:
    suspicion, worker = Suspicion("r"), dead("a")
    suspicion.note_failure(worker)
    assert not suspicion.is_guilty
    suspicion.note_failure(worker)
    assert suspicion.is_guilty


def test_a_hung_engine_is_one_kill_however_often_it_is_asked() -> None:
    """One worker, four step timeouts; then it goes on, and so does the request."""

    async def main() -> None:
        scene = Scene()

        def hang(message: Any) -> list[tuple[float, Any]]:
            return pass_on(message) if asyncio.get_running_loop().time() > 9.0 else []

        target = scene.add_target(on_reply=hang)
        finish = check_stream(await scene.serve(), generate(PROMPT, 40))
        assert finish.retries >= 4
        assert not target.worker.is_lost
        await scene.check_free()

    run_virtual(main())


def test_a_bystander_of_many_unrelated_deaths_is_served() -> None:
    """It runs some rounds on every worker, so none of the deaths is its doing."""

    async def main() -> None:
        scene = Scene(round_s=0.02)
        slow = delayed(0.01)
        scene.add_target(on_reply=slow)
        serving = asyncio.create_task(scene.serve(max_new_tokens=200))
        for index in range(5):
            await asyncio.sleep(0.2)
            scene.add_target(on_reply=slow)
            scene.targets[index].lose()
        finish = check_stream(await serving, generate(PROMPT, 200))
        assert finish.retries == 5
        await scene.check_free()

    run_virtual(main())


@pytest.mark.parametrize("deadly", ["prompt", "round"])
@pytest.mark.parametrize("num_targets", [1, 2, 3])
def test_the_poisonous_one_is_refused_and_the_others_are_served(
    num_targets: int, deadly: str
) -> None:
    """Whatever died with it again and again, at most a few workers go down."""
    num_deaths = 0

    async def main() -> None:
        nonlocal num_deaths
        scene = Scene()
        slow = delayed(0.005)

        def add() -> None:
            target: InMemoryWorker

            def is_deadly(message: Any) -> bool:
                if deadly == "prompt":
                    is_it = isinstance(message, TargetOpen)
                else:
                    is_it = isinstance(message, AcceptedPath) and message.round_idx > 0
                return is_it and message.request_id == "test.poison"

            def fault(message: Any) -> list[tuple[float, Any]]:
                if is_deadly(message):
                    asyncio.get_running_loop().call_soon(die, target)
                    return []
                return pass_on(message)

            def reply(message: Any) -> list[tuple[float, Any]]:
                return slow(message) if fault(message) else []

            target = scene.add_target(on_request=fault, on_reply=reply)

        def die(target: InMemoryWorker) -> None:
            nonlocal num_deaths
            if not target.worker.is_lost:
                num_deaths += 1
                target.lose()
                asyncio.get_running_loop().call_later(0.3, add)

        for _ in range(num_targets):
            add()
        names = [f"good{i}" for i in range(6)]
        good = [
            asyncio.create_task(
                scene.serve(name, prompt_ids=(i, 7), max_new_tokens=100, shape=None)
            )
            for i, name in enumerate(names)
        ]
        await asyncio.sleep(0.1)
        with pytest.raises(InternalError) as caught:
            await scene.serve("poison", shape=None, max_new_tokens=100)
        assert caught.value.reason == "REQUEST_KILLED_WORKERS"
        for i, events in enumerate(await asyncio.gather(*good)):
            check_stream(events, generate((i, 7), 100))
        await scene.check_free()
        assert all(not target.worker.on_trial for target in scene.targets)

    run_virtual(main())
    assert 2 <= num_deaths <= 3


def test_requests_that_were_there_both_times_are_tried_one_by_one() -> None:
    """A trial holds up no one but the next one that needs one."""

    async def main() -> None:
        scene = Scene()
        slow = delayed(0.02)
        num_tried: list[int] = []

        def add(*, is_deadly: bool) -> None:
            target: InMemoryWorker

            def on_reply(message: Any) -> list[tuple[float, Any]]:
                if is_deadly and isinstance(message, AcceptedPath):
                    if not target.worker.is_lost:
                        asyncio.get_running_loop().call_soon(target.lose)
                    return []
                if not is_deadly:
                    num_tried.append(len(target.worker.opening))
                return slow(message)

            target = scene.add_target(on_reply=on_reply)

        add(is_deadly=True)
        serving = [
            asyncio.create_task(scene.serve(f"r{i}", prompt_ids=(i, 7), shape=None))
            for i in range(4)
        ]
        await asyncio.sleep(0.5)
        add(is_deadly=True)
        await asyncio.sleep(0.5)
        assert all(not task.done() for task in serving)
        add(is_deadly=False)
        for i, events in enumerate(await asyncio.gather(*serving)):
            check_stream(events, generate((i, 7), 40))
        assert max(num_tried) == 1
        await scene.check_free()

    run_virtual(main())

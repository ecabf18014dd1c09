"""Who is blamed when workers die: the request that the deaths have in common, and no other."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.fates import Fates
from orchestrator.suspicion import MOMENT_S, Suspicion
from orchestrator.workers import SILENCE_S, Fate, WorkerSession
from shared.errors import InternalError
from shared.messages import AcceptedPath, TargetOpen
from tests.fakes import FakeTarget, generate
from tests.fakes.in_memory import InMemoryWorker, pass_on, run_virtual, virtual
from tests.unit.scene import PROMPT, Scene, check_stream, delayed

minutes = itertools.count(0.0, 60.0)
"""Moments so far apart that deaths have nothing but requests in common."""


def broken(incarnation: str, *suspects: str, **fields: Any) -> WorkerSession:
    worker = WorkerSession(
        address=f"{incarnation}:1", info=FakeTarget(incarnation=incarnation).info, **fields
    )
    worker.suspects.update(suspects)
    return worker


def dead(incarnation: str, *suspects: str) -> WorkerSession:
    return broken(incarnation, *suspects, fate=Fate.ENDED)


def test_one_incarnation_dies_once() -> None:
    suspicion = Suspicion("r")
    for _ in range(5):
        suspicion.note_death(dead("a"), now_s=next(minutes))
    assert suspicion.num_kills == 1 and not suspicion.is_guilty(0.0)
    suspicion.note_death(dead("b"), now_s=next(minutes))
    assert suspicion.is_guilty(0.0)


def test_two_deaths_with_another_request_in_common_prove_nothing() -> None:
    suspicion = Suspicion("r")
    suspicion.note_death(dead("a", "r", "other", "third"), now_s=next(minutes))
    suspicion.note_death(dead("b", "r", "other"), now_s=next(minutes))
    assert suspicion.needs_trial and not suspicion.is_guilty(0.0)
    suspicion.note_death(dead("c", "r"), now_s=next(minutes))
    assert suspicion.is_guilty(0.0)


def test_deaths_within_a_moment_prove_nothing() -> None:
    """Both hosts lost power, and one request had moved between them by then."""
    suspicion, now_s = Suspicion("r"), next(minutes)
    suspicion.note_death(dead("a", "r"), now_s=now_s)
    suspicion.note_death(dead("b", "r"), now_s=now_s + 0.07)
    assert suspicion.needs_trial and not suspicion.is_guilty(0.0)
    suspicion.note_death(dead("c", "r"), now_s=now_s + 0.14)
    assert suspicion.is_guilty(0.0)


@pytest.mark.parametrize("is_reported_late", [False, True])
@pytest.mark.parametrize("losses", ["".join(order) for order in itertools.product("DR", repeat=4)])
def test_resets_among_deaths_count_for_nothing(losses: str, *, is_reported_late: bool) -> None:
    """D: a death, R: a reset; which it was is known before the next loss, or after all of them."""
    suspicion = Suspicion("r")
    fates = [Fate.ENDED if loss == "D" else Fate.LIVES for loss in losses]
    workers = [broken(str(i), "r", lost_s=1.1 * i) for i in range(len(losses))]
    for i, worker in enumerate(workers):
        suspicion.note_death(worker, now_s=worker.lost_s)
        num_proved = 0 if is_reported_late else losses[:i].count("D")
        assert suspicion.is_guilty(worker.lost_s) == (num_proved >= 2)
        assert suspicion.is_undecided(worker.lost_s) == (is_reported_late and i >= 2)
        if not is_reported_late:
            worker.fate = fates[i]
    for worker, fate in zip(workers, fates, strict=True):
        worker.fate = fate
    now_s = workers[-1].lost_s
    assert suspicion.is_guilty(now_s) == (losses.count("D") >= 2)
    assert not suspicion.is_undecided(now_s)


def test_who_does_not_answer_in_time_counts_as_dead_until_it_does() -> None:
    suspicion, first, second = Suspicion("r"), broken("a", "r"), broken("b", "r", lost_s=2.0)
    for worker in (first, second):
        suspicion.note_death(worker, now_s=worker.lost_s)
    assert not suspicion.is_guilty(second.lost_s + SILENCE_S - 0.01)
    assert suspicion.is_guilty(second.lost_s + SILENCE_S)
    first.fate = Fate.LIVES
    assert not suspicion.is_guilty(second.lost_s + SILENCE_S)


def test_a_hang_is_one_whoever_answers_later() -> None:
    suspicion = Suspicion("r")
    for worker in (broken("a", "r"), broken("b", "r")):
        suspicion.note_death(worker, now_s=next(minutes), is_broken=False)
        worker.fate = Fate.LIVES
    assert suspicion.is_guilty(0.0)


def test_who_answers_next_says_what_became_of_a_worker() -> None:
    def fate_once(answers: Callable[[Fates], None]) -> Fate:
        fates, lost = Fates(), broken("a")
        fates.note_lost(lost)
        answers(fates)
        return lost.fate

    same, other, elsewhere = broken("a"), broken("b"), broken("b")
    other.address = same.address
    assert fate_once(lambda fates: None) is Fate.UNKNOWN
    assert fate_once(lambda fates: fates.note_answer(same)) is Fate.LIVES
    assert fate_once(lambda fates: fates.note_answer(other)) is Fate.ENDED
    assert fate_once(lambda fates: fates.note_answer(elsewhere)) is Fate.UNKNOWN
    assert fate_once(lambda fates: fates.note_loading(same.address)) is Fate.ENDED
    assert fate_once(lambda fates: fates.note_loading("elsewhere:1")) is Fate.UNKNOWN
    same.address = "elsewhere:1"
    assert fate_once(lambda fates: fates.note_answer(same)) is Fate.LIVES


@pytest.mark.parametrize("is_acquitted_before", [False, True])
def test_who_runs_elsewhere_is_acquitted_and_leaves_the_other_alone_with_later_deaths(
    *, is_acquitted_before: bool
) -> None:
    """Acquitted after both deaths, it tells nothing of the other: nothing may have brought both."""
    mine, others = Suspicion("r"), Suspicion("other")
    first, second = dead("a", "r", "other"), dead("b", "r", "other")
    for suspicion in (mine, others):
        suspicion.note_death(first, now_s=next(minutes))
    if is_acquitted_before:
        others.acquit(dead("c"))
    for suspicion in (mine, others):
        suspicion.note_death(second, now_s=next(minutes))
    assert mine.is_guilty(0.0) == is_acquitted_before
    assert not others.is_guilty(0.0)
    others.acquit(dead("d"))
    assert mine.is_guilty(0.0) == is_acquitted_before
    assert mine.needs_trial
    assert (others.num_kills, others.needs_trial) == (0, False)
    mine.note_death(dead("e", "r"), now_s=next(minutes))
    assert mine.is_guilty(0.0)


def test_a_failure_that_names_the_request_counts_each_time() -> None:
    suspicion, worker = Suspicion("r"), dead("a")
    suspicion.note_failure(worker)
    assert not suspicion.is_guilty(0.0)
    suspicion.note_failure(worker)
    assert suspicion.is_guilty(0.0)


def test_who_leaves_a_worker_stays_suspect_only_of_what_it_went_down_with() -> None:
    """Else the next one to hear of a hang would seem to have been alone there."""
    suspicion = Suspicion("r")
    elsewhere, hung, gone = broken("a", "r"), broken("b", "r"), broken("c", "r")
    suspicion.note_death(hung, now_s=next(minutes), is_broken=False)
    gone.is_lost = True
    for worker in (elsewhere, hung, gone):
        suspicion.leave(worker)
    assert [worker.suspects for worker in (elsewhere, hung, gone)] == [set(), {"r"}, {"r"}]


@virtual
async def test_bystanders_of_a_hang_are_no_suspects_of_a_living_worker_for_ever() -> None:
    """One request hears nothing for long, the other one goes on beside it, and ends."""
    scene = Scene(round_s=0.02)

    def hang(message: Any) -> list[tuple[float, Any]]:
        is_round = isinstance(message, AcceptedPath) and message.round_idx > 0
        return [] if is_round and message.request_id == "test.hung" else pass_on(message)

    target = scene.add_target(on_reply=hang)
    bystander = asyncio.create_task(scene.serve("other", max_new_tokens=200, shape=None))
    hung = asyncio.create_task(scene.serve("hung", shape=None))
    await asyncio.sleep(scene.config.step_timeout_s + 0.5)
    assert target.worker.suspects == {"test.other", "test.hung"}
    target.on_reply = pass_on
    check_stream(await bystander, generate(PROMPT, 200))
    check_stream(await hung, generate(PROMPT, 40))
    assert not target.worker.is_lost and target.worker.suspects == set()
    await scene.check_free()


@virtual
async def test_a_hung_engine_is_one_kill_however_often_it_is_asked() -> None:
    """One worker, four step timeouts; then it goes on, and so does the request."""
    scene = Scene()

    def hang(message: Any) -> list[tuple[float, Any]]:
        return pass_on(message) if asyncio.get_running_loop().time() > 9.0 else []

    target = scene.add_target(on_reply=hang)
    finish = check_stream(await scene.serve(), generate(PROMPT, 40))
    assert finish.retries >= 4
    assert not target.worker.is_lost
    await scene.check_free()


@virtual
async def test_a_bystander_of_many_unrelated_deaths_is_served() -> None:
    """It runs some rounds on every worker, so none of the deaths is its doing."""
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


@pytest.mark.parametrize("losses", ["".join(order) for order in itertools.product("DR", repeat=3)])
@virtual
async def test_only_deaths_end_a_request_that_loses_target_after_target(losses: str) -> None:
    """Each time it has not run a round yet; D: the process dies, R: its connection is reset."""
    scene, left = Scene(), list(losses)

    def lose(message: Any) -> list[tuple[float, Any]]:
        if not isinstance(message, TargetOpen) or not left:
            return pass_on(message)
        lost = next(t for t in scene.targets if t.worker.num_own_requests)
        is_dead = left.pop(0) == "D"
        loop = asyncio.get_running_loop()
        loop.call_later(1.2 * MOMENT_S, lost.lose if is_dead else lost.reset)
        if is_dead:
            address = lost.worker.address
            loop.call_later(1.5 * MOMENT_S, lambda: scene.add_target(address=address))
        return []

    for _ in range(4):
        scene.add_target(on_request=lose)
    if losses[:2] == "DD":
        with pytest.raises(InternalError) as caught:
            await scene.serve()
        assert caught.value.reason == "REQUEST_KILLED_WORKERS"
    else:
        assert check_stream(await scene.serve(), generate(PROMPT, 40)).retries == 3
    await scene.check_free()


@virtual
async def test_connections_that_are_reset_all_the_time_cost_no_token() -> None:
    """Two targets; often not one round runs between two resets."""
    scene = Scene(round_s=0.1)
    for _ in range(2):
        scene.add_target(on_reply=delayed(1.2 * MOMENT_S))
    serving = asyncio.create_task(scene.serve())
    num_resets, pauses_s = 0, itertools.cycle([1.1, 1.1, 1.1, 2.5])
    while not serving.done():
        await asyncio.sleep(next(pauses_s) * MOMENT_S)
        for target in scene.targets:
            if target.worker.num_own_requests:
                target.reset()
                num_resets += 1
    finish = check_stream(await serving, generate(PROMPT, 40))
    assert finish.retries == num_resets >= 8
    await scene.check_free()


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


@pytest.mark.parametrize("apart_s", [0.5 * MOMENT_S, 2.0 * MOMENT_S])
@virtual
async def test_requests_that_were_there_both_times_are_tried_one_by_one(apart_s: float) -> None:
    """A trial holds up no one but the next one that needs one; all are bystanders, the last too."""
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

        address = scene.targets[-1].worker.address if scene.targets else ""
        target = scene.add_target(on_reply=on_reply, address=address)

    add(is_deadly=True)
    serving = [
        asyncio.create_task(scene.serve(f"r{i}", prompt_ids=(i, 7), shape=None)) for i in range(4)
    ]
    await asyncio.sleep(apart_s)
    add(is_deadly=True)
    await asyncio.sleep(0.5)
    assert all(not task.done() for task in serving)
    add(is_deadly=False)
    for i, events in enumerate(await asyncio.gather(*serving)):
        check_stream(events, generate((i, 7), 40))
    assert max(num_tried) == 1
    await scene.check_free()

"""Workers that drain: their requests move where there is room, or end where they are."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.moves import MAX_MOVING
from orchestrator.workers import WorkerSession
from shared.messages import DraftOpen, TargetOpen
from tests.fakes import FakeTarget, generate
from tests.fakes.engine import NUM_PAGES
from tests.fakes.in_memory import Fault, InMemoryWorker, virtual
from tests.unit.scene import PROMPT, Scene, check_stream, read


def drain(worker: InMemoryWorker, *, is_draining: bool = True) -> None:
    """Say it as the watch of the worker's health does."""
    session: WorkerSession = worker.worker
    session.is_draining = is_draining
    session.on_load()


@virtual
async def test_requests_leave_a_target_that_drains() -> None:
    """Its requests go on elsewhere long before they would have ended; new ones do not come."""
    scene = Scene(has_peer=True)
    first, draft = scene.add_target(), scene.add_draft()
    serving = [asyncio.create_task(scene.serve(f"r{i}", max_new_tokens=1500)) for i in range(9)]
    await asyncio.sleep(0.05)
    second = scene.add_target()
    drain(first)
    await asyncio.sleep(0.5)
    assert first.engine.requests == {}
    assert not first.worker.is_lost
    serving.append(asyncio.create_task(scene.serve("late", max_new_tokens=1500)))
    for task in serving:
        finish = check_stream(await task, generate(PROMPT, 1500))
        assert finish.speculation.num_draft_tokens > 0
    assert len(first.received(TargetOpen)) == 9
    assert len(second.received(TargetOpen)) == 10
    assert {m.target_address for m in draft.received(DraftOpen)} == {"t:0", "t:1"}
    await scene.check_free()


@virtual
async def test_requests_stay_where_they_are_while_there_is_no_other_place() -> None:
    """A target that drains serves what it has; what comes meanwhile waits for another one."""
    scene = Scene()
    first = scene.add_target()
    serving = asyncio.create_task(scene.serve(max_new_tokens=200))
    await asyncio.sleep(0.05)
    drain(first)
    finish = check_stream(await serving, generate(PROMPT, 200))
    assert finish.retries == 0
    drain(first, is_draining=False)
    check_stream(await scene.serve("next"), generate(PROMPT, 40))
    await scene.check_free()


@virtual
async def test_requests_do_not_move_to_a_full_target() -> None:
    """They move once it has pages for them."""
    scene = Scene()
    first, second = scene.add_target(), scene.add_target()
    drain(second)
    serving = asyncio.create_task(scene.serve(max_new_tokens=1500))
    await asyncio.sleep(0.05)
    drain(second, is_draining=False)
    other = asyncio.create_task(scene.serve("other", max_new_tokens=1500))
    await asyncio.sleep(0.05)
    assert set(second.engine.requests) == {"test.other"}
    assert isinstance(second.engine, FakeTarget)
    second.engine.num_pages_taken = NUM_PAGES
    second.step()
    await asyncio.sleep(0.01)
    drain(first)
    await asyncio.sleep(0.5)
    assert set(first.engine.requests) == {"test.r"}
    second.engine.num_pages_taken = 0
    await asyncio.sleep(0.1)
    assert set(second.engine.requests) == {"test.r", "test.other"}
    check_stream(await serving, generate(PROMPT, 1500))
    check_stream(await other, generate(PROMPT, 1500))
    await scene.check_free()


@virtual
async def test_few_requests_are_on_their_way_at_a_time() -> None:
    """So that none of them waits for the prefills of all."""
    scene = Scene()
    first = scene.add_target()
    serving = [asyncio.create_task(scene.serve(f"r{i}", max_new_tokens=2000)) for i in range(9)]
    await asyncio.sleep(0.05)
    slow: Fault = lambda message: [(0.2, message)]  # noqa: E731
    second = scene.add_target(on_request=slow)
    drain(first)
    await asyncio.sleep(0.1)
    assert len(first.engine.requests) == 9 - MAX_MOVING
    for task in serving:
        check_stream(await task, generate(PROMPT, 2000))
    assert second.engine.received
    await scene.check_free()


@virtual
async def test_requests_whose_clients_do_not_read_hold_up_no_others() -> None:
    """They leave a target that drains, and go to another one once their clients read."""
    scene = Scene()
    first = scene.add_target()
    unread = [
        scene.generation(f"unread{i}", max_new_tokens=2000, shape=None)
        for i in range(MAX_MOVING + 1)
    ]
    running = [asyncio.create_task(generation.run()) for generation in unread]
    await asyncio.sleep(5.0)
    assert not any(generation.events.has_room for generation in unread)
    assert not any(task.done() for task in running)
    serving = [asyncio.create_task(scene.serve(f"r{i}", max_new_tokens=3000)) for i in range(3)]
    await asyncio.sleep(0.05)
    second = scene.add_target()
    drain(first)
    await asyncio.sleep(0.5)
    assert first.engine.requests == {}
    assert second.engine.requests.keys() == {"test.r0", "test.r1", "test.r2"}
    for events in await asyncio.gather(*map(read, unread)):
        assert check_stream(events, generate(PROMPT, 2000)).retries == 1
    for task in serving:
        check_stream(await task, generate(PROMPT, 3000))
    await asyncio.gather(*running)
    await scene.check_free()


@virtual
async def test_a_request_that_ends_on_its_way_makes_room_for_the_next() -> None:
    scene = Scene()
    first = scene.add_target()
    serving = [asyncio.create_task(scene.serve(f"r{i}", max_new_tokens=1500)) for i in range(9)]
    await asyncio.sleep(0.05)
    never: Fault = lambda message: []  # noqa: E731
    second = scene.add_target(on_request=never)
    drain(first)
    await asyncio.sleep(0.1)
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)
    second.lose()
    scene.add_target()
    serving = [asyncio.create_task(scene.serve(f"n{i}", max_new_tokens=1500)) for i in range(9)]
    await asyncio.sleep(0.05)
    drain(scene.targets[-1])
    scene.add_target()
    await asyncio.sleep(1.0)
    assert scene.targets[-2].engine.requests == {}
    for task in serving:
        check_stream(await task, generate(PROMPT, 1500))
    await scene.check_free()


@pytest.mark.parametrize("has_peer", [False, True])
@virtual
async def test_another_draft_takes_over_from_one_that_drains(has_peer: bool) -> None:  # noqa: FBT001
    scene = Scene(has_peer=has_peer)
    scene.add_target()
    first = scene.add_draft()
    serving = asyncio.create_task(scene.serve(max_new_tokens=2000))
    await asyncio.sleep(0.1)
    drain(first)
    await asyncio.sleep(0.1)
    assert first.engine.requests  # there is no other one: it goes on
    second = scene.add_draft()
    await asyncio.sleep(0.1)
    assert first.engine.requests == {}
    finish = check_stream(await serving, generate(PROMPT, 2000))
    assert finish.retries == 1
    assert second.received(DraftOpen)
    assert finish.speculation.num_root_only_rounds < finish.speculation.num_rounds / 2
    await scene.check_free()


@settings(max_examples=25)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["target", "draft"]),
            st.integers(0, 1),
            st.sampled_from(["drain", "undrain", "replace"]),
            st.floats(0.0, 0.08),
        ),
        max_size=12,
    ),
    has_peer=st.booleans(),
)
@virtual
async def test_no_order_of_drains_changes_an_output(
    events: list[tuple[str, int, str, float]],
    has_peer: bool,  # noqa: FBT001
) -> None:
    scene = Scene(has_peer=has_peer)
    workers = {
        "target": [scene.add_target(), scene.add_target()],
        "draft": [scene.add_draft(), scene.add_draft()],
    }
    serving = [asyncio.create_task(scene.serve(f"r{i}", max_new_tokens=150)) for i in range(6)]
    for role, index, act, delay_s in events:
        await asyncio.sleep(delay_s)
        worker = workers[role][index]
        drain(worker, is_draining=act != "undrain")
        if act == "replace":
            add = scene.add_target if role == "target" else scene.add_draft
            workers[role][index] = add()
            await asyncio.sleep(delay_s)
            worker.lose(is_clean=True)
    drain(workers["target"][0], is_draining=False)  # a new request must find a place
    for task in serving:
        check_stream(await task, generate(PROMPT, 150))
    await scene.check_free()

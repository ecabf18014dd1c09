"""Peer rounds as the orchestrator sees them: it takes paths, and steps in when none comes."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from orchestrator.target_handle import CREDIT_ROUNDS
from shared.errors import StatusCode
from shared.messages import (
    AcceptedPath,
    Credit,
    CreditUpdate,
    DraftDetached,
    DraftOpen,
    DraftRound,
    FinishInfo,
    FinishReason,
    RootOnly,
    TokenTree,
    VerifyRound,
)
from tests.fakes import FakeDraft, FakeTarget, generate
from tests.fakes.in_memory import (
    LATENCY_S,
    ROUND_S,
    Fault,
    InMemoryWorker,
    pass_on,
    run_virtual,
    virtual,
)
from tests.fakes.target import ASK_ROUNDS
from tests.unit.scene import (
    BAD_TREES,
    CONFIG,
    PROMPT,
    Scene,
    check_stream,
    delayed,
    failed,
    scripted,
    spoiled,
)

NUM_TOKENS = 400  # about 110 rounds


async def serve(scene: Scene, count: int = NUM_TOKENS, **fields: Any) -> FinishInfo:
    """Serve a request and check its stream."""
    events = await scene.serve(max_new_tokens=count, **fields)
    finish = check_stream(events, generate(PROMPT, count))
    await scene.check_free()
    return finish


def credits_of(target: Any) -> list[Credit]:
    """Return the credits that a target was given after the opening one."""
    return [message.credit for message in target.received(CreditUpdate)]


def missed(target: InMemoryWorker) -> list[VerifyRound]:
    """Return the orders of rounds, which say that one was waited for in vain, or a draft lost."""
    return target.received(VerifyRound)


def nothing(message: Any) -> list[tuple[float, Any]]:
    return []


CATCH_UP_ROUNDS = 3
"""Of the root alone, at most, before a draft without faults has caught up."""


@virtual
async def test_peer_rounds_begin_as_soon_as_the_draft_has_caught_up() -> None:
    """No round is ordered; nothing is sent but credit, and it never runs out."""
    scene = Scene(has_peer=True)
    left = []

    def note(message: Any) -> list[tuple[float, Any]]:
        if isinstance(message, CreditUpdate) and credits_of(target):
            (request,) = target.engine.requests.values()
            left.append(credits_of(target)[-1].until_round_idx - request.round_idx)
        return pass_on(message)

    target, draft = scene.add_target(on_request=note), scene.add_draft()
    stats = (await serve(scene, 2000)).speculation
    assert stats.num_root_only_rounds <= CATCH_UP_ROUNDS and stats.accept_length > 2
    assert missed(target) == []
    orders = draft.received(DraftRound)
    assert len(orders) <= CATCH_UP_ROUNDS and all(order.unless_attached for order in orders)
    limits = [credit.until_round_idx for credit in credits_of(target)]
    assert limits == [1 + CREDIT_ROUNDS + i * (CREDIT_ROUNDS // 2 + 1) for i in range(len(limits))]
    assert len(limits) > 4 and min(left) > CREDIT_ROUNDS // 4


@pytest.mark.parametrize("has_peer", [False, True])
@pytest.mark.parametrize("reading_s", [0.0, 0.05, 0.15])
@virtual
async def test_a_newcomer_decodes_at_once_while_its_draft_reads(
    *, has_peer: bool, reading_s: float
) -> None:
    """Its first tokens come as in plain decoding, and no wait is noticed later either."""
    scene = Scene(has_peer=has_peer)
    times: list[float] = []

    def note(message: Any) -> list[tuple[float, Any]]:
        if isinstance(message, AcceptedPath):
            times.append(asyncio.get_running_loop().time())
        return pass_on(message)

    scene.add_target(on_reply=note)

    def slow(message: Any) -> list[tuple[float, Any]]:
        left_s = max(reading_s - asyncio.get_running_loop().time(), 0.0)
        return [(left_s if isinstance(message, TokenTree) else 0.0, message)]

    scene.add_draft(on_reply=slow, on_channel=slow)
    stats = (await serve(scene)).speculation
    num_alone = max(round(reading_s / ROUND_S) - 5, 0)  # it is opened after 5 ms
    assert num_alone <= stats.num_root_only_rounds <= num_alone + 15
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps[:num_alone], default=0.0) < 1.01 * ROUND_S
    assert max(gaps) < 6 * LATENCY_S
    assert stats.num_accepted_drafts > 100


@virtual
async def test_rounds_of_workers_that_are_not_attached_are_relayed() -> None:
    """Once the first tree is here: until then the target goes on by itself, for nobody waits."""
    scene = Scene()
    target, draft = scene.add_target(), scene.add_draft()
    stats = (await serve(scene)).speculation
    assert stats.num_root_only_rounds < 8
    assert len(credits_of(target)) == 1
    num_rounds = stats.num_rounds
    assert num_rounds - 8 < len(target.received(VerifyRound)) <= num_rounds
    assert len(draft.received(DraftRound)) == num_rounds


def from_tree(number: int, *faults: Fault) -> Fault:
    """Apply faults to the trees that come over a channel, from the `number`-th on."""
    return scripted(iter([*[pass_on] * number, *faults]), only=TokenTree)


HANGS: dict[str, tuple[Fault, int]] = {
    "lost": (nothing, 1),
    "late": (delayed(0.1), 1),
    "twice": (lambda tree: [(0.0, tree), (0.0005, tree)], 0),
    "another round": (lambda tree: [(0.0, dataclasses.replace(tree, round_idx=1))], 1),
}


@pytest.mark.parametrize("fault", HANGS)
@pytest.mark.parametrize("number", [0, 1, 7, 40])
@virtual
async def test_a_missing_tree_costs_one_wait_and_a_round_of_the_root_alone(
    fault: str, number: int
) -> None:
    """Then the draft catches up, and peer rounds go on."""
    scene = Scene(has_peer=True)
    target = scene.add_target()
    change, num_misses = HANGS[fault]
    draft = scene.add_draft(on_channel=from_tree(number, change))
    started = asyncio.get_running_loop().time()
    finish = await serve(scene)
    assert finish.retries == 0
    # The first tree is not waited for; if it is lost, another one is ordered some rounds later.
    num_behind = ASK_ROUNDS if number == 0 else 4
    assert finish.speculation.num_root_only_rounds <= CATCH_UP_ROUNDS + num_behind * num_misses
    assert len(missed(target)) <= num_misses
    assert len(draft.received(DraftOpen)) == 1
    wasted = asyncio.get_running_loop().time() - started - 5.0  # of check_free
    assert wasted < 0.15


@virtual
async def test_rounds_of_a_draft_whose_trees_never_come_are_relayed() -> None:
    """It is attached, but no tree of its ever gets to the target: in time it counts as silent."""
    scene = Scene(has_peer=True)
    target = scene.add_target()
    draft = scene.add_draft(on_channel=scripted(iter([nothing] * 999), only=TokenTree))
    finish = await serve(scene, 1000)
    assert finish.retries == 1
    silence_s = CONFIG.draft_open_timeout_ms / 1e3
    reopened_after_s = 0.1
    on_the_way_s = 0.01  # the next open, its first order and its first tree
    num_alone = (silence_s + reopened_after_s + on_the_way_s) / ROUND_S
    assert finish.speculation.num_root_only_rounds <= num_alone
    orders = [m for m in draft.received(DraftRound) if m.draft_epoch == 2]
    assert orders and not any(order.unless_attached for order in orders)
    assert len(missed(target)) > 100, "they are relayed"


@pytest.mark.parametrize("number", [1, 7, 40])
@virtual
async def test_rounds_of_a_draft_whose_trees_cease_to_come_are_relayed(number: int) -> None:
    scene = Scene(has_peer=True)
    target = scene.add_target()
    scene.add_draft(on_channel=from_tree(number, *[nothing] * 9999))
    finish = await serve(scene, 1000)
    assert finish.retries == 1
    assert finish.speculation.num_root_only_rounds <= 350
    assert len(missed(target)) > 100


@pytest.mark.parametrize("wrong", [name for name in BAD_TREES if name != "score is NaN"])
@virtual
async def test_a_wrong_tree_over_the_peer_channel_replaces_the_draft(wrong: str) -> None:
    scene = Scene(has_peer=True)
    target = scene.add_target()
    draft = scene.add_draft(on_channel=from_tree(9, spoiled(BAD_TREES[wrong])))
    finish = await serve(scene)
    assert finish.retries == 1
    assert [m.draft_epoch for m in draft.received(DraftOpen)] == [1, 2]
    assert credits_of(target)[-1].trees.draft_epoch == 2, "peer rounds again"
    reopened_after_s = 0.1
    num_alone = reopened_after_s / ROUND_S + 2 * CATCH_UP_ROUNDS
    assert finish.speculation.num_root_only_rounds <= num_alone


@virtual
async def test_a_wrong_tree_of_a_revoked_round_fails_nothing() -> None:
    """The target says so after the credit was revoked; the round is ordered again."""
    scene = Scene()

    def spoil(path: AcceptedPath) -> list[tuple[float, Any]]:
        ((_, failure),) = failed(StatusCode.INVALID_ARGUMENT, "INVALID_TREE")(path)
        return [(0.0, failure), (0.001, path)]

    script = iter([pass_on, pass_on, spoil])
    target = scene.add_target(on_reply=scripted(script, only=AcceptedPath))
    assert (await serve(scene, 20)).retries == 0
    rounds = [m.round_idx for m in missed(target)]
    assert rounds[0] == 2, "the wrong one is ordered"


def lose(scene: Scene, draft: InMemoryWorker) -> None:
    draft.lose()


def retract(scene: Scene, draft: InMemoryWorker) -> None:
    assert isinstance(draft.engine, FakeDraft)
    draft.engine.retract("test.r")
    draft.step()


@pytest.mark.parametrize("delay", [0.0101, 0.0123, 0.0207])
@pytest.mark.parametrize("miss", [lose, retract])
@virtual
async def test_a_draft_that_goes_away_is_replaced(
    miss: Callable[[Scene, InMemoryWorker], None], delay: float
) -> None:
    scene = Scene(has_peer=True)
    target = scene.add_target()
    drafts = [scene.add_draft(), scene.add_draft()]
    serving = asyncio.create_task(serve(scene))
    await asyncio.sleep(delay)
    (used,) = [draft for draft in drafts if draft.engine.requests]
    (held,) = target.engine.requests.values()
    assert held.round_idx > 5
    miss(scene, used)
    finish = await serving
    assert finish.retries == 1
    assert credits_of(target)[-1].trees.draft_epoch == 2
    assert finish.speculation.num_accepted_drafts > 100


def detach(*workers: InMemoryWorker) -> None:
    for worker in workers:
        worker.engine.lose_channel("test.r")
        worker.step()


# A peer round takes 0.4 ms, a hop to or from the orchestrator 1 ms.
@pytest.mark.parametrize("delay", [0.0101, 0.01025, 0.0104, 0.0123, 0.0207])
@pytest.mark.parametrize("draft_knows", [False, True])
@virtual
async def test_a_lost_channel_costs_no_wait(*, draft_knows: bool, delay: float) -> None:
    """The target says so; that the draft still says it is attached changes nothing."""
    scene = Scene(has_peer=True)
    target, draft = scene.add_target(), scene.add_draft()
    serving = asyncio.create_task(serve(scene))
    await asyncio.sleep(delay)
    assert credits_of(target) and missed(target) == []
    (held,) = target.engine.requests.values()
    before = held.round_idx
    detach(target, *([draft] if draft_knows else []))
    await asyncio.sleep(2.5 * LATENCY_S)
    assert held.round_idx >= before + 2, "the target goes on by itself"
    finish = await serving
    assert finish.retries == 0 and len(draft.received(DraftOpen)) == 1
    assert credits_of(target)[-1].trees == RootOnly(), "no more peer rounds"
    assert finish.speculation.num_root_only_rounds <= CATCH_UP_ROUNDS + 10
    assert finish.speculation.accept_length > 2


@pytest.mark.parametrize("delay", [0.0101, 0.01025, 0.0104, 0.0123])
@virtual
async def test_a_draft_that_hangs_behind_a_lost_channel_is_not_waited_for(delay: float) -> None:
    """The path of the revoked round may still come with a tree: the draft hangs all the same."""
    scene = Scene(has_peer=True)
    late = itertools.repeat(delayed(LATENCY_S / 2))
    target = scene.add_target(on_reply=scripted(late, only=AcceptedPath))
    scene.add_draft(on_reply=scripted(itertools.repeat(nothing), only=TokenTree))
    serving = asyncio.create_task(serve(scene, 120))
    await asyncio.sleep(delay)
    (held,) = target.engine.requests.values()
    before = held.round_idx
    detach(target)
    await asyncio.sleep(10 * LATENCY_S)
    assert held.round_idx >= before + 5
    await serving


@pytest.mark.parametrize("delay", [0.0101, 0.0123, 0.0207])
@virtual
async def test_a_lost_channel_that_no_message_reports_costs_no_wait(delay: float) -> None:
    """The target's rounds have no trees any more, so the draft is asked for them again."""
    scene = Scene(has_peer=True)
    target = scene.add_target(on_reply=scripted(iter([nothing]), only=DraftDetached))
    draft = scene.add_draft()
    serving = asyncio.create_task(serve(scene))
    await asyncio.sleep(delay)
    detach(target, draft)
    await asyncio.sleep(0.015)
    assert len(target.received(VerifyRound)) > 1
    finish = await serving
    assert finish.retries == 0
    assert finish.speculation.num_root_only_rounds <= CATCH_UP_ROUNDS + 10


@pytest.mark.parametrize("delay_us", range(3500, 9000, 250))
@pytest.mark.parametrize("draft_knows", [False, True])
@virtual
async def test_a_channel_that_is_lost_around_the_first_peer_round_costs_no_wait(
    delay_us: int, *, draft_knows: bool
) -> None:
    """While the draft is asked for its first tree, while that is on its way, or just after."""
    scene = Scene(has_peer=True)
    paths: list[float] = []

    def note(message: Any) -> list[tuple[float, Any]]:
        if isinstance(message, AcceptedPath):
            paths.append(asyncio.get_running_loop().time())
        return pass_on(message)

    target, draft = scene.add_target(on_reply=note), scene.add_draft()
    serving = asyncio.create_task(serve(scene))
    await asyncio.sleep(delay_us / 1e6)
    assert target.engine.requests["test.r"].draft_epoch == 1, "it is attached"
    detach(target, *([draft] if draft_knows else []))
    finish = await serving
    assert len(missed(target)) > 50, "relayed"
    assert finish.speculation.num_root_only_rounds <= 15
    assert max(after - before for before, after in pairwise(paths)) < 8 * LATENCY_S


@pytest.mark.parametrize("stale", [{"target_epoch": 0}, {"draft_epoch": 0}, {"draft_epoch": 2}])
@virtual
async def test_a_lost_channel_of_another_epoch_changes_nothing(stale: dict[str, int]) -> None:
    scene = Scene(has_peer=True)
    target = scene.add_target()
    scene.add_draft()
    serving = asyncio.create_task(serve(scene))
    await asyncio.sleep(0.0123)
    epochs = {"target_epoch": 1, "draft_epoch": 1, **stale}
    assert isinstance(target.engine, FakeTarget)
    target.engine.outbox.append(DraftDetached(request_id="test.r", **epochs))
    target.step()
    assert (await serving).speculation.num_root_only_rounds <= CATCH_UP_ROUNDS
    assert missed(target) == []


@virtual
async def test_a_draft_whose_request_rests_is_left_alone() -> None:
    """For much longer than a draft may be silent; then its trees are waited for again."""
    scene = Scene(has_peer=True)
    target, draft = scene.add_target(), scene.add_draft()
    serving = asyncio.create_task(serve(scene, 2000))
    await asyncio.sleep(0.0123)
    assert isinstance(target.engine, FakeTarget)
    target.engine.rest("test.r", is_resting=True)
    target.step()
    await asyncio.sleep(0.01)
    before = len(draft.received(DraftRound))
    await asyncio.sleep(1.5 * CONFIG.draft_open_timeout_ms / 1e3)
    assert len(draft.received(DraftRound)) == before
    target.engine.rest("test.r", is_resting=False)
    target.step()
    finish = await serving
    assert finish.retries == 0 and missed(target) == []
    assert len(draft.received(DraftOpen)) == 1
    stats = finish.speculation
    assert stats.num_resting_rounds > 250
    assert stats.num_root_only_rounds - stats.num_resting_rounds <= CATCH_UP_ROUNDS + 8
    assert sum(stats.tree_size_histogram) == stats.num_rounds
    assert sum(stats.tree_size_histogram[2:]) > 100, "trees again"


@pytest.mark.parametrize("delay", [0.0101, 0.0123, 0.0207])
@pytest.mark.parametrize("is_clean", [False, True])
@virtual
async def test_a_lost_target_is_replaced_and_peer_rounds_go_on(
    *, delay: float, is_clean: bool
) -> None:
    scene = Scene(has_peer=True)
    targets = [scene.add_target(), scene.add_target()]
    scene.add_draft()
    serving = asyncio.create_task(serve(scene))
    await asyncio.sleep(delay)
    (used,) = [target for target in targets if target.engine.requests]
    used.lose(is_clean=is_clean)
    assert (await serving).retries == 1
    (other,) = [target for target in targets if target is not used]
    assert missed(other) == []
    assert {m.target_epoch for m in other.received(CreditUpdate)} == {2}


@pytest.mark.parametrize("stall_s", [0.03, 0.1, 0.5])
@virtual
async def test_answers_that_come_all_at_once_are_not_lost(stall_s: float) -> None:
    """The target goes on while the orchestrator hears nothing and revokes a round in vain."""
    scene = Scene(has_peer=True)

    def stall(message: Any) -> list[tuple[float, Any]]:
        """Hold whatever leaves in the first part of a second until that part is over."""
        past = asyncio.get_running_loop().time() % 1.0 - 0.02
        return [(stall_s - past if 0 <= past < stall_s else 0.0, message)]

    target = scene.add_target(on_reply=stall)
    scene.add_draft()
    finish = await serve(scene)
    assert finish.retries == 0
    assert finish.timings.total_ms < 1000
    assert {m.target_epoch for m in target.received(CreditUpdate)} == {1}
    assert finish.speculation.num_root_only_rounds <= CATCH_UP_ROUNDS, "it was never late"
    assert len(missed(target)) == 1


@virtual
async def test_a_target_that_is_late_again_and_again_is_not_held_against_the_draft() -> None:
    scene = Scene(has_peer=True)
    held_until = 0.0

    def slow(message: Any) -> list[tuple[float, Any]]:
        nonlocal held_until  # a stream keeps its order: later messages wait as well
        now = asyncio.get_running_loop().time()
        if isinstance(message, AcceptedPath) and message.round_idx % 40 == 20:
            held_until = now + 0.1
        return [(max(0.0, held_until - now), message)]

    target = scene.add_target(on_reply=slow)
    draft = scene.add_draft()
    finish = await serve(scene, 2400)
    assert finish.speculation.num_root_only_rounds <= CATCH_UP_ROUNDS + 1
    num_misses = len(missed(target))
    assert num_misses > 6, "one of each late answer"
    num_orders = len(draft.received(DraftRound))
    assert num_orders <= CATCH_UP_ROUNDS + 3 * num_misses, "peer rounds go on at once"


@virtual
async def test_a_target_that_is_slow_in_every_round_is_soon_waited_for() -> None:
    """Rounds that take longer than a draft may are revoked only until that is known."""
    scene = Scene(has_peer=True)

    def slow(message: Any) -> list[tuple[float, Any]]:
        is_path = isinstance(message, AcceptedPath)
        return [(0.03 * message.round_idx if is_path else 0.0, message)]

    target = scene.add_target(on_reply=slow)
    scene.add_draft()
    stats = (await serve(scene)).speculation
    assert stats.num_rounds > 100 and stats.num_root_only_rounds < CATCH_UP_ROUNDS + 4
    assert len(missed(target)) < 20


@virtual
async def test_cancelling_frees_both_workers() -> None:
    for delay in (0.004, 0.0075, 0.01, 0.0213):
        scene = Scene(has_peer=True)
        target, draft = scene.add_target(), scene.add_draft()
        serving = asyncio.create_task(scene.generation(max_new_tokens=900).run())
        await asyncio.sleep(delay)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await asyncio.sleep(0.005)
        assert target.engine.requests == {} and draft.engine.requests == {}
        await scene.check_free()


@pytest.mark.parametrize("place", [30, 31, 32, 33, 34])
@virtual
async def test_a_stop_token_in_a_peer_round(place: int) -> None:
    """The target ends the request by itself, wherever in a path the token is."""
    scene = Scene(has_peer=True)
    scene.add_target()
    scene.add_draft()
    whole = generate(PROMPT, 60)
    stop = whole[place]
    kept = whole[: whole.index(stop)]
    finish = check_stream(await scene.serve(stop_token_ids=(stop,)), kept)
    assert (finish.reason, finish.matched_stop) == (FinishReason.STOP, stop)
    await scene.check_free()


@virtual
async def test_peer_rounds_that_fill_the_context() -> None:
    scene = Scene(has_peer=True)
    for worker in (target := scene.add_target(), scene.add_draft()):
        worker.engine.max_context_len = 64
        worker.worker.info = worker.engine.info
    count = 64 - len(PROMPT)
    events = await scene.serve(max_new_tokens=None)
    finish = check_stream(events, generate(PROMPT, count))
    assert finish.reason is FinishReason.CONTEXT_LENGTH
    assert missed(target) == []
    await scene.check_free()


@pytest.mark.parametrize("count", [1, 2])
def test_short_requests_wait_for_nobody(caplog: pytest.LogCaptureFixture, count: int) -> None:
    async def main() -> None:
        scene = Scene(has_peer=True)
        target, draft = scene.add_target(), scene.add_draft()
        streams = await asyncio.gather(
            *(scene.serve(f"r{i}", prompt_ids=(i, 7), max_new_tokens=count) for i in range(16))
        )
        for i, events in enumerate(streams):
            check_stream(events, generate((i, 7), count))
        # To the target and back; the second token is there when the first one is.
        assert asyncio.get_running_loop().time() < 2.1 * LATENCY_S + (count - 1) * ROUND_S
        assert missed(target) == []
        await scene.check_free()
        assert len(draft.received(DraftOpen)) == 16

    run_virtual(main())
    assert "is lost" not in caplog.text


@virtual
async def test_many_requests_run_peer_rounds_at_once() -> None:
    scene = Scene(has_peer=True)
    target = scene.add_target()
    scene.add_draft()
    streams = await asyncio.gather(
        *(scene.serve(f"r{i}", prompt_ids=(i, 7), max_new_tokens=100 + i) for i in range(8))
    )
    for i, events in enumerate(streams):
        finish = check_stream(events, generate((i, 7), 100 + i))
        assert finish.speculation.num_root_only_rounds <= CATCH_UP_ROUNDS
    assert missed(target) == []
    await scene.check_free()

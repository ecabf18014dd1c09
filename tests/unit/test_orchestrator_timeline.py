"""A round's times: without gaps from one order to the next, and only when asked for."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from orchestrator import timeline
from orchestrator.draft_handle import DraftHandle
from orchestrator.reply import Reply
from shared.messages import AcceptedPath, AnswerTimes, FinishInfo, RoundTimes, TokenTree
from tests.fakes.in_memory import LATENCY_S, run_virtual
from tests.unit.scene import Scene, finish_of, scripted

TARGET = ["target: hop to it", "target: front", "target: forward", "target: hop back"]
DRAFT = ["draft: hop to it", "draft: front", "draft: hop back"]


def foreign(message: Any) -> list[tuple[float, Any]]:
    """Let a timed answer come from another machine: time is virtual here, not on the workers."""
    times = getattr(message, "times", None)
    if times is not None:
        message = replace(message, times=replace(times, clock_id=times.clock_id ^ 1))
    return [(0.0, message)]


def received(message: Any) -> list[tuple[float, Any]]:
    """Do what a worker's front does with a timed request's order."""
    if hasattr(message, "received_ns"):
        message = replace(message, received_ns=time.monotonic_ns())
    return [(0.0, message)]


def late(message: Any) -> list[tuple[float, Any]]:
    return [(3.0, message) for _, message in foreign(message)]


def serve(*, late_tree: int = 0, has_peer: bool = False, **fields: object) -> FinishInfo:
    """Serve a request; `late_tree` is the number of a tree that comes too late."""

    async def main() -> FinishInfo:
        scene = Scene(has_peer=has_peer)
        scene.add_target(on_request=received, on_reply=foreign)
        faults = [late if number == late_tree else foreign for number in range(1, 100)]
        replies = scripted(iter(faults), only=TokenTree)
        scene.add_draft(on_request=received, on_reply=replies)
        return finish_of(await scene.serve(**fields))

    return run_virtual(main())


def names(times: RoundTimes) -> list[str]:
    return [stage.name for stage in times.stages]


def test_rounds_follow_each_other_without_a_gap() -> None:
    finish = serve(round_times=True)
    rounds = finish.round_times
    assert [times.round_idx for times in rounds] == list(
        range(1, finish.speculation.num_rounds + 1)
    )
    relayed = [times for times in rounds if "target: front" in names(times)][1:]
    assert len(relayed) > 5
    for before, after in pairwise(relayed):
        assert names(before) == [*TARGET, "orchestrator: commit", *DRAFT, "orchestrator: order"]
        assert before.stages[-1].end_ns == after.begin_ns
    for times in relayed:
        ends = [times.begin_ns, *(stage.end_ns for stage in times.stages)]
        assert all(first <= second for first, second in pairwise(ends))
    assert names(rounds[-1]) == [*TARGET, "orchestrator: commit"]


def test_peer_rounds_go_from_the_order_to_the_commit() -> None:
    """The answer's way is no part of them: the next one runs meanwhile."""
    finish = serve(round_times=True, has_peer=True)
    assert len(finish.round_times) == finish.speculation.num_rounds
    num_alone = finish.speculation.num_root_only_rounds
    rounds = finish.round_times[num_alone:]
    assert len(rounds) > 5
    for times in finish.round_times[:num_alone]:
        assert names(times) == ["target: forward", "target: hop back", "orchestrator: commit"]
    for times in rounds:
        assert names(times) == [
            "draft: channel",
            "draft: front",
            "target: forward",
            "target: commit",
        ]
        ends = [times.begin_ns, *(stage.end_ns for stage in times.stages)]
        assert ends == sorted(ends)
    assert [times.round_idx for times in finish.round_times] == list(
        range(1, len(finish.round_times) + 1)
    )


def test_hops_take_what_the_way_takes() -> None:
    times = serve(round_times=True, max_new_tokens=80).round_times[-4]
    hop_ns = times.stages[0].end_ns - times.begin_ns
    assert hop_ns == pytest.approx(LATENCY_S * 1e9, rel=0.1)


def test_nothing_is_measured_unless_asked() -> None:
    assert serve().round_times == ()


def test_a_round_whose_tree_is_late_has_no_stages_of_the_draft() -> None:
    rounds = serve(round_times=True, late_tree=8, max_new_tokens=80).round_times
    (late_one,) = [
        times
        for times in rounds[:-1]
        if "target: front" in names(times) and "draft: front" not in names(times)
    ][1:2]
    assert names(late_one)[: len(TARGET)] == TARGET
    assert any("draft: front" in names(times) for times in rounds)


def test_the_next_tree_is_ordered_before_tokens_are_sent_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    order, emit = DraftHandle.order, Reply.emit

    def ordered(self: DraftHandle, **fields: Any) -> bool:
        events.append("order")
        return order(self, **fields)

    def emitted(self: Reply, path: AcceptedPath, **fields: Any) -> None:
        events.append("emit")
        emit(self, path, **fields)

    monkeypatch.setattr(DraftHandle, "order", ordered)
    monkeypatch.setattr(Reply, "emit", emitted)
    num_rounds = serve().speculation.num_rounds
    assert events == ["order", "emit"] * num_rounds + ["emit"]


def test_only_so_many_rounds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_TIMED_ROUNDS", 3)
    assert [times.round_idx for times in serve(round_times=True).round_times] == [1, 2, 3]


def test_a_round_of_the_devices_ends_with_its_sampling() -> None:
    """It has no commit of its own, and the way of its answer is no part of it either."""
    stages = ["draft: channel", "draft: extend", "draft: grow"]
    stages += [f"target: {name}" for name in ("channel", "forward", "sample", "answer", "hop back")]
    rounds = timeline.Timeline()
    for round_idx in (3, 4):
        begin_ns = 100 * round_idx
        times = AnswerTimes(clock_id=1, begin_ns=begin_ns)
        for i, name in enumerate(stages, start=1):
            times = times.then(name, begin_ns + 20 * i)
        rounds.add(round_idx, tree=None, path=times, now_ns=begin_ns + 500)
    assert [(times.round_idx, times.begin_ns) for times in rounds.rounds] == [(3, 300), (4, 400)]
    for times in rounds.rounds:
        assert names(times) == stages[:6]
        assert times.stages[-1].end_ns == times.begin_ns + 120

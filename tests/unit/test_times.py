"""Times of answers: what is measured, on whose clock, and that nothing is unless asked."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from shared import times
from shared.messages import AcceptedPath, AnswerTimes, StageTime, TreeShape
from shared.step import step_timer
from shared.step.step_timer import StepTimer
from shared.times import clock_id, leave, seen_from, take
from tests.engines import Models, make_draft, make_target, run_plain
from tests.local_pair import LocalPair, LocalRequest


def answer(clock: int, *ends_ns: int, begin_ns: int = 100) -> AnswerTimes:
    stages = tuple(StageTime(name=f"s{i}", end_ns=end) for i, end in enumerate(ends_ns))
    return AnswerTimes(clock_id=clock, begin_ns=begin_ns, stages=stages)


def named(seen: AnswerTimes) -> dict[str, int]:
    return {stage.name: stage.end_ns for stage in seen.stages}


def test_a_stage_never_ends_before_it_begins() -> None:
    assert answer(1, 150).then("late stamp", 120).end_ns == 150


def test_on_one_clock_the_hops_are_what_was_measured() -> None:
    seen = seen_from(answer(clock_id(), 130, 150), kind="target", sent_ns=90, arrived_ns=180)
    assert seen.begin_ns == 90
    assert named(seen) == {
        "target: hop to it": 100,
        "target: s0": 130,
        "target: s1": 150,
        "target: hop back": 180,
    }


@pytest.mark.parametrize("offset_ns", [-50, 10**15])
def test_between_two_clocks_both_hops_take_half_of_the_rest(offset_ns: int) -> None:
    """Round trip 90, 50 of it there: each way 20, whatever that clock says."""
    away = answer(clock_id() ^ 1, 130 + offset_ns, 150 + offset_ns, begin_ns=100 + offset_ns)
    seen = seen_from(away, kind="draft", sent_ns=1000, arrived_ns=1090)
    assert named(seen) == {
        "draft: hop to it": 1020,
        "draft: s0": 1050,
        "draft: s1": 1070,
        "draft: hop back": 1090,
    }


def test_an_answer_without_an_order_has_no_hop_to_the_worker() -> None:
    seen = seen_from(answer(clock_id(), 130), kind="target", sent_ns=None, arrived_ns=140)
    assert (seen.begin_ns, named(seen)) == (100, {"target: s0": 130, "target: hop back": 140})


def test_only_timed_answers_are_stamped_when_they_leave() -> None:
    path = AcceptedPath(
        request_id="r", target_epoch=1, round_idx=1, seq_len=3, accept_index=(0,), token_ids=(1,),
        num_accepted_drafts=0, num_draft_tokens=1,
    )  # fmt: skip
    assert leave([path]) == [path]
    timed = AcceptedPath(**{f: getattr(path, f) for f in path.__slots__} | {"times": take(5)})
    left = leave([path, timed])
    assert left[0] is path
    assert [stage.name for stage in left[1].times.stages] == ["front", "answer"]


def test_an_order_that_comes_during_a_step_waits_for_its_end() -> None:
    assert named(take(50, busy_until_ns=80))["busy engine"] == 80
    assert "busy engine" not in named(take(50, busy_until_ns=40))


def test_a_clock_without_a_name_is_like_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "_CLOCK_FILES", (Path("/nonexistent"),))
    clock_id.cache_clear()
    try:
        seen = seen_from(answer(0, 150), kind="target", sent_ns=1000, arrived_ns=1090)
        assert named(seen)["target: hop to it"] == 1020
    finally:
        clock_id.cache_clear()


class FakeEvent:
    """An event of a device whose time only moves when a test says so."""

    now_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at_ms - self.at_ms


def run_timer(monkeypatch: pytest.MonkeyPatch, *, device_free_ns: int) -> dict[str, int]:
    """Pack until 2 us, launch 40 us of forward and 5 us of sampling by 9 us, read until 60 us."""
    stamps = iter([0, 2000, 5000, 9000, 60_000])
    monkeypatch.setattr(step_timer.time, "monotonic_ns", lambda: next(stamps))
    monkeypatch.setattr(step_timer.torch.cuda, "Event", FakeEvent)
    FakeEvent.now_ms = 7.0
    timer = StepTimer(torch.device("cuda"), is_on=True)
    timer.host("pack")
    FakeEvent.now_ms += 0.040
    timer.device("forward")
    FakeEvent.now_ms += 0.005
    timer.device("sample")
    timer.host("read")
    stages = timer.stages(device_free_ns=device_free_ns)
    assert timer.device_end_ns(stages) == max(2000, device_free_ns) + 45_000
    return {stage.name: stage.end_ns for stage in stages}


def test_a_device_begins_when_it_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = run_timer(monkeypatch, device_free_ns=1000)
    assert ends == {"pack": 2000, "forward": 42_000, "sample": 47_000, "read": 60_000}


def test_a_busy_device_begins_when_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = run_timer(monkeypatch, device_free_ns=10_000)
    assert ends == {
        "pack": 2000, "busy device": 10_000, "forward": 50_000, "sample": 55_000, "read": 60_000
    }  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def test_the_read_waits_for_every_mark_of_the_device(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of an event that is still to come cannot be asked for."""
    target = make_target(models.pairing("standalone"))
    start_read, mark = target.runner.start_read, StepTimer.device
    order: list[str] = []

    def noted_read(*args: Any) -> Any:
        order.append("read")
        return start_read(*args)

    def noted_mark(timer: StepTimer, name: str) -> None:
        order.append(name)
        mark(timer, name)

    monkeypatch.setattr(target.runner, "start_read", noted_read)
    monkeypatch.setattr(StepTimer, "device", noted_mark)
    run_plain(target, [LocalRequest(prompt=[5, 6, 7], max_new_tokens=4, is_timed=True)])
    num_steps = target.load.num_steps
    assert num_steps > 2 and order == ["forward", "sample", "read"] * num_steps


def own_stages(measured: AnswerTimes) -> list[str]:
    """Return the stages, the wait for other requests' steps left out."""
    return [stage.name for stage in measured.stages if stage.name != "busy engine"]


def test_engines_time_rounds_of_timed_requests_only(models: Models) -> None:
    pairing = models.pairing("eagle3")
    pair = LocalPair(make_target(pairing), make_draft(pairing), credit_rounds=4)
    shape = TreeShape(num_steps=3, topk=2, num_draft_tokens=6)
    timed, granted, other = (
        LocalRequest(prompt=[5, 6, 7, 8], max_new_tokens=12, shape=each, is_timed=is_timed)
        for each, is_timed in ((shape, True), (None, True), (shape, False))
    )
    pair.run([timed, granted, other])
    assert timed.output == granted.output == other.output
    assert all(answer.times is None for answer in (*other.paths, *other.trees))
    assert timed.paths[0].times is None, "prefills are not timed"
    step = ["pack", "forward", "sample", "read", "commit"]
    for request, names in ((timed, ["front", "queue", *step]), (granted, step)):
        for path in request.paths[1:]:
            assert path.times is not None
            assert own_stages(path.times) == names
    for tree in timed.trees:
        assert tree.times is not None
        expected = ["front", "features", "queue", "pack", "extend", "grow", "read", "tree"]
        assert own_stages(tree.times) == expected
    for times_ in [path.times for path in timed.paths[1:]] + [tree.times for tree in timed.trees]:
        assert times_ is not None
        ends = [times_.begin_ns, *(stage.end_ns for stage in times_.stages)]
        assert all(first <= second for first, second in pairwise(ends))

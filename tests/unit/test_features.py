"""The feature stream: ordered, acknowledged, complete for every subscriber, within its budget."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.messages import (
    MAX_CHUNK_BYTES,
    FeatureAck,
    FeatureChunk,
    FeatureFailure,
    FeatureSubscribe,
    FeatureUnsubscribe,
    TargetClose,
)
from target_service.batch import StepBatch, build_batch
from target_service.engine import TargetEngine
from target_service.feature_log import FeatureLog
from target_service.scheduler import ReplayWork
from tests.engines import SHAPES, Models, make_target, random_tokens
from tests.local_pair import LocalPair, LocalRequest


def rows_at(position: int, count: int) -> np.ndarray:
    """Return rows that say where they belong, [count, 4] u8."""
    return np.arange(position, position + count, dtype="<u4").view(np.uint8).reshape(count, 4)


class FeatureLogMachine(RuleBasedStateMachine):
    """A subscriber counts; whatever it is sent must be the next rows that it misses."""

    @initialize(retain_rows=st.sampled_from([0, 1, 3, 10, 1000]))
    def start(self, retain_rows: int) -> None:
        self.log = FeatureLog(retain_rows=retain_rows)
        self.end = 0
        self.wanted: int | None = None
        self.blocks: list[int] = []

    @rule(count=st.integers(1, 7))
    def append(self, count: int) -> None:
        self.log.append(self.end, rows_at(self.end, count))
        self.end += count
        self.blocks.append(count)

    @rule()
    def take_and_trim(self) -> None:
        had_gap = self.log.gap is not None
        for position, rows in self.log.take_unsent():
            assert position == self.wanted and not had_gap
            assert (rows == rows_at(position, len(rows))).all()
            self.wanted = position + len(rows)
        if self.wanted is not None and not had_gap:
            assert self.wanted >= self.end, "rows were held back"
        self.log.trim()
        held = self.log.end - self.log.start
        # No more than the budget, but for the block that it cuts through.
        assert held < self.log.retain_rows + max(self.blocks, default=1)

    @rule(data=st.data())
    def subscribe(self, data: st.DataObject) -> None:
        self.wanted = data.draw(st.integers(0, self.end))
        self.log.subscribe(self.wanted)

    @precondition(lambda self: self.wanted is not None)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        assert self.wanted is not None
        position = data.draw(st.integers(0, min(self.wanted, self.end)))
        before = self.log.start
        self.log.acknowledge(position)
        assert before <= self.log.start <= max(before, position), "more than was acknowledged"

    @precondition(lambda self: self.log.gap is not None)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        assert self.log.gap is not None
        first, stop = self.log.gap
        assert first == self.wanted and first < stop <= self.end
        self.wanted = data.draw(st.integers(first + 1, stop))
        self.log.next = self.wanted

    @rule()
    def unsubscribe(self) -> None:
        self.log.next = self.wanted = None

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "log"):
            return
        log = self.log
        assert 0 <= log.start <= log.end == self.end
        assert sum(map(len, log._blocks)) == log.end - log.start
        assert log.next == self.wanted


FeatureLogMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
test_log_against_a_counting_subscriber = FeatureLogMachine.TestCase


def test_rows_out_of_order_are_our_bug() -> None:
    log = FeatureLog(retain_rows=9)
    log.append(0, rows_at(0, 2))
    with pytest.raises(AssertionError, match="row 3 appended at 2"):
        log.append(3, rows_at(3, 1))


@pytest.mark.parametrize("position", range(11))
def test_acknowledging_drops_whole_blocks_below_the_position(position: int) -> None:
    log = FeatureLog(retain_rows=99)
    for start, stop in ((0, 3), (3, 5), (5, 6), (6, 10)):
        log.append(start, rows_at(start, stop - start))
    log.acknowledge(position)
    assert log.start == max(edge for edge in (0, 3, 5, 6, 10) if edge <= position)
    log.subscribe(log.start)
    assert sum(len(rows) for _, rows in log.take_unsent()) == 10 - log.start


def open_request(target: TargetEngine, *, prompt_len: int = 60) -> tuple[LocalPair, LocalRequest]:
    """Open a request that wants features, and prefill it."""
    pair = LocalPair(target)
    prompt = random_tokens(random.Random(0), prompt_len)
    request = LocalRequest(prompt=prompt, max_new_tokens=40, shape=SHAPES[0], joins_at=10_000)
    pair.open(request)
    while not request.paths:
        pair.step()
    return pair, request


def chunks_of_step(pair: LocalPair) -> list[FeatureChunk]:
    chunks = []
    for message in pair.target.step():
        if isinstance(message, FeatureChunk):
            chunks.append(message)
        else:
            pair.on_target(message)
    return chunks


@pytest.mark.parametrize("retain_rows", [0, 1, 5, 30, 8192])
def test_a_late_subscriber_catches_up_while_rounds_go_on(models: Models, retain_rows: int) -> None:
    target = make_target(
        models.pairing("eagle3"), feature_retain_rows=retain_rows, prefill_chunk_len=20
    )
    pair, request = open_request(target)
    for _ in range(5):
        pair.step()
    target.submit(FeatureSubscribe(request_id="r1", target_epoch=1, from_position=0))
    position = 0
    for step in range(20):
        for chunk in chunks_of_step(pair):
            assert chunk.start == position
            position += chunk.shape[0]
        if step >= 4:  # 65 rows in replays of 20
            assert position == target.requests["r1"].committed_len
    assert len(request.output) == 26, "rounds went on meanwhile"
    target.submit(TargetClose(request_id="r1", target_epoch=1))
    pair.check_idle()


@pytest.mark.parametrize("retain_rows", [0, 5, 30])
def test_a_late_subscriber_catches_up_with_a_target_that_runs_ahead(
    models: Models, retain_rows: int
) -> None:
    target = make_target(
        models.pairing("eagle3"), feature_retain_rows=retain_rows, prefill_chunk_len=20
    )
    target.scheduler.overlaps_steps = True
    pair, request = open_request(target)
    for _ in range(5):
        pair.step()
    target.submit(FeatureSubscribe(request_id="r1", target_epoch=1, from_position=0))
    position = 0
    for step in range(20):
        for chunk in chunks_of_step(pair):
            assert chunk.start == position
            position += chunk.shape[0]
        if step > 8:  # 65 rows in replays of 20
            log = target.requests["r1"].features
            assert log is not None and position == log.end
    assert len(request.output) == 13, "rounds went on meanwhile, each two steps long"
    target.submit(TargetClose(request_id="r1", target_epoch=1))
    while target.has_work:
        target.step()
    pair.check_idle()


def test_replays_write_no_kv(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(models.pairing("eagle3"), feature_retain_rows=0, prefill_chunk_len=20)
    pair, _ = open_request(target)
    batches: list[tuple[StepBatch, torch.Tensor]] = []

    def build_and_note(*args: Any, **options: Any) -> StepBatch:
        batch = build_batch(*args, **options)
        batches.append((batch, batch.extend.rows.slot_mapping.clone()))
        return batch

    monkeypatch.setattr("target_service.runner.build_batch", build_and_note)
    target.submit(FeatureSubscribe(request_id="r1", target_epoch=1, from_position=0))
    for _ in range(4):
        pair.step()
    spans = []
    for batch, slots in batches:
        assert slots[0] >= target.info.page_size, "the row of the verify writes"
        for chain in batch.chains:
            assert isinstance(chain.work, ReplayWork)
            spans.append((chain.work.start, chain.work.stop))
            count = chain.work.stop - chain.work.start
            assert (slots[chain.first_row : chain.first_row + count] == 0).all()
    assert spans == [(0, 20), (20, 40), (40, 60), (60, 63)]
    target.submit(TargetClose(request_id="r1", target_epoch=1))


def test_acknowledged_rows_are_dropped_and_unsubscribed_ones_not_sent(models: Models) -> None:
    target = make_target(models.pairing("eagle3"))
    pair, _ = open_request(target)
    target.submit(FeatureSubscribe(request_id="r1", target_epoch=1, from_position=0))
    assert sum(chunk.shape[0] for chunk in chunks_of_step(pair)) == 61
    log = target.requests["r1"].features
    assert log is not None and (log.start, log.end) == (0, 61)
    target.submit(FeatureAck(request_id="r1", target_epoch=0, position=60))  # another epoch's
    assert log.start == 0
    target.submit(FeatureAck(request_id="r1", target_epoch=1, position=61))
    assert (log.start, log.end) == (61, 61)
    target.submit(FeatureUnsubscribe(request_id="r1", target_epoch=1))
    assert chunks_of_step(pair) == []
    target.submit(TargetClose(request_id="r1", target_epoch=1))
    pair.check_idle()


def test_rows_of_a_request_that_is_over_are_freed_though_somebody_still_knows_it(
    models: Models,
) -> None:
    """As budgets know the last request of each slot."""
    target = make_target(models.pairing("eagle3"))
    pair, _ = open_request(target)
    request = target.requests["r1"]
    assert request.features is not None and request.features.end == 60
    target.submit(TargetClose(request_id="r1", target_epoch=1))
    assert request.features is None
    pair.check_idle()


@pytest.mark.parametrize("rows_per_chunk", [10, 0])  # 0: a row is larger than a chunk should be
def test_chunks_hold_at_most_one_mebibyte(
    models: Models, monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int
) -> None:
    pairing = models.pairing("eagle3")
    width = make_target(pairing).info.features.width
    assert MAX_CHUNK_BYTES == 1 << 20
    monkeypatch.setattr("target_service.features.MAX_CHUNK_BYTES", rows_per_chunk * 4 * width + 1)
    target = make_target(pairing)
    pair, _ = open_request(target)
    target.submit(FeatureSubscribe(request_id="r1", target_epoch=1, from_position=3))
    chunks = chunks_of_step(pair)
    if rows_per_chunk:
        assert [chunk.start for chunk in chunks] == [3, 13, 23, 33, 43, 53, 60]
        assert [chunk.shape[0] for chunk in chunks] == [10, 10, 10, 10, 10, 7, 1]
    else:
        assert [chunk.start for chunk in chunks] == list(range(3, 61)), "rows are kept whole"
    assert all(len(chunk.data) == chunk.shape[0] * 4 * width for chunk in chunks)
    target.submit(TargetClose(request_id="r1", target_epoch=1))


def failure_of(target: TargetEngine, message: FeatureSubscribe) -> FeatureFailure:
    target.submit(message)
    failures = [m for m in target.step() if isinstance(m, FeatureFailure)]
    assert len(failures) == 1
    return failures[0]


def test_bad_subscriptions_fail_and_the_request_goes_on(models: Models) -> None:
    target = make_target(models.pairing("eagle3"))
    pair, request = open_request(target)
    pair.step()
    for subscription, reason, field in (
        (FeatureSubscribe(request_id="r1", target_epoch=0, from_position=0), 9, "target_epoch"),
        (FeatureSubscribe(request_id="r1", target_epoch=1, from_position=99), 3, "from_position"),
        (FeatureSubscribe(request_id="r1", target_epoch=1, from_position=-1), 3, "from_position"),
    ):
        target.submit(subscription)
        messages = target.step()
        [failure] = [m.failure for m in messages if isinstance(m, FeatureFailure)]
        assert (failure.code, failure.field) == (reason, field)
        for message in messages:
            if not isinstance(message, FeatureFailure):
                pair.on_target(message)
    pair.finish()
    assert len(request.output) == 40


def test_a_request_that_keeps_no_features_says_so(models: Models) -> None:
    target = make_target(models.pairing("eagle3"))
    pair = LocalPair(target)
    pair.open(LocalRequest(prompt=[1, 2, 3], max_new_tokens=5))
    failure = failure_of(
        target, FeatureSubscribe(request_id="r1", target_epoch=1, from_position=0)
    ).failure
    assert failure.code == 3 and "wants_features" in failure.message
    target.submit(TargetClose(request_id="r1", target_epoch=1))


def test_early_subscriptions_are_held_bounded_and_can_be_withdrawn(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("target_service.features.MAX_EARLY_SUBSCRIPTIONS", 3)
    target = make_target(models.pairing("eagle3"))
    for name in ("a", "b", "c", "d"):
        target.submit(FeatureSubscribe(request_id=name, target_epoch=1, from_position=0))
    assert list(target.features.early_subscriptions) == ["b", "c", "d"]
    target.submit(FeatureUnsubscribe(request_id="c", target_epoch=0))
    target.submit(FeatureUnsubscribe(request_id="d", target_epoch=1))
    assert list(target.features.early_subscriptions) == ["b", "c"]
    assert not target.has_work

    pair = LocalPair(target)
    requests = [
        LocalRequest(prompt=[1, 2], max_new_tokens=2, shape=SHAPES[0], joins_at=9, request_id=name)
        for name in ("a", "b")
    ]
    for request in requests:
        pair.open(request)
    chunks = chunks_of_step(pair)
    assert [(chunk.request_id, chunk.shape[0]) for chunk in chunks] == [("b", 2)]
    pair.finish()
    assert list(target.features.early_subscriptions) == ["c"]

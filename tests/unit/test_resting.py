"""Requests that rest: nothing is sent to their drafts, and nothing is lost when they come back."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ladder import LADDER
from shared.messages import PeerTrees, TreeShape
from target_service.batch import StepBatch
from target_service.budgets.shapes import TreeShapes
from target_service.peer_rounds import PeerRounds
from target_service.request import Phase, TargetRequest
from target_service.resting_rows import RestedPath, RestedRows
from target_service.scheduler import StepPlan
from target_service.tree_source import TreeSource
from tests.device_pair import DevicePair, Make, check, device_engines, requests_of
from tests.engines import Models, fresh, make_draft, make_target, plain_of, random_tokens
from tests.marks import EXHAUSTIVE
from tests.peer_pair import PeerPair, close_channels

LARGEST = TreeShape(num_steps=4, topk=2, num_draft_tokens=8)
ROW_BYTES = 8
_FIRST_REST = 6


class RestsAtTimes(TreeShapes):
    """Wants trees of each request, or none, for some rounds on end.

    Args:
        rests_first: Requests begin with a rest, and their prompts are held back.
        keeps_none: Of who rests no rows are kept.
    """

    def __init__(self, seed: int, *, rests_first: bool = False, keeps_none: bool = False) -> None:
        self._rng = random.Random(seed)
        self._keeps_none = keeps_none
        self._rests_first = rests_first
        self._wanted: dict[str, tuple[int, TreeShape | None]] = {}

    def would_rest(self, request: TargetRequest) -> bool:
        return self._rests_first

    def needs_no_rows(self, request: TargetRequest) -> bool:
        return self._keeps_none

    def of(self, request: TargetRequest, credit: PeerTrees) -> TreeShape | None:
        first = (_FIRST_REST if self._rests_first else 0, None)
        until, wanted = self._wanted.get(request.request_id, first)
        if request.round_idx >= until:
            until = request.round_idx + self._rng.randint(3, 12)
            wanted = LADDER[3] if wanted is None else None
            self._wanted[request.request_id] = until, wanted
        return wanted


@pytest.fixture
def make(models: Models) -> Iterator[Make]:
    """Return what makes a target with a mailbox and a draft."""
    with device_engines(models) as make:
        yield make


@given(st.data())
def test_rows_of_a_request_come_back_in_order(data: st.DataObject) -> None:
    """As far as there is room for them: the newest ones, up to the last that was kept."""
    num_slots = 4
    max_rows = data.draw(st.sampled_from([3, 20, 1000]))
    rested = RestedRows(ROW_BYTES, max_rows * ROW_BYTES)
    ends = [0] * num_slots
    since: dict[int, tuple[int, int]] = {}  # rows and position
    for _ in range(data.draw(st.integers(1, 30))):
        if not since:
            rested.restart()
        for slot in data.draw(st.sets(st.integers(0, num_slots - 1))):
            if slot not in since:
                since[slot] = rested.end, ends[slot]
            else:
                _check_rows(rested, slot, *since.pop(slot), ends[slot])
        width = data.draw(st.integers(1, 3))
        paths, features = [], np.zeros((num_slots, width, ROW_BYTES), dtype=np.uint8)
        for slot in range(num_slots):
            count = data.draw(st.integers(1, width))
            for i in range(count):
                features[slot, i] = _row(slot, ends[slot] + i)
            if slot in since:
                paths.append(RestedPath(slot, slot, ends[slot], count))
            ends[slot] += count
        if paths:
            rested.append(paths, features)
        features.fill(255)  # the step's buffer is used again


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * mmap.PAGESIZE / 2**20


def test_only_a_target_with_a_gpu_takes_all_memory_for_rows_at_once() -> None:
    before = _resident_mib()
    rested = RestedRows(1024, 64 << 20)
    rested.append([RestedPath(0, 0, 0, 1)], np.ones((1, 1, 1024), dtype=np.uint8))
    assert _resident_mib() < before + 16
    touched = RestedRows(1024, 64 << 20)
    touched.reserve()
    assert _resident_mib() > before + 48


def test_requests_that_rest_one_after_the_other_share_memory() -> None:
    """A target that has served for hours has touched no more than it needed at a time."""
    before = _resident_mib()
    rested = RestedRows(1024, 64 << 20)
    rows = np.ones((1, 1024, 1024), dtype=np.uint8)
    for _ in range(64):
        rested.append([RestedPath(0, 0, 0, 1024)], rows)
        rested.restart()
    assert _resident_mib() < before + 16


def _check_rows(rested: RestedRows, slot: int, since: int, begin: int, end: int) -> None:
    run = rested.newest(slot, since)
    if run is None:
        assert begin == end or not rested.has_all(since)
        return
    assert begin <= run.position and run.position + len(run.places) == end
    if rested.has_all(since):
        assert run.position == begin
    for position, row in enumerate(rested.copy(run.places), run.position):
        assert (row == _row(slot, position)).all()


def _row(slot: int, position: int) -> np.ndarray:
    return np.array([slot, position % 251, 0, 1, 2, 3, 4, 5], dtype=np.uint8)


@pytest.mark.parametrize(
    ("max_rows", "keeps_none"),
    [pytest.param(0, False, marks=EXHAUSTIVE), (12, False), (10_000, False), (10_000, True)],
)
def test_whatever_is_kept_the_draft_reads_the_true_rows(
    models: Models, max_rows: int, *, keeps_none: bool
) -> None:
    """What was dropped is replayed; trees are the ones of a draft that has read everything."""
    pairing = models.pairing("eagle3")
    target, draft = make_target(pairing, feature_ring_mb=1), make_draft(pairing)
    width = target.info.features.width * 4
    target.features.rested = RestedRows(width, max_rows * width)
    requests = [replace(r, max_new_tokens=44) for r in requests_of(3, 1, LADDER[3])]
    expected = plain_of(target, requests)
    pair = PeerPair(target, draft)
    pair.run(list(map(fresh, requests)))
    true_trees = _trees_of(pair)
    assert isinstance(target.source, PeerRounds)
    target.source.shapes = RestsAtTimes(1, keeps_none=keeps_none)
    pair = PeerPair(target, draft, adapts=True)
    pair.run(requests)
    check(requests, expected)
    assert {rest.is_resting for rest in pair.rests} == {False, True}
    trees = _trees_of(pair)
    shared = trees.keys() & true_trees.keys()
    assert len(shared) > 10
    assert all(trees[key] == true_trees[key] for key in shared)
    close_channels(target, draft)


def _trees_of(pair: PeerPair) -> dict[tuple[str, int], tuple[int, ...]]:
    """Return the tokens of trees by their request and where their root is."""
    return {(tree.request_id, tree.seq_len): tree.token_ids for tree in pair.trees}


@pytest.mark.parametrize("keeps_none", [False, True])
def test_prompts_are_held_back_where_all_rest(make: Make, *, keeps_none: bool) -> None:
    """A request that never gets a tree costs its draft nothing; one that does gets all its rows."""
    target, draft, _ = make("eagle3", prefill_chunk_len=16)
    requests = [
        replace(r, prompt=random_tokens(random.Random(i), 50), max_new_tokens=30)
        for i, r in enumerate(requests_of(3, 2, LARGEST))
    ]
    expected = plain_of(target, requests)
    assert isinstance(target.source, PeerRounds)
    target.source.shapes = RestsAtTimes(2, rests_first=True, keeps_none=keeps_none)
    pair = DevicePair(target, draft, adapts=True)
    for request in requests:
        pair.open(request)
    while not any(len(request.paths) > _FIRST_REST for request in requests):
        assert not any(held.kv_len for held in draft.requests.values())
        pair.step()
    assert draft.requests
    logs = [held.features for held in target.requests.values() if held.features is not None]
    # But for a chunk that was computed before the draft attached.
    assert logs and all(log.end - log.start <= 16 for log in logs)
    assert (target.features.rested.end > 2 * 34) is not keeps_none
    pair.finish()
    check(requests, expected)
    assert any(path.num_draft_tokens > 1 for request in requests for path in request.paths)
    pair.check_idle()


class RestsWhileAsked(TreeShapes):
    """Always wants trees, and says of prompts whether their requests will rest."""

    rests = False

    def would_rest(self, request: TargetRequest) -> bool:
        return self.rests


@pytest.mark.parametrize("rests", [False, True])
def test_what_a_draft_gets_of_a_prompt_is_decided_when_that_is_read(
    make: Make, *, rests: bool
) -> None:
    """Not when the draft attaches, which is before there is room for the request."""
    target, draft, _ = make("eagle3", max_num_requests=1, prefill_chunk_len=16)
    requests = [
        replace(r, prompt=random_tokens(random.Random(i), 50), max_new_tokens=12)
        for i, r in enumerate(requests_of(2, 2, LARGEST))
    ]
    expected = plain_of(target, requests)
    assert isinstance(target.source, PeerRounds)
    target.source.shapes = shapes = RestsWhileAsked()
    pair = DevicePair(target, draft, adapts=True)
    shapes.rests = not rests
    for request in requests:
        pair.open(request)
    waiting = target.requests[requests[1].request_id]
    while waiting.draft is None:
        pair.step()
    assert waiting.req_idx < 0 and waiting.features is not None
    assert waiting.features.is_held_back is not rests
    shapes.rests = rests
    while waiting.phase is not Phase.PREFILL:
        pair.step()
    assert waiting.features.is_held_back is rests
    pair.finish()
    check(requests, expected)
    pair.check_idle()


class NeverWanted(TreeShapes):
    """Wants no trees, and none later."""

    def would_rest(self, request: TargetRequest) -> bool:
        return True

    def of(self, request: TargetRequest, credit: PeerTrees) -> TreeShape | None:
        return None

    def needs_no_rows(self, request: TargetRequest) -> bool:
        return True


@pytest.mark.parametrize("overlaps", [False, True])
def test_steps_of_requests_without_hope_bring_no_rows(make: Make, *, overlaps: bool) -> None:
    """Neither of prompts nor of rounds, as if no draft were there."""
    target, draft, _ = make("eagle3", prefill_chunk_len=16)
    target.scheduler.overlaps_steps = overlaps
    requests = [
        replace(r, prompt=random_tokens(random.Random(i), 50), max_new_tokens=20)
        for i, r in enumerate(requests_of(3, 2, LARGEST))
    ]
    expected = plain_of(target, requests)
    assert isinstance(target.source, PeerRounds)
    target.source.shapes = NeverWanted()
    pair, wanted = DevicePair(target, draft, adapts=True), []
    pack = target.runner.pack

    def noting_pack(plan: StepPlan, source: TreeSource) -> StepBatch:
        batch = pack(plan, source)
        wanted.append(batch.wants_features)
        return batch

    target.runner.pack = noting_pack  # type: ignore[method-assign]
    pair.run(requests)
    check(requests, expected)
    # A draft attaches while its request's first chunk is being computed.
    assert len(wanted) > 20 and not any(wanted[2:])
    assert not any(held.kv_len for held in draft.requests.values())
    pair.check_idle()

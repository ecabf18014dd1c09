"""Warming up serves requests of every kind, and leaves nothing of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import draft_service.warm_up
import target_service.runner
import target_service.warm_up
from draft_service.phases import DraftOutput
from draft_service.pipeline import CHUNK_ROWS
from draft_service.warm_up import batch_sizes
from shared.config.check import parse_shapes
from shared.step.buckets import ROW_BUCKETS
from shared.step.step_timer import StepTimer
from target_service.batch import StepBatch
from tests.engines import KINDS, Models, make_draft, make_target, run_plain
from tests.local_pair import LocalPair, LocalRequest


@pytest.mark.parametrize("options", [{}, {"page_size": 1, "num_pages": 84, "max_num_requests": 1}])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_target_warms_up(
    models: Models, options: dict[str, int], monkeypatch: pytest.MonkeyPatch, *, runs_ahead: bool
) -> None:
    assert len(target_service.warm_up._LONG_PROMPT) > ROW_BUCKETS[-1]
    monkeypatch.setattr(target_service.warm_up, "_LONG_PROMPT", (0,) * 400)  # the context has 512
    target = make_target(models.pairing("standalone"), **{"prefill_chunk_len": 512} | options)
    expected = run_plain(target, [LocalRequest(prompt=[5, 6, 7], max_new_tokens=9)])
    steps = target.load.num_steps
    target.scheduler.overlaps_steps = runs_ahead
    build_batch = target_service.runner.build_batch
    batches: list[StepBatch] = []

    def noted_batch(*args: Any, **options: Any) -> StepBatch:
        batches.append(build_batch(*args, **options))
        return batches[-1]

    monkeypatch.setattr(target_service.runner, "build_batch", noted_batch)
    target_service.warm_up.warm_up(target)
    has_long_step = any(
        batch.num_rows > 400 and batch.extend.rows.attention.has_trees for batch in batches
    )
    assert has_long_step == (not options), "a long prompt beside trees, if there is room"
    assert target.load.num_steps > steps + 3 and target.load.num_moved_rounds >= 0
    assert target.requests == {} and not target.has_work
    assert target.load.num_free_pages == target.load.num_pages
    assert run_plain(target, expected)[0].output == expected[0].output


@pytest.mark.parametrize("max_num_requests", [1, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_warms_up(
    models: Models, kind: str, max_num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairing = models.pairing(kind)
    draft = make_draft(pairing, max_num_requests=max_num_requests)
    sizes: list[int] = []
    read, extend = draft.runner.read, draft.runner.launch_extend

    def read_and_note(timer: StepTimer) -> DraftOutput:
        output = read(timer)
        sizes.extend(count for count in output.num_nodes.tolist() if count)  # 0: padding
        return output

    monkeypatch.setattr(draft.runner, "read", read_and_note)
    monkeypatch.setattr(draft.runner, "pads_rows", True)
    buckets: set[int | None] = set()
    monkeypatch.setattr(
        draft.runner, "launch_extend", lambda inputs: (buckets.add(inputs.bucket), extend(inputs))
    )
    shapes = parse_shapes(" 5/8/32,3/1/4")
    draft_service.warm_up.warm_up(
        draft, shapes=shapes, dtype=torch.float32, max_num_requests=max_num_requests
    )
    assert len(sizes) == len(shapes) + 4 * sum(
        min(n, max_num_requests) for n in batch_sizes(max_num_requests)
    )
    assert set(sizes) == {3, 31}
    assert buckets >= {b for b in ROW_BUCKETS if b <= CHUNK_ROWS or max_num_requests > 1}
    assert draft.load.num_running == 0 and not draft.has_work
    assert draft.load.num_free_pages == draft.load.num_pages
    target = make_target(pairing)
    request = LocalRequest(prompt=[5, 6, 7], max_new_tokens=9, shape=shapes[1])
    [plain] = run_plain(target, [request])
    LocalPair(target, draft).run([request])
    assert request.output == plain.output


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (2, [1, 2]), (20, [1, 2, 4, 8, 16, 32])])
def test_every_batch_that_growth_is_padded_to_is_warm(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes

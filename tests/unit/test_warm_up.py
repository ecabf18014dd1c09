"""Warming up serves requests of every kind, and leaves nothing of them."""

from __future__ import annotations

import pytest
import torch

import draft_service.warm_up
import target_service.warm_up
from draft_service.phases import DraftOutput
from draft_service.pipeline import CHUNK_ROWS
from shared.config.check import parse_shapes
from shared.step.step_timer import StepTimer
from tests.engines import KINDS, Models, make_draft, make_target, run_plain
from tests.local_pair import LocalPair, LocalRequest


@pytest.mark.parametrize("options", [{}, {"page_size": 1, "num_pages": 84, "max_num_requests": 1}])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_target_warms_up(models: Models, options: dict[str, int], *, runs_ahead: bool) -> None:
    target = make_target(models.pairing("standalone"), **options)
    expected = run_plain(target, [LocalRequest(prompt=[5, 6, 7], max_new_tokens=9)])
    steps = target.load.num_steps
    target.scheduler.overlaps_steps = runs_ahead
    target_service.warm_up.warm_up(target)
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
    assert len(sizes) == len(shapes) + 4 * sum(draft.runner.batch_buckets)
    assert set(sizes) == {3, 31}
    assert buckets >= {
        b for b in draft.runner.row_buckets if b <= CHUNK_ROWS or max_num_requests > 1
    }
    assert draft.load.num_running == 0 and not draft.has_work
    assert draft.load.num_free_pages == draft.load.num_pages
    target = make_target(pairing)
    request = LocalRequest(prompt=[5, 6, 7], max_new_tokens=9, shape=shapes[1])
    [plain] = run_plain(target, [request])
    LocalPair(target, draft).run([request])
    assert request.output == plain.output

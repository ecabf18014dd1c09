"""Views that the CPU's tree attention keeps: the same for slices of one form, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.kernels import tree_attention_workspace as module
from shared.kernels.tree_attention_plan import CPU_KV_TILE, RowSlice
from shared.kernels.tree_attention_workspace import make_workspaces

CPU = torch.device("cpu")
SHAPE = (2, 2, 16, 16)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with no buffers, and leave those of other tests alone."""
    memory = module._Memory()
    monkeypatch.setattr(module, "_memory", lambda: memory)


def slice_of(num_rows: int, num_shared: int, num_own: int, *, masked_tile: int = 0) -> RowSlice:
    num_gathered = (num_shared + num_own * num_rows) * SHAPE[0] * CPU_KV_TILE
    return RowSlice(
        where=slice(0, num_rows),
        num_rows=num_rows,
        num_padded=num_rows,
        num_shared=num_shared,
        num_own=num_own,
        index=torch.zeros(num_gathered, dtype=torch.int64),
        masked_tile=masked_tile,
        mask=torch.zeros(num_shared + num_own - masked_tile, 1, num_rows, 1, CPU_KV_TILE),
    )


def test_slices_of_one_form_share_views_and_nothing_else() -> None:
    first, again = slice_of(8, 2, 1), slice_of(8, 2, 1)
    (one,), (two,) = make_workspaces([first], SHAPE, CPU), make_workspaces([again], SHAPE, CPU)
    assert one.rows is first and two.rows is again
    assert one.k is two.k and one.score_batches is two.score_batches
    other_forms = [
        slice_of(9, 2, 1), slice_of(8, 1, 1), slice_of(8, 2, 0), slice_of(8, 2, 1, masked_tile=1),
    ]  # fmt: skip
    for rows in other_forms:
        (other,) = make_workspaces([rows], SHAPE, CPU)
        assert other.scores.shape[:3] == (rows.num_shared + rows.num_own, 2, rows.num_padded)
        assert other.masked_scores.shape[0] == len(rows.mask)
    (other,) = make_workspaces([first], (1, 2, 16, 16), CPU)
    assert other.q.shape[0] == 1


def test_views_go_with_the_buffers_that_they_are_of() -> None:
    rows = slice_of(8, 2, 1)
    (before,) = make_workspaces([rows], SHAPE, CPU)
    make_workspaces([slice_of(64, 9, 2)], SHAPE, CPU)  # needs more room
    (after,) = make_workspaces([rows], SHAPE, CPU)
    held = module._memory().buffers.values()
    starts = {buffer.data_ptr() for buffer in held}
    assert after.k.data_ptr() in starts and before.k.data_ptr() not in starts


def test_what_is_kept_is_bounded_and_holds_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_KEPT_BATCHES", 60)
    monkeypatch.setattr(module, "_MAX_KEPT_BATCHES_OF_ONE", 30)
    make_workspaces([slice_of(9, 9, 1)], SHAPE, CPU)
    sizes = set()
    for num_shared in range(9):
        (workspace,) = make_workspaces([slice_of(8, num_shared, 1)], SHAPE, CPU)
        kept = module._memory().workspaces.values()
        assert sum(each.num_batches for each in kept) <= 60
        assert any(each.k is workspace.k for each in kept) is (workspace.num_batches <= 30)
        assert not any(len(each.rows.index) for each in kept)
        sizes.add(workspace.num_batches <= 30)
    assert sizes == {True, False} and len(kept) < 6


def test_views_made_in_inference_mode_are_written_outside_of_it() -> None:
    rows = slice_of(8, 2, 1)
    with torch.inference_mode():
        make_workspaces([rows], SHAPE, CPU)
    (workspace,) = make_workspaces([replace(rows)], SHAPE, CPU)
    workspace.acc.zero_()
    workspace.k.fill_(1.0)
    assert bool((workspace.k == 1.0).all()) and not workspace.acc.any()

"""Clients that ask see the tree of each committed round once, whatever happens to workers."""

from __future__ import annotations

from typing import Any

import pytest

from shared.messages import FinishInfo, GenerateEvent, TargetOpen, TokenDelta
from tests.fakes import generate
from tests.fakes.in_memory import virtual
from tests.unit.scene import FAULTS, PROMPT, Scene, check_stream, finish_of


def check_trees(events: list[GenerateEvent]) -> FinishInfo:
    """Check the trees of an output, all of whose rounds left whole."""
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    tokens = list(PROMPT)
    for delta in deltas:
        tree = delta.tree
        assert tree is not None and tree.texts == ()
        assert tree.token_ids[0] == tokens[-1]
        accepted = [tree.token_ids[node] for node in tree.accept_index[1:]]
        assert (*accepted, tree.bonus_token_id) == delta.token_ids
        climbed = [tree.parent_index[node] for node in tree.accept_index]
        assert climbed == [-1, *tree.accept_index[:-1]]
        tokens += delta.token_ids
    finish = finish_of(events)
    trees = [delta.tree for delta in deltas if delta.tree is not None]
    assert sum(len(tree.token_ids) - 1 for tree in trees) == finish.speculation.num_draft_tokens
    num_accepted = sum(tree.num_accepted_drafts for tree in trees)
    assert num_accepted == finish.speculation.num_accepted_drafts > 0
    return finish


@pytest.mark.parametrize("has_peer", [False, True], ids=["relayed", "peer"])
@pytest.mark.parametrize("fault", FAULTS)
@virtual
async def test_each_round_has_one_tree(fault: str, *, has_peer: bool) -> None:
    scene = Scene(has_peer=has_peer)
    events = await scene.serve_through(fault, round_trees=True)
    finish = check_trees(events)
    check_stream(events, generate(PROMPT, 200))
    # The prefill has one as well, and so has that of each target.
    num_rebuilds = {"target lost": 1, "retracted": 1}.get(fault, 0)
    num_trees = sum(isinstance(event, TokenDelta) for event in events)
    assert num_trees == finish.speculation.num_rounds + 1 + num_rebuilds
    await scene.check_free()


@pytest.mark.parametrize("asked", [{}, {"omit_text": True}])
@virtual
async def test_who_does_not_ask_has_none(asked: dict[str, Any]) -> None:
    scene = Scene()
    target = scene.add_target()
    scene.add_draft()
    events = await scene.serve(**asked)
    assert all(event.tree is None for event in events if isinstance(event, TokenDelta))
    opens = target.received(TargetOpen)
    assert [opened.wants_trees for opened in opens] == [False]

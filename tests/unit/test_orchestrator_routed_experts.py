"""Clients that ask get the experts of each output token once, whatever happens to workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.messages import GenerateEvent, TargetOpen, TokenDelta
from shared.messages.routed_experts import RoutedExperts, join_routed
from tests.fakes import generate, routed_row
from tests.fakes.in_memory import virtual
from tests.unit.scene import FAULTS, PROMPT, Scene, check_stream, tokens_of

NUM_EXPERTS = 300


def scene_of(**options: Any) -> Scene:
    return Scene(num_experts=NUM_EXPERTS, **options)


def experts_of(events: list[GenerateEvent]) -> RoutedExperts | None:
    """Return the experts of an output, whose deltas each have those of their tokens."""
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    for delta in deltas:
        routed = delta.routed_experts
        assert (routed.shape[0] if routed else 0) == len(delta.token_ids)
    return join_routed(delta.routed_experts for delta in deltas)


def expected_of(output: list[int], resumed: int = 0) -> bytes:
    tokens = [*PROMPT, *output]
    lengths = range(len(PROMPT) + resumed, len(tokens))
    return b"".join(routed_row(tokens[:length], NUM_EXPERTS) for length in lengths)


@pytest.mark.parametrize("has_peer", [False, True], ids=["relayed", "peer"])
@pytest.mark.parametrize("fault", FAULTS)
@virtual
async def test_each_token_has_its_experts_once(fault: str, *, has_peer: bool) -> None:
    scene = scene_of(has_peer=has_peer)
    events = await scene.serve_through(fault, routed_experts=True)
    finish = check_stream(events, generate(PROMPT, 200))
    assert (finish.retries > 0) is (fault in ("target lost", "retracted"))
    found = experts_of(events)
    assert found is not None and found.ids == expected_of(generate(PROMPT, 200))
    await scene.check_free()


@virtual
async def test_a_request_that_asks_waits_for_a_target_that_knows() -> None:
    """As one of a release that has no such field: it would leave the experts out."""
    scene = Scene()
    old = scene.add_target()
    scene.num_experts = NUM_EXPERTS
    serving = asyncio.create_task(scene.serve(routed_experts=True))
    await asyncio.sleep(0.5)
    new = scene.add_target()
    events = await serving
    assert experts_of(events) is not None
    opened = [t.received(TargetOpen) for t in (old, new)]
    assert [len(opens) for opens in opened] == [0, 1]


@virtual
async def test_a_resumed_output_has_those_of_its_new_tokens() -> None:
    scene = scene_of()
    scene.add_target()
    output = generate(PROMPT, 40)
    events = await scene.serve(resume_ids=tuple(output[:11]), routed_experts=True)
    assert tokens_of(events) == output[11:]
    found = experts_of(events)
    assert found is not None and found.ids == expected_of(output, 11)


@pytest.mark.parametrize("asked", [{}, {"omit_text": True}])
@virtual
async def test_who_does_not_ask_has_none(asked: dict[str, Any]) -> None:
    scene = scene_of()
    target = scene.add_target()
    events = await scene.serve(**asked)
    assert all(e.routed_experts is None for e in events if isinstance(e, TokenDelta))
    opens = target.received(TargetOpen)
    assert [opened.wants_routed_experts for opened in opens] == [False]

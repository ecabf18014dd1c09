"""Rounds with a draft: whatever it does, the output equals the one without."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.target_handle import CREDIT_ROUNDS
from shared.errors import StatusCode
from shared.messages import (
    AcceptedPath,
    CreditUpdate,
    DraftOpen,
    DraftRound,
    FinishReason,
    RequestFailure,
    SamplingParams,
    TargetOpen,
    TokenDelta,
    TokenTree,
    VerifyRound,
)
from tests.fakes import generate
from tests.fakes.in_memory import Fault, Unreadable, pass_on, run_virtual, virtual
from tests.unit.scene import (
    BAD_TREES,
    PROMPT,
    SHAPE,
    Scene,
    check_stream,
    delayed,
    failed,
    scripted,
    spoiled,
)


@virtual
async def test_the_order_of_a_tree_leaves_before_the_tokens_do() -> None:
    """Only the client waits for the text of a round."""
    scene = Scene()
    scene.add_target()
    orders = []

    def note(message: Any) -> list[tuple[float, Any]]:
        if isinstance(message, DraftRound):
            orders.append((message.round_idx, len(generation.events)))
        return pass_on(message)

    scene.add_draft(on_request=note)
    generation = scene.generation()
    await generation.run()
    assert len(orders) > 5
    # PromptInfo, and a delta of every round but the last two: this one, and the one that ended.
    # After a round by credit its delta waits as well, to be written after the order.
    assert all(round_idx <= num_events <= round_idx + 1 for round_idx, num_events in orders)


@virtual
async def test_speculation_commits_more_than_a_token_per_round() -> None:
    """Without faults: every round has its tree once there is one, and the statistics add up."""
    scene = Scene()
    scene.add_target()
    scene.add_draft()
    events = await scene.serve(max_new_tokens=200)
    finish = check_stream(events, generate(PROMPT, 200))
    stats = finish.speculation
    assert stats.num_root_only_rounds < 8
    assert stats.accept_length > 2
    assert stats.num_moved_rounds > 0  # the fake's guesses stand behind wrong siblings
    assert stats.num_draft_tokens == 6 * (stats.num_rounds - stats.num_root_only_rounds)
    assert finish.retries == 0
    assert finish.reason is FinishReason.LENGTH
    await scene.check_free()


@virtual
async def test_off_and_no_draft_are_root_only_rounds() -> None:
    """Plain decoding is the same loop with no tree."""
    scene = Scene()
    scene.add_target()
    plain = check_stream(await scene.serve(), generate(PROMPT, 40)).speculation
    draft = scene.add_draft()
    off = check_stream(await scene.serve(shape=None), generate(PROMPT, 40)).speculation
    for stats in (plain, off):
        assert (stats.num_rounds, stats.num_root_only_rounds) == (39, 39)
        assert stats.accept_length == 1.0
    assert draft.engine.received == []
    await scene.check_free()


@virtual
async def test_plain_decoding_needs_no_order_per_round() -> None:
    """The target goes on by its credit, and paths that come early are not lost."""
    scene = Scene()
    target = scene.add_target()
    events = await scene.serve(shape=None, max_new_tokens=200)
    check_stream(events, generate(PROMPT, 200))
    await scene.check_free()
    received = target.engine.received
    assert not any(isinstance(message, VerifyRound) for message in received)
    limits = [m.credit.until_round_idx for m in received if isinstance(m, CreditUpdate)]
    # That of the opening covers the first 256 rounds.
    assert limits == [385], "199 rounds, and never less than half of a credit left"


@pytest.mark.parametrize("count", [1, 2, 3])
@virtual
async def test_very_short_outputs(count: int) -> None:
    """The prefill alone gives the first token."""
    scene = Scene()
    scene.add_target()
    scene.add_draft()
    events = await scene.serve(max_new_tokens=count)
    check_stream(events, generate(PROMPT, count))
    await scene.check_free()


@virtual
async def test_sampling_parameters_reach_both_workers() -> None:
    """Seed and temperature decide the tokens, and the draft guesses with the same noise."""
    scene = Scene()
    target, draft = scene.add_target(), scene.add_draft()
    sampling = SamplingParams(temperature=0.7, seed=2**64 - 1)
    events = await scene.serve(sampling=sampling, stop_token_ids=(499,), logprobs=True)
    check_stream(events, generate(PROMPT, 40, sampling))
    opened = target.received(TargetOpen)[0]
    assert (opened.sampling, opened.stopping.stop_token_ids) == (sampling, (499,))
    assert draft.received(DraftOpen)[0].sampling == (sampling)
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)


@virtual
async def test_the_draft_hears_of_every_token() -> None:
    """None is left out, the last one is the root; once a tree has come, none is repeated."""
    scene = Scene()
    scene.add_target()
    draft = scene.add_draft()
    await scene.serve(max_new_tokens=100)
    opened = draft.received(DraftOpen)[0]
    tokens = list(opened.token_ids)
    num_repeated = 0
    for order in draft.received(DraftRound):
        assert order.token_offset <= len(tokens)
        num_repeated += order.token_offset < len(tokens)
        tokens[order.token_offset :] = order.token_ids
        assert order.seq_len == len(tokens) - 1
        assert order.shape == SHAPE
    assert num_repeated < 8
    assert tokens == [*PROMPT, *generate(PROMPT, 100)][: len(tokens)]


@pytest.mark.parametrize("change", BAD_TREES.values(), ids=BAD_TREES.keys())
@virtual
async def test_a_wrong_tree_costs_a_round_and_a_new_draft_state(
    change: Callable[[TokenTree], dict[str, Any]],
) -> None:
    """The round goes root-only at once; the draft is closed and opened with the next epoch."""
    scene = Scene()
    target = scene.add_target()
    faults = iter([*[pass_on] * 12, spoiled(change)])
    draft = scene.add_draft(on_reply=scripted(faults, only=TokenTree))
    finish = check_stream(await scene.serve(max_new_tokens=200), generate(PROMPT, 200))
    assert finish.speculation.num_root_only_rounds >= 1
    assert finish.speculation.num_accepted_drafts > 0
    epochs = [m.draft_epoch for m in draft.received(DraftOpen)]
    assert epochs == [1, 2]
    assert finish.retries == 1
    trees = [m.tree for m in target.received(VerifyRound)]
    assert None in trees[6:], "the round of the wrong tree"
    await scene.check_free()


@virtual
async def test_a_tree_that_only_the_target_finds_wrong() -> None:
    """INVALID_ARGUMENT leaves the target's state as it was: the same round goes root-only."""
    scene = Scene()
    draft = scene.add_draft()
    requests: list[VerifyRound] = []

    def refuse(message: Any) -> list[tuple[float, Any]]:
        """Answer the second VerifyRound with a failure without showing it to the engine."""
        if not isinstance(message, VerifyRound):
            return pass_on(message)
        requests.append(message)
        if len(requests) == 2:
            ((_, failure),) = failed(StatusCode.INVALID_ARGUMENT, "INVALID_TREE")(message)
            asyncio.get_running_loop().call_later(0.001, target.deliver, failure)
            return []
        return pass_on(message)

    target = scene.add_target(on_request=refuse)
    check_stream(await scene.serve(max_new_tokens=200), generate(PROMPT, 200))
    assert requests[1].tree is not None
    assert requests[2] == dataclasses.replace(requests[1], tree=None)
    opens = draft.received(DraftOpen)
    assert [m.draft_epoch for m in opens] == [1, 2]
    await scene.check_free()


def unreadable(message: Any) -> list[tuple[float, Any]]:
    ((_, failure),) = failed(StatusCode.INVALID_ARGUMENT)(message)
    return [(0.0, Unreadable(failure))]


@virtual
async def test_replies_that_cannot_be_read_count_as_wrong() -> None:
    """A garbled tree replaces the draft, a garbled path moves the request."""
    scene = Scene()
    scene.add_target()
    draft = scene.add_draft(on_reply=scripted(iter([unreadable]), only=TokenTree))
    finish = check_stream(await scene.serve(max_new_tokens=200), generate(PROMPT, 200))
    assert finish.retries == 1
    epochs = [m.draft_epoch for m in draft.received(DraftOpen)]
    assert epochs == [1, 2]
    await scene.check_free()

    scene = Scene()
    scene.add_target(on_reply=scripted(iter([pass_on, unreadable]), only=AcceptedPath))
    other = scene.add_target()
    finish = check_stream(await scene.serve(max_new_tokens=200), generate(PROMPT, 200))
    assert finish.retries == 1
    opens = other.received(TargetOpen)
    assert [m.target_epoch for m in opens] == [2]
    await scene.check_free()


@virtual
async def test_a_late_draft_costs_one_wait_and_comes_back_with_any_tree() -> None:
    """Rounds do not wait for a late draft; it hears of every token and catches up."""
    scene = Scene()
    scene.add_target()
    draft = scene.add_draft(on_reply=scripted(iter([pass_on, delayed(0.05)]), only=TokenTree))
    started = asyncio.get_running_loop().time()
    finish = check_stream(await scene.serve(max_new_tokens=200), generate(PROMPT, 200))
    stats = finish.speculation
    assert 1 <= stats.num_root_only_rounds <= 25
    assert stats.num_accepted_drafts > 50
    assert finish.retries == 0
    assert asyncio.get_running_loop().time() - started < 1.0
    assert len(draft.received(DraftOpen)) == 1


@virtual
async def test_no_round_waits_for_the_draft_to_read_the_prompt() -> None:
    scene = Scene(round_s=0.01)
    scene.add_target()
    scene.add_draft(on_reply=delayed_until(0.08))
    finish = check_stream(await scene.serve(), generate(PROMPT, 40))
    assert 6 <= finish.speculation.num_root_only_rounds <= 12
    assert finish.timings.mean_draft_wait_ms < 3.0, "of a relayed round"


def delayed_until(when: float) -> Fault:
    """Hold trees until some time."""

    def hold(message: Any) -> list[tuple[float, Any]]:
        left_s = max(when - asyncio.get_running_loop().time(), 0.0)
        return [(left_s if isinstance(message, TokenTree) else 0.0, message)]

    return hold


@virtual
async def test_a_silent_draft_is_replaced() -> None:
    """A draft that never answers is closed, and the request opened on another one."""
    scene = Scene(round_s=0.05)
    scene.add_target()
    silent = scene.add_draft(on_reply=lambda message: [])
    serving = asyncio.create_task(scene.serve(max_new_tokens=100))
    await asyncio.sleep(0.1)
    good = scene.add_draft()
    finish = check_stream(await serving, generate(PROMPT, 100))
    assert finish.speculation.num_accepted_drafts > 10
    assert silent.engine.requests == {}
    assert good.engine.received
    assert finish.retries == 1
    await scene.check_free()


@virtual
async def test_trees_that_a_grammar_forces_are_no_answer_of_a_draft() -> None:
    """It is silent, and replaced, also if every other round of its request has such a tree."""
    scene = Scene(has_peer=True, round_s=0.05)

    def force(message: Any) -> list[tuple[float, Any]]:
        if isinstance(message, AcceptedPath) and message.round_idx % 2:
            message = dataclasses.replace(message, num_draft_tokens=3, is_forced=True)
        return [(0.0, message)]

    scene.add_target(on_reply=force)
    silent = scene.add_draft(on_reply=lambda message: [], on_channel=lambda message: [])
    serving = asyncio.create_task(scene.serve(max_new_tokens=400))
    await asyncio.sleep(0.1)
    good = scene.add_draft()
    check_stream(await serving, generate(PROMPT, 400))
    assert silent.engine.requests == {}
    assert good.engine.received
    await scene.check_free()


@virtual
async def test_a_draft_is_not_silent_while_nothing_is_ordered() -> None:
    """A prompt that takes the target long to read says nothing about the draft."""
    scene = Scene()

    def stall(message: Any) -> list[tuple[float, Any]]:
        is_early = isinstance(message, AcceptedPath) and asyncio.get_running_loop().time() < 1.5
        return [(1.5 - asyncio.get_running_loop().time() if is_early else 0.0, message)]

    scene.add_target(on_reply=stall)
    draft = scene.add_draft()
    finish = check_stream(await scene.serve(max_new_tokens=200), generate(PROMPT, 200))
    assert finish.retries == 0
    assert finish.speculation.num_root_only_rounds <= CREDIT_ROUNDS + 8
    opens = draft.received(DraftOpen)
    assert [m.draft_epoch for m in opens] == [1]
    await scene.check_free()


@virtual
async def test_a_draft_that_joins_late_is_used() -> None:
    """Opened with everything so far; joining is no retry."""
    scene = Scene(round_s=0.05)
    scene.add_target()
    serving = asyncio.create_task(scene.serve(max_new_tokens=100))
    await asyncio.sleep(1.0)
    draft = scene.add_draft()
    finish = check_stream(await serving, generate(PROMPT, 100))
    assert finish.speculation.num_root_only_rounds >= 15
    assert finish.speculation.num_accepted_drafts > 10
    assert finish.retries == 0
    opened = draft.received(DraftOpen)[0]
    assert len(opened.token_ids) > len(PROMPT) + 10


@virtual
async def test_a_lost_draft_worker_is_replaced_by_another_one() -> None:
    """The round that waited goes on at once."""
    scene = Scene(round_s=0.02)
    scene.add_target(on_reply=scripted(iter([delayed(0.01)] * 300), only=AcceptedPath))
    first = scene.add_draft()
    second = scene.add_draft()
    serving = asyncio.create_task(scene.serve(max_new_tokens=200))
    await asyncio.sleep(0.2)
    used, other = (first, second) if first.engine.requests else (second, first)
    used.lose()
    finish = check_stream(await serving, generate(PROMPT, 200))
    assert other.engine.received
    assert finish.speculation.num_root_only_rounds <= 10
    assert finish.retries == 1
    await scene.check_free()


@pytest.mark.parametrize(
    ("num_tokens", "code", "is_news"),
    [
        (1, StatusCode.INTERNAL, False),
        (12, StatusCode.INTERNAL, True),
        (12, StatusCode.NOT_FOUND, False),
    ],
)
def test_a_lost_draft_is_news_only_to_a_request_that_goes_on(
    caplog: pytest.LogCaptureFixture, num_tokens: int, code: StatusCode, *, is_news: bool
) -> None:
    """A request that ends soon may be gone from the target before its draft asks there."""

    async def main() -> None:
        scene = Scene()

        def slow_paths(message: Any) -> list[tuple[float, Any]]:
            return [(0.01 if isinstance(message, AcceptedPath) else 0.0, message)]

        def refuse(message: Any) -> list[tuple[float, Any]]:
            """Say in time that the target no longer has the request."""
            if isinstance(message, DraftOpen) and message.draft_epoch == 1:
                failure = RequestFailure(
                    request_id=message.request_id,
                    code=int(code),
                    reason="TEST",
                    message="no request here",
                    target_epoch=message.target_epoch,
                    draft_epoch=message.draft_epoch,
                )
                asyncio.get_running_loop().call_later(0.002, draft.deliver, failure)
                refused.append(message)
                return []
            return pass_on(message)

        refused: list[DraftOpen] = []
        scene.add_target(on_reply=slow_paths)
        draft = scene.add_draft(on_request=refuse)
        events = await scene.serve(max_new_tokens=num_tokens)
        check_stream(events, generate(PROMPT, num_tokens))
        assert len(refused) == 1

    run_virtual(main())
    assert ("the draft is lost: no request here" in caplog.text) is is_news

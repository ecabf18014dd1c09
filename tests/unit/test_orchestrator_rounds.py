"""Rounds and recovery: whatever workers do, the output equals the fault-free one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.losses import TargetGone
from orchestrator.target_handle import TargetHandle
from orchestrator.workers import WorkerSession
from shared.errors import (
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    StatusCode,
    UnavailableError,
)
from shared.messages import (
    AcceptedPath,
    CreditUpdate,
    DraftOpen,
    FinishReason,
    RequestRetracted,
    SamplingParams,
    TargetClose,
    TargetOpen,
    TokenDelta,
    TokenTree,
    TreeShape,
    VerifyRound,
)
from shared.messages.batches import Batch
from shared.rpc.status import failure_of
from tests.contract.driver import target_open
from tests.fakes import FakeTarget, generate
from tests.fakes.in_memory import Fault, InMemoryWorker, pass_on, run_virtual, virtual
from tests.unit.scene import (
    BAD_TREES,
    PROMPT,
    SHAPE,
    Scene,
    check_stream,
    delayed,
    failed,
    finish_of,
    read,
    scripted,
    spoiled,
    tokens_of,
)


@virtual
async def test_a_lost_target_is_replaced_and_both_epochs_advance() -> None:
    """Prompt and committed tokens are prefilled elsewhere; the draft reads them again."""
    scene = Scene()
    first = scene.add_target()
    draft = scene.add_draft()
    serving = asyncio.create_task(scene.serve(max_new_tokens=200))
    await asyncio.sleep(0.1)
    second = scene.add_target()
    first.lose()
    finish = check_stream(await serving, generate(PROMPT, 200))
    (opened,) = second.received(TargetOpen)
    assert opened.target_epoch == 2
    assert opened.num_prompt_tokens == len(PROMPT)
    assert len(opened.token_ids) > len(PROMPT)
    opens = draft.received(DraftOpen)
    assert [(m.target_epoch, m.draft_epoch, m.target_address) for m in opens] == [
        (1, 1, "t:0"),
        (2, 2, "t:1"),
    ]
    assert finish.retries == 1
    assert finish.speculation.num_root_only_rounds <= 12, "a few on each target"
    await scene.check_free()


@virtual
async def test_a_lost_target_that_comes_back_is_used_again() -> None:
    """With one target the request waits for its successor."""
    scene = Scene()
    first = scene.add_target()
    scene.add_draft()
    serving = asyncio.create_task(scene.serve(max_new_tokens=200))
    await asyncio.sleep(0.1)
    first.lose()
    await asyncio.sleep(1.5)
    scene.add_target()
    check_stream(await serving, generate(PROMPT, 200))
    await scene.check_free()


@virtual
async def test_without_a_successor_the_request_ends_as_unavailable() -> None:
    """After step_timeout_s; the client may resume elsewhere."""
    scene = Scene()
    target = scene.add_target()
    draft = scene.add_draft()
    generation = scene.generation(max_new_tokens=200)
    serving = asyncio.create_task(generation.run())
    await asyncio.sleep(0.1)
    target.lose()
    started = asyncio.get_running_loop().time()
    with pytest.raises(UnavailableError):
        await serving
    assert asyncio.get_running_loop().time() - started == pytest.approx(2.0, abs=0.5)
    received = tokens_of(await read(generation))
    assert received == generate(PROMPT, len(received)) and received
    await asyncio.sleep(1.0)
    assert draft.engine.requests == {}


@virtual
async def test_a_silent_target_is_given_up() -> None:
    """The socket lives, the engine does not answer: another target takes over."""
    scene = Scene()
    silent = scene.add_target(
        on_reply=scripted(iter([pass_on, pass_on, lambda message: []]), only=AcceptedPath)
    )
    other = scene.add_target()
    scene.add_draft()
    events = await scene.serve(session_id="s")
    check_stream(events, generate(PROMPT, 40))
    assert any(isinstance(m, TargetOpen) for m in other.engine.received)
    assert any(isinstance(m, TargetClose) for m in silent.engine.received)
    await scene.check_free()


@virtual
async def test_a_request_that_kills_workers_is_refused() -> None:
    """Three, as they die within a moment; a fourth worker must not see it."""
    scene = Scene()
    scene.add_draft()

    def kill(worker_index: int) -> Fault:
        def fault(message: Any) -> list[tuple[float, Any]]:
            if isinstance(message, CreditUpdate):
                asyncio.get_running_loop().call_soon(scene.targets[worker_index].lose)
                return []
            return pass_on(message)

        return fault

    for index in range(3):
        scene.add_target(on_request=kill(index))
    fourth = scene.add_target()
    with pytest.raises(InternalError) as caught:
        await scene.serve()
    assert caught.value.reason == "REQUEST_KILLED_WORKERS"
    assert fourth.engine.received == []
    await asyncio.sleep(1.0)
    assert scene.drafts[0].engine.requests == {}


@pytest.mark.parametrize("shape", [SHAPE, None])
@pytest.mark.parametrize("has_peer", [False, True])
@virtual
async def test_logits_that_are_no_numbers_end_the_request(
    shape: TreeShape | None, *, has_peer: bool
) -> None:
    """At once, in any kind of round, and on no other worker: the same would happen there."""
    scene = Scene(has_peer=has_peer)
    broken = failed(StatusCode.INTERNAL, "NON_FINITE_LOGITS")
    for _ in range(2):
        scene.add_target(on_reply=scripted(iter([pass_on] * 5 + [broken]), only=AcceptedPath))
    scene.add_draft()
    with pytest.raises(InternalError) as caught:
        await scene.serve(shape=shape, max_new_tokens=400)
    assert caught.value.reason == "NON_FINITE_LOGITS"
    assert asyncio.get_running_loop().time() < 1.0
    opens = [m for t in scene.targets for m in t.received(TargetOpen)]
    assert len(opens) == 1
    await scene.check_free()


@virtual
async def test_a_failure_that_comes_together_with_the_path_before_it_is_kept() -> None:
    """Nobody waits for the round that failed yet: without it, the target looked silent."""
    worker = WorkerSession(address="t:0", info=FakeTarget().info)
    handle = TargetHandle(
        *(worker, "a", 1),
        step_timeout_s=2.0,
        on_admitted=lambda admitted: None,
        on_detached=lambda draft_epoch: None,
        on_rest=lambda rest: None,
        on_gone=lambda: None,
        may_move=lambda: False,
    )
    message = target_open("a")
    path = AcceptedPath(
        request_id="a",
        target_epoch=1,
        round_idx=0,
        seq_len=5,
        accept_index=(0,),
        token_ids=(7,),
        num_accepted_drafts=0,
        num_draft_tokens=1,
    )
    error = InvalidArgumentError("no token is allowed", reason="INVALID_GRAMMAR")
    batch = Batch(messages=[path, failure_of(error, message, round_idx=1)])
    asyncio.get_running_loop().call_soon(worker.receive, batch)
    assert await handle.open(message) == path
    with pytest.raises(InvalidArgumentError, match="no token is allowed"):
        await handle.credited_rounds(1, lambda path: True)
    with pytest.raises(TargetGone, match="silent"):
        await handle.credited_rounds(1, lambda path: True)


@pytest.mark.parametrize("has_peer", [False, True])
@virtual
async def test_a_draft_that_is_lost_during_the_prefill_costs_nothing(*, has_peer: bool) -> None:
    """It has been opened, and reads along."""
    scene = Scene(has_peer=has_peer)

    def slow_prefill(message: Any) -> list[tuple[float, Any]]:
        is_prefill = isinstance(message, AcceptedPath) and message.round_idx == 0
        return [(0.4, message)] if is_prefill else pass_on(message)

    target = scene.add_target(on_reply=slow_prefill)
    draft = scene.add_draft()
    serving = asyncio.create_task(scene.serve())
    await asyncio.sleep(0.2)
    assert draft.engine.requests
    draft.lose()
    check_stream(await serving, generate(PROMPT, 40))
    orders = target.received(VerifyRound)
    assert all(order.round_idx for order in orders), "a prefill is no round to order"
    await scene.check_free()


@virtual
async def test_a_prompt_that_kills_in_its_first_step_is_refused_too() -> None:
    """The engine never got to say that it had admitted the request."""
    scene = Scene()

    def kill(message: Any) -> list[tuple[float, Any]]:
        if isinstance(message, TargetOpen):
            victim = next(t for t in scene.targets if t.worker.num_own_requests)
            asyncio.get_running_loop().call_soon(victim.lose)
            return []
        return pass_on(message)

    for _ in range(4):
        scene.add_target(on_request=kill)
    with pytest.raises(InternalError) as caught:
        await scene.serve()
    assert caught.value.reason == "REQUEST_KILLED_WORKERS"
    assert sum(target.worker.is_lost for target in scene.targets) == 3


def test_every_record_of_a_request_says_which_request_and_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As fields for machines, and in the message for people."""
    caplog.set_level("INFO", logger="orchestrator")

    async def main() -> None:
        scene = Scene()
        scene.add_target()
        late = [*[pass_on] * 8, delayed(0.05)]
        scene.add_draft(on_reply=scripted(iter(late), only=TokenTree))
        await scene.serve("mine")

    run_virtual(main())
    records = [record for record in caplog.records if hasattr(record, "request_id")]
    assert {record.request_id for record in records} == {"mine"}
    late, finished = records
    round_idx = late.round_idx
    assert f"[mine round {round_idx}] the draft is late" in late.getMessage()
    assert finished.round_idx > round_idx > 2
    assert "finished by LENGTH: 40 tokens" in finished.getMessage()


@virtual
async def test_draining_targets_are_no_kills() -> None:
    """A rolling restart moves a request any number of times."""
    scene = Scene()
    scene.add_draft()
    scene.add_target(on_reply=scripted(iter([delayed(0.01)] * 300), only=AcceptedPath))
    serving = asyncio.create_task(scene.serve(max_new_tokens=300))
    for index in range(4):
        await asyncio.sleep(0.2)
        scene.add_target(on_reply=scripted(iter([delayed(0.01)] * 300), only=AcceptedPath))
        scene.targets[index].lose(is_clean=True)
    finish = check_stream(await serving, generate(PROMPT, 300))
    assert finish.retries == 4
    await scene.check_free()


@virtual
async def test_a_forgotten_request_is_rebuilt_on_the_same_target() -> None:
    """NOT_FOUND and FAILED_PRECONDITION are about state, not about the request."""
    for code in (StatusCode.NOT_FOUND, StatusCode.FAILED_PRECONDITION):
        scene = Scene()
        target = scene.add_target(
            on_reply=scripted(iter([pass_on, pass_on, failed(code)]), only=AcceptedPath)
        )
        scene.add_draft()
        check_stream(await scene.serve(), generate(PROMPT, 40))
        opens = target.received(TargetOpen)
        assert [m.target_epoch for m in opens] == [1, 2]
        await scene.check_free()


@virtual
async def test_a_target_that_forgets_again_and_again_is_no_progress() -> None:
    """Rebuilding has a budget."""
    scene = Scene()
    scene.add_target(
        on_reply=scripted(iter([failed(StatusCode.NOT_FOUND)] * 99), only=AcceptedPath)
    )
    with pytest.raises(UnavailableError) as caught:
        await scene.serve()
    assert caught.value.reason == "NO_PROGRESS"
    await scene.check_free()


@virtual
async def test_a_new_request_without_room_is_resource_exhausted() -> None:
    """Before work starts; one that runs is re-opened instead, see the retractions."""
    scene = Scene()
    scene.add_target(
        on_reply=scripted(iter([failed(StatusCode.RESOURCE_EXHAUSTED)]), only=AcceptedPath)
    )
    with pytest.raises(ResourceExhaustedError):
        await scene.serve()
    await scene.check_free()


@virtual
async def test_a_retracted_request_comes_back_when_there_is_room() -> None:
    """It goes before new requests, and waits while another one needs the pages."""
    scene = Scene(round_s=0.01)
    target = scene.add_target()
    older = asyncio.create_task(scene.serve("older", max_new_tokens=60))
    newer = asyncio.create_task(scene.serve("newer", max_new_tokens=30))
    await asyncio.sleep(0.1)
    target.engine.num_pages_taken = target.engine.num_free_pages
    target.engine.retract("test.newer")
    target.step()
    await asyncio.sleep(0.3)
    assert "test.newer" not in target.engine.requests
    assert "test.older" in target.engine.requests
    target.engine.num_pages_taken = 0
    check_stream(await newer, generate(PROMPT, 30))
    finish = check_stream(await older, generate(PROMPT, 60))
    assert finish.retries == 0
    await scene.check_free()


@virtual
async def test_cancelling_frees_both_workers_within_a_message() -> None:
    """At any moment: while opening, waiting for a tree, or verifying."""
    for delay in (0.0005, 0.0015, 0.003, 0.01, 0.05):
        scene = Scene()
        target = scene.add_target()
        draft = scene.add_draft(on_reply=scripted(iter([delayed(0.02)] * 9), only=TokenTree))
        generation = scene.generation(max_new_tokens=300)
        serving = asyncio.create_task(generation.run())
        await asyncio.sleep(delay)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await asyncio.sleep(0.005)
        assert target.engine.requests == {} and draft.engine.requests == {}
        await scene.check_free()


@virtual
async def test_resuming_goes_on_exactly_after_the_tokens_held() -> None:
    """They count as output, are not sent again, and the offset goes on."""
    scene = Scene()
    target = scene.add_target()
    scene.add_draft()
    whole = generate(PROMPT, 40)
    for held in (0, 1, 17, 39, 40):
        events = await scene.serve(resume_ids=tuple(whole[:held]))
        assert tokens_of(events) == whole[held:]
        finish = finish_of(events)
        assert finish.usage.num_output_tokens == 40 - held
        assert finish.usage.num_prompt_tokens == len(PROMPT)
        assert finish.reason is FinishReason.LENGTH
        deltas = [event for event in events if isinstance(event, TokenDelta)]
        assert not deltas or deltas[0].token_offset == held
    opened = target.received(TargetOpen)
    assert len(opened) == 4  # the last one was complete already
    assert all(m.num_prompt_tokens == len(PROMPT) for m in opened)
    await scene.check_free()


@virtual
async def test_the_context_ends_a_request_without_a_limit() -> None:
    """CONTEXT_LENGTH, not LENGTH: the client's limit was not reached."""
    scene = Scene()
    target = InMemoryWorker(
        FakeTarget(has_features=False, max_context_len=32), scene.pool, address="t:0"
    )
    scene.targets.append(target)
    scene.add_draft()
    for limit in (None, 100):
        events = await scene.serve(max_new_tokens=limit)
        finish = check_stream(events, generate(PROMPT, 32 - len(PROMPT)))
        assert finish.reason is FinishReason.CONTEXT_LENGTH
    await scene.check_free()


@virtual
async def test_a_stop_token_ends_the_output_and_is_cut() -> None:
    """The target stops inside its commit; the client does not get the stop token."""
    scene = Scene()
    scene.add_target()
    scene.add_draft()
    whole = generate(PROMPT, 40)
    stop = whole[20]
    kept = whole[: whole.index(stop)]
    events = await scene.serve(stop_token_ids=(stop,))
    finish = check_stream(events, kept)
    assert (finish.reason, finish.matched_stop) == (FinishReason.STOP, stop)
    events = await scene.serve(stop_token_ids=(stop,), include_stop_in_output=True)
    check_stream(events, [*kept, stop])
    await scene.check_free()


DRAFT_FAULTS: dict[str, Fault] = {
    "late": delayed(0.03),
    "very late": delayed(0.4),
    "lost": lambda message: [],
    "twice": lambda message: [(0.0, message), (0.003, message)],
    "old epoch": lambda message: [
        (0.0, dataclasses.replace(message, draft_epoch=message.draft_epoch - 1))
    ],
    "old round": lambda message: [
        (0.0, dataclasses.replace(message, round_idx=max(0, message.round_idx - 1)))
    ],
    "future round": lambda message: [
        (0.0, dataclasses.replace(message, round_idx=message.round_idx + 1))
    ],
    "failure": failed(StatusCode.INTERNAL),
    "retracted": lambda message: [
        (0.0, RequestRetracted(request_id=message.request_id, draft_epoch=message.draft_epoch))
    ],
    **{f"tree: {name}": spoiled(change) for name, change in BAD_TREES.items()},
}
TARGET_FAULTS: dict[str, Fault] = {
    "slow": delayed(0.5),
    "forgotten": failed(StatusCode.NOT_FOUND),
    "stale": failed(StatusCode.FAILED_PRECONDITION),
    "draining": failed(StatusCode.UNAVAILABLE),
    "twice": lambda message: [(0.0, message), (0.002, message)],
    "retracted": lambda message: [
        (0.0, RequestRetracted(request_id=message.request_id, target_epoch=message.target_epoch))
    ],
}
KILLS = st.none() | st.tuples(
    st.sampled_from(["target", "target cleanly", "draft", "silent target"]), st.integers(0, 12)
)


@given(
    draft_faults=st.lists(st.sampled_from(["ok", "ok", *DRAFT_FAULTS]), max_size=16),
    target_faults=st.lists(st.sampled_from(["ok", "ok", *TARGET_FAULTS]), max_size=16),
    kill=KILLS,
    num_targets=st.integers(1, 2),
    num_drafts=st.integers(0, 2),
    num_plain=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 1.0]),
    has_peer=st.booleans(),
    stall=st.none() | st.tuples(st.integers(5, 60), st.sampled_from([10, 30, 100, 700])),
    round_ms=st.sampled_from([0.1, 1.0, 8.0, 40.0]),
)
@settings(max_examples=150)
@virtual
async def test_no_fault_changes_the_output(
    draft_faults: list[str],
    target_faults: list[str],
    kill: tuple[str, int] | None,
    num_targets: int,
    num_drafts: int,
    num_plain: int,
    temperature: float,
    has_peer: bool,  # noqa: FBT001
    stall: tuple[int, int] | None,
    round_ms: float,
) -> None:
    """Three requests at once under any mix of faults stream exactly their fault-free outputs."""
    scene = Scene(has_peer=has_peer, round_s=round_ms / 1e3)
    draft_script = iter([DRAFT_FAULTS.get(name, pass_on) for name in draft_faults])
    target_script = iter([TARGET_FAULTS.get(name, pass_on) for name in target_faults])
    num_replies: Counter[str] = Counter()

    def stalled(replies: list[tuple[float, Any]]) -> list[tuple[float, Any]]:
        """Hold what is sent during the stall until it is over, in order."""
        if stall is None:
            return replies
        past_ms = asyncio.get_running_loop().time() * 1e3 - stall[0]
        left_s = (stall[1] - past_ms) / 1e3 if 0 <= past_ms < stall[1] else 0.0
        return [(max(delay, left_s), message) for delay, message in replies]

    def on_target_reply(message: Any) -> list[tuple[float, Any]]:
        return stalled(spoiled_reply(message))

    def spoiled_reply(message: Any) -> list[tuple[float, Any]]:
        if not isinstance(message, AcceptedPath):
            return pass_on(message)
        num_replies["all"] += 1
        if kill is not None and num_replies["all"] == kill[1] + 1:
            match kill[0]:
                case "silent target":
                    return []
                case "draft" if scene.drafts:
                    scene.drafts[0].lose()
                case "target" | "target cleanly":
                    loop = asyncio.get_running_loop()
                    loop.call_soon(replace_target, kill[0] == "target cleanly")
                    return []
        return next(target_script, pass_on)(message)

    def replace_target(is_clean: bool) -> None:  # noqa: FBT001
        scene.targets[0].lose(is_clean=is_clean)
        asyncio.get_running_loop().call_later(
            0.3, lambda: scene.add_target(on_reply=on_target_reply)
        )

    for _ in range(num_targets):
        scene.add_target(on_reply=on_target_reply)
    for _ in range(num_drafts):
        fault = scripted(draft_script, only=TokenTree)
        scene.add_draft(on_reply=fault, on_channel=fault)
    sampling = [SamplingParams(temperature=temperature, seed=seed) for seed in range(3)]
    streams = await asyncio.gather(
        *(
            scene.serve(
                f"r{i}",
                prompt_ids=(i, 7),
                max_new_tokens=30 + i,
                sampling=params,
                shape=None if i < num_plain else SHAPE,
            )
            for i, params in enumerate(sampling)
        )
    )
    for i, events in enumerate(streams):
        check_stream(events, generate((i, 7), 30 + i, sampling[i]))
    await scene.check_free()

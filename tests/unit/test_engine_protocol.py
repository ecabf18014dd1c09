"""Messages that are late, repeated, stale, wrong or malformed: answered, and nothing changes."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shared.errors import StatusCode
from shared.messages import (
    AcceptedPath,
    DraftClose,
    RequestFailure,
    SamplingParams,
    StoppingParams,
    TargetAdmitted,
    TargetClose,
    TargetOpen,
    TokenTree,
    VerifyRound,
)
from target_service.engine import TargetEngine
from tests.engines import (
    Models,
    committed_kv,
    make_draft,
    make_target,
)

PROMPT = (5, 6, 7, 8, 9)


def open_message(**changes: Any) -> TargetOpen:
    message = TargetOpen(
        request_id="r", target_epoch=3, token_ids=PROMPT, num_prompt_tokens=len(PROMPT),
        sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=50),
    )  # fmt: skip
    return replace(message, **changes)


@pytest.fixture
def target(models: Models) -> TargetEngine:
    return make_target(models.pairing("eagle3"), page_size=4)


def answers(target: TargetEngine, *messages: Any) -> list[Any]:
    """Submit, step until idle, return what came out."""
    for message in messages:
        target.submit(message)
    outputs = []
    while target.has_work:
        outputs.extend(target.step())
        target.check_integrity()
    return outputs


def opened(target: TargetEngine, **changes: Any) -> AcceptedPath:
    began_ns = time.monotonic_ns()
    admitted, path = answers(target, open_message(**changes))
    assert isinstance(admitted, TargetAdmitted) and isinstance(path, AcceptedPath)
    assert admitted.times is not None
    assert began_ns < admitted.times.begin_ns < time.monotonic_ns()
    return path


def next_round(path: AcceptedPath, **changes: Any) -> VerifyRound:
    message = VerifyRound(
        request_id="r", target_epoch=3, round_idx=path.round_idx + 1, seq_len=path.seq_len,
        root_token_id=path.token_ids[-1],
    )  # fmt: skip
    return replace(message, **changes)


def with_tree(
    message: VerifyRound, token_ids: Sequence[int], parent_index: Sequence[int]
) -> VerifyRound:
    tree = TokenTree(
        request_id="r", target_epoch=3, draft_epoch=1, round_idx=message.round_idx,
        seq_len=message.seq_len, token_ids=tuple(token_ids), parent_index=tuple(parent_index),
    )  # fmt: skip
    return replace(message, tree=tree)


def state(target: TargetEngine) -> tuple[Any, ...]:
    """Return everything about request "r" that a refused message must leave alone."""
    request = target.requests["r"]
    plain = {
        name: copy.deepcopy(getattr(request, name))
        for name in (
            "tokens",
            "committed_len",
            "launched_len",
            "phase",
            "req_idx",
            "round_idx",
            "last_reply",
            "queued",
        )
    }
    kv = committed_kv(target, "r", request.committed_len)
    return plain, kv.numpy().tobytes(), target.load.num_free_pages


def test_round_zero_is_the_prefill(target: TargetEngine) -> None:
    path = opened(target)
    assert (path.round_idx, path.seq_len, path.accept_index) == (0, 5, (0,))
    assert (path.num_draft_tokens, path.num_accepted_drafts, len(path.token_ids)) == (1, 0, 1)
    assert path.target_epoch == 3 and path.finish_reason == 0


def test_a_repeated_round_gets_the_same_reply(target: TargetEngine) -> None:
    path = opened(target, logprobs=True, top_logprobs=2)
    message = next_round(path)
    [first] = answers(target, message)
    before = state(target)
    steps = target.load.num_steps
    assert answers(target, message) == [first]
    assert answers(target, message, message) == [first, first]
    assert target.load.num_steps == steps, "it was computed again"
    assert state(target) == before
    # A retry may ask with another tree; the round is over all the same.
    other = with_tree(message, [message.root_token_id, 1], [-1, 0])
    assert answers(target, other) == [first]
    [second] = answers(target, next_round(first))
    assert second.round_idx == 2 and state(target)[0]["tokens"][-3:] == [
        *path.token_ids, *first.token_ids, *second.token_ids,
    ]  # fmt: skip


def test_the_same_round_sent_twice_at_once_is_answered_once_per_step(
    target: TargetEngine,
) -> None:
    message = next_round(opened(target))
    outputs = answers(target, message, message)
    assert [output.round_idx for output in outputs] == [1]


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"request_id": "other"}, StatusCode.NOT_FOUND, "request_id"),
        ({"target_epoch": 2}, StatusCode.FAILED_PRECONDITION, "target_epoch"),
        ({"target_epoch": 4}, StatusCode.FAILED_PRECONDITION, "target_epoch"),
        ({"round_idx": 3}, StatusCode.FAILED_PRECONDITION, "round_idx"),
        ({"round_idx": 0, "seq_len": 0}, StatusCode.FAILED_PRECONDITION, "round_idx"),
        ({"seq_len": 5}, StatusCode.FAILED_PRECONDITION, "seq_len"),
        ({"seq_len": 7}, StatusCode.FAILED_PRECONDITION, "seq_len"),
        ({"root_token_id": 300}, StatusCode.FAILED_PRECONDITION, "root_token_id"),
    ],
)
def test_stale_rounds_are_refused(
    target: TargetEngine, changes: dict[str, Any], code: StatusCode, field: str
) -> None:
    [path] = answers(target, next_round(opened(target)))
    before = state(target)
    [failure] = answers(target, next_round(path, **changes))
    assert isinstance(failure, RequestFailure)
    assert (failure.code, failure.field) == (code, field)
    assert failure.request_id == changes.get("request_id", "r")
    assert failure.round_idx == changes.get("round_idx", 2)
    assert failure.target_epoch == changes.get("target_epoch", 3)
    assert state(target) == before
    [reply] = answers(target, next_round(path))
    assert reply.round_idx == 2


ROOT = object()  # stands for the bonus token


@pytest.mark.parametrize(
    ("token_ids", "parent_index", "field"),
    [
        ([], [], "tree.token_ids"),
        ([ROOT] * 65, [-1, *range(64)], "tree.token_ids"),
        ([ROOT, 1], [-1], "tree.parent_index"),
        ([ROOT, 1], [0, 0], "tree.parent_index"),
        ([ROOT, 1, 2], [-1, 2, 0], "tree.parent_index"),
        ([ROOT, 1, 2], [-1, 0, -1], "tree.parent_index"),
        ([ROOT, 1, 2], [-1, 0, 7], "tree.parent_index"),
        ([ROOT, 263], [-1, 0], "tree.token_ids"),
        ([ROOT, -5], [-1, 0], "tree.token_ids"),
        ([99_999, 1], [-1, 0], "tree.token_ids"),
        ([0, 1], [-1, 0], "tree.token_ids"),
    ],
)
def test_malformed_trees_are_refused_and_a_root_only_round_may_follow(
    target: TargetEngine, token_ids: list[Any], parent_index: list[int], field: str
) -> None:
    path = opened(target)
    before = state(target)
    message = next_round(path)
    assert message.root_token_id != 0
    ids = [message.root_token_id if token is ROOT else token for token in token_ids]
    [failure] = answers(target, with_tree(message, ids, parent_index))
    assert (failure.code, failure.field) == (StatusCode.INVALID_ARGUMENT, field)
    assert failure.round_idx == 1
    assert state(target) == before
    [reply] = answers(target, message)
    assert reply.round_idx == 1 and reply.num_draft_tokens == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": (), "num_prompt_tokens": 0}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 6}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
        ({"token_ids": (5, 263, 1, 1, 1)}, "token_ids"),
        ({"token_ids": (5, -1, 1, 1, 1)}, "token_ids"),
        ({"token_ids": (1,) * 512, "num_prompt_tokens": 3}, "token_ids"),
        ({"sampling": SamplingParams(logit_bias=((263, 1.0),))}, "sampling.logit_bias"),
        ({"sampling": SamplingParams(logit_bias=((-1, 1.0),))}, "sampling.logit_bias"),
        (
            {"stopping": StoppingParams(max_new_tokens=5, stop_token_ids=(3, 400))},
            "stopping.stop_token_ids",
        ),
    ],
)
def test_bad_opens_are_refused_and_leave_an_older_epoch_alone(
    target: TargetEngine, changes: dict[str, Any], field: str
) -> None:
    path = opened(target)
    before = state(target)
    for request_id in ("r", "new"):
        [failure] = answers(target, open_message(target_epoch=4, request_id=request_id, **changes))
        assert (failure.code, failure.field) == (StatusCode.INVALID_ARGUMENT, field)
        assert failure.request_id == request_id
    assert state(target) == before
    assert "new" not in target.requests
    [reply] = answers(target, next_round(path))
    assert reply.round_idx == 1


def test_a_prompt_that_fills_the_context_names_its_reason(target: TargetEngine) -> None:
    longest = target.info.max_context_len
    [failure] = answers(target, open_message(token_ids=(1,) * longest, num_prompt_tokens=1))
    assert failure.reason == "PROMPT_TOO_LONG"
    outputs = answers(
        target, open_message(token_ids=(1,) * (longest - 1), num_prompt_tokens=longest - 1)
    )
    assert outputs[-1].finish_reason == 3 and target.load.num_running == 0


@pytest.mark.parametrize("epoch", [1, 3])
def test_an_open_that_is_not_newer_is_stale(target: TargetEngine, epoch: int) -> None:
    opened(target)
    before = state(target)
    [failure] = answers(target, open_message(target_epoch=epoch))
    assert (failure.code, failure.field) == (StatusCode.FAILED_PRECONDITION, "target_epoch")
    assert state(target) == before


def test_a_newer_open_rebuilds_and_goes_on_exactly(target: TargetEngine) -> None:
    path = opened(target)
    tokens = [*PROMPT, *path.token_ids]
    for _ in range(6):
        [path] = answers(target, next_round(path))
        tokens.extend(path.token_ids)
    [want] = answers(target, next_round(path))
    # Mid-round: the old epoch's order is dropped with it.
    target.submit(next_round(want))
    admitted, again = answers(target, open_message(target_epoch=9, token_ids=tuple(tokens)))
    assert (admitted.target_epoch, again.target_epoch, again.round_idx) == (9, 9, 0)
    assert again.token_ids == want.token_ids and again.seq_len == want.seq_len
    [failure] = answers(target, next_round(want))
    assert failure.field == "target_epoch"
    assert answers(target, TargetClose(request_id="r", target_epoch=9)) == []
    assert target.load.num_free_pages == target.load.num_pages


def test_close_in_every_phase_frees_everything(target: TargetEngine) -> None:
    close = TargetClose(request_id="r", target_epoch=3)
    target.submit(close)  # unknown: a no-op
    target.submit(open_message())
    target.submit(replace(close, target_epoch=2))  # of an older epoch: a no-op
    assert target.load.num_waiting == 1
    target.submit(close)
    assert answers(target) == []
    path = opened(target)
    target.submit(next_round(path))
    assert answers(target, close) == []
    target.submit(open_message(token_ids=PROMPT * 90, num_prompt_tokens=5))
    target.step()  # in the middle of a prefill
    assert target.load.num_running == 1
    assert answers(target, close) == []
    assert target.load.num_free_pages == target.load.num_pages
    [failure] = answers(target, next_round(path))
    assert failure.code == StatusCode.NOT_FOUND


def test_a_round_that_overtakes_its_prefill_is_stale(target: TargetEngine) -> None:
    early = VerifyRound(
        request_id="r", target_epoch=3, round_idx=0, seq_len=0, root_token_id=PROMPT[-1]
    )
    target.submit(open_message())
    [failure, *_] = answers(target, early)
    assert failure.code == StatusCode.FAILED_PRECONDITION and failure.field == "round_idx"


def test_unknown_messages_are_our_bug(target: TargetEngine, models: Models) -> None:
    with pytest.raises(TypeError, match="a target engine takes no DraftClose"):
        target.submit(DraftClose(request_id="r", draft_epoch=1))
    with pytest.raises(TypeError, match="a draft engine takes no TargetClose"):
        make_draft(models.pairing("eagle3")).submit(TargetClose(request_id="r", target_epoch=1))

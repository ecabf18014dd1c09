"""Orders and features that are late, repeated, stale or wrong: a draft serves what it can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from draft_service.features import FeatureRows, FeatureStream
from shared.errors import StatusCode
from shared.messages import (
    DraftClose,
    DraftOpen,
    DraftRound,
    FeatureAck,
    FeatureChunk,
    FeatureCommand,
    FeatureSubscribe,
    FeatureUnsubscribe,
    RequestFailure,
    SamplingParams,
    TokenTree,
    TreeShape,
)
from shared.step.recorder import Recorder
from tests.engines import SHAPES, Models, make_draft

PROMPT = (5, 6, 7, 8, 9)


class Draft:
    """A draft engine and a request on it, fed by hand with random features."""

    def __init__(self, models: Models, kind: str = "eagle", **options: Any) -> None:
        pairing = models.pairing(kind)
        self.engine = make_draft(pairing, **options)
        self.width = self.engine.info.features.width
        self.tokens = [*PROMPT]
        self.rows = torch.randn(200, max(self.width, 1), generator=torch.Generator().manual_seed(1))

    def open(self, **changes: Any) -> list[Any]:
        message = DraftOpen(
            request_id="r", target_epoch=3, draft_epoch=2, target_address="t",
            token_ids=tuple(self.tokens), sampling=SamplingParams(),
        )  # fmt: skip
        return self.send(replace(message, **changes))

    def send(self, *messages: Any) -> list[Any]:
        """Submit, step until idle, return trees and failures."""
        for message in messages:
            self.engine.submit(message)
        outputs = []
        while self.engine.has_work:
            outputs.extend(self.engine.step())
            self.engine.check_integrity()
        return [output for output in outputs if not isinstance(output, FeatureCommand)]

    def order(self, *new_tokens: int, **changes: Any) -> DraftRound:
        """Return the order of the round that commits these tokens."""
        self.tokens.extend(new_tokens)
        message = DraftRound(
            request_id="r", target_epoch=3, draft_epoch=2, round_idx=1,
            seq_len=len(self.tokens) - 1, token_offset=len(self.tokens) - len(new_tokens),
            token_ids=new_tokens, shape=SHAPES[2],
        )  # fmt: skip
        return replace(message, **changes)

    def chunk(self, start: int, stop: int, **changes: Any) -> FeatureChunk:
        message = FeatureChunk(
            request_id="r", target_epoch=3, start=start, shape=(stop - start, self.width),
            dtype="float32", data=self.rows[start:stop].numpy().tobytes(),
        )  # fmt: skip
        return replace(message, **changes)


@pytest.fixture
def draft(models: Models) -> Draft:
    return Draft(models)


def content(tree: TokenTree) -> tuple[Any, ...]:
    return tree.token_ids, tree.parent_index, tree.cumulative_logprobs


def test_a_tree_comes_when_order_and_features_are_there(draft: Draft) -> None:
    assert draft.open() == []
    order = draft.order(10)
    assert draft.send(order) == []
    assert draft.send(draft.chunk(0, 3)) == []
    [tree] = draft.send(draft.chunk(3, 5))
    assert (tree.request_id, tree.target_epoch, tree.draft_epoch) == ("r", 3, 2)
    assert (tree.round_idx, tree.seq_len, tree.token_ids[0]) == (1, 5, 10)


def test_order_and_features_may_come_in_any_order_or_overlap(models: Models) -> None:
    trees = []
    for events in (
        ["order", (0, 5)], [(0, 5), "order"], [(0, 2), "order", (2, 5)],
        [(0, 4), (0, 4), (2, 5), "order"], [(0, 3), (1, 2), (0, 5), "order", (3, 5)],
    ):  # fmt: skip
        draft = Draft(models)
        draft.open()
        outputs = []
        for event in events:
            is_order = event == "order"
            outputs += draft.send(draft.order(10) if is_order else draft.chunk(*event))
        [tree] = outputs
        trees.append(content(tree))
    assert len(set(trees)) == 1


def test_a_gap_is_asked_for_once_and_rows_that_came_are_left_out(models: Models) -> None:
    trees = []
    for spans, expected in [([(0, 5)], []), ([(0, 2), (1, 3), (0, 1), (4, 5), (4, 5)], [3])]:
        draft = Draft(models)
        draft.open()
        asked: list[int] = []
        for span in spans:
            draft.engine.submit(draft.chunk(*span))
            while draft.engine.has_work:
                asked += [output.command.from_position for output in draft.engine.step()]
        assert asked == expected
        trees += draft.send(*[draft.chunk(2, 5)] * len(expected), draft.order(10))
    assert content(trees[0]) == content(trees[1]) and len(trees) == 2


def test_features_are_acknowledged_now_and_then(draft: Draft) -> None:
    """And a position that was is never acknowledged again."""
    draft.tokens += range(150)
    draft.open()
    positions = []
    for start in range(0, 150, 5):
        draft.engine.submit(draft.chunk(start, start + 5))
        draft.engine.submit(draft.chunk(start, start + 5))
        while draft.engine.has_work:
            for output in draft.engine.step():
                if isinstance(output, FeatureCommand) and isinstance(output.command, FeatureAck):
                    positions.append(output.command.position)
    assert positions == [65, 130]


def test_a_repeated_order_gets_the_same_tree(draft: Draft) -> None:
    draft.open()
    order = draft.order(10)
    [first] = draft.send(order, draft.chunk(0, 5))
    assert draft.send(order) == [first]
    later = draft.order(11, 12, round_idx=2)
    [second] = draft.send(later, draft.chunk(5, 7))
    # Late duplicates of a round that is over: no failure, no tree, nothing lost.
    assert draft.send(order) == []
    assert draft.send(order, replace(order, token_ids=(99,))) == []
    assert draft.send(later) == [second]
    [third] = draft.send(draft.order(13, round_idx=3), draft.chunk(7, 8))
    assert third.seq_len == 8


def test_a_newer_order_supersedes_an_unanswered_one(draft: Draft) -> None:
    draft.open()
    first, second = draft.order(10), draft.order(11, 12, round_idx=2)
    assert draft.send(first, second) == []
    [tree] = draft.send(draft.chunk(0, 7))
    assert (tree.round_idx, tree.seq_len) == (2, 7)


def test_an_order_may_repeat_tokens_that_are_known(draft: Draft) -> None:
    draft.open()
    overlapping = replace(draft.order(10), token_offset=3, token_ids=(*PROMPT[3:], 10))
    [tree] = draft.send(overlapping, draft.chunk(0, 5))
    assert tree.seq_len == 5


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_offset": 6}, "token_offset"),
        ({"token_offset": 4}, "token_ids"),
        ({"seq_len": 6}, "seq_len"),
        ({"token_ids": (263,)}, "token_ids"),
        ({"token_ids": (-1,)}, "token_ids"),
        ({"seq_len": 512}, "seq_len"),
        ({"shape": TreeShape(num_steps=0, topk=1, num_draft_tokens=2)}, "shape.num_steps"),
        ({"shape": TreeShape(num_steps=2, topk=17, num_draft_tokens=2)}, "shape.topk"),
        (
            {"shape": TreeShape(num_steps=1, topk=1, num_draft_tokens=65)},
            "shape.num_draft_tokens",
        ),
    ],
)
def test_wrong_orders_fail_the_request_only(
    draft: Draft, changes: dict[str, Any], field: str
) -> None:
    draft.open()
    draft.send(draft.chunk(0, 5))
    [failure] = draft.send(draft.order(10, **changes))
    assert isinstance(failure, RequestFailure) and failure.field == field
    assert (failure.draft_epoch, failure.target_epoch, failure.round_idx) == (2, 3, 1)
    load = draft.engine.load
    assert load.num_running == 0 and load.num_free_pages == load.num_pages
    draft.tokens = [*PROMPT]
    assert draft.open(draft_epoch=5) == []
    [tree] = draft.send(draft.order(10, draft_epoch=5), draft.chunk(0, 5))
    assert tree.draft_epoch == 5


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": ()}, "token_ids"),
        ({"token_ids": (1, 263)}, "token_ids"),
        ({"token_ids": (1,) * 513}, "token_ids"),
    ],
)
def test_wrong_opens_fail(draft: Draft, changes: dict[str, Any], field: str) -> None:
    [failure] = draft.open(**changes)
    assert (failure.code, failure.field) == (StatusCode.INVALID_ARGUMENT, field)
    assert draft.engine.load.num_running == 0


def test_more_requests_than_rows_of_the_page_table(models: Models) -> None:
    draft = Draft(models, max_num_requests=1)
    draft.open()
    [failure] = draft.open(request_id="s")
    assert failure.code == StatusCode.RESOURCE_EXHAUSTED and failure.request_id == "s"
    draft.send(DraftClose(request_id="r", draft_epoch=2))
    assert draft.open(request_id="s") == []


def test_stale_messages_to_a_draft_are_dropped(draft: Draft) -> None:
    draft.open()
    order = draft.order(10)
    for stale in (
        replace(order, draft_epoch=1),
        replace(order, draft_epoch=3),
        replace(order, request_id="other"),
        draft.chunk(0, 5, target_epoch=2),
        draft.chunk(0, 5, request_id="other"),
        DraftClose(request_id="r", draft_epoch=1),
        DraftClose(request_id="other", draft_epoch=9),
        RequestFailure(
            request_id="r", code=9, reason="STALE_STATE", message="over", target_epoch=2
        ),
    ):
        assert draft.send(stale) == []
    draft.tokens = [*PROMPT, 99]
    assert draft.open() == [], "a late duplicate of the open"
    draft.tokens = [*PROMPT, 10]
    [tree] = draft.send(order, draft.chunk(0, 5))
    assert tree.seq_len == 5


def test_features_of_another_width_fail_the_request(draft: Draft) -> None:
    draft.open()
    bad = draft.chunk(0, 2, shape=(1, 2 * draft.width))
    [failure] = draft.send(bad)
    assert (failure.reason, failure.draft_epoch) == ("FEATURE_MISMATCH", 2)
    assert draft.engine.load.num_running == 0


def test_a_target_without_features_ends_the_request(draft: Draft) -> None:
    draft.open()
    failure = RequestFailure(
        request_id="r", code=3, reason="INVALID_ARGUMENT", message="no features", target_epoch=3
    )
    [passed_on] = draft.send(failure)
    assert passed_on == replace(failure, draft_epoch=2)
    assert draft.engine.load.num_running == 0


class Sent(list[Any]):
    """What was put into a channel."""

    put = list.append


def test_a_subscription_at_the_front_ends_though_a_later_one_went_to_the_channel() -> None:
    message = DraftOpen(
        request_id="r", target_epoch=3, draft_epoch=2, target_address="t", token_ids=PROMPT,
        sampling=SamplingParams(),
    )  # fmt: skip
    front: list[FeatureCommand] = []
    channel: Any = Sent()
    features = FeatureStream(message, front, Recorder(torch.device("cpu")), start=0)
    features.attach(channel)
    features.subscribe()
    features.close()
    assert not front and len(channel) == 1, "detaching ends what the channel brings"
    features.receive(0, None)  # overwritten in the ring: bytes come through the front
    features.receive(0, FeatureRows.of(torch.zeros(5, 4)))
    features.receive(30, FeatureRows.of(torch.zeros(2, 4)))  # of the channel, from before
    assert len(channel) == 2
    features.close()
    assert [each.command for each in front] == [
        FeatureSubscribe(request_id="r", target_epoch=3, from_position=0, draft_epoch=2),
        FeatureUnsubscribe(request_id="r", target_epoch=3),
    ]


def test_a_newer_open_and_a_close_end_the_subscription(draft: Draft) -> None:
    draft.engine.submit(
        DraftOpen(
            request_id="r", target_epoch=3, draft_epoch=2, target_address="t", token_ids=PROMPT,
            sampling=SamplingParams(),
        )
    )  # fmt: skip
    draft.engine.step()
    draft.engine.submit(
        DraftOpen(
            request_id="r", target_epoch=4, draft_epoch=3, target_address="u", token_ids=PROMPT,
            sampling=SamplingParams(),
        )
    )  # fmt: skip
    ended, begun = draft.engine.step()
    assert (ended.target_address, begun.target_address) == ("t", "u")
    assert ended.command == FeatureUnsubscribe(request_id="r", target_epoch=3)
    draft.engine.submit(DraftClose(request_id="r", draft_epoch=3))
    [ended] = draft.engine.step()
    assert ended.command == FeatureUnsubscribe(request_id="r", target_epoch=4)
    assert not draft.engine.has_work

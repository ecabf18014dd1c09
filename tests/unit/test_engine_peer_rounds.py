"""Peer rounds: target and draft run them by themselves; whatever ends that costs no token."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from draft_service.engine import DraftEngine
from draft_service.engine_factory import EXTRA_SLOTS
from shared.errors import StatusCode
from shared.messages import (
    DraftClose,
    DraftRound,
    FeatureAck,
    FeatureChunk,
    FeatureFailure,
    FeatureSubscribe,
    FinishReason,
    PathBatch,
    PeerAttach,
    PeerDetach,
    RequestFailure,
    RootOnly,
    SamplingParams,
    TokenTree,
    VerifyRound,
)
from shared.peer.channel import PeerChannel, connect
from shared.rpc.protocol import PROTOCOL_VERSION
from target_service.engine import TargetEngine
from target_service.peer_rounds import ASK_ROUNDS, PeerRounds
from target_service.scheduler import StepPlan
from tests.engines import (
    KINDS,
    SHAPES,
    Models,
    fresh,
    graft,
    keep_table_apart,
    make_draft,
    make_target,
    plain_of,
    pool_of,
    random_tokens,
)
from tests.local_pair import LocalRequest
from tests.marks import EXHAUSTIVE, exhaustive, first_fast
from tests.peer_pair import PeerPair, PoisonedPeerPair, batch_of, close_channels, peer_rounds

PAGE_SIZES = {"eagle3": (16, 64), "eagle": (1, 4), "mtp": (4, 1), "standalone": (64, 16)}
PAGE_SIZES["frozen_kv_mtp"] = (2, 16)


def requests_of(count: int, seed: int) -> list[LocalRequest]:
    rng = random.Random(seed)
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=seed),
        SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=seed),
    ]
    return [
        LocalRequest(
            prompt=random_tokens(rng, 1 + 17 * i),
            max_new_tokens=22,
            shape=SHAPES[(seed + i) % len(SHAPES)],
            sampling=samplings[(seed + i) % 3],
            logprobs=i == 1,
        )
        for i in range(count)
    ]


Engines = tuple[TargetEngine, DraftEngine]
Make = Callable[..., Engines]
Options = dict[str, Any]


@pytest.fixture
def make(models: Models) -> Iterator[Make]:
    """Return what makes a target and a draft that are detached after the test."""
    made: list[TargetEngine | DraftEngine] = []

    def build(kind: str, target: Options | None = None, draft: Options | None = None) -> Engines:
        pairing = models.pairing(kind)
        options = {
            "feature_ring_mb": 1,
            **(target or {}),
        }  # without it nothing goes in path_batches
        engines = make_target(pairing, **options), make_draft(pairing, **draft or {})
        made.extend(engines)
        return engines

    yield build
    close_channels(*made)


@pytest.mark.parametrize("kind", first_fast(KINDS))
def test_output_equals_the_plain_run(make: Make, kind: str) -> None:
    target_page, draft_page = PAGE_SIZES[kind]
    target, draft = make(
        kind, {"page_size": target_page, "feature_ring_mb": 1}, {"page_size": draft_page}
    )
    pair: PoisonedPeerPair

    def edit(tree: TokenTree) -> TokenTree:
        if kind != "eagle3":
            return tree
        plain = expected[int(tree.request_id[1:]) - 1]
        return graft(tree, plain.output[tree.seq_len + 1 - len(plain.prompt) :], rng)

    rng = random.Random(1)
    for seed, (count, margin) in enumerate([(1, 3), (3, 0), (3, 3)]):
        requests = requests_of(count, seed)
        expected = plain_of(target, requests)
        pair = PoisonedPeerPair(target, draft, edit_tree=edit, margin=margin)
        pair.run(requests)
        for request, plain in zip(requests, expected, strict=True):
            assert request.output == plain.output
            assert request.logprob_rows == plain.logprob_rows
            assert request.finish_reason == plain.finish_reason
            assert request.trees == [], "no round is relayed"
            # All but the prefill, the one while the draft catches up, and perhaps the last.
            assert peer_rounds(pair, request) >= len(request.paths) - 3
        check_rows(pair)


@pytest.mark.slow
def test_pages_of_a_tree_are_on_the_device_before_it_comes(make: Make) -> None:
    """As on a GPU, where the page table has a copy that is brought up to date."""
    target, draft = make("eagle3", {"page_size": 4, "feature_ring_mb": 1})
    requests = requests_of(3, 0)
    expected = plain_of(target, requests)
    pool, plan = pool_of(target), target.scheduler.plan
    keep_table_apart(pool)
    are_behind: list[bool] = []

    def plan_and_look() -> StepPlan:
        planned = plan()
        if any(r.draft and r.draft.ordered_round == r.round_idx + 1 for r in planned.verifies):
            are_behind.append(pool.is_page_table_behind)
        return planned

    target.scheduler.plan = plan_and_look  # type: ignore[method-assign]
    PeerPair(target, draft).run(requests)
    assert [r.output for r in requests] == [plain.output for plain in expected]
    assert len(are_behind) > 10
    assert sum(are_behind) <= 1, "but for what the first tree found"


# --- rounds that are ended at any moment ---------------------------------------------------------


def ways_of(pair: PeerPair, *, overlaps: bool) -> list[Callable[[], object]]:
    """Return what happens in a peer round, in order, while nobody hears the answers."""

    def grow() -> None:
        assert pair.draft is not None
        assert pair.draft.step() == [], "trees go over the channel"

    def verify() -> None:
        for message in pair.target.step():
            pair.on_target(message)

    return [pair.to_draft, grow, pair.to_target, *[verify] * (1 + overlaps)]


def moments(per_round: int) -> list[int]:
    """Return after how many of its steps a round is disturbed: each one, and some of the next."""
    return [*range(per_round + 1), *range(per_round + 2, 2 * per_round, 2), 2 * per_round]


def order_again(pair: PeerPair, request: LocalRequest) -> None:
    pair.miss(request)


def cut_by_draft(pair: PeerPair, request: LocalRequest) -> None:
    """Nobody ends the round before the target says that the channel is lost."""
    assert pair.draft is not None
    for channel in pair.draft.channels:
        channel.close()


def cut_by_target(pair: PeerPair, request: LocalRequest) -> None:
    for channel in pair.target.channels:
        channel.close()


def retract(pair: PeerPair, request: LocalRequest) -> None:
    pair.close_draft(request)
    pair.miss(request)


def close_late(pair: PeerPair, request: LocalRequest) -> None:
    """The order comes first, then what it was sent for."""
    pair.miss(request)
    pair.close_draft(request)


def renew_credit(pair: PeerPair, request: LocalRequest) -> None:
    """A late order ends the credit, and another credit comes after what was on the way."""
    before, last = request.paths[-2:]
    pair.target.submit(
        VerifyRound(
            request_id=request.request_id,
            target_epoch=1,
            round_idx=last.round_idx,
            seq_len=before.seq_len,
            root_token_id=before.token_ids[-1],
        )
    )
    for way in ways_of(pair, overlaps=False)[:3]:
        way()
    pair.peer_until[request.request_id] = 0
    pair.order_tree(request)


def is_attached_again(disturb: Any) -> bool:
    return disturb not in (cut_by_draft, cut_by_target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disturb", "overlaps"),
    [
        (order_again, False),
        pytest.param(order_again, True, marks=EXHAUSTIVE),
        (cut_by_draft, True),
        (cut_by_target, False),
        (retract, False),
        (close_late, True),
        pytest.param(renew_credit, False, marks=EXHAUSTIVE),
        (renew_credit, True),
    ],
)
def test_a_peer_round_that_is_given_up_at_any_moment_is_answered_once(
    make: Make, *, disturb: Callable[[PeerPair, LocalRequest], None], overlaps: bool
) -> None:
    """Its tree may be ordered, on its way, queued, in flight, or answered with others after it."""
    target, draft = make("eagle")
    target.scheduler.overlaps_steps = overlaps
    request = LocalRequest(prompt=[3, 1, 4, 1, 5], max_new_tokens=32, shape=SHAPES[2])
    (plain,) = plain_of(target, [request])
    per_round = 4 + overlaps
    answered = set()
    for moment in moments(per_round):
        pair = PeerPair(target, draft)
        served = fresh(request)
        pair.open(served)
        while len(served.paths) < 3:
            pair.step()
        ways = ways_of(pair, overlaps=overlaps)
        for way in ways * 2:
            way()
        assert is_ordered(pair)
        pair.is_deaf = True
        for way in itertools.islice(itertools.cycle(ways), moment):
            way()
        answered.add(len(pair.unheard))
        last = served.paths[-1].round_idx
        disturb(pair, served)
        while pair.step():
            pass
        pair.hear()
        assert served.paths[-1].round_idx > last, f"nothing came of the order at moment {moment}"
        pair.finish()
        assert served.output == plain.output
        assert pair.detached == [served.request_id] or is_attached_again(disturb)
        assert {(start, stop) for spans in pair.rows.values() for start, stop in spans}
        check_rows(pair)
        assert (peer_rounds(pair, served) > 3) or not is_attached_again(disturb)
    assert answered >= {0, 1, 2}


def is_ordered(pair: PeerPair) -> bool:
    """Return whether the target waits for a tree that it has ordered."""
    (held,) = pair.target.requests.values()
    draft = held.draft
    assert draft is not None
    is_ordered = draft.ordered_round == held.round_idx + 1
    return held.is_between_rounds and draft.credit is not None and is_ordered


def check_rows(pair: PeerPair) -> None:
    """Check that rows came over the channel once and in order."""
    for spans in pair.rows.values():
        assert spans[0][0] == 0
        for before, after in pairwise(spans):
            assert before[1] == after[0], spans


# --- a draft that has not caught up --------------------------------------------------------------

LONG = 300  # tokens
SLOW: Options = {"max_batch_rows": 32}
"""Of a draft that takes about ten steps to read as many."""


def long_request(**fields: Any) -> LocalRequest:
    prompt = random_tokens(random.Random(5), LONG)
    fields = {"prompt": prompt, "max_new_tokens": 24, "shape": SHAPES[2], **fields}
    return LocalRequest(**fields)


def sizes(request: LocalRequest) -> list[int]:
    """Return the nodes of each round but the prefill."""
    return [path.num_draft_tokens for path in request.paths[1:]]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_newcomer_decodes_at_once_and_delays_nobody(make: Make, *, overlaps: bool) -> None:
    target, draft = make("eagle", draft=SLOW)
    target.scheduler.overlaps_steps = overlaps
    pair = (PeerPair if overlaps else PoisonedPeerPair)(target, draft)
    others = [opened(pair, prompt=[seed, 4, 1], max_new_tokens=60) for seed in range(2)]
    newcomer = long_request()
    num_before = [len(request.paths) for request in others]
    pair.open(newcomer)
    num_steps = 0
    while not any(num_nodes > 1 for num_nodes in sizes(newcomer)):
        pair.step()
        num_steps += 1
    alone = sizes(newcomer)[:-1]
    assert 2 <= len(alone) <= num_steps and set(alone) == {1}
    for request, count in zip(others, num_before, strict=True):
        # A round takes a step of the draft and one of the target, two that overlap.
        assert (len(request.paths) - count) * (2 + overlaps) >= num_steps - 3
        assert all(num_nodes > 1 for num_nodes in sizes(request)[3:])
    pair.finish()
    requests = [*others, newcomer]
    for request, plain in zip(requests, plain_of(target, requests), strict=True):
        assert request.output == plain.output
    assert all(num_nodes > 1 for num_nodes in sizes(newcomer)[len(alone) : -1])


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_first_tree_that_is_lost_is_ordered_again_soon(make: Make, num_lost: int) -> None:
    """However many rounds the credit has left."""
    target, draft = make("standalone")
    lost = iter(range(num_lost))
    pair = PeerPair(
        target,
        draft,
        credit_rounds=1000,
        edit_tree=lambda tree: tree if next(lost, None) is None else None,
    )
    request = LocalRequest(prompt=[3, 1, 4], max_new_tokens=60, shape=SHAPES[2])
    pair.run([request])
    alone = list(itertools.takewhile(lambda num_nodes: num_nodes == 1, sizes(request)))
    assert num_lost * ASK_ROUNDS <= len(alone) <= num_lost * ASK_ROUNDS + 2
    assert all(num_nodes > 1 for num_nodes in sizes(request)[len(alone) : -1])
    assert request.output == plain_of(target, [request])[0].output


def test_an_order_that_comes_in_vain_grows_no_tree(make: Make) -> None:
    """An attached draft leaves it to its target to order trees; another one does not."""
    target, draft = make("eagle")
    pair = PeerPair(target, draft)
    request = opened(pair)
    order = DraftRound(
        request_id=request.request_id,
        target_epoch=1,
        draft_epoch=1,
        round_idx=len(request.paths),
        seq_len=len(request.tokens) - 1,
        token_offset=len(request.prompt),
        token_ids=tuple(request.output),
        shape=SHAPES[2],
        unless_attached=True,
    )
    held = draft.requests[request.request_id]
    before = held.pending
    draft.submit(order)
    assert held.pending is before
    for channel in draft.channels:
        channel.close()
    pair.to_draft()
    draft.submit(order)
    assert held.pending is not None and held.pending.channel is None
    pair.finish()
    assert request.output == plain_of(target, [request])[0].output


@pytest.mark.parametrize(
    ("fault", "num_steps"),
    [
        *first_fast([("cut", 1), ("miss", 1), ("close", 3), ("reopen", 3)], num_fast=4),
        *first_fast([(fault, n) for fault in ("cut", "miss") for n in (2, 5, 6)], num_fast=0),
        *first_fast([(fault, n) for fault in ("close", "reopen") for n in (4, 7, 8)], num_fast=0),
        *exhaustive((fault, n) for fault in ("cut", "miss") for n in (3, 4, 7, 8)),
        *exhaustive((fault, n) for fault in ("close", "reopen") for n in (1, 2, 5, 6)),
    ],
)
def test_a_draft_that_is_lost_while_it_catches_up(make: Make, fault: str, num_steps: int) -> None:
    target, draft = make("eagle", draft=SLOW)
    target.scheduler.overlaps_steps = num_steps % 2 == 0
    pair = PeerPair(target, draft)
    request = long_request(max_new_tokens=16)
    pair.open(request)
    while not request.paths:
        pair.step()
    for _ in range(num_steps):
        pair.step()
    match fault:
        case "cut":
            for channel in draft.channels:
                channel.close()
        case "close":
            pair.close_draft(request)
        case "miss":
            pair.miss(request)
        case "reopen":
            pair.open_draft(request)
    pair.finish()
    assert request.output == plain_of(target, [request])[0].output


def test_a_target_goes_on_alone_within_its_credit_when_its_draft_is_lost(make: Make) -> None:
    """Nobody orders a round: the orchestrator hears of the loss, and has nothing to do at once."""
    target, draft = make("eagle")
    pair = PeerPair(target, draft, credit_rounds=12)
    request = opened(pair, max_new_tokens=60)
    pair.miss = lambda request: None  # type: ignore[method-assign]
    for channel in draft.channels:
        channel.close()
    until = pair.peer_until.pop(request.request_id)
    before = len(request.paths)
    pair.peer_until[request.request_id] = 1000  # no more credit
    while pair.step():
        pass
    assert pair.detached == [request.request_id]
    assert request.paths[-1].round_idx == until
    assert set(sizes(request)[before:]) == {1}
    del pair.miss  # type: ignore[method-assign]
    pair.miss(request)
    pair.finish()
    assert request.output == plain_of(target, [request])[0].output


def test_credit_for_the_root_alone_that_is_left_lets_no_round_run_without_its_tree(
    make: Make,
) -> None:
    target, draft = make("eagle")
    pair = PeerPair(target, draft)
    request = LocalRequest(prompt=[3, 1, 4], max_new_tokens=24, shape=SHAPES[2])
    pair.open(request)
    while not request.paths:
        pair.step()
    pair.give_credit(request, 100, RootOnly())
    pair.peer_until[request.request_id] = 0
    pair.order_tree(request)
    pair.finish()
    assert request.output == plain_of(target, [request])[0].output
    assert all(num_nodes > 1 for num_nodes in sizes(request)[2:-1])


# --- trees that are no good ----------------------------------------------------------------------


def opened(pair: PeerPair, **fields: Any) -> LocalRequest:
    """Open a request and run it until it is in peer rounds."""
    fields = {"prompt": [3, 1, 4, 1, 5], "max_new_tokens": 24, "shape": SHAPES[2], **fields}
    request = LocalRequest(**fields)
    pair.open(request)
    while len(request.paths) < 3:
        pair.step()
    return request


WRONG: dict[str, Callable[[TokenTree], Options]] = {
    "root": lambda tree: {"token_ids": (tree.token_ids[0] ^ 1, *tree.token_ids[1:])},
    "order": lambda tree: {"parent_index": (-1, 2, *tree.parent_index[2:])},
    "size": lambda tree: {
        "token_ids": (*tree.token_ids, 1),
        "parent_index": (*tree.parent_index, 0),
    },
    "vocabulary": lambda tree: {"token_ids": (*tree.token_ids[:-1], 1 << 20)},
    "seq_len": lambda tree: {"seq_len": tree.seq_len + 1},
}


@pytest.mark.parametrize("wrong", first_fast(WRONG))
def test_a_wrong_tree_fails_its_round_and_the_root_alone_goes_on(make: Make, wrong: str) -> None:
    pair = PeerPair(*make("standalone"))
    request = opened(pair)
    pair.edit_tree = lambda tree: replace(tree, **WRONG[wrong](tree))
    while pair.step():
        pass
    (failure,) = pair.failures
    assert failure.code == StatusCode.INVALID_ARGUMENT
    assert (failure.request_id, failure.target_epoch) == (request.request_id, 1)
    assert failure.round_idx == len(request.paths)
    pair.failures.clear()
    pair.edit_tree = lambda tree: tree
    pair.miss(request)
    pair.finish()
    assert request.output == plain_of(pair.target, [request])[0].output
    root_only = [path.round_idx for path in request.paths[1:] if path.num_draft_tokens == 1]
    caught_up, failed, *caught_up_again = root_only
    assert (caught_up, failed) == (1, failure.round_idx) and len(caught_up_again) <= 1


@pytest.mark.parametrize("wrong", first_fast(WRONG))
def test_a_wrong_tree_fails_its_round_and_no_other(make: Make, wrong: str) -> None:
    target, draft = make("standalone")
    pair = PeerPair(target, draft)
    requests = requests_of(3, 0)
    for request in requests:
        pair.open(request)
    while min(len(request.paths) for request in requests) < 4:
        pair.step()
    one, others = requests[1], (requests[0], requests[2])

    def spoil(tree: TokenTree) -> TokenTree:
        is_its = tree.request_id == one.request_id
        return replace(tree, **WRONG[wrong](tree)) if is_its else tree

    pair.edit_tree = spoil
    num_rounds = [peer_rounds(pair, request) for request in others]
    pair.pump()
    while pair.step() and not pair.failures:
        pass
    (failure,) = pair.failures
    assert (failure.request_id, failure.code) == (one.request_id, StatusCode.INVALID_ARGUMENT)
    pair.failures.clear()
    pair.edit_tree = lambda tree: tree
    pair.miss(one)
    pair.finish()
    expected = plain_of(target, requests)
    assert [request.output for request in requests] == [plain.output for plain in expected]
    for request, count in zip(others, num_rounds, strict=True):
        assert peer_rounds(pair, request) > count
        root_only = [path.round_idx for path in request.paths[1:-1] if path.num_draft_tokens == 1]
        assert root_only == [1], "while the draft caught up"


STALE: dict[str, Callable[[TokenTree], Options]] = {
    "round before": lambda tree: {"round_idx": tree.round_idx - 1},
    "round after": lambda tree: {"round_idx": tree.round_idx + 1},
    "epoch of the target": lambda tree: {"target_epoch": tree.target_epoch - 1},
    "epoch of the draft": lambda tree: {"draft_epoch": tree.draft_epoch + 1},
    "request": lambda tree: {"request_id": "who"},
}


@pytest.mark.parametrize("stale", first_fast(STALE))
def test_a_tree_that_nobody_waits_for_is_ignored(make: Make, stale: str) -> None:
    target, draft = make("standalone")
    pair = PeerPair(target, draft)
    request = opened(pair)

    def twice(tree: TokenTree) -> TokenTree:
        held = target.requests[tree.request_id]
        assert held.draft is not None
        channel, is_growing = held.draft.channel, target.source.window.is_growing
        wrong = {"token_ids": (tree.token_ids[0] ^ 1, *tree.token_ids[1:])}
        target.submit_peer(channel, batch_of(replace(tree, **wrong, **STALE[stale](tree))))
        assert target.source.window.is_growing == is_growing, "the real one is still to come"
        assert held.queued is None
        return tree

    pair.edit_tree = twice
    pair.finish()
    assert request.output == plain_of(target, [request])[0].output
    assert peer_rounds(pair, request) == len(request.paths) - 2


def test_a_tree_that_comes_twice_is_verified_once(make: Make) -> None:
    target, draft = make("standalone")
    pair = PeerPair(target, draft)
    request = opened(pair)
    tell = pair.tell_target

    def twice(channel: PeerChannel, message: Any) -> None:
        tell(channel, message)
        tell(channel, message)

    pair.tell_target = twice  # type: ignore[method-assign]
    pair.finish()
    assert request.output == plain_of(target, [request])[0].output


def test_a_lost_tree_is_waited_for_until_somebody_orders_the_round(make: Make) -> None:
    pair = PeerPair(*make("eagle"))
    request = opened(pair)
    pair.edit_tree = lambda tree: None
    while pair.step():
        pass
    assert request.finish_reason is FinishReason.NONE
    pair.edit_tree = lambda tree: tree
    pair.miss(request)
    pair.finish()
    assert request.output == plain_of(pair.target, [request])[0].output


# --- room ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_context_that_fills_up(make: Make, page_size: int) -> None:
    """The last trees are cut to what fits, then the root goes alone; and nobody has to order it."""
    target, draft = make("standalone", {"page_size": page_size, "max_context_len": 40})
    pair = PeerPair(target, draft)
    request = opened(pair, max_new_tokens=100, shape=SHAPES[3])
    edit = dict[int, int]()

    def note(tree: TokenTree) -> TokenTree:
        edit[tree.seq_len] = len(tree.token_ids)
        return tree

    pair.edit_tree = note
    pair.finish()
    (plain,) = plain_of(target, [request])
    assert request.finish_reason is plain.finish_reason is FinishReason.CONTEXT_LENGTH
    assert request.output == plain.output
    assert all(seq_len + num_nodes <= 40 for seq_len, num_nodes in edit.items())
    assert min(edit.values()) < SHAPES[3].num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scarce", "num_slots", "count", "length", "overlaps"),
    [
        ("target", 232, 3, 10, False),
        ("target", 232, 3, 10, True),
        ("draft", EXTRA_SLOTS + 160, 5, 120, True),
    ],
)
def test_retraction_ends_peer_rounds_and_they_come_back(
    make: Make, *, scarce: str, num_slots: int, count: int, length: int, overlaps: bool
) -> None:
    rng = random.Random(2)
    target, draft = make("eagle", **{scarce: {"page_size": 4, "num_pages": 1 + num_slots // 4}})
    target.scheduler.overlaps_steps = overlaps
    requests = [
        LocalRequest(
            prompt=random_tokens(rng, length),
            max_new_tokens=75 if scarce == "target" else 30,
            shape=SHAPES[2],
        )
        for _ in range(count)
    ]
    expected = plain_of(target, requests)
    pair = PeerPair(target, draft)
    pair.run(requests)
    assert (pair.num_retracted if scarce == "target" else pair.num_draft_retracted) > 0
    for request, plain in zip(requests, expected, strict=True):
        assert request.output == plain.output
    assert peer_rounds(pair, requests[0]) > 2


def test_a_draft_that_runs_out_of_pages_tells_the_target_too(make: Make) -> None:
    target, draft = make("standalone")
    pair = PeerPair(target, draft)
    request = opened(pair)
    (held,) = target.requests.values()
    assert held.draft is not None and held.draft.credit is not None
    draft.submit(DraftClose(request_id=request.request_id, draft_epoch=request.draft_epoch))
    pair.pump()
    assert held.draft is None
    assert not target.source.window.is_growing
    request.has_draft = False
    pair.finish()
    assert pair.detached == [request.request_id]
    assert request.output == plain_of(target, [request])[0].output


@pytest.mark.parametrize("num_steps", first_fast(range(5)))
def test_the_target_says_so_when_a_channel_is_lost_under_a_credit(
    make: Make, num_steps: int
) -> None:
    target, draft = make("eagle")
    pair = PeerPair(target, draft)
    requests = [opened(pair, prompt=[seed, 4, 1]) for seed in range(3)]
    for _ in range(num_steps):
        pair.step()
    for channel in target.channels:
        channel.close()
    pair.finish()
    assert sorted(pair.detached) == [request.request_id for request in requests]
    for request, plain in zip(requests, plain_of(target, requests), strict=True):
        assert request.output == plain.output
        assert any(path.num_draft_tokens > 1 for path in request.paths[-4:]), "it has trees again"


def test_a_draft_that_was_asleep_takes_nothing_from_a_newer_one(make: Make) -> None:
    target, draft = make("eagle")
    pair = PeerPair(target, draft)
    request = opened(pair)
    (held,) = target.requests.values()
    features, peer = held.features, held.draft
    assert features is not None and peer is not None

    def state() -> tuple[Any, ...]:
        return (
            held.draft,
            peer.channel,
            peer.credit,
            features.channel,
            features.start,
            features.next,
        )

    before = state()
    asleep = connect(target.info.peer_socket)
    ids = {"request_id": request.request_id, "target_epoch": 1}
    asleep.put(PeerAttach(**ids, draft_epoch=request.draft_epoch - 1))
    asleep.put(FeatureSubscribe(**ids, from_position=0))
    asleep.put(FeatureAck(**ids, position=1000))
    asleep.put(PeerDetach(**ids, draft_epoch=request.draft_epoch - 1))
    asleep.flush()
    for _ in range(2):
        for channel, message in target.channels.receive():
            target.submit_peer(channel, message)
    assert state() == before
    target.channels.flush()
    (failure,) = asleep.receive()
    assert failure.reason == "SUBSCRIPTION_REPLACED"
    asleep.close()
    pair.finish()
    assert request.output == plain_of(target, [request])[0].output
    assert peer_rounds(pair, request) == len(request.paths) - 2
    check_rows(pair)


def test_a_draft_of_another_protocol_is_refused_by_name(make: Make) -> None:
    """Over its own channel, so that it drops the request; the draft that is attached stays."""
    target, draft = make("eagle")
    pair = PeerPair(target, draft)
    request = opened(pair)
    (held,) = target.requests.values()
    before = held.draft
    other = connect(target.info.peer_socket)
    other.put(
        PeerAttach(
            request_id=request.request_id,
            target_epoch=1,
            draft_epoch=request.draft_epoch + 1,
            protocol_version=PROTOCOL_VERSION + 2,
        )
    )
    other.flush()
    for _ in range(2):
        for channel, message in target.channels.receive():
            target.submit_peer(channel, message)
    assert held.draft is before is not None
    target.channels.flush()
    (failure,) = other.receive()
    assert failure.reason == "PROTOCOL_MISMATCH"
    assert f"protocol version {PROTOCOL_VERSION + 2}" in failure.message
    assert failure.draft_epoch == request.draft_epoch + 1
    other.close()
    pair.finish()
    assert request.output == plain_of(target, [request])[0].output


# --- features ------------------------------------------------------------------------------------


def subscription(**fields: Any) -> FeatureSubscribe:
    return FeatureSubscribe(**{"request_id": "r1", "target_epoch": 1, "from_position": 0, **fields})


@pytest.mark.slow
@pytest.mark.parametrize("has_peer", [False, True])
def test_an_older_draft_takes_no_features_from_an_attached_one(
    make: Make, *, has_peer: bool
) -> None:
    """Whatever way its subscription comes, even over the newer draft's own channel."""
    target, draft = make("eagle")
    pair = PeerPair(target, draft)
    request = opened(pair)
    pair.miss(request)
    pair.open_draft(request)
    (held,) = target.requests.values()
    while held.draft is None or held.draft.draft_epoch < 2:
        pair.step()
    log, peer = held.features, held.draft
    assert log is not None and peer is not None and peer.draft_epoch == 2
    channel, before, late = log.channel, log.next, subscription(draft_epoch=1)
    assert channel is peer.channel
    failures: list[RequestFailure] = []
    tell, on_target = pair.tell_draft, pair.on_target

    def note(message: Any) -> None:
        if isinstance(message, RequestFailure | FeatureFailure):
            failures.append(getattr(message, "failure", message))

    def tell_draft(channel: PeerChannel, message: Any) -> None:
        note(message)
        tell(channel, message)

    def take(message: Any) -> None:
        note(message)
        on_target(message)

    pair.tell_draft, pair.on_target = tell_draft, take  # type: ignore[method-assign]
    if has_peer:
        target.submit_peer(channel, late)
    else:
        target.submit(late)
    assert (log.channel, log.next) == (channel, before)
    pair.step()
    (failure,) = failures
    assert (failure.reason, failure.draft_epoch) == ("SUBSCRIPTION_REPLACED", 1)
    assert request.request_id in draft.requests, "the failure was of its former self"
    pair.finish()
    assert request.output == plain_of(target, [request])[0].output


def test_an_older_attached_draft_takes_no_features_from_one_that_is_not(make: Make) -> None:
    target, draft = make("eagle")
    pair = PeerPair(target, draft)
    request = opened(pair)
    (held,) = target.requests.values()
    log, peer = held.features, held.draft
    assert log is not None and peer is not None and log.channel is peer.channel
    channel = peer.channel
    target.submit(subscription(draft_epoch=2))
    assert log.channel is None
    target.submit_peer(channel, subscription(draft_epoch=1))
    assert log.channel is None
    target.submit(subscription())  # of a draft that does not say its epoch: the last one wins
    target.submit_peer(channel, subscription(draft_epoch=2))
    assert log.channel is channel
    pair.close_draft(request)
    pair.finish()


def test_orders_of_all_shapes_are_sent_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that hears of some would grow trees for those alone, and then for the others."""
    pair = PeerPair(*make("eagle3"))
    for index, shape in enumerate(SHAPES[:3]):
        pair.open(LocalRequest(prompt=[5 + index, 6, 7], max_new_tokens=20, shape=shape))
    queued: list[PathBatch] = []
    sent: list[list[PathBatch]] = []
    put, flush = PeerChannel.put, PeerChannel.flush

    def note_put(channel: PeerChannel, message: Any, **options: Any) -> None:
        if isinstance(message, PathBatch):
            queued.append(message)
        put(channel, message, **options)

    def note_flush(channel: PeerChannel) -> None:
        if queued:
            sent.append(queued.copy())
            queued.clear()
        flush(channel)

    monkeypatch.setattr(PeerChannel, "put", note_put)
    monkeypatch.setattr(PeerChannel, "flush", note_flush)
    num_shapes = []
    while pair.step():
        assert len(sent) <= 1
        num_shapes += [len(batches) for batches in sent]
        sent.clear()
    assert max(num_shapes) == 3


def test_rows_that_were_sent_with_an_order_are_not_kept(make: Make) -> None:
    pair = PeerPair(*make("eagle3", {}))
    request = opened(pair)
    for _ in range(6):
        pair.step()
    log = pair.target.requests[request.request_id].features
    assert log is not None and log.end > len(request.prompt)
    assert log.start == log.end == log.next
    pair.finish()


@pytest.mark.slow
def test_rows_that_are_lost_in_the_ring_come_through_the_front(make: Make) -> None:
    """Trees still go over the channel; rows come as bytes from then on."""
    target, draft = make("eagle", {"feature_ring_mb": 1})
    ring = target.features.ring
    assert ring is not None
    pair = PeerPair(target, draft)
    request = opened(pair)
    tell = pair.tell_draft
    by_front: list[FeatureChunk] = []

    def late(channel: PeerChannel, message: Any) -> None:
        if isinstance(message, PathBatch):
            for _ in range(10):
                ring.start_step()
                ring.write(torch.zeros((1, ring.capacity // 8), dtype=torch.uint8).numpy())
        tell(channel, message)

    def note(chunk: FeatureChunk) -> FeatureChunk:
        by_front.append(chunk)
        return chunk

    pair.tell_draft = late  # type: ignore[method-assign]
    pair.edit_chunk = note
    pair.finish()
    assert by_front and all(isinstance(chunk.data, bytes) for chunk in by_front)
    check_rows(pair)
    for before, after in pairwise(by_front):
        assert before.start + before.shape[0] == after.start
    assert request.output == plain_of(target, [request])[0].output
    assert peer_rounds(pair, request) == len(request.paths) - 2


def test_a_timed_round_says_what_both_did(make: Make) -> None:
    pair = PeerPair(*make("eagle"))
    request = opened(pair, is_timed=True)
    pair.finish()
    for path in request.paths[2:]:
        assert path.times is not None
        names = [stage.name for stage in path.times.stages]
        assert names[0] == "draft: channel" and names[-1] == "commit"
        assert names.index("channel") > names.index("draft: tree")
        ends = [path.times.begin_ns, *(stage.end_ns for stage in path.times.stages)]
        assert ends == sorted(ends)


# --- everything at once --------------------------------------------------------------------------


class Chaos:
    """Serves requests in random steps, with something going wrong in every fifteenth of them."""

    def __init__(self, pair: PeerPair, rng: random.Random) -> None:
        self.pair, self.rng = pair, rng
        self.num_trees: Counter[str] = Counter()
        pair.edit_tree = self.spoil

    def spoil(self, tree: TokenTree) -> TokenTree | None:
        fate = self.rng.choices(["", "lost", *WRONG], [20, 1, *[0.3] * len(WRONG)])[0]
        self.num_trees[fate] += 1
        if fate == "lost":
            return None
        return replace(tree, **WRONG[fate](tree)) if fate else tree

    def run(self) -> None:
        pair = self.pair
        assert pair.draft is not None
        for _ in range(20_000):
            running = [r for r in pair.requests.values() if not r.finish_reason]
            if not running:
                break
            if self.rng.random() < 1 / 15:
                self.disturb(self.rng.choice(running))
            for engine, on_message in (
                (pair.target, pair.on_target),
                (pair.draft, pair.on_draft),
            ):
                if engine.has_work and self.rng.random() < 0.6:
                    for message in engine.step():
                        on_message(message)
                    engine.channels.flush()  # as their processes do: a frame has no order
                    engine.check_integrity()
            for carry in (pair.to_draft, pair.to_target):
                if self.rng.random() < 0.7:
                    carry()
            failures = [f for f in pair.failures if f.code == StatusCode.INVALID_ARGUMENT]
            assert failures == pair.failures, "nothing but wrong trees may fail"
            pair.failures.clear()
            for failure in failures:
                request = pair.requests[failure.request_id]
                if failure.target_epoch == request.target_epoch:
                    pair.miss(request)
        pair.finish()

    def disturb(self, request: LocalRequest) -> None:
        if not any(path.target_epoch == request.target_epoch for path in request.paths):
            return
        match self.rng.choice(["order", "order", "close", "cut"]):
            case "close":
                self.pair.close_draft(request)
            case "cut":
                engine = self.rng.choice([self.pair.target, self.pair.draft])
                assert engine is not None
                for channel in engine.channels:
                    channel.close()
        self.pair.miss(request)


KINDS_AND_PACES = [
    ("eagle", True), ("standalone", False),
    pytest.param("eagle", False, marks=EXHAUSTIVE),
    pytest.param("standalone", True, marks=EXHAUSTIVE),
]  # fmt: skip
"""Draft kind, and whether the target overlaps its steps."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "overlaps"), KINDS_AND_PACES)
def test_no_mix_of_faults_changes_the_output(make: Make, kind: str, *, overlaps: bool) -> None:
    target, draft = make(kind, {"feature_ring_mb": 1, "page_size": 4, "num_pages": 1 + 60})
    target.scheduler.overlaps_steps = overlaps
    num_trees: Counter[str] = Counter()
    for seed in range(3):
        requests = requests_of(3, seed)
        expected = plain_of(target, requests)
        pair = PeerPair(target, draft, credit_rounds=5, margin=seed % 3)
        for request in requests:
            pair.open(request)
        chaos = Chaos(pair, random.Random(seed))
        chaos.run()
        num_trees += chaos.num_trees
        for request, plain in zip(requests, expected, strict=True):
            assert request.output == plain.output
            assert request.finish_reason == plain.finish_reason
    assert num_trees[""] and num_trees["lost"] and any(num_trees[fate] for fate in WRONG)


def test_a_wrong_order_among_good_ones_costs_its_own_request_alone(make: Make) -> None:
    """Its draft is dropped, as for any token that does not exist; the other one's goes on."""
    target, draft = make("eagle")
    pair = PeerPair(target, draft)
    requests = [
        LocalRequest(prompt=[3 + i, 1, 4], max_new_tokens=60, shape=SHAPES[2]) for i in range(2)
    ]
    for request in requests:
        pair.open(request)
    tell = pair.tell_draft
    spoiled: list[str] = []

    def spoil(channel: PeerChannel, message: Any) -> None:
        if isinstance(message, PathBatch) and len(message.parts) == 2 and not spoiled:
            bad, good = message.parts
            spoiled.append(bad.request_id)
            ids = (draft.info.vocab_size, *bad.token_ids[1:])
            message = replace(message, parts=(bad._replace(token_ids=ids), good))
        tell(channel, message)

    pair.tell_draft = spoil  # type: ignore[method-assign]
    while not pair.failures:
        pair.step()
    (failure,) = pair.failures
    pair.failures.clear()
    assert (failure.request_id, failure.field) == (spoiled[0], "token_ids")
    pair.finish()
    plain = plain_of(target, requests)
    assert [request.output for request in requests] == [request.output for request in plain]
    good = requests[1]
    assert good.request_id != spoiled[0] and peer_rounds(pair, good) == len(good.paths) - 2


def test_a_draft_says_how_many_targets_wait_for_its_trees(make: Make) -> None:
    target, draft = make("eagle")
    other, _ = make("eagle")
    pairs = [PeerPair(engine, draft) for engine in (target, other)]
    heard: list[list[int]] = [[], []]
    served = []
    for i, (pair, engine) in enumerate(zip(pairs, (target, other), strict=True)):
        source = engine.source
        assert isinstance(source, PeerRounds)
        source.shapes.note_targets = heard[i].append  # type: ignore[method-assign]
        (request,) = requests_of(1, i)
        served.append(replace(request, request_id=f"r{i}", max_new_tokens=40 * (1 + i)))
        pair.open(served[-1])
    while not all(request.finish_reason for request in served):
        for pair in pairs:
            pair.step()
    assert 2 in heard[0] and 2 in heard[1]
    assert heard[1][-1] == 1, "the other's request has ended"
    for pair in pairs:
        pair.finish()

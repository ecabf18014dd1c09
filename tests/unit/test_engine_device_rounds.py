"""Rounds that devices run by themselves, through a mailbox: their output is the plain one."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import draft_service.device_rounds.rounds
from draft_service.device_rounds.mailbox_io import MailboxPaths
from draft_service.device_rounds.rounds import DeviceRounds
from shared.kernels.mailbox_words import MAX_PATH
from shared.messages import PathBatch, SamplingParams, TokenTree, TreeShape
from shared.peer.channel import PeerChannel
from shared.peer.mailbox import is_tag
from target_service.phases import MailboxTrees
from tests.checkpoints import VOCAB_SIZE
from tests.device_pair import (
    BUSHY,
    DevicePair,
    EditPaths,
    Make,
    PoisonedDevicePair,
    check,
    num_rounds,
    requests_of,
)
from tests.engines import KINDS, SHAPES, Models, graft, make_draft, make_target, plain_of
from tests.local_pair import LocalRequest
from tests.marks import EXHAUSTIVE, exhaustive, first_fast
from tests.peer_pair import PeerPair, close_channels, peer_rounds
from tests.unit.test_engine_peer_rounds import PAGE_SIZES

DEEPEST = TreeShape(num_steps=MAX_PATH - 1, topk=4, num_draft_tokens=24)
TOO_DEEP = TreeShape(num_steps=MAX_PATH, topk=2, num_draft_tokens=16)


# --- words ---------------------------------------------------------------------------------------

Nodes = dict[int, tuple[int, int]]
"""(token id, parent) by node."""


def words_of(trees: MailboxTrees) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield of each tree its words, [63], and its round_tag."""
    for slot, tag in zip(trees.slot.tolist(), trees.round_tag.tolist(), strict=True):
        yield trees.words[slot, 1:], tag


def word(tag: int, small: int, token_id: int) -> int:
    return tag << 40 | small << 32 | token_id


def nodes_in(words: torch.Tensor, tag: int) -> Nodes:
    """Return the nodes that words hold of a round."""
    found = enumerate(words.tolist(), start=1)
    return {
        node: (number & 0xFFFFFFFF, number >> 32 & 0xFF)
        for node, number in found
        if number >> 40 == tag and number >> 32 & 0xFF != 255
    }


def graft_mailbox(
    pair: DevicePair, expected: Sequence[LocalRequest], rng: random.Random, *, doubt: float = 0.1
) -> None:
    """Let trees in the mailbox hold what the target will say, so that long paths are accepted."""

    def edit(trees: MailboxTrees) -> None:
        by_slot = {held.req_idx: held for held in pair.target.requests.values()}
        for slot, (words, tag) in zip(trees.slot.tolist(), words_of(trees), strict=True):
            held, nodes = by_slot[slot], nodes_in(words, tag)
            plain = expected[list(pair.requests).index(held.request_id)]
            tokens = [held.tokens[-1], *[token for token, _ in nodes.values()]]
            parents = [-1, *[parent for _, parent in nodes.values()]]
            tree = tree_of(tokens, parents)
            rest = plain.output[held.num_output_tokens :]
            grafted = graft(tree, rest, rng, doubt=doubt).token_ids
            for node in nodes:
                words[node - 1] = word(tag, nodes[node][1], grafted[node])

    pair.edit_trees = edit


def tree_of(token_ids: Sequence[int], parent_index: Sequence[int]) -> Any:
    return TokenTree(
        request_id="",
        target_epoch=1,
        draft_epoch=1,
        round_idx=1,
        seq_len=1,
        token_ids=tuple(token_ids),
        parent_index=tuple(parent_index),
    )


# --- output --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *first_fast(zip(KINDS, [SHAPES[0], SHAPES[5], SHAPES[3], BUSHY, SHAPES[3]], strict=True)),
        *first_fast(
            zip(KINDS, [DEEPEST, SHAPES[1], DEEPEST, SHAPES[1], DEEPEST], strict=True), num_fast=0
        ),
        *first_fast([("mtp-layers", SHAPES[3]), ("mtp-layers", DEEPEST)], num_fast=1),
        *exhaustive(zip(KINDS, [SHAPES[1], DEEPEST] * 3, strict=False)),
    ],
    ids=str,
)
def test_output_equals_the_plain_run(make: Make, kind: str, shape: TreeShape) -> None:
    target, draft, _ = make(kind, PAGE_SIZES.get(kind, (4, 16)))
    requests = requests_of(5, [*KINDS, "mtp-layers"].index(kind), shape)
    expected = plain_of(target, requests)
    pair = PoisonedDevicePair(target, draft)
    if kind == "eagle3":
        graft_mailbox(pair, expected, random.Random(1))
    pair.run(requests)
    check(requests, expected)
    assert pair.num_device_trees > num_rounds(requests) // 2
    assert pair.num_overlapped > num_rounds(requests) // 3
    assert max(path.num_accepted_drafts for r in requests for path in r.paths) > 0


@pytest.mark.slow
@pytest.mark.parametrize("page_sizes", [(1, 64), (64, 1), pytest.param((4, 16), marks=EXHAUSTIVE)])
def test_output_does_not_depend_on_page_sizes(make: Make, page_sizes: tuple[int, int]) -> None:
    target, draft, _ = make("mtp", page_sizes)
    target.scheduler.overlaps_steps = True
    requests = requests_of(5, 7)
    expected = plain_of(target, requests)
    pair = PoisonedDevicePair(target, draft)
    pair.run(requests)
    check(requests, expected)
    assert pair.num_device_trees > num_rounds(requests) // 2


def test_a_path_of_the_longest_kind_fits_into_the_mailbox(make: Make) -> None:
    """Seven drafts and the bonus: every word of a path is a token of it."""
    target, draft, _ = make("eagle3")
    (request,) = requests_of(1, 0, TreeShape(num_steps=7, topk=1, num_draft_tokens=8))
    request.max_new_tokens = 60
    expected = plain_of(target, [request])
    pair = PoisonedDevicePair(target, draft)
    graft_mailbox(pair, expected, random.Random(1), doubt=0.0)
    pair.run([request])
    check([request], expected)
    assert max(path.num_accepted_drafts for path in request.paths) == 7
    assert pair.num_overlapped > 0


def test_a_target_without_a_mailbox_is_no_fault(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pairing = models.pairing("eagle")
    target = make_target(pairing, feature_ring_mb=1)
    draft = make_draft(pairing, make_source=DeviceRounds)
    draft.source.compile(torch.float32)
    (request,) = requests_of(1, 0)
    pair = PeerPair(target, draft)
    pair.run([request])
    check([request], plain_of(target, [request]))
    close_channels(target, draft)
    assert peer_rounds(pair, request) > 3
    assert "engine to engine" in caplog.text and "mailbox" not in caplog.text


def test_trees_that_are_too_deep_go_over_the_hosts(make: Make) -> None:
    target, draft, _ = make("eagle")
    requests = requests_of(3, 0, TOO_DEEP)
    expected = plain_of(target, requests)
    pair = PoisonedDevicePair(target, draft)
    pair.run(requests)
    check(requests, expected)
    assert pair.num_device_trees == pair.num_overlapped == 0


NEEDS_HOST: dict[str, dict[str, Any]] = {
    "repetition": {"sampling": SamplingParams(repetition_penalty=1.2)},
    "presence": {"sampling": SamplingParams(temperature=1.0, presence_penalty=0.4, seed=3)},
    "min_new_tokens": {"min_new_tokens": 20, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 2))},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("needs_host", "overlaps"),
    [
        *[("repetition", False), ("presence", True), ("min_new_tokens", False)],
        *exhaustive([("repetition", True), ("presence", False), ("min_new_tokens", True)]),
    ],
)
def test_device_rounds_go_on_beside_a_request_whose_host_must_know_the_tree(
    make: Make, needs_host: str, *, overlaps: bool
) -> None:
    target, draft, _ = make("eagle")
    target.scheduler.overlaps_steps = overlaps
    one = LocalRequest(prompt=[3, 1, 4], max_new_tokens=40, shape=BUSHY, **NEEDS_HOST[needs_host])
    others = [replace(request, max_new_tokens=40) for request in requests_of(2, 0)]
    requests = [one, *others]
    expected = plain_of(target, requests)
    pair = PoisonedDevicePair(target, draft)
    pair.run(requests)
    check(requests, expected)
    of_others = num_rounds(others)
    assert pair.num_device_trees > of_others * 2 // 3 and pair.num_overlapped > of_others // 2
    assert one.request_id not in {request_id for request_id, _ in pair.device_trees}
    assert any(path.num_draft_tokens > 1 for path in one.paths), "it speculates as well"


@pytest.mark.parametrize(
    ("neighbour", "overlaps"),
    [("plain", True), ("deep", False), *exhaustive([("plain", False), ("deep", True)])],
)
def test_device_rounds_go_on_beside_a_request_without_them(
    make: Make, neighbour: str, *, overlaps: bool
) -> None:
    """One that never speculates, or whose trees are too deep for the mailbox."""
    target, draft, _ = make("eagle")
    target.scheduler.overlaps_steps = overlaps
    shape = None if neighbour == "plain" else TOO_DEEP
    one = LocalRequest(prompt=[3, 1, 4], max_new_tokens=60, shape=shape)
    others = [replace(request, max_new_tokens=40) for request in requests_of(2, 0)]
    requests = [one, *others]
    expected = plain_of(target, requests)
    pair = PoisonedDevicePair(target, draft)
    pair.run(requests)
    check(requests, expected)
    of_others = num_rounds(others)
    assert pair.num_device_trees > of_others * 2 // 3 and pair.num_overlapped > of_others // 2


# --- trees that are no good ----------------------------------------------------------------------

EditWords = Callable[[torch.Tensor, int, random.Random], None]


def noise(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    for i in range(len(words)):
        words[i] = rng.getrandbits(64) - (1 << 63)


def noise_of_the_round(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    for i in range(len(words)):
        words[i] = word(tag, rng.getrandbits(8), rng.getrandbits(32))


def any_tree(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    for i in range(len(words)):
        words[i] = word(tag, rng.randrange(i + 1), rng.randrange(VOCAB_SIZE))


def tokens_past_the_vocabulary(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    for node, (_, parent) in nodes_in(words, tag).items():
        if rng.random() < 0.5:
            words[node - 1] = word(tag, parent, rng.choice([VOCAB_SIZE, 1 << 31, (1 << 32) - 1]))


def parents_out_of_order(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    for node, (token_id, _) in nodes_in(words, tag).items():
        words[node - 1] = word(tag, rng.choice([node, node + 1, 63, 64, 254]), token_id)


def siblings_alike(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    for node, (_, parent) in nodes_in(words, tag).items():
        words[node - 1] = word(tag, parent, 7)


def a_chain_that_is_too_long(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    for i in range(len(words)):
        words[i] = word(tag, i, rng.randrange(VOCAB_SIZE))


def nothing(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    words.zero_()


def some_missing(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    for i in range(len(words)):
        if rng.random() < 0.4:
            words[i] = 0


def no_nodes(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    words.fill_(word(tag, 255, 0))


def stale(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    words -= 1 << 40


def stale_in_part(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    words[::2] -= 1 << 40


def sign_bit(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    """A number in bits that no word has: it is not the round's."""
    words |= -(1 << 63)


LEAVES_NOTHING = {nothing, no_nodes, stale, sign_bit, parents_out_of_order}
WRONG_TREES: list[EditWords] = [
    noise, noise_of_the_round, any_tree, tokens_past_the_vocabulary, parents_out_of_order,
    siblings_alike, a_chain_that_is_too_long, nothing, some_missing, no_nodes, stale,
    stale_in_part, sign_bit,
]  # fmt: skip


@pytest.mark.parametrize("spoil", first_fast(WRONG_TREES))
def test_wrong_trees_in_the_mailbox_cost_no_token(make: Make, spoil: EditWords) -> None:
    target, draft, mailbox = make("eagle", (4, 16))
    rng = random.Random(1)
    requests = requests_of(2, 1, SHAPES[3])
    expected = plain_of(target, requests)

    def edit(trees: MailboxTrees) -> None:
        for words, tag in words_of(trees):
            before = words.clone()
            spoil(words, tag, rng)
            num_spoiled[0] += not torch.equal(before, words)

    num_spoiled = [0]
    pair = PoisonedDevicePair(target, draft, edit_trees=edit)
    pair.run(requests)
    check(requests, expected)
    assert num_spoiled[0] > 0
    if spoil in LEAVES_NOTHING:
        assert sizes_of_device_trees(pair) == {1}


def sizes_of_device_trees(pair: DevicePair) -> set[int]:
    """Return how many nodes were verified where trees were taken from the mailbox."""
    return {
        pair.requests[request_id].paths[round_idx].num_draft_tokens
        for request_id, round_idx in pair.device_trees
    }


def test_a_draft_that_posts_nothing_costs_speculation_and_no_token(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, mailbox = make("standalone")
    monkeypatch.setattr(draft_service.device_rounds.rounds, "stage_posts", lambda *_: [])
    requests = requests_of(2, 0)
    expected = plain_of(target, requests)
    pair = PoisonedDevicePair(
        target, draft, edit_paths=lambda paths: paths.mailboxes[0].paths.zero_()
    )
    pair.run(requests)
    check(requests, expected)
    assert not mailbox.trees.any() and pair.num_device_trees > 0 and pair.num_overlapped == 0
    assert sizes_of_device_trees(pair) == {1}
    taken = set(pair.device_trees)
    assert not any((name, round_idx + 1) in taken for name, round_idx in taken), (
        "the device waits for a draft that has just let it wait in vain"
    )


def test_no_tree_that_is_here_waits_for_one_of_the_device(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, _ = make("standalone")
    pair = DevicePair(target, draft)
    finish = target.pipeline.finish

    def finish_alone(launched: Any) -> None:
        if launched.batch.mailbox_trees is not None:
            assert not target.source.window.is_growing
        finish(launched)

    monkeypatch.setattr(target.pipeline, "finish", finish_alone)
    pair.run(requests_of(2, 0))
    assert pair.num_device_trees > 0


@pytest.mark.slow
def test_the_device_waits_less_and_less_for_a_draft_that_posts_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time costs 30 ms, and those whose trees are there wait as well."""
    target, draft, _ = make("standalone")
    monkeypatch.setattr(draft_service.device_rounds.rounds, "stage_posts", lambda *_: [])
    pair = DevicePair(target, draft, edit_paths=lambda paths: paths.mailboxes[0].paths.zero_())
    pair.run([replace(requests_of(1, 0)[0], max_new_tokens=100)])
    rounds = [round_idx for _, round_idx in pair.device_trees]
    gaps = [after - before for before, after in itertools.pairwise(rounds)]
    assert len(gaps) > 2 and gaps == [(1 << i) + 1 for i in range(len(gaps))]


@pytest.mark.slow
def test_a_draft_that_was_late_once_in_a_while_is_waited_for_again(make: Make) -> None:
    target, draft, _ = make("standalone")
    num_seen = itertools.count()

    def lose_some(trees: MailboxTrees) -> None:
        if next(num_seen) % 4 == 0:
            trees.words.zero_()

    pair = DevicePair(target, draft, edit_trees=lose_some)
    request = replace(requests_of(1, 0)[0], max_new_tokens=100)
    pair.run([request])
    assert pair.num_device_trees > num_rounds([request]) // 2


# --- paths that are no good ----------------------------------------------------------------------

EditPath = Callable[[torch.Tensor, int, random.Random], None]


def no_change(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    pass


def another_path(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    length = rng.randint(1, 4)
    tokens = [VOCAB_SIZE - 1 - rng.randrange(3) for _ in range(length)]
    words.copy_(
        torch.tensor(
            [word(tag, length, token) for token in (tokens + [0] * len(words))[: len(words)]]
        )
    )


def now_and_then_another_path(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    if rng.random() < 0.5:
        another_path(words, tag, rng)


def a_long_path(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    words.copy_(torch.tensor([word(tag, rng.choice([9, 64, 255]), 1)] * len(words)))


def an_empty_path(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    words.fill_(word(tag, 0, 0))


def a_shorter_path(words: torch.Tensor, tag: int, rng: random.Random) -> None:
    """Or one token more: what its first word says."""
    length = int(words[0]) >> 32 & 0xFF
    tokens = [number & 0xFFFFFFFF for number in words.tolist()]
    length = length - 1 or 2
    words.copy_(torch.tensor([word(tag, length, token) for token in tokens]))


WRONG_PATHS: list[EditPath] = [
    noise, noise_of_the_round, another_path, a_long_path, an_empty_path, a_shorter_path, nothing,
    stale, stale_in_part, sign_bit,
]  # fmt: skip


def spoiled(spoil: EditPath) -> EditPaths:
    rng = random.Random(1)

    def edit(paths: MailboxPaths) -> None:
        for slot, tag in zip(paths.slot[0].tolist(), paths.round_tag.tolist(), strict=True):
            spoil(paths.mailboxes[0].paths[slot], tag, rng)

    return edit


@pytest.mark.parametrize("spoil", first_fast(WRONG_PATHS))
def test_what_a_device_took_and_no_host_confirms_is_done_again(make: Make, spoil: EditPath) -> None:
    target, draft, _ = make("eagle", (4, 16))
    requests = requests_of(2, 1, SHAPES[3])
    expected = plain_of(target, requests)
    pair = PoisonedDevicePair(target, draft, edit_paths=spoiled(spoil))
    pair.run(requests)
    check(requests, expected)
    assert pair.num_device_trees > 0 and pair.num_overlapped == 0


def trees_by_round(pair: DevicePair, requests: Sequence[LocalRequest]) -> list[Any]:
    """Return what each request accepted, and the trees that its draft grew, round by round."""
    trees = {
        (tree.request_id, tree.round_idx): (tree.token_ids, tuple(tree.parent_index))
        for tree in pair.trees
    }
    return [
        (path.token_ids, trees.get((request.request_id, path.round_idx)))
        for request in requests
        for path in request.paths
    ]


@pytest.mark.parametrize("kind", [*KINDS, "mtp-layers"])
@pytest.mark.slow
def test_a_draft_grows_the_same_overlapped_or_ordered_or_once_more(make: Make, kind: str) -> None:
    """What is done before the host is told leaves no trace if wrong, and is the same if not."""
    target, draft, _ = make(kind, (4, 16))
    found = []
    for has_mailbox, spoil, is_overlapped in [
        (True, no_change, True),
        (False, no_change, False),
        (True, another_path, False),
        (True, now_and_then_another_path, True),
    ]:
        edit = spoiled(spoil)
        pair = PoisonedDevicePair(target, draft, edit_paths=edit, has_mailbox=has_mailbox)
        requests = requests_of(2, 1, SHAPES[3])
        pair.run(requests)
        found.append(trees_by_round(pair, requests))
        assert (pair.num_device_trees > 0) is has_mailbox
        assert (pair.num_overlapped > 3) is is_overlapped
    assert found == found[:1] * 4


def test_a_round_of_a_target_that_is_gone_leaves_no_hidden_row(make: Make) -> None:
    """What the device did for all of them is void, and extended again from where it began."""
    target, draft, _ = make("mtp-layers", (4, 16))
    pair = DevicePair(target, draft)
    for request in requests_of(2, 1, SHAPES[3]):
        pair.open(request)
    while not pair.draft_device.overlap.is_deferred:
        pair.step()
    pair.step_target()  # the paths are there
    before = draft.runner.last_hidden.clone()
    pair.run_draft_device()
    idx = [request.req_idx for request in draft.requests.values()]
    assert not torch.equal(draft.runner.last_hidden[idx], before[idx])
    channel = next(iter(draft.requests.values())).channel
    assert channel is not None
    pair.draft_device.disconnect(channel)
    assert torch.equal(draft.runner.last_hidden[idx], before[idx])


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_wrong_feature_rows_in_the_mailbox_cost_no_token(make: Make, value: float) -> None:
    """They end up in the draft's KV: its trees are worthless from then on, and still are trees."""
    target, draft, _ = make("eagle")
    requests = requests_of(3, 1, SHAPES[3])
    expected = plain_of(target, requests)
    num_left = 3

    def edit(paths: MailboxPaths) -> None:
        nonlocal num_left
        assert paths.mailboxes[0].rows is not None
        num_left -= 1
        if num_left >= 0:
            paths.mailboxes[0].rows.fill_(value)

    pair = DevicePair(target, draft, edit_paths=edit)
    pair.run(requests)
    check(requests, expected)
    assert num_left < 0 and pair.num_overlapped > 0


# --- places that are no good ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slot", "tag"),
    [
        (10_000, None), ((1 << 31) - 1, None), (-1, None), (-(1 << 31), None), (None, 0),
        (None, 1), (None, -1), (None, 1 << 23), (None, (1 << 31) - 1), (1, 7), (0, (1 << 23) - 1),
    ],
)  # fmt: skip
def test_an_order_for_another_place_costs_no_token(
    make: Make, slot: int | None, tag: int | None
) -> None:
    target, draft, mailbox = make("eagle")
    requests = requests_of(2, 0)
    expected = plain_of(target, requests)
    pair = PoisonedDevicePair(target, draft)
    tell, num_orders = pair.tell_draft, 0

    def tell_draft(channel: PeerChannel, message: Any) -> None:
        nonlocal num_orders
        if isinstance(message, PathBatch):
            parts = tuple(
                part._replace(
                    mailbox_slot=part.mailbox_slot if slot is None else slot,
                    round_tag=part.round_tag if tag is None else tag,
                )
                for part in message.parts
            )
            message = replace(message, parts=parts)
            num_orders += len(parts)
        tell(channel, message)
        if tag is not None and not is_tag(tag):
            assert not any(request.device_tree for request in draft.requests.values())

    pair.tell_draft = tell_draft  # type: ignore[method-assign]
    pair.run(requests)
    check(requests, expected)
    assert num_orders > 0 and pair.num_device_trees > 0 and pair.num_overlapped == 0
    assert sizes_of_device_trees(pair) == {1}


def test_a_draft_does_not_overlap_trees_that_are_too_deep(make: Make) -> None:
    """No path of theirs fits into a mailbox, whatever an order says."""
    target, draft, _ = make("eagle")
    requests = requests_of(2, 0, TOO_DEEP)
    expected = plain_of(target, requests)
    pair = PoisonedDevicePair(target, draft)
    tell, numbers = pair.tell_draft, itertools.count(2)

    def tell_draft(channel: PeerChannel, message: Any) -> None:
        if isinstance(message, PathBatch):
            parts = tuple(part._replace(round_tag=next(numbers)) for part in message.parts)
            message = replace(message, parts=parts)
        tell(channel, message)

    pair.tell_draft = tell_draft  # type: ignore[method-assign]
    pair.run(requests)
    check(requests, expected)
    assert next(numbers) > 10

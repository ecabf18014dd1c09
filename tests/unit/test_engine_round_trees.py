"""The trees that a target shows are those that it verified, wherever they come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from shared.messages import FinishReason, TokenTree
from shared.step.read_back import ReadBack
from target_service.phases import MailboxTrees
from tests.checkpoints import EOS_ID
from tests.device_pair import DevicePair, Make, check, requests_of
from tests.engines import SHAPES, Models, fresh, make_draft, make_target, plain_of
from tests.grammars import CASES, compiled_for
from tests.local_pair import LocalPair, LocalRequest
from tests.peer_pair import PeerPair, close_channels, peer_rounds

Tree = tuple[tuple[int, ...], tuple[int, ...]]  # token_ids, parent_index
Trees = dict[tuple[str, int], Tree]  # by request and round


def asking(count: int, seed: int) -> list[LocalRequest]:
    """Return requests of several samplings; all but the last one want to see their trees."""
    requests = requests_of(count, seed)
    return [replace(r, wants_trees=i < count - 1) for i, r in enumerate(requests)]


def by_round(trees: Iterable[TokenTree]) -> Trees:
    return {(t.request_id, t.round_idx): (t.token_ids, t.parent_index) for t in trees}


def check_trees(request: LocalRequest, sent: Trees | None = None) -> int:
    """Check the trees of a request round by round; return how many drafts were accepted.

    Args:
        sent: What the draft says that it has grown; None: what is verified is something else.
    """
    assert request.wants_trees
    tokens, num_accepted = list(request.prompt), 0
    for path in request.paths:
        tree = path.tree
        assert tree is not None and tree.texts == ()
        assert tree.token_ids[0] == tokens[-1]
        assert len(tree.token_ids) == path.num_draft_tokens
        accepted = [tree.token_ids[node] for node in tree.accept_index[1:]]
        assert (*accepted, tree.bonus_token_id) == path.token_ids
        climbed = [tree.parent_index[node] for node in tree.accept_index]
        assert climbed == [-1, *tree.accept_index[:-1]], "an ancestor is not accepted"
        # With a grammar no path leads to a node for which there was no time to find its mask.
        if path.finish_reason is FinishReason.NONE and not request.compiled_grammar:
            below = zip(tree.parent_index, tree.token_ids, strict=True)
            assert (tree.accept_index[-1], tree.bonus_token_id) not in below, "one more fits"
        if sent is not None and path.num_draft_tokens > 1:
            assert (tree.token_ids, tree.parent_index) == sent[request.request_id, path.round_idx]
        tokens += path.token_ids
        num_accepted += tree.num_accepted_drafts
    return num_accepted


def check_all(requests: Sequence[LocalRequest], sent: Trees) -> None:
    """Check who sees what, and that trees were worth looking at."""
    *seeing, blind = requests
    assert sum([check_trees(request, sent) for request in seeing]) > 0
    assert any(path.num_draft_tokens > 2 for request in seeing for path in request.paths)
    assert all(path.tree is None for path in blind.paths)


def test_relayed_trees_are_shown(models: Models) -> None:
    pairing = models.pairing("eagle")
    target = make_target(pairing)
    requests = asking(3, 1)
    expected = plain_of(target, [replace(request, wants_trees=False) for request in requests])
    LocalPair(target, make_draft(pairing)).run(requests)
    check(requests, expected)
    check_all(requests, by_round(tree for request in requests for tree in request.trees))


def test_trees_of_peer_rounds_are_shown(models: Models) -> None:
    pairing = models.pairing("eagle")
    target, draft = make_target(pairing, feature_ring_mb=1), make_draft(pairing)
    requests = asking(3, 2)
    expected = plain_of(target, [replace(request, wants_trees=False) for request in requests])
    pair = PeerPair(target, draft)
    pair.run(requests)
    check(requests, expected)
    check_all(requests, by_round(pair.trees))
    assert sum([peer_rounds(pair, request) for request in requests[:-1]]) > 6
    close_channels(target, draft)


@pytest.mark.parametrize("overlaps", [False, True])
def test_trees_from_the_mailbox_are_shown(make: Make, *, overlaps: bool) -> None:
    """Also where the step does not know its roots; some words do not come."""
    target, draft, _ = make("eagle")
    target.scheduler.overlaps_steps = overlaps
    requests = asking(3, 3)
    expected = plain_of(target, [replace(request, wants_trees=False) for request in requests])
    pair = DevicePair(target, draft)
    lost: set[tuple[str, int]] = set()

    def lose_words(trees: MailboxTrees) -> None:
        """Tear the first node below the root of every third tree."""
        by_slot = {held.req_idx: held for held in target.requests.values()}
        for slot in trees.slot.tolist():
            held = by_slot[slot]
            round_idx = held.round_idx + held.num_in_flight + 1
            if round_idx % 3 == 0:
                trees.words[slot, 1] = 0
                lost.add((held.request_id, round_idx))

    pair.edit_trees = lose_words
    pair.run(requests)
    check(requests, expected)
    sent = by_round(pair.trees)
    for key in lost & sent.keys():
        sent[key] = without_first(*sent[key])
    check_all(requests, sent)
    shown = {(r.request_id, path.round_idx) for r in requests[:-1] for path in r.paths}
    assert len(shown & {*pair.device_trees}) > len(shown) // 2
    smaller = [key for key in shown & lost if 1 < len(sent[key][0])]
    assert smaller, "no tree lost some of its nodes only"


def without_first(token_ids: Sequence[int], parent_index: Sequence[int]) -> Tree:
    """Return a tree without node 1 and what is below it."""
    kept = [0]
    for node in range(2, len(token_ids)):
        if parent_index[node] in kept:
            kept.append(node)
    parents = tuple(-1 if node == 0 else kept.index(parent_index[node]) for node in kept)
    return tuple(token_ids[node] for node in kept), parents


def test_nothing_more_is_read_where_nobody_asks(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's trees are among what a step brings to its host only if a request asks."""
    names: list[set[str]] = []
    add = ReadBack.add

    def note(read: ReadBack, name: str, source: torch.Tensor, *rows: torch.Tensor) -> None:
        if name == "accept_index":
            names.append(set())
        if names:
            names[-1].add(name)
        add(read, name, source, *rows)

    monkeypatch.setattr(ReadBack, "add", note)
    for asks in (False, True):
        target, draft, _ = make("eagle")
        (request,) = requests_of(1, 0)
        names.clear()
        DevicePair(target, draft).run([replace(request, wants_trees=asks)])
        device_steps = [step for step in names if "num_nodes" in step]
        assert device_steps
        assert all(("taken_parents" in step) is asks for step in device_steps)


@pytest.mark.usefixtures("patient_grammars")
@pytest.mark.parametrize("has_draft", [True, False])
def test_trees_with_a_grammar_are_those_that_it_leaves(models: Models, *, has_draft: bool) -> None:
    """Pruned, and with what it forces: also where there is no draft."""
    pairing = models.pairing("eagle")
    target = make_target(pairing)
    requests = [
        LocalRequest(
            prompt=[3, 1, 4 + i],
            max_new_tokens=60,
            shape=SHAPES[2] if has_draft else None,
            stop_token_ids=(EOS_ID,),
            compiled_grammar=compiled_for(pairing.target, name),
            grows_forced=True,
            wants_trees=True,
        )
        for i, name in enumerate(CASES)
    ]
    plain = plain_of(target, [fresh(request, wants_trees=False) for request in requests])
    sent: Trees = {}

    def spoil(tree: TokenTree) -> TokenTree:
        """Let the last node be a token that hardly any grammar allows."""
        tree = replace(tree, token_ids=(*tree.token_ids[:-1], EOS_ID))
        sent.update(by_round([tree]))
        return tree

    draft = make_draft(pairing) if has_draft else None
    pair = LocalPair(target, draft, edit_tree=spoil, credit_rounds=30)
    pair.run(requests)
    check(requests, plain)
    assert sum([check_trees(request) for request in requests]) > 0
    trees = [
        (sent.get((request.request_id, path.round_idx), ((), ())), path.tree)
        for request in requests
        for path in request.paths
    ]
    grafted = [tree for drafted, tree in trees if tree and {*tree.token_ids[1:]} - {*drafted[0]}]
    assert grafted, "no forced token is shown"
    if has_draft:
        pruned = [d for d, tree in trees if tree and {*d[0][1:]} - {*tree.token_ids}]
        assert pruned, "no draft was left out"

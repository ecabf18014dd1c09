"""What a draft's device posts to the mailboxes of targets, and takes from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draft_service.request import DeviceTree
from shared.kernels.mailbox_growth import advance_growth
from shared.kernels.mailbox_paths import take_paths, take_rows
from shared.kernels.mailbox_trees import post_trees
from shared.kernels.mailbox_words import MAX_PATH
from shared.messages import MAX_TREE_NODES
from shared.peer.mailbox import MailboxEnd, next_tag
from shared.step.staging import Fields, Staging


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePosts:
    """Where grown trees are posted for a target's device.

    Args:
        words: [S, 64] i64, the mailbox's trees.
        slot, round_tag: [B] i32, place of each tree and tag of its round; slot -1: not posted.
    """

    words: torch.Tensor
    slot: torch.Tensor
    round_tag: torch.Tensor

    def post(self, packed: torch.Tensor) -> None:
        """Post trees as `select_nodes` packs them; launches only."""
        post_trees(self.words, packed, self.slot, self.round_tag)


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxPaths:
    """Where the paths of R requests come from, and where the trees go that grow from their ends.

    Args:
        mailboxes: M, of several targets.
        mailbox_idx: [R] i32, of `mailboxes`.
        slot: [M, R] i32, place of each path in its mailbox; -1: it is not there.
        round_tag: [R] i32, tag of each path's round.
        arrived: [1] i64, for the kernel that waits.
        path_width: Tokens of the longest path that may come.
        posts: Of as many trees, a mailbox after the other.
    """

    mailboxes: Sequence[MailboxEnd]
    mailbox_idx: torch.Tensor
    slot: torch.Tensor
    round_tag: torch.Tensor
    arrived: torch.Tensor
    path_width: int
    posts: Sequence[TreePosts]


def stage_posts(
    trees: Sequence[DeviceTree | None],
    mailboxes: Sequence[MailboxEnd | None],
    staging: Staging,
) -> list[TreePosts]:
    """Stage where the trees go that targets' devices wait for, a mailbox after the other.

    Args:
        trees: Of every request that grows one; None: no device waits for it.
        mailboxes: Of the same requests.
        staging: Of nothing else in the step.
    """
    used = [
        None if tree is None else mailbox for tree, mailbox in zip(trees, mailboxes, strict=True)
    ]
    distinct = {id(mailbox): mailbox for mailbox in used if mailbox is not None}
    if not distinct:
        return []
    staging.begin()
    posts = []
    for mailbox in distinct.values():
        host, device = staging.place_zeros(_tree_fields, len(trees))
        host["round_tag"][:] = [0 if tree is None else tree.round_tag for tree in trees]
        host["slot"][:] = [
            tree.slot if tree is not None and own is mailbox else -1
            for tree, own in zip(trees, used, strict=True)
        ]
        posts.append(TreePosts(words=mailbox.trees, **device))
    staging.flush()
    return posts


def place_paths(
    trees: Sequence[DeviceTree],
    mailboxes: Sequence[MailboxEnd],
    path_width: int,
    staging: Staging,
) -> MailboxPaths:
    """Place where the paths through the newest trees are, and where the next trees go.

    Args:
        mailboxes: Of the same requests.
        path_width: Tokens of the longest path.
    """
    distinct = list({id(mailbox): mailbox for mailbox in mailboxes}.values())
    host, device = staging.place_zeros(_path_fields, len(distinct), len(trees))
    host["slot"].fill(-1)
    for i, mailbox in enumerate(distinct):
        is_own = np.array([own is mailbox for own in mailboxes])
        host["mailbox_idx"][is_own] = i
        host["slot"][i, : len(trees)][is_own] = [
            tree.slot for tree, own in zip(trees, mailboxes, strict=True) if own is mailbox
        ]
    host["path_tag"][:] = [tree.round_tag for tree in trees]
    host["tree_tag"][:] = [next_tag(tree.round_tag) for tree in trees]
    slot, tree_tag = device["slot"][:, : len(trees)], device["tree_tag"]
    return MailboxPaths(
        mailboxes=distinct,
        mailbox_idx=device["mailbox_idx"],
        slot=slot,
        round_tag=device["path_tag"],
        arrived=device["arrived"],
        path_width=path_width,
        posts=[
            TreePosts(words=mailbox.trees, slot=slot[i], round_tag=tree_tag)
            for i, mailbox in enumerate(distinct)
        ],
    )


def compile_mailbox(
    stop: torch.Tensor, *, width: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Compile what reads and writes mailboxes; nothing comes and nothing is posted.

    Args:
        width: Of the features that will come; 0: none.
        dtype: Of those.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    nowhere, count = zeros(1) - 1, zeros(1)
    index = [zeros(1, dtype=torch.int64) for _ in range(2)]
    words = zeros(1, MAX_TREE_NODES, dtype=torch.int64)
    post_trees(words, zeros(1, 4), nowhere, nowhere)
    taken = take_paths(
        [words[:, :MAX_PATH].contiguous()],
        count,
        nowhere[None],
        nowhere,
        stop,
        zeros(1, dtype=torch.int64),
        index[0],
        count,
        *index,
        num_reqs=1,
        path_width=1,
        spare_idx=0,
        vocab_size=vocab_size,
        timeout_us=0,
        grace_us=0,
    )
    if width:
        rows = zeros(2, 1, MAX_PATH, width, dtype=dtype)
        take_rows(rows, nowhere, nowhere, taken, zeros(1, width, dtype=dtype), path_width=1)
    advance_growth(taken, count, *index, *[zeros(1) for _ in range(4)])


def _tree_fields(num_reqs: int) -> Fields:
    return dict.fromkeys(("slot", "round_tag"), (torch.int32, (num_reqs,)))


def _path_fields(num_mailboxes: int, num_reqs: int) -> Fields:
    return {
        "arrived": (torch.int64, (1,)),
        # Rows as kernels know them: compiled for places that are multiples of 16 bytes.
        "slot": (torch.int32, (num_mailboxes, -(-num_reqs // 4) * 4)),
        **dict.fromkeys(("mailbox_idx", "path_tag", "tree_tag"), (torch.int32, (num_reqs,))),
    }

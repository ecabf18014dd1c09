"""What a draft's device takes from targets' mailboxes, and posts there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draft_service.phases import DraftExtendInput, DraftInput, MailedPaths, MailedTrees
from draft_service.request import DraftRequest
from shared.kernels.mailbox_growth import advance_growth
from shared.kernels.mailbox_paths import take_paths, take_rows
from shared.kernels.mailbox_trees import post_trees
from shared.kernels.mailbox_words import MAX_PATH
from shared.messages import MAX_TREE_NODES
from shared.peer.mailbox import MailboxEnd, next_tag
from shared.step.staging import Fields, Staging

# Longer than any step of a target; the host ends a wait when it knows better.
PATH_PATIENCE_US = 100_000


def stage_trees(requests: Sequence[DraftRequest], staging: Staging) -> list[MailedTrees]:
    """Stage where the trees go that targets' devices wait for, a mailbox after the other.

    Args:
        staging: Of nothing else in the step.
    """
    mailboxes = [request.mailbox if request.round_tag else None for request in requests]
    distinct = {id(mailbox): mailbox for mailbox in mailboxes if mailbox is not None}
    if not distinct:
        return []
    staging.begin()
    mail = []
    for mailbox in distinct.values():
        host, device = staging.place_zeros(_tree_fields, len(requests))
        host["seq"][:] = [request.round_tag for request in requests]
        host["slot"][:] = [
            request.mailbox_slot if own is mailbox else -1
            for request, own in zip(requests, mailboxes, strict=True)
        ]
        mail.append(MailedTrees(words=mailbox.trees, **device))
    staging.flush()
    return mail


def place_paths(
    requests: Sequence[DraftRequest], mailbox: MailboxEnd, path_width: int, staging: Staging
) -> MailedPaths:
    """Place where the paths through the requests' newest trees are, and where the next trees go.

    Args:
        path_width: Tokens of the longest path.
    """
    host, device = staging.place_zeros(_path_fields, len(requests))
    host["slot"][:] = [request.mailbox_slot for request in requests]
    host["path_seq"][:] = [request.round_tag for request in requests]
    host["tree_seq"][:] = [next_tag(request.round_tag) for request in requests]
    slot = device["slot"]
    return MailedPaths(
        mailbox=mailbox,
        slot=slot,
        seq=device["path_seq"],
        path_width=path_width,
        trees=MailedTrees(words=mailbox.trees, slot=slot, seq=device["tree_seq"]),
    )


def take_from_mailbox(
    paths: MailedPaths,
    extend: DraftExtendInput,
    grow: DraftInput,
    stop: torch.Tensor,
    *,
    spare_idx: int,
    vocab_size: int,
) -> torch.Tensor:
    """Wait for paths; make of inputs for the longest ones those of the ones that came.

    Args:
        extend: path_width rows for each request, without tokens and features.
        grow: Trees from where those rows begin.
        stop: [1] i32; the device does not wait while it is not 0.
        spare_idx: Of the hidden rows.
    Mutates: `extend` and `grow`.
    Returns: [R, 1 + MAX_PATH] i32, as `take_paths` has it.
    """
    mailbox = paths.mailbox
    taken = take_paths(
        mailbox.paths,
        paths.slot,
        paths.seq,
        stop,
        extend.token_ids,
        extend.rows.slot_mapping,
        extend.last_rows,
        extend.hidden_idx,
        num_reqs=len(paths.slot),
        path_width=paths.path_width,
        spare_idx=spare_idx,
        vocab_size=vocab_size,
        timeout_us=PATH_PATIENCE_US,
    )
    if extend.features is not None:
        assert mailbox.rows is not None
        take_rows(
            mailbox.rows,
            paths.slot,
            paths.seq,
            taken,
            extend.features,
            path_width=paths.path_width,
        )
    advance_growth(
        taken,
        grow.trees.kv_len,
        grow.trees.node_position,
        grow.child_position,
        grow.trees.req_idx,
        grow.trees.topk,
        grow.trees.num_steps,
        grow.num_nodes,
    )
    return taken


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
        words[:, :MAX_PATH].contiguous(),
        nowhere,
        nowhere,
        stop,
        index[0],
        count,
        *index,
        num_reqs=1,
        path_width=1,
        spare_idx=0,
        vocab_size=vocab_size,
        timeout_us=0,
    )
    if width:
        rows = zeros(2, 1, MAX_PATH, width, dtype=dtype)
        take_rows(rows, nowhere, nowhere, taken, zeros(1, width, dtype=dtype), path_width=1)
    advance_growth(taken, count, *index, *[zeros(1) for _ in range(4)])


def _tree_fields(num_reqs: int) -> Fields:
    return {"slot": (torch.int32, (num_reqs,)), "seq": (torch.int32, (num_reqs,))}


def _path_fields(num_reqs: int) -> Fields:
    return dict.fromkeys(("slot", "path_seq", "tree_seq"), (torch.int32, (num_reqs,)))

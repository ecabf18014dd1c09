"""What a target's engine says to attached drafts when it orders trees, and what may come back."""

from __future__ import annotations

import time

from shared.errors import InvalidTreeError
from shared.messages import DraftRound, PathEntry, PeerTree, PeerTrees, TreeShape
from shared.tree import check_tree
from target_service.draft_peer import DraftPeer
from target_service.nodes import AcceptedNodes
from target_service.request import TargetRequest


def may_order(request: TargetRequest, peer: DraftPeer, round_idx: int) -> bool:
    """Return whether the tree of a round is covered by the credit and not ordered yet."""
    return peer.ordered_round < round_idx <= request.credit_until


def put_order(request: TargetRequest, peer: DraftPeer, shape: TreeShape) -> None:
    """Order the tree after what is committed."""
    peer.channel.put(
        DraftRound(
            request_id=request.request_id,
            target_epoch=request.target_epoch,
            draft_epoch=peer.draft_epoch,
            round_idx=request.round_idx + 1,
            seq_len=request.committed_len,
            token_offset=peer.num_tokens_sent,
            token_ids=tuple(request.tokens[peer.num_tokens_sent :]),
            shape=shape,
        )
    )
    peer.ordered_round = request.round_idx + 1
    peer.num_tokens_sent = len(request.tokens)
    peer.ordered_ns = time.monotonic_ns()


def path_entry(
    request: TargetRequest, peer: DraftPeer, path: AcceptedNodes, round_tag: int
) -> PathEntry:
    """Return the part of a PathBatch that orders the tree after a path, not committed yet."""
    return PathEntry(
        request.request_id,
        request.target_epoch,
        peer.draft_epoch,
        request.round_idx + 2,
        path.seq_len,
        path.token_ids,
        request.req_idx,
        round_tag,
    )


def check_ordered_tree(
    request: TargetRequest,
    credit: PeerTrees,
    tree: PeerTree,
    *,
    is_sound: bool,
    vocab_size: int,
) -> None:
    """Raise InvalidTreeError unless a tree is one that could be ordered.

    Args:
        is_sound: It is known to be a tree, of tokens of the vocabulary.
    """
    if tree.seq_len != request.committed_len:
        raise InvalidTreeError(
            f"seq_len is {tree.seq_len}, expected {request.committed_len}", field="seq_len"
        )
    root_token_id, most = request.tokens[-1], credit.shape.num_draft_tokens
    if is_sound and tree.token_ids[0] == root_token_id and len(tree.token_ids) <= most:
        return
    check_tree(
        tree.token_ids,
        tree.parent_index,
        root_token_id=root_token_id,
        vocab_size=vocab_size,
        max_num_nodes=most,
    )

"""Trees of committed rounds as they were verified, for requests that asked to see them."""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages import RoundTree
from target_service.commit import CommittedPath
from target_service.nodes import SampledTrees
from target_service.phases import PathOutputs


def round_tree(
    trees: SampledTrees, paths: PathOutputs, committed: CommittedPath
) -> RoundTree | None:
    """Return the tree of a round that is committed; None: its request did not ask.

    Args:
        trees: Of the step.
        paths: What the step computed.
    """
    request, row, path, cut, *_ = committed
    if not request.open.wants_trees:
        return None
    accept_index = path.accept_index[: cut.num_tokens]
    if row < trees.num_on_device:
        token_ids, parent_index, accept_index = _taken(paths, row, accept_index)
    else:
        first = sum(trees.num_nodes[:row])
        token_ids = trees.token_ids[first : first + path.num_nodes]
        parent_index = trees.parent_index[first : first + path.num_nodes]
    return RoundTree(
        token_ids=(request.tokens[path.seq_len], *token_ids[1:]),  # a step may not know the root
        parent_index=tuple(parent_index),
        accept_index=tuple(accept_index),
        bonus_token_id=path.token_ids[cut.num_tokens - 1],
    )


def _taken(
    paths: PathOutputs, row: int, accept_index: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Return what the device took from the mailbox: token_ids, parent_index, accept_index.

    Nodes whose words did not come are left out, so the others are numbered anew.
    """
    assert paths.taken_token_ids is not None and paths.taken_parents is not None
    parents = paths.taken_parents[row].tolist()
    nodes = [node for node, parent in enumerate(parents) if parent >= -1]
    number_of = {node: i for i, node in enumerate(nodes)} | {-1: -1}
    token_ids = paths.taken_token_ids[row, nodes].tolist()
    return (
        token_ids,
        [number_of[parents[node]] for node in nodes],
        [number_of[node] for node in accept_index],
    )

"""Token-tree algebra: checks, paths, masks. Node 0 is the root; parents come first.

Host side, numpy only: the orchestrator validates trees with the same functions. The accept walk, on
the device, is in kernels/accept_walk.py.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidTreeError
from shared.messages import MAX_TREE_NODES

_NODES = [bytes([node]) for node in range(MAX_TREE_NODES)]


def check_tree(
    token_ids: Sequence[int],
    parent_index: Sequence[int],
    *,
    root_token_id: int,
    vocab_size: int,
    max_num_nodes: int = MAX_TREE_NODES,
) -> None:
    """Raise InvalidTreeError unless this is a tree that a target can verify.

    Args:
        token_ids: [N] ids of the target's vocabulary, root included.
        parent_index: [N] topological (parent < child); root = -1.
        root_token_id: The target's bonus token of the round before.
        max_num_nodes: Most nodes, root included.
    """
    num_nodes = len(token_ids)
    if not 1 <= num_nodes <= max_num_nodes:
        raise InvalidTreeError(
            f"the tree has {num_nodes} nodes, expected 1..{max_num_nodes}", field="tree.token_ids"
        )
    if len(parent_index) != num_nodes:
        raise InvalidTreeError(
            f"{len(parent_index)} parents for {num_nodes} nodes", field="tree.parent_index"
        )
    # No arrays: trees are small, and every call of numpy costs as much as ten nodes.
    if parent_index[0] != -1:
        raise InvalidTreeError("parent_index[0] must be -1 (the root)", field="tree.parent_index")
    is_topological = all(map(operator.lt, parent_index, range(num_nodes)))
    if not is_topological or min(parent_index[1:], default=0) < 0:
        nodes = range(1, num_nodes)
        node = next(node for node in nodes if not 0 <= parent_index[node] < node)
        raise InvalidTreeError(
            f"parent_index[{node}] is {parent_index[node]}, expected 0..{node - 1}",
            field="tree.parent_index",
        )
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        node = next(node for node in range(num_nodes) if not 0 <= token_ids[node] < vocab_size)
        raise InvalidTreeError(
            f"token_ids[{node}] is {token_ids[node]}, expected 0..{vocab_size - 1}",
            field="tree.token_ids",
        )
    if token_ids[0] != root_token_id:
        raise InvalidTreeError(
            f"the root is token {token_ids[0]}, the bonus token is {root_token_id}",
            field="tree.token_ids",
        )


def are_trees(
    token_ids: Sequence[int],
    parent_index: Sequence[int],
    num_nodes: Sequence[int],
    *,
    vocab_size: int,
) -> bool:
    """Return whether every tree of many would pass `check_tree`, root token and size apart.

    Args:
        token_ids: [L] tree by tree.
        parent_index: [L] within the own tree.
        num_nodes: [B], L in all.
    """
    nodes = itertools.chain.from_iterable(map(range, num_nodes))
    return (
        0 <= min(token_ids) <= max(token_ids) < vocab_size
        and all(map(operator.lt, parent_index, nodes))
        and min(parent_index) == -1
        and parent_index.count(-1) == len(num_nodes)  # the roots, which have nothing else below 0
    )


class TreeLayout(NamedTuple):
    """Every node's own path from the root; a byte for each number.

    Args:
        path_len: [N], tokens on the own path: depth + 1.
        path: [N, MAX_TREE_NODES]: the nodes from the root to each, ascending; 0 past it.
        max_depth: Of the deepest node.
        is_chain: Every node is the parent of the next.
    """

    path_len: bytes
    path: bytes
    max_depth: int
    is_chain: bool


def paths_of(layouts: Iterable[TreeLayout]) -> NDArray[np.uint8]:
    """Return the paths of the nodes of trees, [.., MAX_TREE_NODES], tree by tree."""
    paths = b"".join([layout.path for layout in layouts])
    return np.frombuffer(paths, np.uint8).reshape(-1, MAX_TREE_NODES)


def depths_of(layouts: Iterable[TreeLayout]) -> NDArray[np.int64]:
    """Return the depth of every node of trees, tree by tree."""
    path_len = b"".join([layout.path_len for layout in layouts])
    return np.frombuffer(path_len, np.uint8).astype(np.int64) - 1


@functools.lru_cache(maxsize=256)  # roots alone, and chains; other trees hardly ever come again
def lay_out_tree(parent_index: tuple[int, ...]) -> TreeLayout:
    """Lay out every node's own path.

    Args:
        parent_index: [N] topological, root = -1, N <= MAX_TREE_NODES.
    """
    # Bytes and no arrays, as in check_tree: calls of numpy would cost more than all of this.
    paths = [_NODES[0]]
    for node in range(1, len(parent_index)):
        paths.append(paths[parent_index[node]] + _NODES[node])
    path_len = bytes(map(len, paths))
    return TreeLayout(
        path_len=path_len,
        path=b"".join([path.ljust(MAX_TREE_NODES, b"\0") for path in paths]),
        max_depth=max(path_len) - 1,
        is_chain=path_len[-1] == len(path_len),
    )

"""The trees of a step, as columns: gathered from its plan, and what was accepted of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.messages import TreeShape
from shared.tree import TreeLayout, depths_of, lay_out_tree, paths_of
from target_service.request import DeviceTree, HostTree, TargetRequest
from target_service.scheduler import StepPlan

_ROOT_ONLY: tuple[int, ...] = (-1,)
_ROOT_LAYOUT = lay_out_tree(_ROOT_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTrees:
    """The requests whose next tokens a step decides: B trees of L nodes in all, tree by tree.

    Args:
        requests: [B].
        req_idx: [B], rows of the page table.
        seq_len: [B], logical slot of each root; the least that it can be where the device knows.
        layouts: [B].
        token_ids: [L], roots included; 0 where only the device knows the token.
        device_roots: The nodes whose tokens only the device knows: each is the newest token of a
            request, here by row of the page table.
        parent_index: [L] within the own tree, root = -1.
        num_on_device: How many of the trees the device takes from the mailbox: the first ones. Of
            these the nodes here, but for the roots, hold places.
    """

    requests: Sequence[TargetRequest]
    req_idx: list[int]
    seq_len: list[int]
    layouts: list[TreeLayout]
    token_ids: list[int]
    device_roots: dict[int, int]
    parent_index: list[int]
    num_on_device: int

    @property
    def num_nodes(self) -> list[int]:
        """Return the nodes of each tree, [B]; roots included."""
        return [len(layout.path_len) for layout in self.layouts]

    @property
    def num_device_nodes(self) -> int:
        """Return how many nodes hold the places of trees from the mailbox: the first ones."""
        return sum(self.num_nodes[: self.num_on_device])


class SampledNodes:
    """The trees of a step once more, as arrays.

    Args:
        first_node: [B] i64, node of the step that each root is.
        tree: [L] i64, which tree each node belongs to.
        depth: [L] i64.
    """

    def __init__(self, trees: SampledTrees) -> None:
        self.requests, self._layouts = trees.requests, trees.layouts
        per_tree = np.array([trees.req_idx, trees.seq_len, trees.num_nodes])
        per_node = np.array([trees.token_ids, trees.parent_index])
        self.req_idx, self.seq_len, self.num_nodes = per_tree
        self.token_ids, self.parent_index = per_node
        self.depth = depths_of(trees.layouts)
        self.first_node = np.cumsum(self.num_nodes) - self.num_nodes
        self.tree = np.repeat(np.arange(len(trees.layouts)), self.num_nodes)
        self.max_depth = max(layout.max_depth for layout in trees.layouts)

    @property
    def path(self) -> NDArray[np.int64]:
        """Return [L, D], nodes of the step from the root to each; its root past it."""
        paths = paths_of(self._layouts)[:, : self.max_depth + 1]
        return paths + self.first_node[self.tree][:, None]


class AcceptedNodes(NamedTuple):
    """A verified tree and its path.

    Args:
        seq_len: Logical slot of the root.
        num_nodes: Of the tree, root included.
        accept_index: Nodes of the path, root first.
        token_ids: The target's token at each of them, bonus last.
    """

    seq_len: int
    num_nodes: int
    accept_index: list[int]
    token_ids: list[int]


def gather_trees(plan: StepPlan) -> SampledTrees | None:
    """Collect the trees of a step: those to verify, then the last tokens of prompts."""
    token_ids: list[int] = []
    device_roots: dict[int, int] = {}
    parent_index: list[int] = []
    layouts: list[TreeLayout] = []
    num_on_device = 0
    for request in plan.verifies:
        queued = request.queued
        if isinstance(queued, DeviceTree):
            assert len(layouts) == num_on_device, "trees from the mailbox come first"
            num_on_device += 1
        if request.num_in_flight and not isinstance(queued, HostTree):
            device_roots[len(token_ids)] = request.req_idx  # the root is still being computed
        tree_ids, parents, layout = _tree_of(request)
        token_ids += tree_ids
        parent_index += parents
        layouts.append(layout)
    seq_len = [request.launched_len for request in plan.verifies]
    endings = [work.request for work in plan.prefills if work.is_last]
    for request in endings:
        token_ids.append(request.tokens[-1])
        parent_index += _ROOT_ONLY
        layouts.append(_ROOT_LAYOUT)
        seq_len.append(len(request.tokens) - 1)
    requests = [*plan.verifies, *endings]
    if not requests:
        return None
    return SampledTrees(
        requests=requests,
        req_idx=[request.req_idx for request in requests],
        seq_len=seq_len,
        layouts=layouts,
        token_ids=token_ids,
        device_roots=device_roots,
        parent_index=parent_index,
        num_on_device=num_on_device,
    )


def _tree_of(request: TargetRequest) -> tuple[Sequence[int], tuple[int, ...], TreeLayout]:
    """Return the tokens of a tree to verify, 0 where only the device knows them; its parents and
    its layout.
    """
    queued = request.queued
    if isinstance(queued, HostTree):
        return queued.token_ids, queued.parent_index, lay_out_tree(queued.parent_index)
    root_id = 0 if request.num_in_flight else request.tokens[-1]
    if isinstance(queued, DeviceTree):
        unknown_ids, parents, layout = _place_holder(queued.shape)
        return (root_id, *unknown_ids), parents, layout
    return (root_id,), _ROOT_ONLY, _ROOT_LAYOUT


class _PlaceHolder(NamedTuple):
    """What holds the place of a tree that is not here: tokens below the root, parents, layout."""

    token_ids: tuple[int, ...]
    parent_index: tuple[int, ...]
    layout: TreeLayout


@functools.cache
def _place_holder(shape: TreeShape) -> _PlaceHolder:
    """Return what holds the place of a tree that is not here: of a chain, or of any tree."""
    drafts = (0,) * (shape.num_draft_tokens - 1)
    is_chain = shape.topk == 1
    parent_index = (-1, *range(len(drafts))) if is_chain else (-1, *drafts)
    layout = lay_out_tree(parent_index)._replace(max_depth=shape.num_steps, is_chain=is_chain)
    return _PlaceHolder(drafts, parent_index, layout)

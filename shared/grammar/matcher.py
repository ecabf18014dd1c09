"""Where an output stands in its grammar, and which tokens may follow each node of a tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xgrammar

TREE_TIMEOUT_S = 1.0
"""Of the masks of one tree; it takes microseconds a node."""


class OutputMatcher:
    """Follows one output.

    Args:
        compiled: The grammar.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._is_stuck = False

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Take committed tokens; return whether the output still has the grammar."""
        if self._is_stuck:
            return False
        return all(map(self._matcher.accept_token, token_ids))

    def fill_masks(
        self, masks: torch.Tensor, token_ids: Sequence[int], parent_index: Sequence[int]
    ) -> None:
        """Say which tokens may follow each node of a tree, whose root is committed.

        Args:
            masks: [N, ceil(V / 32)] i32 on the host, bit i of word w = token 32 w + i.
            token_ids, parent_index: [N], root first.
        Mutates: `masks`. Rows of nodes that may not be there, or where nothing may follow, are all
            ones; a path never leads to the former, and `accept` finds the latter out.
        """
        first_child, next_sibling = _links(parent_index)
        masks.zero_()
        is_done = self._matcher.traverse_draft_tree(
            torch.tensor(first_child),
            torch.tensor(next_sibling),
            torch.tensor([*token_ids]),
            masks,
            TREE_TIMEOUT_S,
        )
        if not is_done:
            self._is_stuck = True
        masks[(masks == 0).all(dim=1)] = -1


def _links(parent_index: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the first child and the next sibling of each node, -1 = none."""
    first_child, next_sibling = [-1] * len(parent_index), [-1] * len(parent_index)
    newest_child = first_child.copy()
    for node, parent in enumerate(parent_index):
        if parent < 0:
            continue
        if newest_child[parent] < 0:
            first_child[parent] = node
        else:
            next_sibling[newest_child[parent]] = node
        newest_child[parent] = node
    return first_child, next_sibling

"""Where an output stands in its grammar, and which tokens may follow each node of a tree."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
import xgrammar

logger = logging.getLogger(__name__)

TREE_BUDGET_S = 0.002
"""Of the masks of one tree below its root. Most take microseconds a node; one near the end of a
string of limited length takes milliseconds, as every token may be too long.
"""
MAX_FORCED = 16
"""Tokens that are certain and looked for, of one path; more are rare."""


class Vocabulary:
    """The tokens of a model, as matchers need them."""

    def __init__(self, info: xgrammar.TokenizerInfo) -> None:
        self.info = info

    def split(self, data: bytes) -> Iterator[int]:
        """Yield tokens that spell a text, each the longest that fits: mostly the model's own."""
        start = 0
        while start < len(data):
            most = min(self._longest, len(data) - start)
            ends = (start + size for size in range(most, 0, -1))
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                return
            yield self._ids[data[start:end]]
            start = end

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = {*self.info.special_token_ids, *self.info.stop_token_ids}
        spelled = enumerate(self.info.decoded_vocab)
        return {data: i for i, data in spelled if data and i not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))


class OutputMatcher:
    """Follows one output.

    Whatever the library raises ends this output, by `accept`, and nothing else.

    Args:
        compiled: The grammar.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._vocabulary = vocabulary
        self._is_stuck = False

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Take committed tokens; return whether the output still has the grammar."""
        matcher, has_accepted = self._matcher, False
        with self._guard():
            has_accepted = all(
                not matcher.is_terminated() and matcher.accept_token(i) for i in token_ids
            )
        return has_accepted and not self._is_stuck

    def fill_masks(
        self, masks: torch.Tensor, token_ids: Sequence[int], parent_index: Sequence[int]
    ) -> list[int]:
        """Say which tokens may follow each node of a tree, whose root is committed.

        Args:
            masks: [N, ceil(V / 32)] i32 on the host, bit i of word w = token 32 w + i.
            token_ids, parent_index: [N], root first.
        Returns: the nodes that no path may lead to: they may not be there, or it would take too
            long to say what may follow them, or nothing may.
        Mutates: `masks`. Rows of nodes that are returned are all ones; and so is the root's if
            nothing may follow it, which `accept` finds out.
        """
        first_child, next_sibling = _links(parent_index)
        words = masks.numpy()  # of which torch's threads would make a long story
        words.fill(0)
        with self._guard():
            self._matcher.traverse_draft_tree(
                torch.tensor(first_child),
                torch.tensor(next_sibling),
                torch.tensor([*token_ids]),
                masks,
                TREE_BUDGET_S,
            )
        is_empty = ~words.any(axis=1)
        words[is_empty] = -1
        return [node for node in np.flatnonzero(is_empty).tolist() if node]

    def fill_mask_after(self, mask: torch.Tensor, path: Sequence[int]) -> None:
        """Say which tokens may follow some that are not committed.

        Args:
            mask: [1, ceil(V / 32)] i32 on the host.
        Mutates: `mask`; all zeros if the path may not be there, or nothing may follow it.
        """
        matcher, num_accepted = self._matcher, 0
        mask.numpy().fill(0)
        with self._guard():
            for token_id in path:
                if matcher.is_terminated() or not matcher.accept_token(token_id):
                    break
                num_accepted += 1
            if num_accepted == len(path) and not matcher.is_terminated():
                matcher.fill_next_token_bitmask(mask)
            if num_accepted:
                matcher.rollback(num_accepted)

    def forced(self) -> list[int]:
        """Return the tokens that must follow, as far as there is but one text that may."""
        tokens: list[int] = []
        with self._guard():
            tokens = self._forced()
        return tokens

    def _forced(self) -> list[int]:
        matcher = self._matcher
        tokens: list[int] = []
        try:
            data = matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError as error:  # in the middle of a letter
            data = error.object
        for token in self._vocabulary.split(data):
            if len(tokens) == MAX_FORCED or not matcher.accept_token(token):
                break
            tokens.append(token)
        num_accepted = len(tokens)
        if 0 < num_accepted < MAX_FORCED and matcher.is_completed():
            tokens += self._only_stop()
        if num_accepted:
            matcher.rollback(num_accepted)
        return tokens

    def prune_and_graft(
        self, token_ids: Sequence[int], parent_index: Sequence[int], *, most_nodes: int
    ) -> tuple[list[int], tuple[int, ...]]:
        """Return a tree without the nodes that may not be there, and with those that are certain.

        Where a node that is left has no child, the tokens that must follow it do.

        Args:
            token_ids, parent_index: [N], root first.
            most_nodes: Of the result; no fewer than N.
        Returns: token_ids, parent_index.
        """
        children: list[list[int]] = [[] for _ in token_ids]
        for node, parent in enumerate(parent_index[1:], start=1):
            children[parent].append(node)
        chains: dict[int, list[int]] = {}  # of the nodes that are left
        with self._guard():
            self._visit(0, token_ids, children, chains)
        kept = sorted(chains)
        index = {node: i for i, node in enumerate(kept)}
        ids = [token_ids[node] for node in kept]
        parents = [-1, *(index[parent_index[node]] for node in kept[1:])]
        room = min(most_nodes - len(ids), MAX_FORCED)
        for node in kept:
            chain = chains[node][:room]
            room -= len(chain)
            if chain:
                parents += [index[node], *range(len(ids), len(ids) + len(chain) - 1)]
                ids += chain
        return ids, tuple(parents)

    def _visit(
        self,
        node: int,
        token_ids: Sequence[int],
        children: Sequence[Sequence[int]],
        chains: dict[int, list[int]],
    ) -> None:
        """Note a node that may be there, where the matcher stands, and all below it."""
        chains[node] = []
        if self._matcher.is_terminated():
            return
        is_leaf = True
        for child in children[node]:
            if self._matcher.accept_token(token_ids[child]):
                self._visit(child, token_ids, children, chains)
                self._matcher.rollback(1)
                is_leaf = False
        if is_leaf:
            chains[node] = self._forced()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Let the output end if the library fails."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError) as error:
            self._is_stuck = True
            logger.error("an output cannot be followed any more: %s", error)

    def _only_stop(self) -> list[int]:
        """Return the stop token, if nothing else may follow."""
        mask = torch.zeros(1, -(-self._vocabulary.info.vocab_size // 32), dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(mask)
        stops = self._matcher.stop_token_ids
        if len(stops) != 1 or mask.count_nonzero() != 1:
            return []
        word, bit = divmod(stops[0], 32)
        is_only = int(mask[0, word]) & 0xFFFFFFFF == 1 << bit
        return stops if is_only else []


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

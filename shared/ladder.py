"""The shapes of trees that a target chooses from by itself, smallest first.

Each is at least as deep and as wide as the one before it and has more nodes, so the shapes that fit
into a permitted one are the first few, a batch of several shapes grows by the graph of its largest,
and the size of a tree says its rung.

Nodes are the best of all that grow, so depth brings much where texts are easy to guess. A chain has
the most depth per row, and its steps take the draft the least: in a step whose rows are full, some
requests have longer chains and harder ones shorter ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from shared.messages import TreeShape

LADDER = (
    TreeShape(num_steps=1, topk=1, num_draft_tokens=2),
    TreeShape(num_steps=2, topk=1, num_draft_tokens=3),
    TreeShape(num_steps=3, topk=1, num_draft_tokens=4),
    TreeShape(num_steps=5, topk=1, num_draft_tokens=6),
    TreeShape(num_steps=7, topk=2, num_draft_tokens=8),
    TreeShape(num_steps=7, topk=4, num_draft_tokens=16),
    TreeShape(num_steps=7, topk=8, num_draft_tokens=32),
    TreeShape(num_steps=9, topk=8, num_draft_tokens=40),
)


@functools.cache
def num_rungs_within(shape: TreeShape) -> int:
    """Return how many rungs of the ladder are no wider or larger than a shape, and can grow all of
    their nodes in its steps.
    """

    def fits(rung: TreeShape) -> bool:
        cut = _cut(rung, shape.num_steps)
        is_within = cut.topk <= shape.topk and cut.num_draft_tokens <= shape.num_draft_tokens
        return is_within and cut.num_draft_tokens <= cut.max_num_draft_tokens

    return sum(1 for _ in itertools.takewhile(fits, LADDER))


@functools.cache
def rung_within(rung: int, largest: TreeShape) -> TreeShape:
    """Return the shape of a rung that is within a shape, with no more steps than that has; what a
    chain has more nodes than these, it has as a second child.

    Args:
        rung: 1 or more.
    """
    return _cut(LADDER[rung - 1], largest.num_steps)


@functools.cache
def has_size_of_rung(shape: TreeShape) -> bool:
    """Return whether a shape is a rung of the ladder, but perhaps for fewer steps."""
    return any(_cut(rung, shape.num_steps) == shape for rung in LADDER)


def _cut(shape: TreeShape, num_steps: int) -> TreeShape:
    """Return a shape with no more than so many steps, wider if it was a chain of more nodes."""
    cut = dataclasses.replace(shape, num_steps=min(shape.num_steps, num_steps))
    is_full = cut.num_draft_tokens > cut.max_num_draft_tokens
    return dataclasses.replace(cut, topk=2) if is_full and cut.topk == 1 else cut

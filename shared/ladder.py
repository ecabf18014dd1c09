"""The shapes of trees that a target chooses from by itself, smallest first.

Each is at least as deep, as wide and as large as the one before it, so the shapes that fit into a
permitted one are the first few, and a batch of several shapes grows by the graph of its largest.
Each has more nodes than the one before it: the size of a tree says its rung.

Nodes are the best of all that grow, so depth brings much where texts are easy to guess, and costs a
step of the draft where they are not: of 7 nodes and of 8 there is a shallow and a deep shape.
"""

from __future__ import annotations

from shared.messages import TreeShape

LADDER = (
    TreeShape(num_steps=1, topk=1, num_draft_tokens=2),
    TreeShape(num_steps=2, topk=1, num_draft_tokens=3),
    TreeShape(num_steps=3, topk=1, num_draft_tokens=4),
    TreeShape(num_steps=4, topk=2, num_draft_tokens=7),
    TreeShape(num_steps=6, topk=2, num_draft_tokens=8),
    TreeShape(num_steps=6, topk=4, num_draft_tokens=16),
    TreeShape(num_steps=6, topk=8, num_draft_tokens=32),
)


def num_rungs_within(shape: TreeShape) -> int:
    """Return how many rungs of the ladder are no deeper, wider or larger than a shape."""
    return sum(
        rung.num_steps <= shape.num_steps
        and rung.topk <= shape.topk
        and rung.num_draft_tokens <= shape.num_draft_tokens
        for rung in LADDER
    )

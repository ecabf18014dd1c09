"""EAGLE-2's dynamic trees (arXiv:2406.16858), grown node by node.

Expand the root; then, `num_steps - 1` times, expand the `topk` best nodes of the depth before.
Every expanded node offers its `topk` best children, scored by the sum of log-probabilities from
the root. The best `num_draft_tokens - 1` of all candidates form the tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.reference.causal_lm import DenseOutput
from tests.reference.drafts import ReferenceDraft, Row
from tests.reference.noise import gumbel


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceTree:
    """A tree in order of creation, root first.

    Args:
        token_ids, parent_index, scores: [N] root included; the root's parent is -1, its score 0.
        margin: Smallest gap between two scores whose order shapes the tree: where it is tiny,
            another order of summation may grow another one.
    """

    token_ids: tuple[int, ...]
    parent_index: tuple[int, ...]
    scores: tuple[float, ...]
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    token_id: int
    parent: int  # candidate, -1 = the root
    score: float
    rows: tuple[Row, ...]  # of the expanded nodes between the root and this one
    parent_hidden: torch.Tensor


def draft_tree(
    draft: ReferenceDraft,
    token_ids: list[int],
    target: DenseOutput,
    *,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> ReferenceTree:
    """Draft one tree from the newest token.

    Args:
        token_ids: Prompt and output; the last is the root.
        target: Of at least all tokens before the root.
    """
    margins = [float("inf")]
    base = draft.true_rows(token_ids, target)
    next_position = base[-1].position + 1  # of a child of the root, as a row

    def children(hidden: torch.Tensor, depth: int) -> list[tuple[int, float]]:
        """Return (token, log-probability) of the best children of a node at `depth`."""
        logits = draft.logits(hidden)
        if temperature > 0:
            index = len(token_ids) + depth  # absolute index of the token being guessed
            noise = torch.tensor([gumbel(seed, index, i) for i in range(len(logits))])
            logits = logits / temperature + noise
        logprobs = logits.log_softmax(-1).tolist()
        margins.extend(_gaps(logprobs, 0, topk))
        return [(i, logprobs[i]) for i in _rank(logprobs, topk) if logprobs[i] > float("-inf")]

    def expand(parent: int, score: float, rows: tuple[Row, ...]) -> list[_Candidate]:
        hidden = draft.hidden([*base, *rows])
        return [
            _Candidate(
                token_id=token_id, parent=parent, score=score + logprob, rows=rows,
                parent_hidden=hidden,
            )
            for token_id, logprob in children(hidden, len(rows))
        ]  # fmt: skip

    candidates = expand(-1, 0.0, ())
    beams = list(range(len(candidates)))
    for step in range(1, num_steps):
        first = len(candidates)
        for beam in beams:
            node = candidates[beam]
            is_head = base[-1].recurrent is not None
            row = Row(
                token_id=node.token_id,
                position=next_position + step - 1,
                recurrent=node.parent_hidden if is_head else None,
            )
            candidates += expand(beam, node.score, (*node.rows, row))
        new_scores = [candidate.score for candidate in candidates[first:]]
        margins.extend(_gaps(new_scores, 0, topk))
        beams = [first + i for i in _rank(new_scores, topk)]
    scores = [candidate.score for candidate in candidates]
    margins.extend(_gaps(scores, num_draft_tokens - 2, num_draft_tokens - 1))
    chosen = sorted(_rank(scores, num_draft_tokens - 1))
    node_of = {-1: 0} | {candidate: node for node, candidate in enumerate(chosen, start=1)}
    return ReferenceTree(
        token_ids=(token_ids[-1], *(candidates[i].token_id for i in chosen)),
        parent_index=(-1, *(node_of[candidates[i].parent] for i in chosen)),
        scores=(0.0, *(candidates[i].score for i in chosen)),
        margin=min(margins),
    )


def _rank(scores: list[float], count: int) -> list[int]:
    """Return the indices of the `count` best, best first, ties by index."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:count]  # stable


def _gaps(scores: list[float], first: int, last: int) -> list[float]:
    """Return how far apart neighbours of ranks first..last are; what is impossible has no gap."""
    values = sorted((score for score in scores if score > float("-inf")), reverse=True)
    values = values[first : last + 1]
    return [a - b for a, b in zip(values, values[1:], strict=False)]

"""Which shape the next tree of a request gets: its credit's, or what a budget decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shared.ladder import has_size_of_rung, num_rungs_within, rung_within
from shared.messages import PeerTrees, TreeShape
from target_service.budgets.budget import StepTimes, TreeBudget
from target_service.budgets.deal import FixedRounds
from target_service.draft_peer import Progress
from target_service.nodes import AcceptedNodes, SampledTrees
from target_service.request import Phase, TargetRequest

# What a round with a tree of a fixed shape brings, of its depth: it hardly matters how much.
_FIXED_ACCEPTED = 0.5
# Rounds say what trees take, unless one draft in so many has to catch up; and those without trees
# what plain rounds take, unless one request in so many would have one but for this round.
_UNLIKE_SHARE = 8


class TreeShapes:
    """Every tree has the shape of its credit."""

    def begin(self, request: TargetRequest) -> bool:
        """Take note that a draft is attached to a request.

        Returns: Whether the request is likely to rest at first.
        """
        return False

    def of(self, request: TargetRequest, credit: PeerTrees) -> TreeShape | None:
        """Return the shape of the next tree that is ordered; None: the request rests."""
        return credit.shape

    def note_step(
        self, trees: SampledTrees, nodes: Sequence[AcceptedNodes], *, is_clean: bool
    ) -> None:
        """Learn from a step that was read; its rounds are not committed yet.

        Args:
            is_clean: It had no rows but those of the trees.
        """

    def note_targets(self, num_targets: int) -> None:
        """Take note of how many targets the draft grows trees for; 0: not said."""


class BudgetedShapes(TreeShapes):
    """Shapes of credits that adapt are what a budget decides, within the credit's own.

    Args:
        requests: Of the engine.
        num_dropped: Rows that a request which rests would have to compute again for its draft.
    """

    def __init__(
        self,
        requests: Mapping[str, TargetRequest],
        budget: TreeBudget,
        num_dropped: Callable[[TargetRequest], int] = lambda _: 0,
    ) -> None:
        self._requests = requests
        self._budget = budget
        self._num_dropped = num_dropped
        # By slot: who holds it as far as the budget knows, and the rung it wants of that request;
        # None: it was not asked yet, or only before the request had credit for trees.
        self._owners: list[TargetRequest | None] = [None] * len(budget.rungs)
        self._wanted: list[int | None] = [None] * len(budget.rungs)

    def begin(self, request: TargetRequest) -> bool:
        if request.req_idx >= 0:
            self._owners[request.req_idx] = None
        return self._budget.would_rest(min(len(self._requests), len(self._owners)))

    def of(self, request: TargetRequest, credit: PeerTrees) -> TreeShape | None:
        if not credit.adapts:
            return credit.shape
        self._note_owner(request)
        if self._wanted[request.req_idx] is None or self._budget.is_due:
            self._decide()
        rung = self._wanted[request.req_idx]
        # The credit may be another one by now.
        return (
            rung_within(min(rung, num_rungs_within(credit.shape)), credit.shape) if rung else None
        )

    def note_step(
        self, trees: SampledTrees, nodes: Sequence[AcceptedNodes], *, is_clean: bool
    ) -> None:
        count = sum([request.phase is Phase.RUNNING for request in trees.requests])
        paths = nodes[:count]  # prompts that end come last
        for request in trees.requests[:count]:
            self._note_owner(request)
        running = [r for r in self._requests.values() if r.phase is Phase.RUNNING]
        num_requests = len(running)
        if trees.num_on_device or any([path.num_nodes > 1 for path in paths]):
            num_unlike = sum(map(_is_catching_up, running))
        else:
            num_unlike = count - sum(map(_does_without, trees.requests[:count]))
        self._budget.note_step(
            np.array(trees.req_idx[:count], dtype=np.int64),
            np.array(
                [
                    request.num_grown or path.num_nodes
                    for request, path in zip(trees.requests, paths, strict=False)
                ],
                dtype=np.int64,
            ),
            np.array([len(path.token_ids) - 1 for path in paths], dtype=np.int64),
            StepTimes(
                num_rows=sum(trees.num_nodes[:count]),
                num_requests=num_requests,
                waited_rungs=np.array(
                    list(map(self._waited_rung, trees.requests[:count])), dtype=np.int64
                ),
                has_prompts=not is_clean,
                is_clean=is_clean and num_unlike * _UNLIKE_SHARE <= num_requests,
            ),
            num_steps=np.array(list(map(_most_steps, trees.requests[:count])), dtype=np.int64),
        )

    def note_targets(self, num_targets: int) -> None:
        self._budget.costs.num_targets = max(num_targets, 1)

    def _waited_rung(self, request: TargetRequest) -> int:
        """Return the rung of the tree that the newest round of a request has waited for."""
        if request.draft is None or not request.draft.is_waited_for:
            return 0
        return self._wanted[request.req_idx] or 0

    def _note_owner(self, request: TargetRequest) -> None:
        """Take note of who holds a slot."""
        slot = request.req_idx
        if self._owners[slot] is not request:
            self._owners[slot] = request
            self._wanted[slot] = None
            self._budget.begin(slot)

    def _decide(self) -> None:
        slots, caps, dropped, fixed = [], [], [], []
        num_others, num_coming = 0, 0
        for request in self._requests.values():
            if request.phase is not Phase.RUNNING:
                num_coming += request.phase is Phase.PREFILL
                continue
            self._note_owner(request)
            peer = request.draft
            credit = None if peer is None else peer.credit
            if credit is None:
                num_others += 1
            elif credit.adapts:
                slots.append(request.req_idx)
                caps.append(num_rungs_within(credit.shape))
                dropped.append(self._num_dropped(request))
            else:
                fixed.append(credit.shape)
        places = np.array(slots, dtype=np.int64)
        fixed_rounds = _fixed_rounds(num_others, fixed)
        self._budget.decide(
            places,
            np.array(caps, dtype=np.int64),
            fixed_rounds,
            num_dropped=np.array(dropped, dtype=np.int64),
            num_coming=num_coming,
        )
        for slot, rung in zip(slots, self._budget.rungs[places].tolist(), strict=True):
            self._wanted[slot] = rung


def _fixed_rounds(num_roots: int, shapes: Sequence[TreeShape]) -> FixedRounds:
    """Return what requests need whose shapes are not chosen, or who have no trees."""
    num_tokens = sum([1 + _FIXED_ACCEPTED * shape.num_steps for shape in shapes])
    return FixedRounds(
        num_requests=num_roots + len(shapes),
        num_rows=num_roots + sum([shape.num_draft_tokens for shape in shapes]),
        num_tokens=num_roots + num_tokens,
        rung=max(map(num_rungs_within, shapes), default=0),
        num_trees=len(shapes),
    )


def _most_steps(request: TargetRequest) -> int:
    """Return how many steps the trees of a request have at most; 0: they are none of the ladder's,
    whose sizes say which they are.
    """
    credit = None if request.draft is None else request.draft.credit
    if credit is None:
        return 0
    is_rung = credit.adapts or has_size_of_rung(credit.shape)
    return credit.shape.num_steps if is_rung else 0


def _does_without(request: TargetRequest) -> bool:
    """Return whether a request has no trees for a while, and not just none in its last rounds, for
    which its host waits.
    """
    peer = request.draft
    if peer is None:
        return request.peer_trees is None and not request.open.wants_features
    return peer.progress is Progress.RESTING


def _is_catching_up(request: TargetRequest) -> bool:
    """Return whether the draft of a request has been asked for its first tree."""
    return request.draft is not None and request.draft.progress is Progress.ASKED

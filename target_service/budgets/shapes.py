"""Which shape the next tree of a request gets: its credit's, or what a budget decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shared.ladder import has_size_of_rung, num_rungs_within, rung_within
from shared.messages import PeerTrees, TreeShape
from target_service.budgets.budget import TreeBudget
from target_service.budgets.deal import FixedRounds
from target_service.budgets.round_timer import StepTimes
from target_service.draft_peer import Progress
from target_service.features import MissedRows
from target_service.nodes import AcceptedNodes, SampledTrees
from target_service.request import Phase, TargetRequest

# What a round with a tree of a fixed shape brings, of its depth: it hardly matters how much.
_FIXED_ACCEPTED = 0.5
# Rounds say what trees take, unless one draft in so many has to catch up; and those without trees
# what plain rounds take, unless one request in so many would have one but for this round.
_UNLIKE_SHARE = 8
# .. or did in the last few rounds: its draft may still be busy with what it has read.
_SETTLING_ROUNDS = 4


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

    def expects_nothing_of(self, request: TargetRequest) -> bool:
        """Return whether a request that rests is not expected to have trees at all."""
        return False

    def begin_orders(self) -> None:
        """Take note of what was decided before the orders of a step's rounds: they waited for that,
        and an order may decide anew.
        """

    def note_step(
        self, trees: SampledTrees, nodes: Sequence[AcceptedNodes], *, is_clean: bool
    ) -> None:
        """Take note of a step that was read, to learn from it later; its rounds are ordered and not
        committed yet.

        Args:
            is_clean: It had no rows but those of the trees.
        """

    def learn(self) -> None:
        """Learn from the step that was noted, and decide about trees that are ordered later."""

    def note_targets(self, num_targets: int) -> None:
        """Take note of how many targets the draft grows trees for; 0: not said."""


class _NotedRound(NamedTuple):
    """What a request whose round has ended was like before the commit.

    Args:
        row: Of the step.
        progress: Of its draft; None: none was attached.
        credit: As the draft had it.
        num_grown: As of TargetRequest.
    """

    row: int
    progress: Progress | None
    credit: PeerTrees | None
    num_grown: int


class _NotedStep(NamedTuple):
    """A step to learn from.

    Args:
        rounds: Not of prompts that end, nor of requests that have ended.
        wanted: By slot, the rungs that were decided last.
        num_running: Requests, in this step or in others.
        num_asked: Of these, drafts that were asked for their first trees.
        is_clean: As of `TreeShapes.note_step`.
    """

    trees: SampledTrees
    nodes: Sequence[AcceptedNodes]
    rounds: list[_NotedRound]
    wanted: list[int | None]
    num_running: int
    num_asked: int
    is_clean: bool


class BudgetedShapes(TreeShapes):
    """Shapes of credits that adapt are what a budget decides, within the credit's own.

    It decides in `learn`, and at once only for the first request of a step that nothing was decided
    for yet.

    Args:
        requests: Of the engine.
        missed: Of a request, what its draft would have to get if it rested no more.
    """

    def __init__(
        self,
        requests: Mapping[str, TargetRequest],
        budget: TreeBudget,
        missed: Callable[[TargetRequest], MissedRows] = lambda _: MissedRows(),
    ) -> None:
        self._requests = requests
        self._budget = budget
        self._missed = missed
        # By slot: who holds it as far as the budget knows, and the rung it wants of that request;
        # None: it was not asked yet, or only before the request had credit for trees.
        self._owners: list[TargetRequest | None] = [None] * len(budget.rungs)
        self._wanted: list[int | None] = [None] * len(budget.rungs)
        # By slot, that rung within a credit; None: it was not looked up.
        self._shapes: list[tuple[PeerTrees, TreeShape | None] | None] = [None] * len(budget.rungs)
        self._noted: _NotedStep | None = None
        self._wanted_before: list[int | None] | None = None  # the step's orders
        self._has_decided = False  # at once, since orders began
        self._num_settling = 0  # rounds to come that say nothing of costs

    def begin(self, request: TargetRequest) -> bool:
        if request.req_idx >= 0:
            self._owners[request.req_idx] = None
        return self._budget.would_rest(min(len(self._requests), len(self._owners)))

    def of(self, request: TargetRequest, credit: PeerTrees) -> TreeShape | None:
        if not credit.adapts:
            return credit.shape
        slot = request.req_idx
        self._note_owner(request)
        if self._wanted[slot] is None and self._has_decided:
            self._budget.join(slot, num_rungs_within(credit.shape))
            self._wanted[slot], self._shapes[slot] = int(self._budget.rungs[slot]), None
        elif self._wanted[slot] is None:
            self._decide()
            self._has_decided = True
        known = self._shapes[slot]
        if known is None or known[0] is not credit:  # it may be another one by now
            known = self._shapes[slot] = credit, self._shape(self._wanted[slot], credit.shape)
        return known[1]

    def expects_nothing_of(self, request: TargetRequest) -> bool:
        slot = request.req_idx
        if slot < 0 or self._owners[slot] is not request:
            return self._budget.expects_nothing
        return bool(self._budget.is_hopeless[slot])

    def begin_orders(self) -> None:
        self._wanted_before = self._wanted.copy()
        self._has_decided = False

    @staticmethod
    def _shape(rung: int | None, largest: TreeShape) -> TreeShape | None:
        return rung_within(min(rung, num_rungs_within(largest)), largest) if rung else None

    def note_step(
        self, trees: SampledTrees, nodes: Sequence[AcceptedNodes], *, is_clean: bool
    ) -> None:
        if self._noted is not None:
            self._learn(self._noted)
        rounds = []
        for row, request in enumerate(trees.requests):
            if request.phase is Phase.RUNNING:
                self._note_owner(request)
                peer = request.draft
                progress, credit = None, None
                if peer is not None:
                    progress, credit = peer.progress_in(request.round_idx + 1), peer.credit
                rounds.append(_NotedRound(row, progress, credit, request.num_grown))
        running = [r for r in self._requests.values() if r.phase is Phase.RUNNING]
        self._noted = _NotedStep(
            trees,
            nodes,
            rounds,
            wanted=self._wanted_before or self._wanted.copy(),
            num_running=len(running),
            num_asked=sum(map(_is_catching_up, running)),
            is_clean=is_clean,
        )
        self._wanted_before = None

    def learn(self) -> None:
        noted, self._noted = self._noted, None
        if noted is not None:
            self._learn(noted)
            if self._budget.is_due:
                self._decide()

    def _learn(self, noted: _NotedStep) -> None:
        trees, nodes = noted.trees, noted.nodes
        requests, slots, num_rows = trees.requests, trees.req_idx, trees.num_nodes
        rounds = [r for r in noted.rounds if self._owners[slots[r.row]] is requests[r.row]]
        if trees.num_on_device or any([nodes[r.row].num_nodes > 1 for r in rounds]):
            num_unlike = noted.num_asked
        else:
            num_unlike = sum([not _does_without(requests[r.row], r.progress) for r in rounds])
        is_settled = num_unlike * _UNLIKE_SHARE <= noted.num_running
        self._num_settling = max(self._num_settling - 1, 0) if is_settled else _SETTLING_ROUNDS
        columns = [
            (
                slots[r.row],
                r.num_grown or nodes[r.row].num_nodes,
                len(nodes[r.row].token_ids) - 1,
                noted.wanted[slots[r.row]] or 0 if _is_waited_for(r) else 0,
                _most_steps(r.credit),
            )
            for r in rounds
        ]
        of_slot, num_nodes, num_accepted, waited_rungs, num_steps = (
            np.array(columns, dtype=np.int64).reshape(-1, 5).T
        )
        self._budget.note_step(
            of_slot,
            num_nodes,
            num_accepted,
            StepTimes(
                num_rows=sum([num_rows[r.row] for r in rounds]),
                num_requests=noted.num_running,
                waited_rungs=waited_rungs,
                has_prompts=not noted.is_clean,
                is_clean=noted.is_clean and is_settled and not self._num_settling,
            ),
            num_steps=num_steps,
        )

    def note_targets(self, num_targets: int) -> None:
        self._budget.costs.num_targets = max(num_targets, 1)

    def _note_owner(self, request: TargetRequest) -> None:
        """Take note of who holds a slot."""
        slot = request.req_idx
        if self._owners[slot] is not request:
            self._owners[slot] = request
            self._wanted[slot] = self._shapes[slot] = None
            self._budget.begin(slot)

    def _decide(self) -> None:
        slots, caps, missed, left, fixed = [], [], [], [], []
        num_others, num_coming, num_prompt_rows = 0, 0, 0
        for request in self._requests.values():
            if request.phase is not Phase.RUNNING:
                if request.phase is Phase.PREFILL:
                    num_coming += 1
                    num_prompt_rows += len(request.tokens) - request.committed_len
                continue
            self._note_owner(request)
            peer = request.draft
            credit = None if peer is None else peer.credit
            if credit is None:
                num_others += 1
            elif credit.adapts:
                slots.append(request.req_idx)
                caps.append(num_rungs_within(credit.shape))
                missed.append(self._missed(request))
                left.append(request.token_limit - len(request.tokens))
            else:
                fixed.append(credit.shape)
        places = np.array(slots, dtype=np.int64)
        fixed_rounds = _fixed_rounds(num_others, fixed)
        self._budget.decide(
            places,
            np.array(caps, dtype=np.int64),
            fixed_rounds,
            missed=np.array(missed, dtype=np.int64).reshape(-1, 2),
            num_left=np.array(left, dtype=np.int64),
            num_coming=num_coming,
            num_prompt_rows=num_prompt_rows,
        )
        for slot, rung in zip(slots, self._budget.rungs[places].tolist(), strict=True):
            if rung != self._wanted[slot]:
                self._wanted[slot], self._shapes[slot] = rung, None


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


def _most_steps(credit: PeerTrees | None) -> int:
    """Return how many steps trees of a credit have at most; 0: they are none of the ladder's, whose
    sizes say which they are.
    """
    if credit is None:
        return 0
    is_rung = credit.adapts or has_size_of_rung(credit.shape)
    return credit.shape.num_steps if is_rung else 0


def _is_waited_for(noted: _NotedRound) -> bool:
    """Return whether the newest round of a request has waited for a tree."""
    return noted.progress is Progress.CAUGHT_UP and noted.credit is not None


def _does_without(request: TargetRequest, progress: Progress | None) -> bool:
    """Return whether a request had no trees for a while, and not just none in its last rounds, for
    which its host waits.

    Args:
        progress: Of its draft; None: none was attached.
    """
    if progress is None:
        return request.peer_trees is None and not request.open.wants_features
    return progress is Progress.RESTING


def _is_catching_up(request: TargetRequest) -> bool:
    """Return whether the draft of a request has been asked for its first tree."""
    is_coming = (Progress.ASKED, Progress.JOINING)
    return request.draft is not None and request.draft.progress in is_coming

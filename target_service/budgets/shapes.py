"""The shape of the next tree of each request: the shape that its credit names (`TreeShapes`), or,
in mode AUTO, the shape that the budget decides (`BudgetedShapes`).
"""

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

# Accepted drafts expected of a tree of a fixed shape, as a share of its depth. Decisions hardly
# depend on this number.
_FIXED_ACCEPTED = 0.5
# The time of a round with trees is not learned from while more than one draft in so many catches
# up. The time of a round without trees is not learned from if more than one request in so many
# usually has trees.
_UNLIKE_SHARE = 8
# Nor in so many rounds after such a round: the draft may still be busy.
_SETTLING_ROUNDS = 4
# Members of enums that are looked at by request in each round: Python 3.11 takes longer to look one
# up than to do the rest.
_RUNNING, _PREFILL = Phase.RUNNING, Phase.PREFILL
_CAUGHT_UP, _RESTING = Progress.CAUGHT_UP, Progress.RESTING
_COMING = (Progress.ASKED, Progress.JOINING)


class TreeShapes:
    """Gives every tree the shape that its request's credit names."""

    def begin(self, request: TargetRequest) -> None:
        """Note that a draft was attached to a request."""

    def would_rest(self, request: TargetRequest) -> bool:
        """Return whether a request whose prompt is being read is likely to rest at first."""
        return False

    def of(self, request: TargetRequest, credit: PeerTrees) -> TreeShape | None:
        """Return the shape of the next tree to order for a request; None: the request rests."""
        return credit.shape

    def needs_no_rows(self, request: TargetRequest) -> bool:
        """Return whether the feature rows of a resting request are not worth keeping."""
        return False

    def begin_orders(self) -> None:
        """Remember the rungs that are decided now, before the trees of a step are ordered.

        The rounds that have just ended waited for trees of these rungs; an order may cause a new
        decision.
        """

    def note_step(
        self, trees: SampledTrees, nodes: Sequence[AcceptedNodes], *, is_clean: bool
    ) -> None:
        """Keep what `learn` needs of a step whose result was read: the next trees of its requests
        are ordered, and its rounds are not committed yet.

        Args:
            is_clean: The step had rows of trees only: no prompts, no replays.
        """

    def learn(self) -> None:
        """Learn from the step of the last `note_step`, and decide if a decision is due."""

    def note_targets(self, num_targets: int) -> None:
        """Note how many targets the draft grows trees for; 0: the draft did not say."""


class _NotedRound(NamedTuple):
    """The state of a request whose round has ended, before the commit of this round.

    Args:
        row: The request's row in the step.
        progress: Progress of its draft; None: no draft was attached.
        credit: The credit for trees; None: no draft was attached, or it had no credit.
        num_grown: As of TargetRequest.
    """

    row: int
    progress: Progress | None
    credit: PeerTrees | None
    num_grown: int


class _NotedStep(NamedTuple):
    """A step to learn from.

    Args:
        rounds: Rounds of requests that still run; the ends of prompts are no rounds.
        wanted: By slot, the rungs decided when these rounds' trees were ordered.
        num_running: Running requests, in this step or not.
        num_asked: Running requests whose drafts were asked for their first trees.
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
    """Asks a budget for the shape of each tree whose credit adapts (mode AUTO); the credit's own
    shape is the largest that the budget may choose.

    Decisions are made in `learn`, while the GPU runs the next step. Only for a request about which
    nothing was decided yet a decision is made at once, in `of`; further requests of the same step
    then join that decision.

    Args:
        requests: All requests of the engine, by request_id.
        budget: Decides.
        missed: Returns the rows that a request's draft would need if the request stopped resting.
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
        # By slot: the request that holds the slot as far as the budget knows, and the rung decided
        # for this request. None: nothing was decided, or only before it had credit for trees.
        self._owners: list[TargetRequest | None] = [None] * len(budget.rungs)
        self._wanted: list[int | None] = [None] * len(budget.rungs)
        # By slot, a cache: the credit, and the decided rung as a shape within it. None: not known.
        self._shapes: list[tuple[PeerTrees, TreeShape | None] | None] = [None] * len(budget.rungs)
        # By slot, a cache: the credit, and the highest rung within its shape.
        self._caps: list[tuple[PeerTrees, int] | None] = [None] * len(budget.rungs)
        self._noted: _NotedStep | None = None
        self._wanted_before: list[int | None] | None = None  # `_wanted` when orders of a step began
        self._has_decided = False  # in `of`, since orders of this step began
        self._num_settling = 0  # next rounds whose times are not learned from

    def begin(self, request: TargetRequest) -> None:
        if request.req_idx >= 0:
            self._owners[request.req_idx] = None

    def would_rest(self, request: TargetRequest) -> bool:
        trees = request.peer_trees
        is_free = trees is None or trees.adapts
        return is_free and self._budget.would_rest(self._num_requests)

    @property
    def _num_requests(self) -> int:
        """Return how many requests there are, as far as they can run at once."""
        return min(len(self._requests), len(self._owners))

    def of(self, request: TargetRequest, credit: PeerTrees) -> TreeShape | None:
        if not credit.adapts:
            return credit.shape
        slot = request.req_idx
        if self._owners[slot] is not request:
            self._begin_anew(request)
        if self._wanted[slot] is None and self._has_decided:
            self._budget.join(slot, num_rungs_within(credit.shape))
            self._wanted[slot], self._shapes[slot] = int(self._budget.rungs[slot]), None
        elif self._wanted[slot] is None:
            self._decide()
            self._has_decided = True
        known = self._shapes[slot]
        if known is None or known[0] is not credit:  # the request may have got another credit
            known = self._shapes[slot] = credit, self._shape(self._wanted[slot], credit.shape)
        return known[1]

    def needs_no_rows(self, request: TargetRequest) -> bool:
        slot = request.req_idx
        if slot < 0 or self._owners[slot] is not request:
            return self._budget.newcomer_needs_no_rows(self._num_requests)
        return bool(self._budget.needs_no_rows[slot])

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
        rounds, owners = [], self._owners
        for row, request in enumerate(trees.requests):
            if request.phase is _RUNNING:
                if owners[request.req_idx] is not request:
                    self._begin_anew(request)
                peer = request.draft
                progress, credit = None, None
                if peer is not None:
                    progress, credit = peer.progress_in(request.round_idx + 1), peer.credit
                rounds.append(_NotedRound(row, progress, credit, request.num_grown))
        running = [r for r in self._requests.values() if r.phase is _RUNNING]
        drafts = [r.draft for r in running if r.draft is not None]
        self._noted = _NotedStep(
            trees,
            nodes,
            rounds,
            wanted=self._wanted_before or self._wanted.copy(),
            num_running=len(running),
            num_asked=sum([draft.progress in _COMING for draft in drafts]),
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
        table: list[int] = []  # flat: NumPy takes longer for lists of tuples
        for row, progress, credit, num_grown in rounds:
            slot, path = slots[row], nodes[row]
            rung, most_steps = 0, 0
            if credit is not None:
                rung = (noted.wanted[slot] or 0) if progress is _CAUGHT_UP else 0
                most_steps = _most_steps(credit)
            nodes_grown = num_grown or path.num_nodes
            table += slot, nodes_grown, len(path.token_ids) - 1, rung, most_steps
        columns = np.array(table, dtype=np.int64).reshape(-1, 5).T
        of_slot, num_nodes, num_accepted, waited_rungs, num_steps = columns
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

    def _begin_anew(self, request: TargetRequest) -> None:
        """Note that a request holds its slot, which another one held before."""
        slot = request.req_idx
        self._owners[slot] = request
        self._wanted[slot] = self._shapes[slot] = None
        self._budget.begin(slot)

    def _decide(self) -> None:
        chosen, slots, caps, fixed = [], [], [], []
        missed: list[int] = []  # flat
        num_others, num_coming, num_prompt_rows = 0, 0, 0
        for request in self._requests.values():
            if request.phase is not _RUNNING:
                if request.phase is _PREFILL:
                    num_coming += 1
                    num_prompt_rows += len(request.tokens) - request.committed_len
                continue
            slot, peer = request.req_idx, request.draft
            if self._owners[slot] is not request:
                self._begin_anew(request)
            credit = None if peer is None else peer.credit
            if credit is None:
                num_others += 1
            elif credit.adapts:
                chosen.append(request)
                slots.append(slot)
                caps.append(self._cap(slot, credit))
                missed += self._missed(request)
            else:
                fixed.append(credit.shape)
        places, left = np.array(slots, dtype=np.int64), None
        missed_rows = None
        if any(missed):
            missed_rows = np.array(missed, dtype=np.int64).reshape(-1, 2)
            left = np.array([r.token_limit - len(r.tokens) for r in chosen], dtype=np.int64)
        self._budget.decide(
            places,
            np.array(caps, dtype=np.int64),
            _fixed_rounds(num_others, fixed),
            missed=missed_rows,
            num_left=left,
            num_coming=num_coming,
            num_prompt_rows=num_prompt_rows,
        )
        for slot, rung in zip(slots, self._budget.rungs.take(places).tolist(), strict=True):
            if rung != self._wanted[slot]:
                self._wanted[slot], self._shapes[slot] = rung, None

    def _cap(self, slot: int, credit: PeerTrees) -> int:
        """Return the highest rung within the shape of the credit of a slot's request."""
        known = self._caps[slot]
        if known is None or known[0] is not credit:
            known = self._caps[slot] = credit, num_rungs_within(credit.shape)
        return known[1]


def _fixed_rounds(num_roots: int, shapes: Sequence[TreeShape]) -> FixedRounds:
    """Return what the requests take whose trees are not chosen here.

    Args:
        num_roots: Requests without trees.
        shapes: The shape of each request with a fixed shape.
    """
    num_tokens = sum([1 + _FIXED_ACCEPTED * shape.num_steps for shape in shapes])
    return FixedRounds(
        num_requests=num_roots + len(shapes),
        num_rows=num_roots + sum([shape.num_draft_tokens for shape in shapes]),
        num_tokens=num_roots + num_tokens,
        rung=max(map(num_rungs_within, shapes), default=0),
        num_trees=len(shapes),
    )


def _most_steps(credit: PeerTrees) -> int:
    """Return how many steps trees of a credit have at most; 0: a shape that is not on the ladder,
    so that the size of a tree does not say its rung.
    """
    is_rung = credit.adapts or has_size_of_rung(credit.shape)
    return credit.shape.num_steps if is_rung else 0


def _does_without(request: TargetRequest, progress: Progress | None) -> bool:
    """Return whether a request has had no trees for a while: it rests, or it never has a draft. A
    request that had no tree in just this round does not count.

    Args:
        progress: Progress of its draft; None: no draft was attached.
    """
    if progress is None:
        return request.peer_trees is None and not request.open.wants_features
    return progress is _RESTING

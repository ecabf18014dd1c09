"""Which requests hold pages, and which rows the next step computes."""

from __future__ import annotations

import contextlib
import heapq
import math
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from shared.kv.allocator import OutOfPagesError
from shared.kv.pool import KVPool
from shared.messages import MAX_TREE_NODES
from target_service.prompt_budget import PromptBudget
from target_service.request import DeviceTree, Phase, TargetRequest

# Trees leave one row in so many to prefills and replays, if there are any; and other prompts leave
# as many of those to the one that has waited longest.
CHAIN_SHARE = 4

_QUEUE_IDX = operator.attrgetter("queue_idx")
_TURN = operator.attrgetter("turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWork:
    """Rows of prompt (or rebuilt) tokens [start, stop)."""

    request: TargetRequest
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Return whether the next token is sampled from the last row."""
        return self.stop == len(self.request.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayWork:
    """Rows [start, stop) whose features are computed again over their own committed KV."""

    request: TargetRequest
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one engine step computes; its rows stay within the budget.

    Args:
        verifies: Those whose trees the device takes from the mailbox come first.
    """

    verifies: list[TargetRequest] = field(default_factory=list)
    prefills: list[PrefillWork] = field(default_factory=list)
    replays: list[ReplayWork] = field(default_factory=list)
    admitted: list[TargetRequest] = field(default_factory=list)
    retracted: list[TargetRequest] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to compute."""
        return not (self.verifies or self.prefills or self.replays)

    def leave_out_retracted(self) -> None:
        """Compute nothing of requests that hold no pages any more."""
        self.verifies[:] = [r for r in self.verifies if r.phase is not Phase.WAITING]
        self.prefills[:] = [w for w in self.prefills if w.request.phase is not Phase.WAITING]
        self.admitted[:] = [r for r in self.admitted if r.phase is not Phase.WAITING]


class Scheduler:
    """Admission by KV pages, retraction as the last resort, a row budget per step.

    Who is admitted first, and retracted last, follows from priority and age (`shared/priority.py`).
    A running request is never failed for want of pages: each step reserves a whole round for each
    of its requests first. No request starves: the rounds that have waited longest come first, and
    leave a share of the rows to prefills and replays. Of prompts the one with the fewest tokens
    left comes first, and leaves a share to the one that has waited longest.

    Args:
        prefill_chunk_len: Most tokens of a prompt, or of a replay, in one step.
        prompt_budget: Limits rows of prompts while others wait; None: chunks are all that does.
        overlaps_steps: Plan rounds of the root alone whose root is still being computed.
        window: Tokens that a row sees, its own included; 0: all before it. Pages that no row to
            come sees are freed, but for those of requests whose rows a draft may ask for again.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        max_batch_rows: int,
        prefill_chunk_len: int,
        overlaps_steps: bool = False,
        prompt_budget: PromptBudget | None = None,
        window: int = 0,
    ) -> None:
        self.overlaps_steps = overlaps_steps
        self._pool = pool
        self._max_batch_rows = max_batch_rows
        self._chunk_len = prefill_chunk_len
        self.prompt_budget = prompt_budget
        self._window = window
        self._waiting: list[tuple[tuple[float, int], TargetRequest]] = []  # (turn, request)
        self._held: dict[str, TargetRequest] = {}  # in order of admission
        self._chains_wait = False  # one tree left prefills and replays no row of the last step

    @property
    def num_waiting(self) -> int:
        return sum(request.phase is Phase.WAITING for _, request in self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._held)

    @property
    def held(self) -> Collection[TargetRequest]:
        """Return the requests that hold pages, in order of admission."""
        return self._held.values()

    @property
    def has_work(self) -> bool:
        """Return whether a step would compute or admit anything that is here."""
        return any(self._has_round(r) or _has_chain(r) for r in self.held) or self._can_admit()

    @property
    def num_tree_rows(self) -> int:
        """Return the rows of a step of requests that have trees, or will; 0 of any other."""
        if self._can_admit():
            return 0
        num_rows = 0
        for request in self.held:
            if _has_chain(request):
                return 0
            if self._has_round(request):
                # A round of the root alone joins trees only if it will have trees itself.
                if request.next_num_rows == 1 and request.peer_trees is None:
                    return 0
                num_rows += request.next_num_rows
        return num_rows

    def enqueue(self, request: TargetRequest) -> None:
        """Let a request wait for pages."""
        heapq.heappush(self._waiting, (request.turn, request))

    def remove(self, request: TargetRequest) -> None:
        """Free whatever a request holds, in whatever phase it is."""
        if self._held.pop(request.request_id, None) is None:
            self._waiting = [entry for entry in self._waiting if entry[1] is not request]
            heapq.heapify(self._waiting)
            return
        self._pool.release(request.req_idx)
        request.req_idx = -1
        request.phase = Phase.WAITING

    def reserve_early(self, trees: Iterable[tuple[str, int]]) -> None:
        """Reserve the pages of trees that are being grown, if they are free; `plan` makes sure.

        Args:
            trees: (request_id, rows) of each.
        """
        for request_id, num_rows in trees:
            request = self._held.get(request_id)
            if request is not None:
                with contextlib.suppress(OutOfPagesError):
                    self._pool.reserve(request.req_idx, request.launched_len + num_rows)

    def plan(self) -> StepPlan:
        """Choose the rows of the next step and reserve their pages."""
        if self._window:
            self._free_unseen()
        plan = StepPlan(admitted=self._admit())
        chained = [request for request in self.held if _has_chain(request)]
        set_aside = max(self._max_batch_rows // CHAIN_SHARE, 1) if chained else 0
        budget = self._plan_rounds(plan, self._max_batch_rows, set_aside)
        budget = self._chain_budget(self._max_batch_rows - budget, budget) if chained else 0
        budget = self._plan_prefills(plan, chained, budget)
        self._plan_replays(plan, chained, budget)
        has_chains = bool(plan.prefills or plan.replays)
        self._chains_wait = bool(chained and plan.verifies) and not has_chains
        if plan.retracted:  # for others of this plan
            plan.leave_out_retracted()
        plan.verifies.sort(key=_is_tree_here)
        return plan

    def note_step(self, num_rows: int, *, num_chain_rows: int, began_s: float) -> None:
        """Take note that a step has ended; args as of `PromptBudget.note_step`."""
        if self.prompt_budget is not None:
            self.prompt_budget.note_step(num_rows, num_chain_rows=num_chain_rows, began_s=began_s)

    def _plan_rounds(self, plan: StepPlan, budget: int, set_aside: int) -> int:
        """Plan rounds, those that have waited longest first; return the rows that are left."""
        queued = [request for request in self.held if self._has_round(request)]
        for request in sorted(queued, key=_QUEUE_IDX):
            if request.phase is Phase.WAITING:
                continue  # retracted for an older one
            num_rows = request.next_num_rows
            if num_rows > budget - set_aside and (plan.verifies or self._chains_wait):
                continue
            if self._reserve(request, request.most_launched_len + num_rows, plan.retracted):
                plan.verifies.append(request)
                budget -= num_rows
        return budget

    def _chain_budget(self, num_tree_rows: int, num_left: int) -> int:
        """Return how many of the rows that are left may be those of prompts and replays.

        Whoever decodes has no token before the step is over, in this step or in the next one; and
        where several prompts wait, a short one that comes now does not even begin before it is.
        """
        num_decoding = sum([r.phase is Phase.RUNNING or r.num_in_flight > 0 for r in self.held])
        prompts = [request for request in self.held if request.is_prefilling]
        is_crowded = len(prompts) > 1
        if self.prompt_budget is None or not (num_decoding or is_crowded):
            return num_left
        budget = self.prompt_budget.num_rows(
            max(num_tree_rows, num_decoding),
            sum(map(_num_left, prompts)) or self._max_batch_rows,  # replays have no limit here
            min([request.opened_s for request in prompts], default=math.inf),
            is_crowded=is_crowded,
        )
        return min(num_left, budget)

    def _plan_prefills(self, plan: StepPlan, chained: list[TargetRequest], budget: int) -> int:
        """Plan chunks of prompts; return the rows that are left."""
        prompts = [request for request in chained if request.is_prefilling]
        if not prompts:
            return budget
        oldest = prompts[0]
        set_aside = min(_num_left(oldest), budget // CHAIN_SHARE)
        for request in sorted(prompts, key=_num_left):
            if request is oldest:
                set_aside = 0
            start = request.launched_len
            count = min(_num_left(request), self._chunk_len, budget - set_aside)
            if count <= 0 or request.phase is Phase.WAITING:
                continue
            if self._reserve(request, start + count, plan.retracted):
                work = PrefillWork(request=request, start=start, stop=start + count)
                plan.prefills.append(work)
                budget -= count
        return budget

    def _plan_replays(self, plan: StepPlan, chained: list[TargetRequest], budget: int) -> None:
        for request in chained:
            gap = _replay_gap(request)
            if gap is not None and budget > 0 and request.phase is not Phase.WAITING:
                stop = min(gap[1], gap[0] + min(self._chunk_len, budget))
                plan.replays.append(ReplayWork(request=request, start=gap[0], stop=stop))
                budget -= stop - gap[0]

    def _has_round(self, request: TargetRequest) -> bool:
        return request.queued is not None or request.can_run_alone(
            overlaps_steps=self.overlaps_steps
        )

    def _can_admit(self) -> bool:
        """Return whether the first waiting request fits: its tokens and a whole round."""
        if not self._waiting or not self._pool.has_free_row:
            return False
        if not self._held:
            return True  # max_context_len is chosen so that one request always fits
        # Pages that requests in prefill were promised but have not reserved yet.
        promised = sum(
            max(0, self._most_pages(held) - self._pool.num_held_pages(held.req_idx))
            for held in self._held.values()
            if held.phase is Phase.PREFILL
        )
        return self._most_pages(self._waiting[0][1]) <= self._pool.num_free_pages - promised

    def _most_pages(self, request: TargetRequest) -> int:
        """Return how many pages a request holds at most until its first round is over."""
        num_tokens = len(request.tokens) + MAX_TREE_NODES
        if self._frees_unseen(request):
            # A chunk is planned while the one before it is in flight; both ends are within a page.
            chunks = 2 * (self._chunk_len + self._pool.page_size)
            num_tokens = min(num_tokens, self._window + chunks + MAX_TREE_NODES)
        return self._pool.pages_for(num_tokens)

    def _frees_unseen(self, request: TargetRequest) -> bool:
        """Return whether the request does without pages that no row to come sees."""
        return self._window > 0 and request.features is None  # a replay would see them

    def _free_unseen(self) -> None:
        """Free the pages that lie wholly before the windows of all rows to come or in flight."""
        for request in self.held:
            if self._frees_unseen(request):
                first_seen = request.committed_len + 1 - self._window
                self._pool.drop_before(request.req_idx, first_seen)

    def _admit(self) -> list[TargetRequest]:
        """Move waiting requests in, in turn, while they fit."""
        admitted = []
        while self._can_admit():
            request = heapq.heappop(self._waiting)[1]
            request.req_idx = self._pool.acquire()
            request.phase = Phase.PREFILL
            self._held[request.request_id] = request
            admitted.append(request)
        return admitted

    def _reserve(
        self, request: TargetRequest, num_tokens: int, retracted: list[TargetRequest]
    ) -> bool:
        """Reserve pages, retracting those whose turn is last while there are too few.

        Returns: False if the request itself had to go.
        """
        while True:
            try:
                self._pool.reserve(request.req_idx, num_tokens)
            except OutOfPagesError:
                last = max(self._held.values(), key=_TURN)
                self.remove(last)
                retracted.append(last)
                if last is request:
                    return False
            else:
                return True


def _num_left(request: TargetRequest) -> int:
    """Return the tokens of the prompt that are left to launch."""
    return len(request.tokens) - request.launched_len


def _is_tree_here(request: TargetRequest) -> bool:
    """Return whether the host knows the tree of the round that is queued."""
    return not isinstance(request.queued, DeviceTree)


def _has_chain(request: TargetRequest) -> bool:
    """Return whether a prefill or a replay of the request is unfinished."""
    return request.is_prefilling or _replay_gap(request) is not None


def _replay_gap(request: TargetRequest) -> tuple[int, int] | None:
    """Return the feature rows [from, to) to replay now."""
    return None if request.features is None else request.features.gap_to_replay

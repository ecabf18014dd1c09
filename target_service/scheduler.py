"""Which requests hold pages, and which rows the next step computes."""

from __future__ import annotations

import contextlib
import heapq
import operator
from dataclasses import dataclass, field

from shared.kv.allocator import OutOfPagesError
from shared.kv.pool import KVPool
from shared.messages import MAX_TREE_NODES
from target_service.request import Phase, QueuedRound, TargetRequest

# Trees leave one row in so many to prefills and replays, if there are any.
CHAIN_SHARE = 4

_QUEUED_ORDER = operator.attrgetter("queued_order")


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
    """What one engine step computes; its rows stay within the budget."""

    verifies: list[TargetRequest] = field(default_factory=list)
    prefills: list[PrefillWork] = field(default_factory=list)
    replays: list[ReplayWork] = field(default_factory=list)
    admitted: list[TargetRequest] = field(default_factory=list)
    retracted: list[TargetRequest] = field(default_factory=list)

    @property
    def awaits_mail(self) -> bool:
        """Return whether the device waits for the trees; if so, for all of them."""
        return any(
            r.queued is not None and r.queued.awaited_shape is not None for r in self.verifies
        )

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to compute."""
        return not (self.verifies or self.prefills or self.replays)


class Scheduler:
    """Admission by KV pages, retraction of the newest as the last resort, a row budget per step.

    A running request is never failed for want of pages: each step reserves a whole round for each
    of its requests first. Nobody starves: the rounds that have waited longest come first, and leave
    a share of the rows to prefills and replays.

    Args:
        runs_ahead: Plan granted rounds whose root is still being computed.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        max_batch_rows: int,
        prefill_chunk_len: int,
        runs_ahead: bool = False,
    ) -> None:
        self.runs_ahead = runs_ahead
        self._pool = pool
        self._max_batch_rows = max_batch_rows
        self._chunk_len = prefill_chunk_len
        self._waiting: list[tuple[int, int, TargetRequest]] = []  # (-priority, order, request)
        self._held: dict[str, TargetRequest] = {}  # in order of admission

    @property
    def num_waiting(self) -> int:
        return sum(request.phase is Phase.WAITING for _, _, request in self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._held)

    @property
    def has_work(self) -> bool:
        """Return whether a step would compute or admit anything."""
        return (
            any(self._has_round(r) or _has_chain(r) for r in self._held.values())
            or self._can_admit()
            or self.can_await_mail
        )

    @property
    def num_tree_rows(self) -> int:
        """Return the rows of a step that would compute trees and nothing else; 0 of any other."""
        if self._can_admit():
            return 0
        num_rows = 0
        for request in self._held.values():
            if _has_chain(request):
                return 0
            if self._has_round(request):
                if request.next_num_rows == 1:
                    return 0
                num_rows += request.next_num_rows
        return num_rows

    def await_mail(self) -> bool:
        """Queue the rounds of trees that are being grown, if all requests wait for such.

        The device waits for them: whoever else came meanwhile would wait as well.

        Returns: Whether it did; they must be in the next step, and nobody else.
        """
        if not self.can_await_mail:
            return False
        for request in self._held.values():
            request.queued = QueuedRound(None, awaited_shape=request.mailed)
        return True

    @property
    def can_await_mail(self) -> bool:
        """Return whether all that is to be done is to await trees that come by mail."""
        held = self._held.values()
        if not held or not all([request.can_await_mail for request in held]):
            return False
        num_rows = sum([r.mailed.num_draft_tokens for r in held if r.mailed is not None])
        has_chain = any([_has_chain(request) for request in held])
        return num_rows <= self._max_batch_rows and not has_chain and not self._can_admit()

    def enqueue(self, request: TargetRequest) -> None:
        """Let a request wait for pages."""
        heapq.heappush(self._waiting, (-request.open.priority, request.order, request))

    def remove(self, request: TargetRequest) -> None:
        """Free whatever a request holds, in whatever phase it is."""
        if self._held.pop(request.request_id, None) is None:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            heapq.heapify(self._waiting)
            return
        self._pool.release(request.req_idx)
        request.req_idx = -1
        request.phase = Phase.WAITING

    def reserve_ahead(self, request_id: str, num_rows: int) -> None:
        """Reserve the pages of a round that is on its way, if they are free; `plan` sees to it."""
        request = self._held.get(request_id)
        if request is not None:
            with contextlib.suppress(OutOfPagesError):
                self._pool.reserve(request.req_idx, request.next_seq_len + num_rows)

    def plan(self) -> StepPlan:
        """Choose the rows of the next step and reserve their pages."""
        admitted = self._admit()
        budget = self._max_batch_rows
        verifies: list[TargetRequest] = []
        prefills: list[PrefillWork] = []
        replays: list[ReplayWork] = []
        retracted: list[TargetRequest] = []
        held = self._held.values()
        chained = [request for request in held if _has_chain(request)]
        set_aside = budget // CHAIN_SHARE if chained else 0
        queued = [request for request in held if self._has_round(request)]
        for request in sorted(queued, key=_QUEUED_ORDER):
            if request.phase is Phase.WAITING:
                continue  # retracted for an older one
            num_rows = request.next_num_rows
            if num_rows > budget - set_aside and verifies:
                continue
            if self._reserve(request, request.next_seq_len + num_rows, retracted):
                verifies.append(request)
                budget -= num_rows
        for request in chained:
            if _is_prefilling(request) and budget > 0:
                start = request.seq_len
                stop = min(len(request.tokens), start + min(self._chunk_len, budget))
                if self._reserve(request, stop, retracted):
                    prefills.append(PrefillWork(request=request, start=start, stop=stop))
                    budget -= stop - start
        for request in chained:
            gap = _replay_gap(request)
            if gap is not None and budget > 0 and request.phase is not Phase.WAITING:
                stop = min(gap[1], gap[0] + min(self._chunk_len, budget))
                replays.append(ReplayWork(request=request, start=gap[0], stop=stop))
                budget -= stop - gap[0]
        if retracted:
            verifies = [r for r in verifies if r.phase is not Phase.WAITING]
            prefills = [w for w in prefills if w.request.phase is not Phase.WAITING]
            admitted = [r for r in admitted if r.phase is not Phase.WAITING]
        return StepPlan(
            verifies=verifies,
            prefills=prefills,
            replays=replays,
            admitted=admitted,
            retracted=retracted,
        )

    def _has_round(self, request: TargetRequest) -> bool:
        return request.queued is not None or request.can_run_alone(runs_ahead=self.runs_ahead)

    def _can_admit(self) -> bool:
        """Return whether the first waiting request fits: its tokens and a whole round."""
        if not self._waiting or not self._pool.has_free_row:
            return False
        if not self._held:
            return True  # max_context_len is chosen so that one request always fits
        pages_for = self._pool.pages_for
        # Pages that requests in prefill were promised but have not reserved yet.
        promised = sum(
            max(0, pages_for(len(held.tokens) + MAX_TREE_NODES) - pages_for(held.seq_len))
            for held in self._held.values()
            if held.phase is Phase.PREFILL
        )
        need = pages_for(len(self._waiting[0][2].tokens) + MAX_TREE_NODES)
        return need <= self._pool.num_free_pages - promised

    def _admit(self) -> list[TargetRequest]:
        """Move waiting requests in, best priority first, while they fit."""
        admitted = []
        while self._can_admit():
            request = heapq.heappop(self._waiting)[2]
            request.req_idx = self._pool.acquire()
            request.phase = Phase.PREFILL
            self._held[request.request_id] = request
            admitted.append(request)
        return admitted

    def _reserve(
        self, request: TargetRequest, num_tokens: int, retracted: list[TargetRequest]
    ) -> bool:
        """Reserve pages, retracting newer requests while there are too few.

        Returns: False if the request itself had to go.
        """
        while True:
            try:
                self._pool.reserve(request.req_idx, num_tokens)
            except OutOfPagesError:
                newest = max(self._held.values(), key=lambda held: held.order)
                self.remove(newest)
                retracted.append(newest)
                if newest is request:
                    return False
            else:
                return True


def _has_chain(request: TargetRequest) -> bool:
    """Return whether a prefill or a replay of the request is unfinished."""
    return _is_prefilling(request) or _replay_gap(request) is not None


def _is_prefilling(request: TargetRequest) -> bool:
    """Return whether rows of the prompt are left; the last ones may be in flight."""
    return request.phase is Phase.PREFILL and request.seq_len < len(request.tokens)


def _replay_gap(request: TargetRequest) -> tuple[int, int] | None:
    """Return the feature rows [from, to) to replay now."""
    if request.features is None or request.is_replaying:
        return None
    return request.features.gap

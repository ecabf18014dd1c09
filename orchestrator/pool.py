"""All workers, and who serves whom: a target by load, a draft that fits it.

Requests wait here, not on a worker: in turn they go to the target with the fewest requests that has
room.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from orchestrator.fates import Fates
from orchestrator.moves import Moves
from orchestrator.pairing import ModelIdentity, draft_problem, pair_problem, target_problem
from orchestrator.pairs import Pairs
from orchestrator.siblings import SharedLoads
from orchestrator.tenants import FAIR_S
from orchestrator.workers import WorkerSession
from shared.errors import UnavailableError
from shared.messages import WorkerInfo
from shared.priority import turn_s

logger = logging.getLogger(__name__)

# Requests sent to a target that it has not admitted yet; enough to fill its next batch of prefills.
_MAX_OPENING = 16
# How long a new request waits for the best target where that has so many: while it shows signs of
# life, which steps are, but not for ever. Else all that is left of a burst would go to the target
# whose step ends first.
_SIGN_OF_LIFE_S, _MOST_EVEN_S = 0.25, 1.0
_MAX_SESSIONS = 65536
_RECHECK_S = 0.2
_ROLES = ("target", "draft")
_WORKER_STATES = (
    *((role, state) for role in _ROLES for state in ("available", "draining", "refused")),
    ("draft", "unpaired"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a request asks of a target.

    Args:
        num_tokens: Prompt and output so far.
        context_len: Tokens that the target must be able to hold.
        is_running: It has output already and was moved: it goes before new requests.
        wants_room: It was retracted: the target must have pages for it before it comes back.
        identity: The model that it started on; None for a new request.
        avoid: Addresses that failed it, used only if there are no others.
        needs_trial: Workers went down with it: not to where another such request is.
        arrived_s: When it came, loop time.
        has_grammar: Its output has a grammar, which the target must be able to follow.
        wants_experts: The target must say which experts rows are routed to.
        tenant: Whose it is.
    """

    request_id: str
    num_tokens: int
    context_len: int
    priority: int = 0
    session_id: str = ""
    wants_draft: bool = False
    is_running: bool = False
    wants_room: bool = False
    identity: ModelIdentity | None = None
    avoid: frozenset[str] = frozenset()
    needs_trial: bool = False
    arrived_s: float = 0.0
    has_grammar: bool = False
    wants_experts: bool = False
    tenant: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    need: Need
    arrival_idx: int
    chosen: asyncio.Future[WorkerSession] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def rank(self, num_by_tenant: Mapping[str, int]) -> tuple[bool, float, int]:
        turn = turn_s(self.need.arrived_s, self.need.priority)
        if len(num_by_tenant) > 1:
            turn += FAIR_S * num_by_tenant.get(self.need.tenant, 0)
        return (not self.need.is_running, turn, self.arrival_idx)


class WorkerPool:
    """Workers with open sessions, and the requests that wait for one.

    Args:
        tokenizer_hash: Of the orchestrator's own tokenizer, "" if it has none.
        on_change: Called when `is_ready` or `can_speculate` may have changed.
        num_by_tenant: Requests that are here, waiting ones included; kept up by others.
        loads: What other processes of this orchestrator have at the workers; None: it has none.
    """

    def __init__(
        self,
        *,
        tokenizer_hash: str = "",
        on_change: Callable[[], None] = lambda: None,
        num_by_tenant: Mapping[str, int] = MappingProxyType({}),
        loads: SharedLoads | None = None,
    ) -> None:
        self._tokenizer_hash = tokenizer_hash
        self._on_change = on_change
        self._num_by_tenant = num_by_tenant
        self._loads = loads
        self._targets: list[WorkerSession] = []
        self._drafts: list[WorkerSession] = []
        self._refused: list[WorkerSession] = []
        self._waiters: list[_Waiter] = []
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._arrivals = itertools.count()
        self._was_ready = self._looks_again = False
        self._last_model: WorkerInfo | None = None
        self._lost_at_s = -math.inf
        self.num_lost = Counter(
            {(role, cause): 0 for role in _ROLES for cause in ("ended", "error", "silent")}
        )
        """Sessions that have ended, by role and cause."""
        self.moves = Moves(self)
        self.fates = Fates()
        self.can_speculate = False
        """Whether some draft fits some target."""
        self.pairs = Pairs()

    def open_target(self, worker: WorkerSession) -> str:
        """Take a target into use; return why it must not be, or ""."""
        problem = target_problem(
            worker.info,
            tokenizer_hash=self._tokenizer_hash,
            others=ModelIdentity.of(self._targets[0].info) if self._targets else None,
        )
        return self._open(worker, self._targets, problem)

    def open_draft(self, worker: WorkerSession) -> str:
        """Take a draft into use; return why it must not be, or ""."""
        return self._open(worker, self._drafts, draft_problem(worker.info))

    def lose(self, worker: WorkerSession) -> None:
        """Forget a worker whose session has ended; one that was refused because of it may serve."""
        self.num_lost[worker.role, worker.lost_by or "ended"] += 1
        self.fates.note_lost(worker)
        for group in (self._targets, self._drafts, self._refused):
            if worker in group:
                group.remove(worker)
        for refused in list(self._refused):
            self._refused.remove(refused)
            open_worker = self.open_target if refused.role == "target" else self.open_draft
            if not open_worker(refused):
                logger.info("%s is in use from now on", refused)
        self._workers_changed()

    @property
    def targets(self) -> tuple[WorkerSession, ...]:
        """Return the targets in use."""
        return tuple(self._targets)

    @property
    def drafts(self) -> tuple[WorkerSession, ...]:
        """Return the drafts in use."""
        return tuple(self._drafts)

    @property
    def worker_states(self) -> Counter[tuple[str, str]]:
        """Return how many workers of each role are available, draining, unpaired, or refused."""
        states = Counter(dict.fromkeys(_WORKER_STATES, 0))
        for worker in (*self._targets, *self._drafts):
            state = "available" if worker.is_available else "draining"
            if worker.role == "draft" and worker.address in self.pairs.unpaired:
                state = "unpaired"
            states[worker.role, state] += 1
        for worker in self._refused:
            states[worker.role, "refused"] += 1
        return states

    @property
    def refused(self) -> tuple[WorkerSession, ...]:
        """Return the workers that must not be used; each one's `problem` says why."""
        return tuple(self._refused)

    @property
    def num_waiting(self) -> int:
        """Return the requests that wait for a target."""
        return len(self._waiters)

    @property
    def is_ready(self) -> bool:
        """Return whether any target takes requests."""
        return any(worker.is_available for worker in self._targets)

    @property
    def model(self) -> WorkerInfo | None:
        """Return what is served: the info of the target with the longest context, None if none."""
        infos = [worker.info for worker in self._targets if worker.is_available]
        return max(infos, key=lambda info: info.max_context_len, default=None)

    def lost_model(self, within_s: float) -> WorkerInfo | None:
        """Return what was served until the last target was lost, or drained, so many seconds ago at
        most: one that comes back serves it again. None if there is one, or was none for longer.
        """
        if self.model is not None or time.monotonic() > self._lost_at_s + within_s:
            return None
        return self._last_model

    async def acquire_target(self, need: Need, *, patience_s: float) -> WorkerSession:
        """Wait for a target with room; the request counts as opening there from now on.

        Args:
            patience_s: How long there may be no target at all that could ever take it.
        Raises: UnavailableError when patience is at its end.
        """
        waiter = _Waiter(need=need, arrival_idx=next(self._arrivals))
        self._waiters.append(waiter)
        self._dispatch()
        loop = asyncio.get_running_loop()
        give_up = loop.time() + patience_s
        try:
            while not waiter.chosen.done():
                if self._candidates(need):
                    give_up = loop.time() + patience_s
                elif loop.time() >= give_up or self._serves_another(need):
                    raise UnavailableError(
                        "no target worker is ready for this request; try again later",
                        reason="NO_TARGET",
                    )
                await asyncio.wait([waiter.chosen], timeout=_RECHECK_S)
        except asyncio.CancelledError:
            if waiter.chosen.done():
                waiter.chosen.result().withdraw(need.request_id)
                self._dispatch()
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return waiter.chosen.result()

    def _serves_another(self, need: Need) -> bool:
        """Return whether what a new request waits for has been replaced by another model."""
        if need.identity is None or need.is_running:
            return False
        identities = [ModelIdentity.of(w.info) for w in self._targets if w.is_available]
        return bool(identities) and need.identity not in identities

    def has_room(self, need: Need) -> bool:
        """Return whether a target has room for a request now; one that drains does not count."""
        need = replace(need, wants_room=True)
        return any(_may_open(w) and _has_room(w, need) for w in self._candidates(need))

    def pick_draft(
        self, target: WorkerSession, avoid: frozenset[str] = frozenset()
    ) -> WorkerSession | None:
        """Return a draft that fits the target and has room, if there is one.

        One on the target's own GPU goes first: each works while the other waits for it. Then one
        beside it: what they share in memory is faster than any network. Of several the target's own
        (`Pairs.is_own`), then the least loaded one.
        """
        return min(
            self._drafts_for(target),
            key=lambda draft: (
                draft.address in avoid,
                not target.info.gpu or draft.info.gpu != target.info.gpu,
                draft.host != target.host,
                not self.pairs.is_own(target.address, draft.address),
                draft.num_requests,
                -draft.free_share,
            ),
            default=None,
        )

    def _drafts_for(self, target: WorkerSession) -> Iterator[WorkerSession]:
        """Yield the drafts that fit the target and have room."""
        for draft in self._drafts:
            has_room = draft.is_available and not draft.load.num_waiting
            if has_room and not pair_problem(target.info, draft.info):
                yield draft

    def _open(self, worker: WorkerSession, group: list[WorkerSession], problem: str) -> str:
        self.fates.note_answer(worker)
        twin = next((w for w in group if w.info.incarnation == worker.info.incarnation), None)
        if twin is not None:
            problem = f"it is the same process as {twin.address}"
        worker.on_load = self._load_changed
        worker.share_loads(self._loads)
        worker.problem = problem
        if problem:
            self._refused.append(worker)
        else:
            group.append(worker)
        self._workers_changed()
        return problem

    def _workers_changed(self) -> None:
        self._last_model = self.model or self._last_model
        self.pairs.update(self._targets, self._drafts)
        self.can_speculate = len(self.pairs.problems) < len(self._targets) * len(self._drafts)
        self._load_changed()
        self._on_change()

    def _load_changed(self) -> None:
        """Look again at who waits; called with every message of a worker, so it must be cheap."""
        self._dispatch()
        self.moves.look()
        if self.is_ready != self._was_ready:
            if self._was_ready:
                self._lost_at_s = time.monotonic()
            self._was_ready = self.is_ready
            self._on_change()

    def _dispatch(self) -> None:
        """Send waiting requests to targets with room, in turn: by age, priority and tenant."""
        if not self._waiters or not any(map(_may_open, self._targets)):
            return
        reserved: set[str] = set()
        for waiter in sorted(self._waiters, key=lambda waiter: waiter.rank(self._num_by_tenant)):
            worker = self._choose(waiter.need, reserved)
            if worker is not None and not _may_open(worker):
                self._look_again_soon()
                break  # whoever comes next would wait for it, too
            if worker is not None:
                worker.expect(waiter.need.request_id)
                if waiter.need.needs_trial:
                    worker.on_trial = waiter.need.request_id
                waiter.chosen.set_result(worker)
                self._waiters.remove(waiter)
            elif waiter.need.is_running and not waiter.need.needs_trial:
                # What frees up goes to the one that lost its place, not to newcomers.
                reserved.update(worker.address for worker in self._candidates(waiter.need))

    def _candidates(self, need: Need) -> list[WorkerSession]:
        return [
            worker
            for worker in self._targets
            if worker.is_available
            and need.context_len <= worker.info.max_context_len
            and (worker.info.has_grammars or not need.has_grammar)
            and (worker.info.num_experts or not need.wants_experts)
            and need.identity in (None, ModelIdentity.of(worker.info))
        ]

    def _choose(self, need: Need, reserved: set[str]) -> WorkerSession | None:
        """Return the best target for a request, which may have to admit others first; None: there
        is none to wait for.
        """
        workers = [
            worker
            for worker in self._candidates(need)
            if worker.address not in reserved
            and not (need.needs_trial and worker.on_trial)
            and _has_room(worker, need)
        ]
        if not any(map(_may_open, workers)):
            return None
        favourite = self._sessions.get(need.session_id)

        def cost(worker: WorkerSession) -> tuple[bool, bool, bool, int, float]:
            return (
                worker.address in need.avoid,
                need.wants_draft and next(self._drafts_for(worker), None) is None,
                favourite is not None and worker.address != favourite,
                worker.num_requests,
                -worker.free_share,
            )

        best = min(workers, key=cost)
        if not _may_open(best) and not _admits_soon(best, need):
            best = min(filter(_may_open, workers), key=cost)
        if need.session_id:
            self._sessions[need.session_id] = best.address
            self._sessions.move_to_end(need.session_id)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return best

    def _look_again_soon(self) -> None:
        if not self._looks_again:
            self._looks_again = True
            asyncio.get_running_loop().call_later(_SIGN_OF_LIFE_S, self._look_again)

    def _look_again(self) -> None:
        self._looks_again = False
        self._dispatch()


def _may_open(worker: WorkerSession) -> bool:
    return len(worker.opening) < _MAX_OPENING


def _admits_soon(worker: WorkerSession, need: Need) -> bool:
    """Return whether a target is likely to admit with its next step what it was sent."""
    alive_s = max(worker.last_progress, worker.waits_since or 0.0)  # it had nothing to do before
    until_s = min(alive_s + _SIGN_OF_LIFE_S, need.arrived_s + _MOST_EVEN_S)
    return not worker.load.num_waiting and asyncio.get_running_loop().time() < until_s


def _has_room(worker: WorkerSession, need: Need) -> bool:
    if not need.wants_room or not worker.num_own_requests:
        return True
    return worker.num_free_tokens >= need.num_tokens + worker.info.page_size

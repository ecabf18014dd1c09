"""A request's state on one target worker: one epoch, from open to close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from orchestrator.losses import Loss, TargetGone
from orchestrator.workers import Garbled, WorkerDrains, WorkerLost, WorkerSession
from shared.errors import CoppiceError, InternalError, NonFiniteError, StatusCode
from shared.messages import (
    AcceptedPath,
    Credit,
    CreditUpdate,
    DraftDetached,
    DraftRest,
    PeerTrees,
    RequestFailure,
    RequestRetracted,
    RootOnly,
    TargetAdmitted,
    TargetClose,
    TargetOpen,
    VerifyRound,
)
from shared.messages.batches import TargetReply
from shared.rpc.status import error_of
from shared.times import seen_from

CREDIT_ROUNDS = 256
"""Rounds that one credit covers: seconds, so that a late orchestrator lets none run out."""

TakePath = Callable[[AcceptedPath], bool]
"""Takes the path of a round; returns whether to hand it the next one as well."""


class TargetHandle:
    """Talks to one target about one request: one order at a time, or rounds by credit.

    Args:
        step_timeout_s: A target that shows no progress for so long is given up.
        on_admitted: Called once, when the target holds pages for the request.
        on_detached: Called with a draft_epoch when the target's channel to that draft is lost.
        on_rest: Called when the target wants no trees for a while, and when it wants them again.
        on_gone: Called when the state there is lost, whether or not a path is waited for.
        may_move: Returns whether the request leaves a worker that drains, now.
    """

    def __init__(
        self,
        worker: WorkerSession,
        request_id: str,
        target_epoch: int,
        *,
        step_timeout_s: float,
        on_admitted: Callable[[TargetAdmitted], None],
        on_detached: Callable[[int], None],
        on_rest: Callable[[DraftRest], None],
        on_gone: Callable[[], None],
        may_move: Callable[[], bool],
    ) -> None:
        self.worker = worker
        self._loop = asyncio.get_running_loop()
        self.target_epoch = target_epoch
        self._request_id = request_id
        self._step_timeout_s = step_timeout_s
        self._on_admitted = on_admitted
        self._on_detached = on_detached
        self._on_rest = on_rest
        self._on_gone = on_gone
        self._may_move = may_move
        self._asked_round = -1
        self._asked_at = 0.0
        self._counts_progress = False
        self._watch: asyncio.TimerHandle | None = None
        self._reply: asyncio.Future[AcceptedPath | Exception] | None = None
        self._take: TakePath | None = None  # takes rounds by credit as they arrive
        self._credit_until = 0
        self._trees: PeerTrees | RootOnly = RootOnly()
        self._furthest_credit = 0  # the target may have run that far before a credit was revoked
        self._ordered_round = -1
        self._early: dict[int, AcceptedPath] = {}  # of rounds by credit, not asked for yet
        self._gone: Exception | None = None
        self._failed: tuple[int, Exception] | None = None  # a round that was not asked for yet
        self._is_admitted = False
        worker.attach(request_id, self)

    async def open(self, message: TargetOpen) -> AcceptedPath:
        """Have the request prefilled; return round 0.

        A request may wait there for others to finish: only a target without progress is given up.
        Rounds of the root alone follow at once.
        """
        message = replace(message, credit=self._new_credit(0, RootOnly()))
        return await self._ask(message, round_idx=0, counts_progress=True)

    async def verify(self, message: VerifyRound) -> AcceptedPath:
        """Have a tree (or the root alone) verified and committed; ends a credit."""
        self._credit_until = min(self._credit_until, message.round_idx - 1)
        self._ordered_round = message.round_idx
        return await self._ask(message, round_idx=message.round_idx, counts_progress=False)

    def extend_credit(self, round_idx: int, trees: PeerTrees | RootOnly) -> bool:
        """Let the target run this round and some more by itself, without a hop each.

        Args:
            trees: Where the trees of these rounds come from.
        Returns: Whether that had to be said.
        """
        is_same = trees is self._trees or trees == self._trees
        if (
            is_same
            and round_idx + CREDIT_ROUNDS // 2 <= self._credit_until
            or self._gone is not None
        ):
            return False
        self.worker.send(
            CreditUpdate(
                request_id=self._request_id,
                target_epoch=self.target_epoch,
                credit=self._new_credit(round_idx, trees),
            )
        )
        return True

    def _new_credit(self, round_idx: int, trees: PeerTrees | RootOnly) -> Credit:
        self._credit_until = self._furthest_credit = round_idx + CREDIT_ROUNDS
        self._trees = trees
        return Credit(until_round_idx=self._credit_until, trees=trees)

    def has_credit(self, round_idx: int) -> bool:
        """Return whether the target runs this round by itself, as far as it was told."""
        return round_idx <= self._credit_until

    async def credited_rounds(self, round_idx: int, take: TakePath) -> None:
        """Hand rounds that the target runs by its credit to `take`, as they arrive, until it ends.

        Args:
            round_idx: The first of them.
        Raises: What `take` raises, or why there is no path.
        """
        while (early := self._early.pop(round_idx, None)) is not None:
            if not take(early):
                return
            round_idx += 1
        self._take = take
        try:
            await self._ask(None, round_idx=round_idx, counts_progress=False)
        finally:
            self._take = None

    def has_path(self, round_idx: int) -> bool:
        """Return whether the target has run a round by its credit, and the path is here."""
        return round_idx in self._early

    def revoke_credit(self, order: VerifyRound) -> None:
        """End a credit; the round that was asked for is ordered, unless it is done there.

        Round 0 is a prefill, which is under way and needs no tree.
        """
        self._credit_until = order.round_idx - 1
        if order.round_idx and self.waits_since is not None and self._gone is None:
            self._asked_at = self._loop.time()
            self._ordered_round = order.round_idx
            self.worker.send(order)

    def close(self) -> None:
        """Free whatever the target holds; a no-op there if it is gone already."""
        self.worker.send(TargetClose(request_id=self._request_id, target_epoch=self.target_epoch))
        self.worker.detach(self._request_id, self)
        if self._watch is not None:
            self._watch.cancel()

    def receive(self, message: Any) -> None:
        """Take a reply, or the news that none will come."""
        match message:
            case AcceptedPath() if message.target_epoch == self.target_epoch:
                self._take_path(message if message.times is None else self._timed(message))
            case Garbled():
                self._fail(TargetGone(Loss.FAILED, is_kill=True, detail=message.failure.message))
            case WorkerLost():
                self._take_loss(is_clean=message.is_clean)
            case WorkerDrains():
                if self._gone is None and self._may_move():
                    self._fail(TargetGone(Loss.MOVED))
                    self.close()
            case _ if message.target_epoch == self.target_epoch:
                self._take_news(message)

    def _take_news(self, message: TargetReply) -> None:
        """Take a reply that is no path."""
        match message:
            case TargetAdmitted():
                self._admit(message)
            case DraftDetached():
                self._on_detached(message.draft_epoch)
            case DraftRest():
                self._on_rest(message)
            case RequestRetracted():
                self._fail(TargetGone(Loss.RETRACTED))
            case RequestFailure():
                self._fail(_error_of(message), round_idx=message.round_idx)

    def _take_path(self, path: AcceptedPath) -> None:
        if path.round_idx == self._asked_round:
            if not self._is_admitted:
                self._admit(None)
            take, reply = self._take, self._reply
            if take is None:
                self._settle(path)
            elif reply is not None and not reply.done():
                self._hand_on(path, take)
        elif self._asked_round < path.round_idx <= self._furthest_credit:
            self._early[path.round_idx] = path

    def _hand_on(self, path: AcceptedPath, take: TakePath) -> None:
        """Give a round by credit to who takes it, and wait for the next one, if there is one."""
        following: AcceptedPath | None = path
        try:
            while following is not None:
                if not take(following):
                    self._settle(path)
                    return
                self._asked_round += 1
                following = self._early.pop(self._asked_round, None) if self._early else None
        except Exception as error:  # raised where the rounds are waited for
            self._settle(error)
        self._asked_at = self._loop.time()

    def _take_loss(self, *, is_clean: bool) -> None:
        is_kill = self._is_in_engine and not is_clean
        if is_kill:  # at once: it counts when the next request hears of the loss
            self.worker.suspects.add(self._request_id)
        self._fail(TargetGone(Loss.MOVED if is_clean else Loss.LOST, is_kill=is_kill))

    def _timed(self, path: AcceptedPath) -> AcceptedPath:
        """Return a timed path with its times from order to arrival, as this process sees them."""
        assert path.times is not None
        is_ordered = path.round_idx == self._ordered_round
        times = seen_from(
            path.times,
            kind="target",
            sent_ns=int(self._asked_at * 1e9) if is_ordered else None,
            arrived_ns=int(self._loop.time() * 1e9),
        )
        return replace(path, times=times)

    async def _ask(
        self,
        message: TargetOpen | VerifyRound | None,
        *,
        round_idx: int,
        counts_progress: bool,
    ) -> AcceptedPath:
        """Send a message, if there is one, and wait for the path of a round.

        Raises: Why there is none; once, if the target may still be asked.
        """
        self._asked_at, self._counts_progress = self._loop.time(), counts_progress
        early = self._early.pop(round_idx, None)
        if early is not None:
            return early
        failed, self._failed = self._failed, None
        if failed is not None and failed[0] >= round_idx:
            raise failed[1]
        if message is not None and self._gone is None:
            self.worker.send(message)
        if self._gone is not None:
            raise self._gone
        self._asked_round = round_idx
        self._reply = self._loop.create_future()
        if self._watch is None:
            self._watch_silence()
        reply = await self._reply
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _watch_silence(self) -> None:
        """Give the target up if it shows no progress for too long; else look again in time.

        One timer serves many rounds: an answer does not stop it, and later it finds another
        question asked, or none.
        """
        self._watch = None
        since = self.waits_since
        if since is None:
            return
        if self._counts_progress:
            since = max(since, self.worker.last_progress)
        deadline = since + self._step_timeout_s
        if deadline <= self._loop.time():
            self.worker.suspect_all()
            self._settle(TargetGone(Loss.SILENT, is_kill=True))
        else:
            self._watch = self._loop.call_at(deadline, self._watch_silence)

    def _admit(self, message: TargetAdmitted | None) -> None:
        if not self._is_admitted:
            self._is_admitted = True
            self.worker.opening.discard(self._request_id)
            self._on_admitted(
                message
                or TargetAdmitted(request_id=self._request_id, target_epoch=self.target_epoch)
            )

    @property
    def waits_since(self) -> float | None:
        """Return since when a path is waited for, loop time; None: none is."""
        return self._asked_at if self._reply is not None and not self._reply.done() else None

    @property
    def _is_in_engine(self) -> bool:
        """Return whether the engine works on this request, as far as one can know.

        It says that it has admitted a request only after the first step with it.
        """
        has_credit = self._credit_until > self._asked_round
        is_admitted = self._is_admitted or not self.worker.load.num_waiting
        return (self.waits_since is not None or has_credit) and is_admitted

    def _settle(self, reply: AcceptedPath | Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)

    def _fail(self, error: Exception, *, round_idx: int = 0) -> None:
        # The target has dropped the request: a later question about it gets the same answer.
        if isinstance(error, TargetGone | InternalError):
            self._gone = error
            self._on_gone()
        elif self.waits_since is None and round_idx > self._asked_round:
            self._failed = round_idx, error  # it came together with the path before it
        self._settle(error)


def _error_of(failure: RequestFailure) -> Exception:
    """Distinguish what ends this state from what the request itself got wrong."""
    error: CoppiceError = error_of(failure)
    match failure.code:
        case StatusCode.NOT_FOUND | StatusCode.FAILED_PRECONDITION:
            return TargetGone(Loss.FORGOTTEN, detail=error.message)
        case StatusCode.UNAVAILABLE:
            return TargetGone(Loss.MOVED, detail=error.message)
        case StatusCode.INVALID_ARGUMENT | StatusCode.RESOURCE_EXHAUSTED:
            return error
        case StatusCode.INTERNAL if error.reason == NonFiniteError.default_reason:
            return error
        case _:
            return TargetGone(Loss.FAILED, is_kill=True, detail=error.message)

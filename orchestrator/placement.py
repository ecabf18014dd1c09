"""One request's state on targets: it is built on one target after the other, as each is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from orchestrator.losses import Loss, Losses, TargetGone
from orchestrator.pool import WorkerPool
from orchestrator.target_handle import TargetHandle
from orchestrator.terms import Terms
from orchestrator.workers import WorkerSession
from shared.errors import ResourceExhaustedError
from shared.messages import (
    AcceptedPath,
    DraftRest,
    FinishReason,
    TargetAdmitted,
    TokenTree,
    VerifyRound,
)

OnAdmitted = Callable[[WorkerSession, TargetAdmitted], None]
"""Called once per epoch, with the target, when it holds pages for the request."""


class Placement:
    """Chooses targets, opens the request there, and accounts for those that are lost.

    Args:
        terms: What the request asks of a target.
        step_timeout_s: As of TargetHandle.
        on_detached, on_rest: As of TargetHandle.
        on_gone: As of TargetHandle.
    """

    def __init__(
        self,
        terms: Terms,
        pool: WorkerPool,
        *,
        step_timeout_s: float,
        on_admitted: OnAdmitted,
        on_detached: Callable[[int], None],
        on_rest: Callable[[DraftRest], None],
        on_gone: Callable[[], None],
    ) -> None:
        self.terms = terms
        self.target_epoch = 0
        self.losses = Losses(terms.worker_request_id)
        self._pool = pool
        self._step_timeout_s = step_timeout_s
        self._on_admitted = on_admitted
        self._on_detached = on_detached
        self._on_rest = on_rest
        self._on_gone = on_gone
        self._target: TargetHandle | None = None
        self._is_paused = False

    @property
    def is_open(self) -> bool:
        """Return whether there is a target."""
        return self._target is not None

    @property
    def target(self) -> TargetHandle:
        """Return the target that holds the request, which is open."""
        assert self._target is not None
        return self._target

    async def prefill(self, tokens: Sequence[int]) -> AcceptedPath:
        """Pick a target, open the next epoch there and wait for round 0.

        Args:
            tokens: Prompt and output so far; looked at later as well, when there are more.
        Raises: TargetGone, or CoppiceError if the request cannot be served.
        """
        try:
            return await self._prefill(tokens)
        finally:
            self._pool.moves.end(self.terms.worker_request_id)

    async def _prefill(self, tokens: Sequence[int]) -> AcceptedPath:
        await self.losses.wait_judgment()
        worker = await self._pool.acquire_target(
            self.terms.need(tokens, self.losses, is_running=self._is_running(tokens)),
            patience_s=self._step_timeout_s,
        )
        self.terms = self.terms.on_target(worker.info, is_first=self.target_epoch == 0)
        self.target_epoch += 1
        self._target = TargetHandle(
            worker,
            self.terms.worker_request_id,
            self.target_epoch,
            step_timeout_s=self._step_timeout_s,
            on_admitted=lambda admitted: self._on_admitted(worker, admitted),
            on_detached=self._on_detached,
            on_rest=self._on_rest,
            on_gone=self._on_gone,
            may_move=lambda: self._may_move(tokens),
        )
        self.losses.judge()  # more may be known than when it began to wait for a worker
        try:
            now_s = asyncio.get_running_loop().time()
            message = self.terms.target_open(tokens, self.target_epoch, now_s=now_s)
            return await self._target.open(message)
        except ResourceExhaustedError as error:
            if not self._is_running(tokens):
                raise
            raise TargetGone(Loss.NO_ROOM, detail=error.message) from error

    def order(self, round_idx: int, tokens: Sequence[int], tree: TokenTree | None) -> VerifyRound:
        """Return the order of a round after these tokens; without a tree: of the root alone."""
        return VerifyRound(
            request_id=self.terms.worker_request_id,
            target_epoch=self.target_epoch,
            round_idx=round_idx,
            seq_len=len(tokens) - 1,
            root_token_id=tokens[-1],
            tree=tree,
        )

    def note_path(self, path: AcceptedPath, num_tokens: int) -> None:
        """Take note that the target has committed tokens in a round.

        Args:
            num_tokens: Prompt and output, those of the path included.
        Raises: TargetGone if the path does not follow what the request had before.
        """
        is_over = path.finish_reason is not FinishReason.NONE
        if not path.token_ids or (not is_over and path.seq_len != num_tokens - 1):
            raise TargetGone(
                Loss.FAILED,
                is_kill=True,
                detail=f"{len(path.token_ids)} tokens committed, seq_len {path.seq_len}",
            )
        if self.losses.num_rebuilds:  # else there is nothing to forget
            self.losses.note_progress(self.target.worker, path.round_idx)

    def lose(self, gone: TargetGone) -> None:
        """Account for a loss.

        Raises: InternalError or UnavailableError if that is enough, see Losses.
        """
        self.losses.add(gone, self._target.worker if self._target is not None else None)

    def pause(self) -> None:
        """Take note that the client must read first: a request that leaves its target meanwhile
        goes to no other one before, and those that do must not wait for that.
        """
        self._is_paused = True
        self._pool.moves.end(self.terms.worker_request_id)

    def resume(self) -> None:
        """Take note that the client has read."""
        self._is_paused = False

    def close(self) -> None:
        """Free what the target holds."""
        if self._target is not None:
            self._target.close()
            self.losses.leave(self._target.worker)
            self._target = None

    def end(self) -> None:
        """Free what is held for the request, here and on a target: it is over."""
        self.close()
        self._pool.moves.end(self.terms.worker_request_id)
        self._on_admitted = _tell_nobody

    def _may_move(self, tokens: Sequence[int]) -> bool:
        """Return whether to leave the target, which drains, for one that has room."""
        moves = self._pool.moves
        may_move = moves.begin(self.terms.need(tokens, self.losses, is_running=True))
        if may_move and self._is_paused:
            moves.end(self.terms.worker_request_id)
        return may_move

    def _is_running(self, tokens: Sequence[int]) -> bool:
        """Return whether the request has output, or was moved: it goes before new requests."""
        return self.target_epoch > 1 or len(tokens) > len(self.terms.request.prompt_ids)


def _tell_nobody(worker: WorkerSession, admitted: TargetAdmitted) -> None:
    """Stand for the callback of a request that is over: that led back to who holds the placement,
    and a circle would keep all of the request until the next garbage collection.
    """

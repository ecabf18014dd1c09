"""The draft side of one request: who drafts, whether it keeps up, which tree a round may use.

`draft_states.py` holds the states and what leads from one to another; here are the messages, the
timers and the choice of a worker. Nothing here can change the output of a request, or fail it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.draft_orders import DraftOrders
from orchestrator.draft_retry import DraftRetry
from orchestrator.draft_states import TRANSITIONS, WAITING, DraftEvent, DraftState, Effect
from orchestrator.peer_watch import PeerTrust, PeerWatch
from orchestrator.pool import WorkerPool
from orchestrator.request_log import RequestLog
from orchestrator.workers import Garbled, WorkerLost, WorkerSession
from shared.config import OrchestratorConfig
from shared.errors import InvalidTreeError
from shared.messages import (
    DraftClose,
    DraftOpen,
    DraftRound,
    PeerTrees,
    RequestFailure,
    RequestRetracted,
    SamplingParams,
    TokenTree,
    TreeShape,
)

# A draft may be silent for so many draft_open_timeout_ms, then it is replaced; doubles each time.
_SILENCE_FACTOR = 2.0


class DraftHandle:
    """Keeps one request drafted for.

    Args:
        request_id: As the workers know it.
        shape: Tree shape to order; None = speculation is off.
        sampling: Temperature and seed matter to the draft.
        is_timed: Have the draft say where its time goes.
        on_revoke: Called when peer rounds end, while the path of one may be waited for.
    """

    def __init__(
        self,
        *,
        request_id: str,
        shape: TreeShape | None,
        sampling: SamplingParams,
        is_timed: bool = False,
        pool: WorkerPool,
        config: OrchestratorConfig,
        log: RequestLog,
        on_revoke: Callable[[], None],
    ) -> None:
        self.state = DraftState.OFF if shape is None else DraftState.ABSENT
        self.num_reopened = 0
        """Times that the draft's state was rebuilt for another reason than a rebuilt target."""
        self._request_id = request_id
        self._shape = shape
        self._sampling = sampling
        self._is_timed = is_timed
        self._pool = pool
        self._config = config
        self._log = log
        self._on_revoke = on_revoke
        self._worker: WorkerSession | None = None
        self._target: WorkerSession | None = None
        self._target_epoch = 0
        self._draft_epoch = 0
        self._orders = DraftOrders()
        self._trust = PeerTrust()
        self._news: asyncio.Future[None] | None = None
        self._watch = PeerWatch(lambda: self._patience_s, self._peer_round_overdue)
        self._retry = DraftRetry()
        self._loss = ""  # why the draft was lost; logged when the next tree is ordered in vain

    @property
    def is_off(self) -> bool:
        """Return whether no round of the request will ever have a tree."""
        return self.state is DraftState.OFF

    @property
    def is_peer(self) -> bool:
        """Return whether the target has credit to order the next round's tree of the draft."""
        return self.state is DraftState.PEER

    @property
    def peer_trees(self) -> PeerTrees | None:
        """Return the trees that the target may get credit for; None: `order` every tree."""
        if self.state not in (DraftState.ATTACHED, DraftState.PEER):
            return None
        assert self._shape is not None
        return PeerTrees(
            draft_epoch=self._draft_epoch,
            token_offset=self._orders.num_tokens_sent,
            shape=self._shape,
        )

    def open(self, target: WorkerSession, target_epoch: int, tokens: Sequence[int]) -> None:
        """Start drafting for a request that a target has (re)built; features come from there."""
        if self.is_off:
            return
        self._fire(DraftEvent.CLOSED)
        self._target, self._target_epoch = target, target_epoch
        self._open(tokens)

    async def tree(self, round_idx: int) -> TokenTree | None:
        """Return the tree of a round, None for the root alone; waits in some states only."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        while True:
            tree = self._take(round_idx)
            if tree is not None:
                return tree
            if self.state not in WAITING or not self._orders.is_due(round_idx):
                return None
            if loop.time() >= deadline:
                self._overdue()
                return None
            self._news = loop.create_future()
            timer = loop.call_at(deadline, self._wake)
            try:
                await self._news
            finally:
                timer.cancel()

    def order(self, *, round_idx: int, seq_len: int, tokens: Sequence[int]) -> None:
        """Send the draft what was committed and order the tree of the next round.

        Args:
            seq_len: The root is the token at this index, the last one.
            tokens: Prompt and output so far.
        """
        if self._shape is None or self._target is None:
            return
        now = asyncio.get_running_loop().time()
        if self._orders.silent_s(now) > self._max_silence_s:
            self._lose("it is silent", DraftEvent.SILENT)
        self._log_loss()
        if self.state is DraftState.ABSENT and self._retry.is_due(now):
            is_rebuild = self._draft_epoch > 0
            self._open(tokens)
            self.num_reopened += is_rebuild and self._worker is not None
        shape = self._shape.within(self._target.info.max_context_len - seq_len)
        if self._worker is None or shape is None:
            return
        offset = min(self._orders.num_tokens_sent, seq_len)
        order = DraftRound(
            request_id=self._request_id,
            target_epoch=self._target_epoch,
            draft_epoch=self._draft_epoch,
            round_idx=round_idx,
            seq_len=seq_len,
            token_offset=offset,
            token_ids=tuple(tokens[offset:]),
            shape=shape,
        )
        self._orders.add(order, now)
        self._worker.send(order)
        self._fire(DraftEvent.ORDERED)

    def note_credit(self) -> None:
        """Take note that the target has credit for `peer_trees`: peer rounds begin."""
        if self.state is DraftState.ATTACHED:
            self._fire(DraftEvent.CREDITED)
            self._watch.start()

    def note_peer_round(self, *, had_tree: bool) -> None:
        """Take note that a round is done that began as a peer round.

        Args:
            had_tree: Then the draft did its part: if the round was given up, the target was late.
        """
        if self.state is DraftState.PEER:
            self._trust.note_round()
        elif self.state is DraftState.MISSED and had_tree:
            self._trust.excuse()
            self._fire(DraftEvent.EXCUSED)
        else:
            return
        # No more than twice what is waited for: a target that paused once is no slow one.
        self._orders.note_round(min(self._watch.next_round(), 2 * self._patience_s))

    def pause(self) -> None:
        """Watch no peer rounds until `resume`: the target has no credit, the client must read."""
        self._watch.stop()

    def resume(self) -> None:
        """Watch peer rounds again, if they go on."""
        if self.state is DraftState.PEER:
            self._watch.start()

    def lose_channel(self, draft_epoch: int) -> None:
        """End peer rounds: the target's channel to that draft is lost, and stays so."""
        if draft_epoch != self._draft_epoch:
            return
        self._trust.detach()
        if self.state is DraftState.PEER:
            self._log.info("the draft is detached from the target, the round goes on without it")
        self._fire(DraftEvent.DETACHED)

    def refuse(self, reason: str) -> None:
        """Replace a draft whose tree was wrong."""
        self._lose(f"its tree is wrong: {reason}")

    def close(self) -> None:
        """Free whatever the draft holds."""
        self._fire(DraftEvent.CLOSED)

    def receive(self, message: Any) -> None:
        """Take a tree, or bad news."""
        match message:
            case WorkerLost():
                self._worker = None  # there is nobody to close it on
                self._lose("its worker is gone")
            case TokenTree() if message.draft_epoch == self._draft_epoch:
                self._receive_tree(message)
            case RequestRetracted() if message.draft_epoch == self._draft_epoch:
                self._lose("its worker needed the room")
            case RequestFailure() if message.draft_epoch == self._draft_epoch:
                self._lose(message.message)
            case Garbled() if message.failure.draft_epoch == self._draft_epoch:
                self._lose(message.failure.message)

    def _fire(self, event: DraftEvent) -> bool:
        """Follow the table; return whether the state has changed."""
        before = self.state
        self.state, effect = TRANSITIONS[before, event]
        if Effect.CLOSE in effect:
            self._close()
        if Effect.REVOKE in effect:
            self._watch.stop()
            self._on_revoke()
        return self.state is not before

    def _receive_tree(self, tree: TokenTree) -> None:
        self._orders.receive(tree, asyncio.get_running_loop().time())
        self._retry.note_tree()
        is_attached = tree.has_peer and self._trust.allows_peer_rounds
        self._fire(DraftEvent.ATTACHED_TREE if is_attached else DraftEvent.TREE)
        self._wake()

    def _take(self, round_idx: int) -> TokenTree | None:
        """Return the tree of a round if it is here; replace the draft if it is a wrong one."""
        assert self._target is not None
        try:
            return self._orders.take(round_idx, vocab_size=self._target.info.vocab_size)
        except InvalidTreeError as error:
            self.refuse(error.message)
            return None

    def _wake(self) -> None:
        """Let a round that waits look again."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _peer_round_overdue(self) -> None:
        self._trust.miss()
        self._overdue()

    def _overdue(self) -> None:
        self._log.info("the draft is late, the round goes on without it")
        self._fire(DraftEvent.OVERDUE)

    @property
    def _patience_s(self) -> float:
        """Return how long a round waits for its tree, seconds."""
        floor_s = self._config.draft_timeout_ms / 1e3
        if self.state is DraftState.OPENING:
            return max(self._config.draft_open_timeout_ms / 1e3, floor_s)
        return max(3 * self._orders.mean_round_s, floor_s)

    @property
    def _max_silence_s(self) -> float:
        """Return how long a draft may leave its orders without an answer, seconds."""
        allowed_s = self._config.draft_open_timeout_ms / 1e3 * _SILENCE_FACTOR
        return allowed_s * self._retry.silence_factor

    def _open(self, tokens: Sequence[int]) -> None:
        """Open on the best draft worker; without one, try again after a while."""
        assert self._target is not None
        worker = self._pool.pick_draft(self._target, self._retry.avoid)
        if worker is None:
            self._retry.note_no_worker(asyncio.get_running_loop().time())
            return
        self._worker = worker
        self._draft_epoch += 1
        self._trust = PeerTrust()
        self._orders.restart(len(tokens))
        self._fire(DraftEvent.OPENED if self._draft_epoch == 1 else DraftEvent.REOPENED)
        worker.attach(self._request_id, self)
        worker.send(
            DraftOpen(
                request_id=self._request_id,
                target_epoch=self._target_epoch,
                draft_epoch=self._draft_epoch,
                target_address=self._target.address,
                target_socket=self._target.info.peer_socket,
                token_ids=tuple(tokens),
                sampling=self._sampling,
                is_timed=self._is_timed,
            )
        )

    def _close(self) -> None:
        """Free what the draft holds, wherever that is."""
        if self._worker is not None:
            self._worker.send(
                DraftClose(request_id=self._request_id, draft_epoch=self._draft_epoch)
            )
            self._worker.detach(self._request_id, self)
            self._worker = None
        self._orders.clear()
        self._wake()

    def _lose(self, reason: str, event: DraftEvent = DraftEvent.LOST) -> None:
        """Give the draft up; one is opened again after a while, elsewhere if that can be."""
        address = self._worker.address if self._worker is not None else None
        if self._fire(event):
            self._loss = reason
            self._retry.note_loss(address, asyncio.get_running_loop().time())

    def _log_loss(self) -> None:
        """Log why the draft was lost; not before a tree is missing: the request may be over."""
        if self._loss:
            self._log.warning("the draft is lost: %s", self._loss)
            self._loss = ""

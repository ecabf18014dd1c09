"""The draft side of one request: who drafts, whether it keeps up, which tree a round may use.

`draft_states.py` holds the states and what leads from one to another, `draft_epochs.py` what is
sent, `draft_retry.py` when and where it is opened again; here are the answers and the timers.
Nothing here can change the output of a request, or fail it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.draft_epochs import DraftEpochs, OutputGrammar
from orchestrator.draft_orders import DraftOrders
from orchestrator.draft_retry import DraftRetry
from orchestrator.draft_states import (
    CREDITED,
    ROOT_ONLY_REASONS,
    TRANSITIONS,
    DraftEvent,
    DraftState,
    Effect,
)
from orchestrator.peer_watch import PeerTrust, PeerWatch
from orchestrator.pool import WorkerPool
from orchestrator.request_log import RequestLog
from orchestrator.workers import Garbled, WorkerDrains, WorkerLost, WorkerSession
from shared.config import OrchestratorConfig
from shared.errors import InvalidTreeError, StatusCode
from shared.messages import (
    DraftRest,
    PeerTrees,
    RequestFailure,
    RequestRetracted,
    RootOnly,
    SamplingParams,
    TokenTree,
    TreeShape,
)

_ROOT_ONLY = RootOnly()


class DraftHandle:
    """Keeps one request drafted for.

    Args:
        request_id: As the workers know it.
        shape: Tree shape to order; None = speculation is off.
        adapts: The target may choose smaller trees, or none.
        sampling: Temperature and seed matter to the draft.
        grammar: Of the output; None: it is free.
        is_timed: Have the draft say where its time goes.
        on_revoke: Called when rounds by credit end, while the path of one may be waited for.
    """

    def __init__(
        self,
        *,
        request_id: str,
        shape: TreeShape | None,
        adapts: bool = False,
        sampling: SamplingParams,
        grammar: OutputGrammar | None = None,
        is_timed: bool = False,
        pool: WorkerPool,
        config: OrchestratorConfig,
        log: RequestLog,
        on_revoke: Callable[[], None],
    ) -> None:
        self.state = DraftState.OFF if shape is None else DraftState.ABSENT
        self.num_reopened = 0
        """Times that the draft's state was rebuilt for another reason than a rebuilt target."""
        self.num_overdue = 0
        """Times that a round waited for it in vain."""
        self.is_resting = False
        """Whether the target wants no trees for now: that says nothing of the draft."""
        self._shape = shape
        self._adapts = adapts
        self._pool = pool
        self._log = log
        self._on_revoke = on_revoke
        self._epochs = DraftEpochs(
            request_id=request_id, sampling=sampling, grammar=grammar, is_timed=is_timed
        )
        self._orders = DraftOrders(least_patience_s=config.draft_timeout_ms / 1e3)
        self._trust = PeerTrust()
        self._trees: PeerTrees | RootOnly = _ROOT_ONLY
        self._was_silent = False
        self._watch = PeerWatch()
        self._retry = DraftRetry(pool, max_silence_s=config.draft_open_timeout_ms / 1e3)

    @property
    def is_relayed(self) -> bool:
        """Return whether each round is ordered, with its tree; else the target has credit."""
        return self.state is DraftState.RELAYED

    @property
    def is_peer(self) -> bool:
        """Return whether the target orders the trees, so that the draft needs to hear nothing."""
        return self.state is DraftState.PEER

    @property
    def root_only_reason(self) -> str:
        """Return why a round that is done in this state has no tree, if it has none."""
        return ROOT_ONLY_REASONS[self.state]

    @property
    def waits_since(self) -> float | None:
        """Return since when the draft owes a tree, loop time; None: it owes none.

        One that only an attached target asks for trees owes none while that waits for the client.
        """
        is_asked = self.is_relayed or (
            self.state is DraftState.BEHIND
            and (self._watch.is_running or not self._trust.allows_peer_rounds)
        )
        return self._orders.owes_since if is_asked else None

    @property
    def trees(self) -> PeerTrees | RootOnly:
        """Return the trees that rounds by credit may have.

        Those of a draft that is behind, too: if it is attached to the target's engine, that will
        know before the orchestrator when it has caught up.
        """
        has_credit = self.state in CREDITED and self._trust.allows_peer_rounds
        return self._trees if has_credit else _ROOT_ONLY

    def open(self, target: WorkerSession, target_epoch: int, tokens: Sequence[int]) -> None:
        """Start drafting for a request that a target has (re)built; features come from there."""
        if self._shape is None:
            return
        self._fire(DraftEvent.CLOSED)
        self._epochs.set_target(target, target_epoch)
        self._open(tokens)

    async def tree(self, round_idx: int) -> TokenTree | None:
        """Return the tree of a round, None for the root alone; waits in relayed rounds only."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._orders.patience_s
        while True:
            tree = self._take(round_idx)
            if tree is not None:
                return tree
            if not self.is_relayed or not self._orders.is_due(round_idx):
                return None
            if loop.time() >= deadline:
                self._overdue()
                return None
            await self._orders.wait_until(deadline)

    def order(self, *, round_idx: int, seq_len: int, tokens: Sequence[int]) -> bool:
        """Send the draft what was committed and order the tree of the next round.

        A draft that is attached to the target's engine ignores that, unless it has lost trust.

        Args:
            seq_len: The root is the token at this index, the last one.
            tokens: Prompt and output so far.
        Returns: Whether there is a draft.
        """
        if self._shape is None or self._epochs.target is None:
            return False
        now = asyncio.get_running_loop().time()
        if self._orders.silent_s(now) > self._retry.max_silence_s:
            self._was_silent = True  # its trees may be lost on the way to the target: relay them
            self._lose("it is silent", DraftEvent.SILENT)
        if loss := self._retry.take_loss():  # not logged before: the request might have been over
            self._log.warning("the draft is lost: %s", loss)
        if self.state is DraftState.ABSENT and self._retry.is_due(now):
            is_rebuild = self._epochs.draft_epoch > 0
            self._open(tokens)
            self.num_reopened += is_rebuild and self._epochs.worker is not None
        order = self._epochs.order(
            round_idx=round_idx,
            seq_len=seq_len,
            token_offset=min(self._orders.num_tokens_held, seq_len),
            tokens=tokens,
            shape=self._shape,
            unless_attached=self._trust.allows_peer_rounds,
        )
        if order is None:
            return False
        self._orders.add(order, now)
        self._fire(DraftEvent.ORDERED)
        return True

    def note_credit(self) -> None:
        """Take note that the target has credit for `trees`, and may wait for one from now on."""
        if isinstance(self.trees, PeerTrees):
            self._watch.start(lambda: self._orders.patience_s, self._peer_round_overdue)

    def note_path(self, *, had_tree: bool) -> None:
        """Take note that a round is done that began by credit.

        Args:
            had_tree: Then the draft did its part: if the round was given up, the target was late.
        """
        had_tree = had_tree or self.is_resting
        if self.state is DraftState.PEER and had_tree:
            self._trust.note_round()
        elif self._watch.is_running or self.state is DraftState.MISSED:
            self._note_change(had_tree=had_tree)
        else:
            return
        self._orders.note_peer_round(self._watch.next_round())

    def pause(self) -> None:
        """Watch no peer rounds until `note_credit`: the target has none, the client must read."""
        self._watch.stop()

    def _note_change(self, *, had_tree: bool) -> None:
        """Take note that rounds by credit begin, or cease, to have trees."""
        if had_tree:
            if self.state is DraftState.MISSED:
                self._trust.excuse()
            self._orders.note_answer()
            self._retry.note_tree()
        self._fire(DraftEvent.PEER_TREE if had_tree else DraftEvent.NO_TREE)

    def lose_channel(self, draft_epoch: int) -> None:
        """Take note that the target's channel to that draft is lost, and stays so.

        The target goes on with the root alone until the draft's trees come here.
        """
        if draft_epoch != self._epochs.draft_epoch:
            return
        self._trust.detach()
        if self.state is DraftState.PEER:
            self._log.info("the draft is detached from the target, rounds go on without it")
        self._fire(DraftEvent.DETACHED)

    def note_rest(self, message: DraftRest) -> None:
        """Take note that the target wants no trees for a while, or wants them again."""
        if message.draft_epoch == self._epochs.draft_epoch:
            self.is_resting = message.is_resting

    def refuse(self, reason: str) -> None:
        """Replace a draft whose tree was wrong."""
        self._lose(f"its tree is wrong: {reason}")

    def close(self) -> None:
        """Free whatever the draft holds."""
        self._fire(DraftEvent.CLOSED)

    def end(self) -> None:
        """Close for good: the request is over, and nobody is told of anything any more."""
        self.close()
        self._on_revoke = _tell_nobody

    def receive(self, message: Any) -> None:
        """Take a tree, or bad news."""
        epoch = self._epochs.draft_epoch
        match message:
            case WorkerLost():
                self._epochs.worker = None  # there is nobody to close it on
                self._lose("its worker is gone")
            case WorkerDrains():
                self._leave()
            case TokenTree() if message.draft_epoch == epoch:
                self._receive_tree(message)
            case RequestRetracted() if message.draft_epoch == epoch:
                self._lose("its worker needed the room")
            case RequestFailure() if message.draft_epoch == epoch:
                # That the target does not hold the request is news for the target to tell.
                is_news = message.code != int(StatusCode.NOT_FOUND)
                self._lose(message.message if is_news else "")
            case Garbled() if message.failure.draft_epoch == epoch:
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
        elif not isinstance(self.trees, PeerTrees):
            self._watch.stop()
        return self.state is not before

    def _receive_tree(self, tree: TokenTree) -> None:
        self._orders.receive(tree, asyncio.get_running_loop().time())
        self._retry.note_tree()
        self._fire(DraftEvent.TREE)

    def _take(self, round_idx: int) -> TokenTree | None:
        """Return the tree of a round if it is here; replace the draft if it is a wrong one."""
        assert self._epochs.target is not None
        try:
            return self._orders.take(round_idx, vocab_size=self._epochs.target.info.vocab_size)
        except InvalidTreeError as error:
            self.refuse(error.message)
            return None

    def _peer_round_overdue(self) -> None:
        if self.state is DraftState.PEER:  # else it may be the target that is late
            self._trust.miss()
        self._overdue()

    def _overdue(self) -> None:
        self.num_overdue += 1
        self._log.info("the draft is late, the round goes on without it")
        self._fire(DraftEvent.OVERDUE)

    def _open(self, tokens: Sequence[int]) -> None:
        """Open on the best draft worker; without one, try again after a while."""
        epochs = self._epochs
        assert epochs.target is not None and self._shape is not None
        worker = self._retry.pick(epochs.target, asyncio.get_running_loop().time())
        if worker is None:
            return
        self._trust = PeerTrust(is_detached=self._was_silent)
        self._orders.restart(len(tokens))
        self.is_resting = False
        self._fire(DraftEvent.OPENED)
        epochs.open(worker, tokens, self)  # the worker may turn out to be gone
        self._trees = PeerTrees(
            draft_epoch=epochs.draft_epoch, shape=self._shape, adapts=self._adapts
        )

    def _close(self) -> None:
        """Free what the draft holds, and let no round wait for it."""
        self._epochs.close(self)
        self._orders.clear()

    def _lose(self, reason: str, event: DraftEvent = DraftEvent.LOST) -> None:
        """Give the draft up; one is opened again after a while, elsewhere if that can be."""
        worker = self._epochs.worker
        if self._fire(event):
            self._retry.note_loss(worker, asyncio.get_running_loop().time(), reason)

    def _leave(self) -> None:
        """Have the draft opened on another worker with the next round, if there is one."""
        target = self._epochs.target
        if target is not None and self._pool.pick_draft(target) is not None:
            self._log.info("the draft's worker is draining, another one takes over")
            self._fire(DraftEvent.LOST)


def _tell_nobody() -> None:
    """Stand for the callback of a request that is over.

    The callback leads back to who holds this handle: a circle would keep all of the request, its
    tokens too, until the next garbage collection, which is rare.
    """

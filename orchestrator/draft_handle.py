"""The draft side of one request: who drafts, whether it keeps up, which tree a round may use.

    OFF       speculation is off
    ABSENT    no draft worker; another attempt at `_retry_at`
    OPENING   DraftOpen was sent, no tree has come yet
    LIVE      a round waits for its tree
    DIRECT    target and draft run rounds between themselves, over a channel
    LATE      a tree was late, or the channel of direct rounds was lost: rounds do not wait, the
              draft still hears of every token

Any tree, even a stale one, makes a draft LIVE unless it is DIRECT. Loss, failure, retraction, a
wrong tree or silence make it ABSENT. Nothing here can change the output of a request, or fail it.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tenacity import RetryCallState, wait_exponential_jitter

from orchestrator.pool import WorkerPool
from orchestrator.request_log import RequestLog
from orchestrator.workers import Garbled, Worker, WorkerLost
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
from shared.times import seen_from
from shared.tree import check_tree

_NO_WORKER_WAIT_S = 0.5
_REOPEN_WAIT = wait_exponential_jitter(multiplier=0.05, max=5.0, jitter=0.05)
# A draft may be silent for so many draft_open_timeout_ms, then it is replaced; doubles each time.
_SILENCE_FACTOR = 2.0
_EWMA_WEIGHT = 0.2
_MAX_MISSES = 3
_FORGIVEN_AFTER = 64
"""Direct rounds."""


class DraftState(enum.Enum):
    """See the module."""

    OFF = enum.auto()
    ABSENT = enum.auto()
    OPENING = enum.auto()
    LIVE = enum.auto()
    DIRECT = enum.auto()
    LATE = enum.auto()


class DraftHandle:
    """Keeps one request drafted for.

    Args:
        request_id: As the workers know it.
        shape: Tree shape to order; None = speculation is off.
        sampling: Temperature and seed matter to the draft.
        is_timed: Have it say where its time goes.
        on_miss: Called when rounds that ran directly do so no more, and one may be awaited.
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
        on_miss: Callable[[], None],
    ) -> None:
        self.state = DraftState.OFF if shape is None else DraftState.ABSENT
        self.num_reopened = 0
        """Times that the draft state was rebuilt for another reason than a rebuilt target."""
        self._request_id = request_id
        self._shape = shape
        self._sampling = sampling
        self._is_timed = is_timed
        self._pool = pool
        self._config = config
        self._log = log
        self._on_miss = on_miss
        self._worker: Worker | None = None
        self._target: Worker | None = None
        self._target_epoch = 0
        self._draft_epoch = 0
        self._num_tokens_sent = 0
        self._ordered: dict[int, DraftRound] = {}
        self._ordered_at: dict[int, float] = {}
        self._trees: dict[int, TokenTree] = {}
        self._news: asyncio.Future[None] | None = None
        self._mean_round_s = 0.0  # from the order to the tree; of direct rounds, all of it
        self._has_peer = False
        self._detached_epoch = 0  # last draft_epoch whose channel to the target was lost
        self._num_misses = 0
        self._num_peer_rounds = 0
        self._peer_at = 0.0  # when the direct round that is awaited began
        self._watch: asyncio.TimerHandle | None = None
        self._num_failures = 0
        self._retry_at = 0.0
        self._heard_at = 0.0
        self._avoid: frozenset[str] = frozenset()
        self._loss = ""  # why the draft is lost; logged when a tree is ordered in vain

    @property
    def is_off(self) -> bool:
        """Return whether no round of the request will ever have a tree."""
        return self.state is DraftState.OFF

    @property
    def is_peer(self) -> bool:
        """Return whether the target has leave to order the next round's tree itself."""
        return self.state is DraftState.DIRECT

    def open(self, target: Worker, target_epoch: int, tokens: Sequence[int]) -> None:
        """Start drafting for a request that a target has (re)built; features come from there."""
        if self.state is DraftState.OFF:
            return
        self._leave()
        self._target, self._target_epoch = target, target_epoch
        self._open(tokens)

    async def tree(self, round_idx: int) -> TokenTree | None:
        """Return the tree of a round, None for the root alone; waits only for a live draft."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s()
        while True:
            tree = self._trees.pop(round_idx, None)
            if tree is not None:
                return self._checked(tree)
            if not self._is_awaited(round_idx):
                return None
            if loop.time() >= deadline:
                self._log.info("the draft is late, the round goes on without it")
                self.state = DraftState.LATE
                return None
            self._news = loop.create_future()
            timer = loop.call_at(deadline, self._wake)
            try:
                await self._news
            finally:
                timer.cancel()

    def order(self, *, round_idx: int, seq_len: int, tokens: Sequence[int]) -> None:
        """Tell the draft what was committed and order the tree of the next round.

        Args:
            seq_len: The root is the token at this index, the last one.
        """
        if self._shape is None or self._target is None:
            return
        now = asyncio.get_running_loop().time()
        self._replace_if_silent(now)
        if self._loss:
            self._log.warning("the draft is lost: %s", self._loss)
            self._loss = ""
        if self.state is DraftState.ABSENT and now >= self._retry_at:
            is_rebuild = self._draft_epoch > 0
            self._open(tokens)
            self.num_reopened += is_rebuild and self._worker is not None
        shape = self._shape.within(self._target.info.max_context_len - seq_len)
        if self._worker is None or shape is None:
            return
        offset = min(self._num_tokens_sent, seq_len)
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
        self._num_tokens_sent = len(tokens)
        self._forget_rounds_before(round_idx)
        self._ordered[round_idx] = order
        self._ordered_at[round_idx] = now
        self._heard_at = min(self._heard_at, now)
        self._worker.send(order)

    def granted(self) -> PeerTrees | None:
        """Return what the target may order by itself from now on; None: `order` every tree.

        Rounds run directly from the first tree of a draft on that is attached to the target, until
        the target says that the channel is lost; whoever is let down by a draft that says it is
        attached, again and again, stops believing it.
        """
        trees = self.grantable()
        if trees is not None and self.state is not DraftState.DIRECT:
            self.state = DraftState.DIRECT
            self._peer_at = asyncio.get_running_loop().time()
            self._watch_peer()
        return trees

    def grantable(self) -> PeerTrees | None:
        """Return what `granted` would, and change nothing: rounds are not direct yet."""
        is_trusted = self._has_peer and self._num_misses < _MAX_MISSES
        is_peer = self.state is DraftState.DIRECT
        if not is_peer and not (self.state is DraftState.LIVE and is_trusted):
            return None
        assert self._shape is not None
        return PeerTrees(
            draft_epoch=self._draft_epoch, token_offset=self._num_tokens_sent, shape=self._shape
        )

    def note_peer_round(self, *, had_tree: bool) -> None:
        """Take note that a round is done that began as a direct one.

        Args:
            had_tree: Then the draft did its part: if the round was let down, the target was late.
        """
        now = asyncio.get_running_loop().time()
        was_missed = self.state is DraftState.LATE and had_tree and self._has_peer
        if was_missed:
            self._num_misses -= 1
            self._heard_at = now
            self.state = DraftState.LIVE
        elif self.state is DraftState.DIRECT:
            self._num_peer_rounds += 1
            if self._num_peer_rounds % _FORGIVEN_AFTER == 0:
                self._num_misses = 0
        if was_missed or self.state is DraftState.DIRECT:
            # No more than twice what is waited for: a target that paused once is no slow one.
            took = min(now - self._peer_at, 2 * self._patience_s())
            self._mean_round_s += _EWMA_WEIGHT * (took - self._mean_round_s)
            self._peer_at = now

    def lose_channel(self, draft_epoch: int) -> None:
        """End direct rounds: the target's channel to that draft is lost, and stays so."""
        if draft_epoch != self._draft_epoch:
            return
        self._detached_epoch, self._has_peer = draft_epoch, False
        if self.state is DraftState.DIRECT:
            self._miss("the draft is not attached to the target any more")

    def refuse(self, reason: str) -> None:
        """Replace a draft whose tree was wrong."""
        self._fail(f"its tree is wrong: {reason}")

    def close(self) -> None:
        """Free whatever the draft holds."""
        self._leave()

    def receive(self, message: Any) -> None:
        """Take a tree, or bad news."""
        match message:
            case WorkerLost():
                self._worker = None  # there is nobody to close it on
                self._fail("its worker is gone")
            case TokenTree() if message.draft_epoch == self._draft_epoch:
                self._take(message)
            case RequestRetracted() if message.draft_epoch == self._draft_epoch:
                self._fail("its worker needed the room")
            case RequestFailure() if message.draft_epoch == self._draft_epoch:
                self._fail(message.message)
            case Garbled() if message.failure.draft_epoch == self._draft_epoch:
                self._fail(message.failure.message)

    def _take(self, tree: TokenTree) -> None:
        now = asyncio.get_running_loop().time()
        ordered_at = self._ordered_at.pop(tree.round_idx, None)
        if ordered_at is not None:
            took = now - ordered_at
            self._mean_round_s += _EWMA_WEIGHT * (took - self._mean_round_s)
            if tree.times is not None:
                times = seen_from(
                    tree.times,
                    kind="draft",
                    sent_ns=int(ordered_at * 1e9),
                    arrived_ns=int(now * 1e9),
                )
                tree = replace(tree, times=times)
        self._heard_at = now
        self._num_failures = 0
        self._has_peer = tree.has_peer and self._draft_epoch != self._detached_epoch
        if self.state is not DraftState.DIRECT:
            self.state = DraftState.LIVE
        if tree.round_idx in self._ordered:
            self._trees[tree.round_idx] = tree
        self._wake()

    def _wake(self) -> None:
        """Let a round that waits look again."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _watch_peer(self) -> None:
        """Notice when direct rounds cease. One timer serves many rounds."""
        self._watch = None
        if self.state is not DraftState.DIRECT:
            return
        loop = asyncio.get_running_loop()
        deadline = self._peer_at + self._patience_s()
        if deadline > loop.time():
            self._watch = loop.call_at(deadline, self._watch_peer)
            return
        self._miss("the draft is late")

    def _miss(self, why: str) -> None:
        """Give up direct rounds until the draft has caught up; the awaited one is without it."""
        self._log.info("%s, the round goes on without it", why)
        if self._watch is not None:
            self._watch.cancel()
        self._num_misses += 1
        self.state = DraftState.LATE
        self._heard_at = math.inf  # its silence counts from the first order that leaves here
        self._on_miss()

    def _patience_s(self) -> float:
        floor_s = self._config.draft_timeout_ms / 1e3
        match self.state:
            case DraftState.LIVE | DraftState.DIRECT:
                return max(3 * self._mean_round_s, floor_s)
            case DraftState.OPENING if self._draft_epoch == 1:
                return max(self._config.draft_open_timeout_ms / 1e3, floor_s)
            case _:
                return 0.0

    def _is_awaited(self, round_idx: int) -> bool:
        """Return whether this round may wait: the draft owes its tree and has kept up so far."""
        if round_idx not in self._ordered:
            return False
        if self.state is DraftState.OPENING:
            return self._draft_epoch == 1
        return self.state is DraftState.LIVE

    def _checked(self, tree: TokenTree) -> TokenTree | None:
        """Return the tree if a target can verify it, else replace the draft."""
        order = self._ordered[tree.round_idx]
        assert self._target is not None
        try:
            check_tree(
                tree.token_ids,
                tree.parent_index,
                root_token_id=order.token_ids[-1],
                vocab_size=self._target.info.vocab_size,
                max_num_nodes=order.shape.num_draft_tokens,
            )
        except InvalidTreeError as error:
            self.refuse(error.message)
            return None
        if (tree.seq_len, tree.target_epoch) != (order.seq_len, order.target_epoch):
            self.refuse(f"seq_len is {tree.seq_len}, expected {order.seq_len}")
            return None
        if any(map(math.isnan, tree.cumulative_logprobs)):
            self.refuse("a score is not a number")
            return None
        return tree

    def _open(self, tokens: Sequence[int]) -> None:
        """Open on the best draft worker; without one, try again after a while."""
        assert self._target is not None
        worker = self._pool.pick_draft(self._target, self._avoid)
        if worker is None:
            self._retry_at = asyncio.get_running_loop().time() + _NO_WORKER_WAIT_S
            return
        self._worker = worker
        self._num_misses = 0
        self._draft_epoch += 1
        self._num_tokens_sent = len(tokens)
        self._heard_at = asyncio.get_running_loop().time()
        self.state = DraftState.OPENING
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

    def _leave(self) -> None:
        """Close the draft state, wherever it is."""
        if self._worker is not None:
            self._worker.send(
                DraftClose(request_id=self._request_id, draft_epoch=self._draft_epoch)
            )
            self._worker.detach(self._request_id, self)
            self._worker = None
        was_peer = self.state is DraftState.DIRECT
        if self.state is not DraftState.OFF:
            self.state = DraftState.ABSENT
        if self._watch is not None:
            self._watch.cancel()
        self._ordered.clear()
        self._ordered_at.clear()
        self._trees.clear()
        self._wake()
        if was_peer:
            self._on_miss()

    def _fail(self, reason: str) -> None:
        # News only if the request goes on: one that ends may be gone before its draft asks for it.
        self._loss = reason
        if self._worker is not None:
            self._avoid = frozenset({self._worker.address})
        self._leave()
        self._num_failures += 1
        attempt = RetryCallState(None, None, (), {})  # type: ignore[arg-type]
        attempt.attempt_number = self._num_failures
        self._retry_at = asyncio.get_running_loop().time() + _REOPEN_WAIT(attempt)

    def _replace_if_silent(self, now: float) -> None:
        if self.state in (DraftState.OPENING, DraftState.LATE):
            allowed_s = self._config.draft_open_timeout_ms / 1e3 * _SILENCE_FACTOR
            if now - self._heard_at > allowed_s * 2 ** min(self._num_failures, 8):
                self._fail("it is silent")

    def _forget_rounds_before(self, round_idx: int) -> None:
        for old in [idx for idx in self._ordered if idx < round_idx]:
            del self._ordered[old]
        for old in [idx for idx in self._trees if idx < round_idx]:
            del self._trees[old]
        if len(self._ordered_at) > 64:
            del self._ordered_at[min(self._ordered_at)]

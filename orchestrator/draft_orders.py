"""What one request ordered of its draft: tokens sent, the tree that is due, the time it takes."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from shared.errors import InvalidTreeError
from shared.messages import DraftRound, TokenTree
from shared.times import seen_from
from shared.tree import check_tree

_EWMA_WEIGHT = 0.2
_MAX_TIMED_ORDERS = 64


class DraftOrders:
    """Orders and trees of one request; an order is for the newest round and replaces the last.

    Args:
        least_patience_s: A round waits so long for its tree, or longer.
    """

    def __init__(self, *, least_patience_s: float) -> None:
        self.num_tokens_held = 0
        """Tokens of the request that the draft has for certain: an order may be ignored."""
        self._due: DraftRound | None = None
        self._tree: TokenTree | None = None
        self._sent_at: dict[int, float] = {}
        self.owes_since: float | None = None
        """Since when orders have been without any answer, loop time; None: none is owed."""
        self._least_patience_s = least_patience_s
        self._mean_round_s = 0.0  # from order to tree; of peer rounds, from path to path
        self._news = _News()

    @property
    def patience_s(self) -> float:
        """Return how long a round waits for its tree, seconds."""
        return max(3 * self._mean_round_s, self._least_patience_s)

    def restart(self, num_tokens: int) -> None:
        """Begin a draft_epoch, whose DraftOpen holds so many tokens."""
        self.clear()
        self.num_tokens_held = num_tokens

    def clear(self) -> None:
        """Forget what is due: no answer to it will count, and nobody waits for one."""
        self._due = self._tree = self.owes_since = None
        self._sent_at.clear()
        self._news.tell()

    def add(self, order: DraftRound, now: float) -> None:
        """Take note of an order that leaves now (loop time, seconds)."""
        self._due, self._tree = order, None
        self._sent_at[order.round_idx] = now
        if len(self._sent_at) > _MAX_TIMED_ORDERS:
            del self._sent_at[min(self._sent_at)]
        if self.owes_since is None:
            self.owes_since = now

    def is_due(self, round_idx: int) -> bool:
        """Return whether the tree of this round was ordered."""
        return self._due is not None and self._due.round_idx == round_idx

    def receive(self, tree: TokenTree, now: float) -> None:
        """Take a tree: measure the time that it took, and keep it if it is due."""
        self.note_answer()
        self.num_tokens_held = max(self.num_tokens_held, tree.seq_len + 1)
        sent_at = self._sent_at.pop(tree.round_idx, None)
        if sent_at is not None:
            self._note_round(now - sent_at)
            if tree.times is not None:
                sent_ns, arrived_ns = int(sent_at * 1e9), int(now * 1e9)
                times = seen_from(tree.times, kind="draft", sent_ns=sent_ns, arrived_ns=arrived_ns)
                tree = replace(tree, times=times)
        if self.is_due(tree.round_idx):
            self._tree = tree
        self._news.tell()

    async def wait_until(self, deadline: float) -> None:
        """Wait for a tree, or for `clear`, or until a moment of the loop's time."""
        await self._news.wait_until(deadline)

    def take(self, round_idx: int, *, vocab_size: int) -> TokenTree | None:
        """Return the tree of a round, None if it has not come.

        Args:
            vocab_size: Of the target.
        Raises: InvalidTreeError if a target cannot verify it.
        """
        if self._tree is None or self._tree.round_idx != round_idx:
            return None
        tree, self._tree = self._tree, None
        assert self._due is not None
        _check_answer(tree, self._due, vocab_size=vocab_size)
        return tree

    def note_peer_round(self, took_s: float) -> None:
        """Take the measured time of a round that was not ordered, seconds."""
        if took_s > 2 * self._least_patience_s:
            # No more than twice what is waited for: a target that paused once is no slow one.
            took_s = min(took_s, 2 * self.patience_s)
        self._note_round(took_s)

    def note_answer(self) -> None:
        """Take note that the draft works: what is ordered may take its time again."""
        self.owes_since = None

    def silent_s(self, now: float) -> float:
        """Return how long orders have been without any answer, seconds."""
        return 0.0 if self.owes_since is None else now - self.owes_since

    def _note_round(self, took_s: float) -> None:
        self._mean_round_s += _EWMA_WEIGHT * (took_s - self._mean_round_s)


class _News:
    """Wakes the one who waits for something to have changed."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    async def wait_until(self, deadline: float) -> None:
        """Wait for `tell`, or until a moment of the loop's time."""
        loop = asyncio.get_running_loop()
        self._future = loop.create_future()
        timer = loop.call_at(deadline, self.tell)
        try:
            await self._future
        finally:
            timer.cancel()

    def tell(self) -> None:
        """Let who waits look again."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


def _check_answer(tree: TokenTree, order: DraftRound, *, vocab_size: int) -> None:
    """Raise InvalidTreeError unless the tree answers the order and a target can verify it."""
    check_tree(
        tree.token_ids,
        tree.parent_index,
        root_token_id=order.token_ids[-1],
        vocab_size=vocab_size,
        max_num_nodes=order.shape.num_draft_tokens,
    )
    if tree.seq_len != order.seq_len:
        raise InvalidTreeError(f"seq_len is {tree.seq_len}, expected {order.seq_len}")
    if tree.target_epoch != order.target_epoch:
        raise InvalidTreeError(
            f"target_epoch is {tree.target_epoch}, expected {order.target_epoch}"
        )
    if any(map(math.isnan, tree.cumulative_logprobs)):
        raise InvalidTreeError("a score is not a number")

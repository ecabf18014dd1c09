"""State of one request on a draft worker.

KV index i of a request holds position base + i; base > 0 when the draft joined a conversation
longer than its window. An EAGLE/MTP row at position p is the pair (token p + 1, feature p), a
standalone row is token p, so with L rows committed the first free position is base + L in both, and
a tree node of depth d sits at position base + L + d - 1.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from shared.device import DTYPES
from shared.errors import StaleStateError
from shared.messages import AnswerTimes, DraftOpen, DraftRound, TreeShape
from shared.peer.channel import PeerChannel
from shared.peer.mailbox import MailboxEnd
from shared.times import clock_id, take

_NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.int16}


class FeatureRows(NamedTuple):
    """Rows [first, stop) of an array on the host, which other requests' rows may share.

    Args:
        dtype: Of their values.
        data: [n, width], as staging takes them: bfloat16 as int16.
    """

    dtype: torch.dtype
    data: NDArray[Any]
    first: int
    stop: int

    @classmethod
    def of(cls, rows: torch.Tensor) -> Self:
        """Return the rows of a tensor [n, width]."""
        is_bfloat16 = rows.dtype == torch.bfloat16
        data = (rows.view(torch.int16) if is_bfloat16 else rows).numpy()
        return cls(rows.dtype, data, 0, len(data))

    @classmethod
    def read(cls, data: bytes | NDArray[np.uint8], dtype: str, shape: tuple[int, int]) -> Self:
        """Return the rows that messages carry as bytes of a dtype of shared/device.py."""
        values = np.frombuffer(data, dtype=_NUMPY_DTYPES[dtype]).reshape(shape)
        return cls(DTYPES[dtype], values, 0, len(values))

    @property
    def tensor(self) -> torch.Tensor:
        """Return [stop - first, width]."""
        return torch.from_numpy(self.data[self.first : self.stop]).view(self.dtype)

    def part(self, first: int, stop: int) -> FeatureRows:
        """Return of these rows [first, stop)."""
        return FeatureRows(self.dtype, self.data, self.first + first, self.first + stop)


@dataclass(slots=True, kw_only=True, eq=False)
class DraftRequest:
    """A request: tokens from the orchestrator, features from the target, draft KV of its own.

    Args:
        order: Order of opening; the newest is retracted first.
        req_idx: Row of the page table.
        base: Position of KV index 0.
        input_shift: 1: row p takes token p + 1 and feature p; 0: row p takes token p.
        tokens: Prompt + output, root last once there is one.
        kv_len: Committed rows (extended with true inputs).
        features_end: Position after the last feature row received.
        acknowledged: The target knows that rows of positions below it were received.
        is_awaiting: Rows from features_end on were asked for, none came yet.
        features: Received rows not extended yet, oldest first; those of positions
            [base + kv_len, features_end).
        pending: Latest order for a tree, unanswered.
        pending_times: Of that order, if the request is timed.
        features_ns: When the last rows came, if the request is timed.
        mailbox_slot, round_tag: Place of the newest tree in the target's mailbox, and its tag;
            tag 0: it has none.
        shape: Of the newest tree ordered.
        mailbox: Of the target, as the channel is; None: its device is not told of trees.
        channel: To the target's engine, if that is on this host.
        answer_channel: Where the pending tree goes; None: to the orchestrator.
        has_peer_features: Features come over the channel.
        is_held: The engine has not dropped it.
    """

    open: DraftOpen
    order: int
    req_idx: int
    base: int
    input_shift: int
    tokens: list[int]
    kv_len: int = 0
    features_end: int = 0
    acknowledged: int = 0
    is_awaiting: bool = False
    features: deque[FeatureRows] = field(default_factory=deque)
    pending: DraftRound | None = None
    pending_times: AnswerTimes | None = None
    features_ns: int = 0
    mailbox_slot: int = 0
    round_tag: int = 0
    shape: TreeShape | None = None
    mailbox: MailboxEnd | None = None
    channel: PeerChannel | None = None
    answer_channel: PeerChannel | None = None
    has_peer_features: bool = False
    is_held: bool = True

    @property
    def request_id(self) -> str:
        return self.open.request_id

    @property
    def next_position(self) -> int:
        """Return the position of the next row to extend."""
        return self.base + self.kv_len

    @property
    def num_ready_rows(self) -> int:
        """Return how many rows could be extended now."""
        end = len(self.tokens) - self.input_shift
        if self.input_shift and end > self.features_end:
            end = self.features_end
        return max(end - self.base - self.kv_len, 0)

    @property
    def pending_order(self) -> DraftRound:
        """Return the pending order, where there is one."""
        assert self.pending is not None
        return self.pending

    @property
    def can_grow(self) -> bool:
        """Return whether the pending tree's root has been extended."""
        if self.pending is None or self.kv_len == 0:
            return False
        return self.base + self.kv_len == self.pending.seq_len + 1 - self.input_shift

    def can_run_ahead(self, mailbox: MailboxEnd, shape: TreeShape) -> bool:
        """Return whether the newest tree is answered, and what is accepted of it will be in a
        mailbox, with an order of the same shape.
        """
        is_caught_up = self.pending is None and not self.num_ready_rows
        return (
            is_caught_up and self.round_tag > 0 and self.mailbox is mailbox and self.shape == shape
        )

    def accept_round(
        self,
        order: DraftRound,
        *,
        answer_channel: PeerChannel | None = None,
        mail: tuple[int, int] = (0, 0),
        busy_until_ns: int = 0,
    ) -> None:
        """Take new committed tokens; they supersede an unanswered round.

        An order that is older than what is held came late, and changes nothing.

        Args:
            answer_channel: Where the order came from, and the tree goes; None: the front.
            mail: Slot and number of the tree in the target's mailbox; number 0: it has none.
            busy_until_ns: When the engine's last step ended.
        Raises: StaleStateError if tokens are missing in between or differ from those held.
        """
        if order.seq_len + 1 < len(self.tokens):
            return
        offset = order.token_offset
        if offset > len(self.tokens):
            raise StaleStateError(
                f"tokens up to {offset} are missing, have {len(self.tokens)}; "
                "open the request again",
                field="token_offset",
            )
        known = len(self.tokens) - offset
        if list(order.token_ids[:known]) != self.tokens[offset:]:
            raise StaleStateError(
                "the tokens differ from those held; open the request again", field="token_ids"
            )
        self.tokens.extend(order.token_ids[known:])
        if len(self.tokens) != order.seq_len + 1:
            raise StaleStateError(
                f"seq_len is {order.seq_len}, have {len(self.tokens)} tokens", field="seq_len"
            )
        self.pending, self.answer_channel, self.shape = order, answer_channel, order.shape
        self.mailbox_slot, self.round_tag = mail
        if self.open.is_timed:
            now_ns = time.monotonic_ns()
            self.pending_times = (
                AnswerTimes(clock_id=clock_id(), begin_ns=now_ns)
                if answer_channel is not None
                else take(order.received_ns, busy_until_ns=busy_until_ns)
            )

    def add_features(self, start: int, rows: FeatureRows) -> None:
        """Take the feature rows of positions [start, start + n), start <= features_end."""
        num_rows = rows.stop - rows.first
        num_new = start + num_rows - self.features_end
        self.is_awaiting = False
        if num_new > 0:
            self.features.append(
                rows if num_new == num_rows else rows.part(num_rows - num_new, num_rows)
            )
            self.features_end += num_new

    def take_features(self, count: int) -> list[FeatureRows]:
        """Return the next `count` rows to extend, in parts."""
        taken = []
        while count:
            head = self.features.popleft()
            size = head.stop - head.first
            if size > count:
                self.features.appendleft(head.part(count, size))
                head, size = head.part(0, count), count
            taken.append(head)
            count -= size
        return taken

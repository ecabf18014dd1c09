"""Feature rows of a request: an ordered stream from the target, which this module alone owns.

Rows by position:

    [base, taken)   extended
    [taken, end)    received, not extended yet
    [end, ...)      asked for; a chunk that begins past `end` shows that rows are missing

Rows come over the peer channel, if the request is attached, or else through the front. They lie in
the target's ring in shared memory, or in the messages. Whatever is missing is asked for
again from `end` on; rows that were overwritten in the ring before they were read are asked for as
bytes, which come through the front.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from shared.device import DTYPES
from shared.errors import InvalidArgumentError
from shared.messages import (
    DraftOpen,
    FeatureAck,
    FeatureChunk,
    FeatureCommand,
    FeatureSubscribe,
    FeatureUnsubscribe,
    PathRows,
    RingSpan,
)
from shared.peer.channel import PeerChannel
from shared.peer.ring import RingReader
from shared.step.recorder import Recorder

logger = logging.getLogger(__name__)

ACK_ROWS = 64
"""Feature rows between acknowledgements: each wakes both workers, in the middle of a round."""

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

    @property
    def tensor(self) -> torch.Tensor:
        """Return [stop - first, width]."""
        return torch.from_numpy(self.data[self.first : self.stop]).view(self.dtype)

    def part(self, first: int, stop: int) -> FeatureRows:
        """Return of these rows [first, stop)."""
        return FeatureRows(self.dtype, self.data, self.first + first, self.first + stop)


class FeatureReader:
    """Reads the rows that messages carry or say the place of.

    Args:
        width: Values per row that the draft takes; 0: it takes none.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._rings = RingReader()

    def check(self, rows: FeatureChunk | PathRows) -> None:
        """Raise InvalidArgumentError unless the draft can take these rows."""
        if rows.shape[1] != self._width or rows.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"features are {rows.shape[1]} x {rows.dtype}, expected {self._width} values of "
                "a float type",
                reason="FEATURE_MISMATCH",
                field="handle.shape",
            )

    def read(self, rows: FeatureChunk | PathRows) -> FeatureRows | None:
        """Return the rows; None if they were overwritten in the ring, or the ring is gone."""
        data: bytes | NDArray[np.uint8] | None
        data = self._rings.read(rows.data) if isinstance(rows.data, RingSpan) else rows.data
        if data is None:
            return None
        values = np.frombuffer(data, dtype=_NUMPY_DTYPES[rows.dtype]).reshape(rows.shape)
        return FeatureRows(DTYPES[rows.dtype], values, 0, len(values))


class FeatureStream:
    """The feature rows of one request, in order and without gaps.

    Args:
        outbox: Takes what goes to the front.
        start: Position of the first row that the draft needs.
    """

    def __init__(
        self, message: DraftOpen, outbox: list[Any], recorder: Recorder, *, start: int
    ) -> None:
        self.end = start
        """Position after the last row received."""
        self._open = message
        self._outbox = outbox
        self._recorder = recorder
        self._channel: PeerChannel | None = None
        self._is_by_channel = False
        self._is_at_front = False  # it was ever subscribed there
        self._acknowledged = start
        self._is_requested = False  # rows from `end` on were asked for, none came yet
        self._rows: deque[FeatureRows] = deque()  # of positions [taken, end), oldest first

    def attach(self, channel: PeerChannel) -> None:
        """Let subscriptions go to the target's engine from now on."""
        self._channel = channel

    def subscribe(self, *, avoids_ring: bool = False) -> None:
        """Ask for the rows from `end` on.

        Args:
            avoids_ring: As bytes, which come through the front.
        """
        self._is_requested = True
        self._is_by_channel = self._channel is not None and not avoids_ring
        self._is_at_front |= not self._is_by_channel
        command = FeatureSubscribe(
            request_id=self._open.request_id,
            target_epoch=self._open.target_epoch,
            from_position=self.end,
            draft_epoch=self._open.draft_epoch,
        )
        self._tell_target(command, avoids_ring=avoids_ring)

    def receive(self, start: int, rows: FeatureRows | None) -> None:
        """Take rows of positions from `start` on; those that came before are left out.

        Args:
            rows: None: they were overwritten in the ring.
        """
        if start > self.end:
            if not self._is_requested:
                extra = {"request_id": self._open.request_id}
                logger.warning("feature gap, asking again", extra=extra)
                self.subscribe()
        elif rows is not None:
            self._append(start, rows)
        else:
            logger.warning(
                "feature rows from %d on were overwritten in the ring, asking for bytes",
                self.end,
                extra={"request_id": self._open.request_id},
            )
            self.subscribe(avoids_ring=True)

    def take(self, count: int) -> list[FeatureRows]:
        """Return the next `count` rows to extend, in parts."""
        taken = []
        while count:
            head = self._rows.popleft()
            size = head.stop - head.first
            if size > count:
                self._rows.appendleft(head.part(count, size))
                head, size = head.part(0, count), count
            taken.append(head)
            count -= size
        return taken

    def lose_channel(self) -> None:
        """Go on through the front: the channel is gone, and what was on its way there."""
        self._channel = None
        if self._is_by_channel:
            self.subscribe()

    def close(self) -> None:
        """Want no more rows; of a channel, detaching says so."""
        if self._is_at_front:
            self._tell_front(
                FeatureUnsubscribe(
                    request_id=self._open.request_id, target_epoch=self._open.target_epoch
                )
            )

    def _append(self, start: int, rows: FeatureRows) -> None:
        if self._open.is_timed:
            self._recorder.mark(self._open.request_id, "features")
        self._is_requested = False
        num_rows = rows.stop - rows.first
        num_new = start + num_rows - self.end
        if num_new <= 0:
            return
        self._rows.append(rows if num_new == num_rows else rows.part(num_rows - num_new, num_rows))
        self.end += num_new
        if self.end - self._acknowledged >= ACK_ROWS:
            self._acknowledged = self.end
            self._tell_target(
                FeatureAck(
                    request_id=self._open.request_id,
                    target_epoch=self._open.target_epoch,
                    position=self.end,
                )
            )

    def _tell_target(
        self,
        command: FeatureSubscribe | FeatureAck,
        *,
        avoids_ring: bool = False,
    ) -> None:
        if self._is_by_channel:
            assert self._channel is not None
            self._channel.put(command)
        else:
            self._tell_front(command, avoids_ring=avoids_ring)

    def _tell_front(
        self,
        command: FeatureSubscribe | FeatureAck | FeatureUnsubscribe,
        *,
        avoids_ring: bool = False,
    ) -> None:
        self._outbox.append(
            FeatureCommand(
                target_address=self._open.target_address, command=command, avoids_ring=avoids_ring
            )
        )

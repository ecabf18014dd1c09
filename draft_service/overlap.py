"""Trees that a draft's device grows ahead: before its host is told what the target accepted.

The target's device says that through a mailbox. What the draft's device makes of it counts once the
target's host has said the same; else it is as if it had not been done.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.phases import DraftOutput
from draft_service.request import DraftRequest
from draft_service.runner import DraftRunner
from shared.kernels.mailbox_words import MAX_PATH
from shared.messages import TreeShape
from shared.peer.channel import PeerChannel
from shared.peer.mailbox import MailboxEnd, open_mailbox
from shared.step.buckets import ROW_BUCKETS
from shared.step.step_timer import StepTimer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedTrees:
    """What a device did ahead of orders that have come, and say the same.

    Args:
        rows: Of the requests in `output`.
        num_tokens: Accepted of each request: rows that were extended.
    """

    requests: Sequence[DraftRequest]
    rows: Sequence[int]
    num_tokens: Sequence[int]
    output: DraftOutput
    timer: StepTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """What the device does by itself as soon as the target's device says what it accepted.

    Args:
        shape: Of the trees that it will grow.
        num_tokens: That each request had before.
    """

    requests: Sequence[DraftRequest]
    shape: TreeShape
    num_tokens: Sequence[int]
    timer: StepTimer


class AheadTrees:
    """Launches what a device does ahead, one thing at a time, and says what of it counts.

    Changes no request: that is the engine's.

    Args:
        width: Of the feature rows that the draft reads; 0: none.
    """

    def __init__(self, runner: DraftRunner, *, width: int) -> None:
        self._runner = runner
        self._width = width
        self._mailboxes: dict[PeerChannel, MailboxEnd] = {}
        self._launched: _Launched | None = None

    @property
    def is_running(self) -> bool:
        """Return whether something was launched and not read."""
        return self._launched is not None

    def open_mailbox(self, name: str, channel: PeerChannel) -> None:
        """Open the mailbox of the target at a channel, if it has one that the device can use."""
        try:
            self._mailboxes[channel] = open_mailbox(
                name, width=self._width, device=self._runner.pool.device
            )
        except FileNotFoundError:  # as on a CPU; the target has said why, if it wanted one
            logger.debug("trees go to the target's host only: it has no mailbox")
        except OSError as error:
            logger.info("trees go to the target's host only: no mailbox: %s", error)
        else:
            logger.info("trees go straight to the target's device, and paths come from there")

    def mailbox_of(self, channel: PeerChannel) -> MailboxEnd | None:
        """Return the mailbox of the target at a channel, if there is one."""
        return self._mailboxes.get(channel)

    def lose_channel(self, channel: PeerChannel) -> None:
        """Leave the mailbox of a target that is gone, which the device may be about to read."""
        if self._launched is not None:
            self._runner.read_ahead(self._launched.timer)
            self._launched = None
        self._mailboxes.pop(channel, None)

    def next_shape(self, requests: Sequence[DraftRequest]) -> TreeShape | None:
        """Return the shape of the trees that the device can now grow ahead of orders.

        Only if all requests are at that point: whoever else needed the device would have to wait.

        Args:
            requests: All of the engine.
        """
        if self._launched is not None or not requests:
            return None
        mailbox, shape = requests[0].mailbox, requests[0].shape
        if mailbox is None or shape is None or shape.num_steps >= MAX_PATH:
            return None
        if not all([request.can_run_ahead(mailbox, shape) for request in requests]):
            return None
        return shape if len(requests) * (shape.num_steps + 1) <= ROW_BUCKETS[-1] else None

    def launch(self, requests: Sequence[DraftRequest], shape: TreeShape) -> None:
        """Let the device wait for what the target accepts of the newest trees, and go on from it.

        Args:
            requests: Those that have this `next_shape`, with slots reserved.
        """
        mailbox = requests[0].mailbox
        assert mailbox is not None
        timer = StepTimer(
            self._runner.pool.device, is_on=any(request.open.is_timed for request in requests)
        )
        self._runner.run_ahead(requests, shape, mailbox, timer)
        num_tokens = [len(request.tokens) for request in requests]
        self._launched = _Launched(
            requests=requests, shape=shape, num_tokens=num_tokens, timer=timer
        )

    def finish(self) -> ConfirmedTrees | None:
        """Return what was done ahead and is the same as what would be done now; the rest is void:
        the target's host says otherwise, or did not say it yet.

        Waits for the device, which waits no longer for paths that are not there.
        """
        launched, self._launched = self._launched, None
        if launched is None:
            return None
        taken, output = self._runner.read_ahead(launched.timer)
        paths = [path[1 : 1 + path[0]] for path in taken.tolist()]
        rows = [row for row, path in enumerate(paths) if _is_confirmed(launched, row, path)]
        if not rows:
            return None
        return ConfirmedTrees(
            requests=[launched.requests[row] for row in rows],
            rows=rows,
            num_tokens=[len(paths[row]) for row in rows],
            output=output,
            timer=launched.timer,
        )


def _is_confirmed(launched: _Launched, row: int, path: Sequence[int]) -> bool:
    """Return whether the target's host has said and ordered what its device said."""
    request = launched.requests[row]
    if not path or not request.is_held or request.pending is None:
        return False
    return (
        request.pending.shape == launched.shape
        and request.tokens[launched.num_tokens[row] :] == list(path)
        and request.num_ready_rows == len(path)
    )

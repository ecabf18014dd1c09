"""The draft's side of device rounds: its device takes accepted paths from targets' mailboxes.

What the device makes of a path (extend and grow) counts only once an order from the target's host
has come with the same tokens and shape. Otherwise the work is done again, by the order.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from draft_service.device_rounds.mailbox_io import stage_posts
from draft_service.device_rounds.overlap import OverlapRunner, following_shapes
from draft_service.device_rounds.rows_memory import LentRows
from draft_service.path_source import ConfirmedTrees, PathSource, PostTrees
from draft_service.request import DeviceTree, DraftRequest
from draft_service.runner import STAGED_BYTES, DraftRunner
from shared.kernels.mailbox_paths import MAX_MAILBOXES
from shared.kernels.mailbox_words import MAX_PATH
from shared.messages import PathEntry, TreeShape
from shared.peer.channel import PeerChannel
from shared.peer.device_memory import CudaMemory
from shared.peer.mailbox import MailboxEnd, is_tag, open_mailbox
from shared.peer.stream_waits import check_stream_waits
from shared.step.staging import Staging
from shared.step.step_timer import StepTimer

logger = logging.getLogger(__name__)

# How long other work waits for a launch ahead. Longer than most steps: ending a launch's wait early
# makes the launch useless.
AHEAD_PATIENCE_S = 0.02
# Time for other work and the launch ahead after it. If the next path is not expected within this
# time, as in steps with many rows of prompts, other work need not wait.
_GAP_S = 0.008


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """A launch ahead: extend and growth, which wait on the device for accepted paths.

    Args:
        requests: The requests of the launch.
        shapes: Shapes of the trees that it will grow.
        num_tokens: Tokens of each request before the launch.
        timer: Times its stages.
        began_s: When it was launched, monotonic.
    """

    requests: Sequence[DraftRequest]
    shapes: Sequence[TreeShape]
    num_tokens: Sequence[int]
    timer: StepTimer
    began_s: float


class DeviceRounds(PathSource):
    """Owns the mailboxes of targets, and the launch ahead that is not confirmed yet. Methods are
    described in PathSource.

    It changes no request; the pipeline does.

    Args:
        gpu_is_shared: Other workers use the runner's GPU, too.
    """

    def __init__(self, runner: DraftRunner, *, gpu_is_shared: bool) -> None:
        self._gpu_is_shared = gpu_is_shared
        self.overlap = OverlapRunner(runner)
        self._pool = runner.pool
        self._width = runner.model.feature_spec.width
        self._post_staging = Staging(runner.pool.device, STAGED_BYTES)
        self.lent_rows = LentRows(CudaMemory(runner.pool.device))
        self._mailboxes: dict[PeerChannel | None, MailboxEnd] = {}  # None is no key
        self._offered: dict[PeerChannel, str] = {}  # names of the targets
        self._unanswered: set[PeerChannel] = set()
        self._launched: _Launched | None = None
        self._num_launches = 0
        self._last_launches: dict[PeerChannel | None, int] = {}  # by target, counted from 1
        # When the first launch of this round was made; and for the last rounds, how long after
        # their first launch the paths came.
        self._round_began_s: float | None = None
        self._took_s: deque[float] = deque(maxlen=2)

    @property
    def is_running(self) -> bool:
        """Return whether there is a launch ahead that was neither confirmed nor given up."""
        return self._launched is not None

    def connect(self, socket_name: str, channel: PeerChannel) -> None:
        """Open the mailbox of the target at a channel, if it has one that the device can use."""
        try:
            mailbox = open_mailbox(
                socket_name,
                width=self._width,
                device=self._pool.device,
                gpu_is_shared=self._gpu_is_shared,
            )
            if mailbox.streams_wait:
                check_stream_waits(mailbox.paths)
        except FileNotFoundError:
            return  # a target without one, which is no fault
        except OSError as error:
            logger.info("trees go to the target's host only: no mailbox: %s", error)
            return
        self._mailboxes[channel] = mailbox
        logger.info("trees go straight to the target's device, and paths come from there")
        offer = self.lent_rows.offer(socket_name, mailbox)
        if offer is not None:
            self._offered[channel] = socket_name
            self._unanswered.add(channel)
            channel.put(offer)

    def take_answer(self, channel: PeerChannel, *, is_taken: bool) -> None:
        if channel not in self._unanswered:
            return
        self._unanswered.remove(channel)
        if is_taken:
            mailbox = self._mailboxes[channel]
            self._mailboxes[channel] = self.lent_rows.in_use(self._offered[channel], mailbox)
        else:
            self.lent_rows.refused(self._offered.pop(channel))

    def disconnect(self, channel: PeerChannel) -> None:
        """Leave the mailbox of a target that is gone; first end a launch that may read it."""
        if self._launched is not None:
            self.overlap.read(self._launched.timer)
            self.overlap.restore(self._launched.requests)
            self._launched = None
        self._mailboxes.pop(channel, None)
        self._last_launches.pop(channel, None)
        self._unanswered.discard(channel)
        socket_name = self._offered.pop(channel, None)
        if socket_name is not None:
            self.lent_rows.leave(socket_name)

    def has_mailbox(self, channel: PeerChannel) -> bool:
        return channel in self._mailboxes

    def streams_wait(self, channel: PeerChannel) -> bool:
        mailbox = self._mailboxes.get(channel)
        return mailbox is not None and mailbox.streams_wait

    def place_tree(
        self,
        channel: PeerChannel,
        part: PathEntry,
        shape: TreeShape,
        following: TreeShape | None,
    ) -> DeviceTree | None:
        mailbox, slot = self._mailboxes.get(channel), part.mailbox_slot
        if mailbox is None or slot >= mailbox.num_slots or not is_tag(part.round_tag):
            return None
        return DeviceTree(slot, part.round_tag, shape, following)

    def stage_posts(self, requests: Sequence[DraftRequest]) -> PostTrees | None:
        trees = [request.device_tree for request in requests]
        mailboxes = [self._mailboxes.get(request.channel) for request in requests]
        posts = stage_posts(trees, mailboxes, self._post_staging)
        if not posts:
            return None

        def post(packed: torch.Tensor) -> None:
            for one in posts:
                one.post(packed)

        return post

    def ready_ahead(self, requests: Iterable[DraftRequest]) -> list[DraftRequest]:
        if self._launched is not None:
            return []
        ready = list(filter(self._is_ready, requests))
        if not ready:
            return []
        # One launch takes rows of one dtype from a few mailboxes; other requests wait for orders. A
        # stream can wait for one target, a kernel for several. Targets take turns.
        channels = sorted(dict.fromkeys(r.channel for r in ready), key=self._last_launch_for)
        first = self._mailboxes[channels[0]]
        alike = [
            channel
            for channel in channels
            if self._mailboxes[channel].dtype == first.dtype
            and self._mailboxes[channel].streams_wait == first.streams_wait
        ]
        served = alike[: 1 if first.streams_wait else MAX_MAILBOXES]
        return [request for request in ready if request.channel in served]

    def launch_ahead(
        self, requests: Sequence[DraftRequest], path_width: int, timer: StepTimer
    ) -> None:
        trees = [request.device_tree for request in requests if request.device_tree is not None]
        assert len(trees) == len(requests)
        mailboxes = [self._mailboxes[request.channel] for request in requests]
        self.overlap.launch(requests, trees, mailboxes, path_width, timer)
        self._num_launches += 1
        for request in requests:
            self._last_launches[request.channel] = self._num_launches
        now_s = time.monotonic()
        if self._round_began_s is None:
            self._round_began_s = now_s
        self._launched = _Launched(
            requests=requests,
            shapes=following_shapes(trees),
            num_tokens=[len(request.tokens) for request in requests],
            timer=timer,
            began_s=now_s,
        )

    def ahead_until_s(self, requests: Iterable[DraftRequest]) -> float:
        launched = self._launched
        if launched is None or not any([request.is_held for request in launched.requests]):
            return 0.0
        if any([request.pending is not None for request in launched.requests]):
            return 0.0
        # A deadlock otherwise: the launch waits for a path, whose step waits for these trees.
        is_awaited = [r.pending is not None and r.device_tree is not None for r in requests]
        began_s = self._round_began_s or launched.began_s
        ends_s = began_s + min(self._took_s, default=0.0)
        if any(is_awaited) or ends_s - time.monotonic() > _GAP_S:
            return 0.0
        return launched.began_s + AHEAD_PATIENCE_S

    def confirm(self, hear: Callable[[], None]) -> ConfirmedTrees | None:
        """End the launch ahead, and return the part that orders of targets' hosts confirm."""
        launched, self._launched = self._launched, None
        if launched is None:
            return None
        taken, output = self.overlap.read(launched.timer)
        hear()
        paths = [path[1 : 1 + path[0]] for path in taken.tolist()]
        rows = [row for row, path in enumerate(paths) if _is_confirmed(launched, row, path)]
        self.overlap.restore(
            [request for row, request in enumerate(launched.requests) if row not in rows]
        )
        self._note_paths(launched, has_paths=any(paths))
        answered = zip(launched.requests, paths, strict=True)
        return ConfirmedTrees(
            requests=[launched.requests[row] for row in rows],
            rows=rows,
            output=output,
            timer=launched.timer,
            num_tokens=[len(paths[row]) for row in rows],
            passed=[request for request, path in answered if path and request.pending is None],
        )

    def _note_paths(self, launched: _Launched, *, has_paths: bool) -> None:
        """Learn how long paths take. A round ends when paths have come, or no request is left."""
        if has_paths and self._round_began_s is not None:
            self._took_s.append(time.monotonic() - self._round_began_s)
        if has_paths or not any([request.is_held for request in launched.requests]):
            self._round_began_s = None

    def compile(self, dtype: torch.dtype) -> None:
        self.overlap.compile(dtype)

    def _is_ready(self, request: DraftRequest) -> bool:
        """Return whether a request can be in a launch ahead: its newest tree is sent, and the
        accepted path will come in a mailbox.
        """
        tree = request.device_tree
        is_caught_up = request.pending is None and not request.num_ready_rows
        if not is_caught_up or tree is None or tree.following is None:
            return False
        if max(tree.shape.num_steps, tree.following.num_steps) >= MAX_PATH:
            return False
        return request.channel in self._mailboxes

    def _last_launch_for(self, channel: PeerChannel | None) -> int:
        return self._last_launches.get(channel, 0)


def _is_confirmed(launched: _Launched, row: int, path: Sequence[int]) -> bool:
    """Return whether the target's host has ordered the same as its device has posted."""
    request = launched.requests[row]
    if not path or not request.is_held or request.pending is None:
        return False
    return (
        request.pending.order.shape == launched.shapes[row]
        and request.tokens[launched.num_tokens[row] :] == list(path)
        and request.num_ready_rows == len(path)
    )

"""Launches ahead: the draft's device takes paths, extends them, grows and posts the next trees.

A CPU has no stream that could wait, so there all of this is done when the result is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.answers import PATH_STAGE
from draft_service.device_rounds.mailbox_io import (
    MailboxPaths,
    compile_mailbox,
    place_paths,
)
from draft_service.phases import DraftExtendInput, DraftInput, DraftOutput
from draft_service.request import DeviceTree, DraftRequest
from draft_service.runner import DraftRunner
from shared.kernels.mailbox_growth import advance_growth
from shared.kernels.mailbox_paths import take_paths, take_rows
from shared.messages import TreeShape
from shared.peer.mailbox import MailboxEnd
from shared.peer.stream_waits import NO_PATH, StreamWaits
from shared.step.packing import RowBlocks
from shared.step.step_timer import StepTimer

# How long the device waits for the first path: longer than any step of a target. The host can end
# the wait.
PATH_PATIENCE_US = 100_000
# How long it waits for further paths. The paths of a step are posted together; a request without a
# path by then has ended, or is in another step.
PATH_GRACE_US = 100
# How long a kernel waits whose stream has already waited.
_SHORT_PATIENCE_US = 200


class OverlapRunner:
    """Makes launches ahead, at most one at a time."""

    def __init__(self, runner: DraftRunner) -> None:
        device = runner.pool.device
        self._runner = runner
        self._is_cuda = device.type == "cuda"
        # Read by the device while it waits; not 0: end the wait.
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=self._is_cuda)
        self._stream_waits = StreamWaits(PATH_PATIENCE_US / 1e6, small=NO_PATH, device=device)
        self._deferred: Callable[[], None] | None = None
        # `last_hidden` as it was before the last launch, for drafts that continue from it.
        self._kept_hidden = torch.empty_like(runner.last_hidden) if runner.model.kv_lag else None

    @property
    def is_deferred(self) -> bool:
        """Return whether a launch on a CPU was not computed yet."""
        return self._deferred is not None

    def launch(
        self,
        requests: Sequence[DraftRequest],
        trees: Sequence[DeviceTree],
        mailboxes: Sequence[MailboxEnd],
        path_width: int,
        timer: StepTimer,
    ) -> None:
        """Extend what targets will accept of the requests' newest trees, as soon as the first of
        their devices says so, grow the next trees, and post those; launches only.

        Args:
            requests: All caught up, with slots for `path_width` rows and the next tree reserved.
            trees: Their newest ones, which say what shapes the next ones get.
            mailboxes: Of their targets.
            path_width: Tokens of the longest path through any of the trees.
        Mutates: KV slots past kv_len of each request; its hidden row, see `restore`.
        """
        extend, paths = self._pack_paths(requests, trees, mailboxes, path_width)
        grow = self._runner.pack_growth(requests, following_shapes(trees))
        if self._kept_hidden is not None:
            self._kept_hidden.copy_(self._runner.last_hidden)
        self._stop.zero_()
        timer.host("pack")
        if mailboxes[0].streams_wait:  # one path stands for all: they are posted together
            first = trees[0]
            self._stream_waits.wait(mailboxes[0].paths[:, 0], [first.slot], [first.round_tag])
        self._deferred = lambda: self._launch(paths, extend, grow, timer)
        if self._is_cuda:
            self.run_deferred()

    def run_deferred(self) -> None:
        """Do what a CPU has deferred, if it has."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred()

    def read(self, timer: StepTimer) -> tuple[NDArray[np.int32], DraftOutput]:
        """Return what was launched last; waits for the device, which waits no longer for paths that
        are not there.

        Returns: [B, 1 + MAX_PATH], of each request the tokens of the path that was extended (0:
            nothing was done), and their ids; and the trees.
        """
        self.run_deferred()
        self._stop.fill_(1)
        self._stream_waits.give_up()
        result, taken = self._runner.results.finish()
        timer.host("read")
        return taken, DraftOutput.unpack(result.copy())  # the next growth may begin before its use

    def restore(self, requests: Sequence[DraftRequest]) -> None:
        """Undo for requests what the last launch did beyond scratch; launches only.

        Their paths are extended again from `kv_len`, for which a draft with kv_lag reads the hidden
        row at `kv_len - 1`. To be called before anything else is launched.

        Mutates: hidden rows of the requests.
        """
        hidden, kept = self._runner.last_hidden, self._kept_hidden
        if kept is None or not requests:
            return
        idx = torch.tensor([r.req_idx for r in requests], pin_memory=self._is_cuda)
        idx = idx.to(hidden.device, non_blocking=True)
        hidden.index_copy_(0, idx, kept.index_select(0, idx))

    def compile(self, dtype: torch.dtype) -> None:
        """Compile what reads and writes mailboxes; nothing comes and nothing is posted.

        Args:
            dtype: Of the features that will come.
        """
        runner = self._runner
        compile_mailbox(
            self._stop,
            width=runner.model.feature_spec.width,
            vocab_size=runner.vocab_size,
            dtype=dtype,
            device=runner.pool.device,
        )

    def take_paths(
        self, paths: MailboxPaths, extend: DraftExtendInput, grow: DraftInput
    ) -> torch.Tensor:
        """Wait for paths; make of inputs for the longest ones those of the ones that came.

        Args:
            extend: path_width rows for each request, without tokens and features.
            grow: Trees from where those rows begin.
        Mutates: `extend` and `grow`.
        Returns: [R, 1 + MAX_PATH] i32, as the kernel `take_paths` has it.
        """
        runner = self._runner
        num_reqs = len(paths.round_tag)
        is_awaited = paths.mailboxes[0].streams_wait  # by the stream
        taken = take_paths(
            [mailbox.paths for mailbox in paths.mailboxes],
            paths.mailbox_idx,
            paths.slot,
            paths.round_tag,
            self._stop,
            paths.arrived,
            extend.token_ids,
            extend.rows.slot_mapping,
            extend.last_rows,
            extend.hidden_idx,
            num_reqs=num_reqs,
            path_width=paths.path_width,
            spare_idx=runner.pool.max_num_requests,
            vocab_size=runner.vocab_size,
            timeout_us=_SHORT_PATIENCE_US if is_awaited else PATH_PATIENCE_US,
            grace_us=PATH_GRACE_US,
        )
        if extend.features is not None:
            for mailbox, slot in zip(paths.mailboxes, paths.slot, strict=True):
                assert mailbox.rows is not None
                take_rows(
                    mailbox.rows,
                    slot,
                    paths.round_tag,
                    taken,
                    extend.features,
                    path_width=paths.path_width,
                )
        advance_growth(
            taken,
            grow.trees.kv_len,
            grow.trees.node_position,
            grow.child_position,
            grow.trees.req_idx,
            grow.trees.topk,
            grow.trees.num_steps,
            grow.num_nodes,
        )
        return taken

    def _launch(
        self, paths: MailboxPaths, extend: DraftExtendInput, grow: DraftInput, timer: StepTimer
    ) -> None:
        runner = self._runner
        taken = self.take_paths(paths, extend, grow)
        timer.device(PATH_STAGE)
        runner.launch_extend(extend)
        timer.device("extend")
        packed = runner.launch_growth(grow)
        for posts in paths.posts:
            posts.post(packed)
        timer.device("grow")
        runner.results.start(packed, taken)

    def _pack_paths(
        self,
        requests: Sequence[DraftRequest],
        trees: Sequence[DeviceTree],
        mailboxes: Sequence[MailboxEnd],
        path_width: int,
    ) -> tuple[DraftExtendInput, MailboxPaths]:
        """Stage rows for the longest path of each request, and where its path and its tree are."""
        runner, packer, mailbox = self._runner, self._runner.packer, mailboxes[0]
        num_reqs = len(requests)
        num_live = num_reqs * path_width
        bucket = runner.row_bucket(num_live)
        blocks = RowBlocks(
            req_idx=[request.req_idx for request in requests],
            prefix_len=[request.kv_len for request in requests],
            num_rows=[path_width] * num_reqs,
        )
        position = np.array([request.next_position for request in requests])
        positions = (position[:, None] + np.arange(path_width)).ravel()
        _, fields = packer.begin(blocks, positions, num_live, bucket)
        features = None
        if mailbox.dtype is not None and mailbox.rows is not None and runner.model.input_shift:
            width = mailbox.rows.shape[-1]
            host, device = packer.staging.place(
                features=(mailbox.dtype, (bucket or num_live, width))
            )
            host["features"][num_live:] = 0  # the others come from the mailbox
            features = device["features"]
        paths = place_paths(trees, mailboxes, path_width, packer.staging)
        packer.staging.flush()
        return DraftExtendInput(**fields, features=features), paths


def following_shapes(trees: Sequence[DeviceTree]) -> list[TreeShape]:
    """Return the shapes of the trees after these, all of which are to be grown."""
    shapes = [tree.following for tree in trees if tree.following is not None]
    assert len(shapes) == len(trees)
    return shapes

"""An attached pair whose devices talk through a mailbox, in the order in which GPUs would."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from draft_service.device_rounds.mailbox_io import MailboxPaths
from draft_service.device_rounds.overlap import OverlapRunner
from draft_service.device_rounds.rounds import DeviceRounds
from draft_service.engine import DraftEngine
from draft_service.path_source import ConfirmedTrees
from shared.messages import PeerAttach, SamplingParams, TargetClose, TreeBatch, TreeShape
from shared.peer.channel import PeerChannel
from shared.peer.mailbox import Mailbox
from shared.rpc.engine import will_have_work
from target_service.device_rounds.rounds import DeviceRounds as TargetDeviceRounds
from target_service.engine import TargetEngine
from target_service.phases import MailboxTrees
from tests.engines import (
    SHAPES,
    Models,
    make_draft,
    make_target,
    poison,
    poison_scratch,
    pool_of,
    random_tokens,
)
from tests.local_pair import LocalRequest
from tests.peer_pair import PeerPair, close_channels

Engines = tuple[TargetEngine, DraftEngine, Mailbox]
Make = Callable[..., Engines]

BUSHY = SHAPES[2]
_MUCH = 1e4

EditTrees = Callable[[MailboxTrees], object]
EditPaths = Callable[[MailboxPaths], object]


@contextmanager
def device_engines(models: Models) -> Iterator[Make]:
    """Yield what makes a target with a mailbox and a draft; they are detached at the end."""
    made: list[Engines] = []

    def make(
        kind: str,
        page_sizes: tuple[int, int] = (16, 16),
        *,
        draft: dict[str, Any] | None = None,
        **options: Any,
    ) -> Engines:
        pairing = models.pairing(kind)
        target_page, draft_page = page_sizes
        options = {"feature_ring_mb": 1, "page_size": target_page, **options}
        target = make_target(pairing, has_mailbox=True, **options)
        assert isinstance(target.source, TargetDeviceRounds)
        mailbox = target.source.mailbox
        draft_options = {"page_size": draft_page, "make_source": DeviceRounds, **(draft or {})}
        made.append((target, make_draft(pairing, **draft_options), mailbox))
        return made[-1]

    yield make
    for target, one_draft, mailbox in made:
        close_channels(target, one_draft)
        mailbox.close()


def requests_of(count: int, seed: int, shape: TreeShape = BUSHY) -> list[LocalRequest]:
    """Return requests of every kind that can run device rounds."""
    rng = random.Random(seed)
    filtered = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=seed)
    biased = tuple((token_id, 2.0) for token_id in range(0, 60, 7))
    kinds: list[dict[str, Any]] = [
        {},
        {"sampling": SamplingParams(temperature=1.0, seed=(1 << 64) - 1 - seed)},
        {"sampling": filtered, "logprobs": True, "top_logprobs": 2},
        {"sampling": SamplingParams(logit_bias=biased)},
        {"sampling": replace(filtered, logit_bias=biased), "stop_token_ids": tuple(range(40))},
    ]
    return [
        LocalRequest(
            prompt=random_tokens(rng, 1 + 17 * (i % 3)),
            max_new_tokens=25,
            shape=shape,
            **kinds[(seed + i) % len(kinds)],
        )
        for i in range(count)
    ]


def check(requests: Sequence[LocalRequest], expected: Sequence[LocalRequest]) -> None:
    """Check that requests were answered as expected, to the last logprob."""
    for request, plain in zip(requests, expected, strict=True):
        assert request.output == plain.output
        assert request.logprob_rows == plain.logprob_rows
        assert request.finish_reason == plain.finish_reason


def num_rounds(requests: Sequence[LocalRequest]) -> int:
    """Return how many rounds requests took, prefills included."""
    return sum(len(request.paths) for request in requests)


class DevicePair(PeerPair):
    """A pair whose target begins a step while the trees are on the way to its host.

    On a CPU a device does its work when it is asked for the result, so the words must be there by
    then: the target steps after the draft, and what the draft's host has to say comes later.

    Args:
        edit_trees: Sees the words of the trees in the mailbox before the target's device does.
        has_mailbox: The draft says that it looks into the mailbox.
        edit_paths: Sees paths and rows, and where they are, before the draft's device does.
    """

    def __init__(
        self,
        *args: Any,
        edit_trees: EditTrees = lambda trees: None,
        edit_paths: EditPaths = lambda paths: None,
        has_mailbox: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.edit_trees, self.edit_paths = edit_trees, edit_paths
        self.has_mailbox = has_mailbox
        self.late: list[tuple[PeerChannel, Any]] = []
        """Trees that the target's host has not heard of."""
        self.device_trees: list[tuple[str, int]] = []
        """Request and round of the trees that the target took from the mailbox, or would have."""
        self.num_overlapped = 0
        """Trees that the draft grew before its host was told to."""
        source = self.target.source
        assert isinstance(source, TargetDeviceRounds)

        def take_trees(trees: MailboxTrees, *rest: Any, **options: Any) -> Any:
            self.edit_trees(trees)
            by_slot = {held.req_idx: held for held in self.target.requests.values()}
            for slot in trees.slot.tolist():
                held = by_slot[slot]
                round_idx = held.round_idx + held.num_in_flight + 1
                self.device_trees.append((held.request_id, round_idx))
            return TargetDeviceRounds.take_trees(source, trees, *rest, **options)

        source.take_trees = take_trees  # type: ignore[method-assign]
        if self.draft is None:
            return
        draft_device = self.draft_device
        overlap = draft_device.overlap

        def take_paths(paths: MailboxPaths, *rest: Any) -> torch.Tensor:
            self.edit_paths(paths)
            return OverlapRunner.take_paths(overlap, paths, *rest)

        def confirm(hear: Callable[[], None]) -> ConfirmedTrees | None:
            done = DeviceRounds.confirm(draft_device, hear)
            if done is not None:
                assert all(r.is_held for r in done.requests), "its pages are another's"
                self.num_overlapped += len(done.requests)
            return done

        overlap.take_paths = take_paths  # type: ignore[method-assign]
        draft_device.confirm = confirm  # type: ignore[method-assign]

    def step(self) -> bool:
        """Step both engines once; return whether anything is left to do."""
        self.pump()
        if self.target.scheduler.overlaps_steps:  # the draft's device has the path already
            self.run_draft_device()
        self.step_target()
        self.hear_late()
        self.pump()
        self.step_draft()
        self.pump()
        return bool(self.late) or will_have_work(self.target) or self.draft_has_work

    @property
    def has_device_trees(self) -> bool:
        """Return whether the target could launch a step before its trees are here."""
        return self.target.source.has_device_trees(self.target.scheduler)

    @property
    def num_device_trees(self) -> int:
        """Return how many trees the target took from the mailbox."""
        return len(self.device_trees)

    def hear_late(self) -> None:
        """Let the target's host hear of the trees that it has not heard of."""
        late, self.late = self.late, []
        for channel, message in late:
            super().tell_target(channel, message)

    def run_draft_device(self) -> None:
        """Let the draft's device do now what its host is not told to do yet, as a GPU would."""
        self.draft_device.overlap.run_deferred()

    @property
    def draft_device(self) -> DeviceRounds:
        """Return the draft's source of paths."""
        assert self.draft is not None and isinstance(self.draft.source, DeviceRounds)
        return self.draft.source

    @property
    def is_draft_overlapped(self) -> bool:
        """Return whether the draft's device has done what its host has not read."""
        return self.draft_device.is_running and not self.draft_device.overlap.is_deferred

    def cancel(self, request: LocalRequest) -> None:
        """Close a request, whatever is on the way for it."""
        del self.requests[request.request_id]
        self.peer_until.pop(request.request_id, None)
        self.close_draft(request)
        self.target.submit(
            TargetClose(request_id=request.request_id, target_epoch=request.target_epoch)
        )

    def tell_target(self, channel: PeerChannel, message: Any) -> None:
        """Let the target's engine hear one message; of trees that its device takes, later."""
        if isinstance(message, PeerAttach):
            message = replace(message, has_mailbox=message.has_mailbox and self.has_mailbox)
        if isinstance(message, TreeBatch) and self.has_device_trees:
            self.late.append((channel, message))
        else:
            super().tell_target(channel, message)

    def on_target(self, message: Any) -> None:
        if getattr(message, "request_id", None) in {*self.requests, None}:
            super().on_target(message)

    def on_draft(self, message: Any) -> None:
        if getattr(message, "request_id", None) in {*self.requests, None}:
            super().on_draft(message)


class PoisonedDevicePair(DevicePair):
    """A pair with a mailbox; KV is poisoned wherever nothing is committed, between any two steps.

    The draft's not with NaN: rows of a path that turns out to be shorter than the longest one see
    slots that nobody wrote, with a weight of 0. What a device wrote of a step that its host has not
    read yet is left alone.
    """

    def __init__(self, target: TargetEngine, draft: DraftEngine, **options: Any) -> None:
        super().__init__(target, draft, **options)
        poison(pool_of(target))
        poison(pool_of(draft), _MUCH)

    def step(self) -> bool:
        """Step both engines once, then poison their scratch."""
        is_busy = super().step()
        if self.target.pipeline.in_flight is None:
            poison_scratch(self.target)
        assert self.draft is not None
        if not self.is_draft_overlapped:
            poison_scratch(self.draft, _MUCH)
        return is_busy

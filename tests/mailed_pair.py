"""A linked pair whose devices talk through a mailbox, in the order in which GPUs would."""

from __future__ import annotations

from typing import Any

from shared.mailbox import Mailbox
from shared.rpc.link import Link
from shared.types import TreeBurst
from target_service.engine import TargetEngine
from target_service.runner import TargetRunner
from tests.linked_pair import LinkedPair, PoisonedLinkedPair


def give_mailbox(target: TargetEngine) -> Mailbox:
    """Let a target on a CPU have a mailbox, before any draft links to it."""
    runner: TargetRunner = target._runner
    width = runner.features.width
    mailbox = Mailbox(
        target.info.link,
        num_slots=runner.pool.max_num_requests,
        width=width,
        dtype=runner.model.dtype if width else None,
        device=runner.pool.device,
    )
    target._mailbox = mailbox
    target._direct._has_mailbox = True
    return mailbox


class MailedPair(LinkedPair):
    """A pair whose target begins a step while the trees are on the way to its host.

    On a CPU a device does its work when it is asked for the result, so the words must be there by
    then: the target steps after the draft, and what the draft's host has to say comes later.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.late: list[tuple[Link, Any]] = []
        """Trees that the target's host has not heard of."""
        self.num_awaited = 0
        """Trees that the target took from the mailbox, or would have."""
        self.num_ahead = 0
        """Trees that the draft grew before its host was told to."""
        take_trees = self.target._runner.take_trees

        def count_and_take(batch: Any) -> Any:
            taken = take_trees(batch)
            self.num_awaited += len(batch.trees.requests) if taken is not None else 0
            return taken

        self.target._runner.take_trees = count_and_take  # type: ignore[method-assign]
        if self.draft is not None:
            confirms = self.draft._confirms

            def count_and_confirm(*args: Any) -> bool:
                is_confirmed = confirms(*args)
                self.num_ahead += is_confirmed
                return is_confirmed

            self.draft._confirms = count_and_confirm  # type: ignore[method-assign]

    def step(self) -> bool:
        """Step both engines once; return whether anything is left to do."""
        self.pump()
        self.step_target()
        late, self.late = self.late, []
        for link, message in late:
            super().tell_target(link, message)
        self.pump()
        self.step_draft()
        self.pump()
        has_work = self.target.has_work or self.target.has_work_in_s is not None or self.late
        return bool(has_work) or (self.draft is not None and self.draft.has_work)

    def tell_target(self, link: Link, message: Any) -> None:
        """Let the target's engine hear one message; of trees that it can await, later."""
        if isinstance(message, TreeBurst) and self.target._scheduler._can_await_mail():
            self.late.append((link, message))
        else:
            super().tell_target(link, message)


class PoisonedMailedPair(MailedPair, PoisonedLinkedPair):
    """A mailed pair whose KV is NaN wherever nothing is committed, between any two steps."""

    def step(self) -> bool:
        """Step both engines once, then poison their scratch."""
        return super().step()

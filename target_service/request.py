"""State of one request on a target worker."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.messages import (
    AcceptedPath,
    AnswerTimes,
    PeerTree,
    PeerTrees,
    TargetOpen,
    TokenTree,
    TreeShape,
)
from shared.peer.channel import PeerChannel
from shared.peer.mailbox import tag_of
from target_service.features import FeatureLog


class Phase(enum.Enum):
    """Where a request stands; only the scheduler and the commit move it."""

    WAITING = "waiting"
    """No pages yet."""
    PREFILL = "prefill"
    """Pages held; tokens [seq_len, len(tokens)) have no KV yet."""
    RUNNING = "running"
    """tokens[-1] is the root; between rounds, or with a round queued."""


class QueuedRound(NamedTuple):
    """A round to run.

    Args:
        tree: None: the root alone, unless `awaited_shape` says otherwise.
        awaited_shape: Of a tree that the device takes from the mailbox.
    """

    tree: TokenTree | PeerTree | None
    awaited_shape: TreeShape | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class TargetRequest:
    """A request: its tokens are the truth, its KV can be rebuilt from them.

    Args:
        open: What the orchestrator asked for.
        order: Admission order; the newest is retracted first.
        tokens: Prompt + output. While RUNNING, seq_len == len(tokens) - 1.
        seq_len: Tokens with committed KV; excludes the root.
        req_idx: Row of the page table; -1 while WAITING.
        round_idx: Last round answered; -1 before the prefill is.
        last_reply: Answer of that round, repeated when the round is.
        queued: The round to run next.
        queued_times: Of its order, if the request is timed.
        draft_times: Of the tree that the device awaits, if the request is timed.
        queued_order: Order in which it came; rounds that have waited longest run first.
        granted_until: Last round of the root alone that needs no order.
        grant: Leave to order trees over `channel`, up to round `grant_until`.
        channel: To the draft's engine, if that is on this host; opened with `draft_epoch`.
        feature_channel: Where features go; None: to the front, or nowhere.
        feature_epoch: Newest draft_epoch that has asked for them.
        num_tokens_sent: Tokens that the draft has, under `grant`.
        ordered_round: Round whose tree was ordered last, at `ordered_ns`.
        has_mailbox: That draft posts trees to this target's mailbox.
        is_draft_ahead: That draft's device grew the newest tree before its order came.
        tag_base: Of the numbers of its rounds there (see mailbox.py); None: they have none.
        num_late: Times that the device waited for that draft in vain, less those that it did not.
        mailed_from: First round whose tree may be ordered by mail again.
        mailed: Shape of the tree of the next round, if that was ordered by mail.
        token_limit: Tokens, the prompt included, with which the request ends.
        num_in_flight: Rounds launched and not committed yet.
        is_tree_in_flight: One of them may commit more than one token.
        is_replaying: Features are being computed again.
        features: Rows kept for a draft; None when no draft wants any.
    """

    open: TargetOpen
    order: int
    tokens: list[int] = field(default_factory=list)
    seq_len: int = 0
    phase: Phase = Phase.WAITING
    req_idx: int = -1
    round_idx: int = -1
    last_reply: AcceptedPath | None = None
    queued: QueuedRound | None = None
    queued_times: AnswerTimes | None = None
    draft_times: AnswerTimes | None = None
    queued_order: int = 0
    granted_until: int = 0
    grant: PeerTrees | None = None
    grant_until: int = 0
    channel: PeerChannel | None = None
    draft_epoch: int = 0
    feature_channel: PeerChannel | None = None
    feature_epoch: int = 0
    num_tokens_sent: int = 0
    ordered_round: int = 0
    ordered_ns: int = 0
    has_mailbox: bool = False
    is_draft_ahead: bool = False
    tag_base: int | None = None
    num_late: int = 0
    mailed_from: int = 0
    mailed: TreeShape | None = None
    token_limit: int = 0
    num_in_flight: int = 0
    is_tree_in_flight: bool = False
    is_replaying: bool = False
    features: FeatureLog | None = None

    @property
    def request_id(self) -> str:
        return self.open.request_id

    @property
    def next_seq_len(self) -> int:
        """Return the logical slot of the next round's root; rounds in flight are of one token."""
        return self.seq_len + self.num_in_flight

    @property
    def next_num_rows(self) -> int:
        """Return the rows of the next round."""
        if self.queued is None:
            return 1
        if self.queued.awaited_shape is not None:
            return self.queued.awaited_shape.num_draft_tokens
        return len(self.queued.tree.token_ids) if self.queued.tree else 1

    @property
    def next_round_tag(self) -> int:
        """Return the number of the next round in the mailbox; 0: it has none."""
        if self.tag_base is None:
            return 0
        return tag_of(self.tag_base, self.round_idx + self.num_in_flight + 1)

    @property
    def can_await_mail(self) -> bool:
        """Return whether the next round can be launched before its tree is here."""
        is_between_rounds = self.queued is None and not self.num_in_flight
        return self.mailed is not None and self.phase is Phase.RUNNING and is_between_rounds

    def can_run_alone(self, *, runs_ahead: bool) -> bool:
        """Return whether a granted round of the root alone can be launched.

        Args:
            runs_ahead: Also when the root is still being computed. Penalties count tokens, so they
                need to know it.
        """
        if self.phase is not Phase.RUNNING or self.queued is not None:
            return False
        if self.num_in_flight:
            is_known = not self.is_tree_in_flight and not self.open.sampling.has_penalties
            if not (runs_ahead and is_known):
                return False
        is_granted = self.round_idx + self.num_in_flight < self.granted_until
        return is_granted and len(self.tokens) + self.num_in_flight < self.token_limit

    @property
    def num_output_tokens(self) -> int:
        """Return the output tokens so far, those of earlier epochs included."""
        return len(self.tokens) - self.open.num_prompt_tokens

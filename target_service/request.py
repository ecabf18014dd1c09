"""State of one request on a target worker."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from shared.types import AcceptedPath, TargetOpen, VerifyRound
from target_service.features import FeatureLog


class Phase(enum.Enum):
    """Where a request stands; only the scheduler and the commit move it."""

    WAITING = "waiting"
    """No pages yet."""
    PREFILL = "prefill"
    """Pages held; tokens [seq_len, len(tokens)) have no KV yet."""
    RUNNING = "running"
    """tokens[-1] is the root; between rounds, or with a round queued."""


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
        queued_order: Order in which it came; rounds that have waited longest run first.
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
    queued: VerifyRound | None = None
    queued_order: int = 0
    features: FeatureLog | None = None

    @property
    def request_id(self) -> str:
        return self.open.request_id

    @property
    def num_output_tokens(self) -> int:
        """Return the output tokens so far, those of earlier epochs included."""
        return len(self.tokens) - self.open.num_prompt_tokens

"""What operators add up over requests."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields


class Stage(enum.Enum):
    """How far a request is."""

    WAITING = "it waits for a target"
    PREFILLING = "a target holds it, or will, and no output has left"
    DECODING = "output has left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one request so far, or sums over many.

    Args:
        num_output_tokens: Resumed ones excluded.
        num_rounds: Prefills excluded.
        num_root_only_rounds: Without a tree, those at rest excluded.
        num_resting_rounds: Without a tree, because one would not have paid.
        num_relayed_rounds: With a tree that came through the orchestrator.
        num_draft_tokens, num_accepted_drafts: Nodes verified and accepted; roots and bonus tokens
            excluded.
        draft_wait_s, verify_s: Time that requests waited for a tree, and for the target.
        num_retries: Times that state was rebuilt, on a target or a draft.
    """

    num_output_tokens: int = 0
    num_rounds: int = 0
    num_root_only_rounds: int = 0
    num_resting_rounds: int = 0
    num_relayed_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_drafts: int = 0
    draft_wait_s: float = 0.0
    verify_s: float = 0.0
    num_retries: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            **{
                spec.name: getattr(self, spec.name) + getattr(other, spec.name)
                for spec in fields(self)
            }
        )

    @property
    def num_peer_rounds(self) -> int:
        """Return the rounds whose tree went from engine to engine."""
        without = self.num_root_only_rounds + self.num_resting_rounds
        return self.num_rounds - without - self.num_relayed_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """How far a request is.

    Args:
        end_reason: The finish reason in lower case; empty: the output is not complete.
    """

    stage: Stage
    end_reason: str
    figures: Figures

"""What a Generate call streams back, as plain values; see protos/coppice/v1/generation.proto.

The orchestrator produces them, the client hands them to its user. Torch-free.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from coppice.v1 import generation_pb2
from shared.messages.codec import message
from shared.messages.fields import Count
from shared.messages.times import StageTime


class FinishReason(enum.IntEnum):
    """Why a request ended; the values equal the proto's."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CONTEXT_LENGTH = 3
    ABORTED = 4

    def __str__(self) -> str:
        return self.name


@message(generation_pb2.TokenLogprob)
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Raw-logit log-probability of an output token and its most likely alternatives."""

    token_id: Count
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@message(generation_pb2.PromptInfo)
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """Said once, when a target worker has admitted the request.

    Args:
        seed: The seed in use; resending it with the same request gives the same output.
        model_fingerprint: Of what computes the output; "" from a server that does not say.
    """

    request_id: str
    model: str
    num_prompt_tokens: int
    num_cached_tokens: int
    seed: int
    model_fingerprint: str = ""

    @property
    def text(self) -> str:
        """Return "": every event has a text, which is the output when put together."""
        return ""


@message(
    generation_pb2.TokenDelta,
    ignored=(
        "round_token_offsets",
        "round_num_chars",
        "round_num_accepted_drafts",
        "round_num_accepted_draft_chars",
    ),
)
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """What is new since the delta before, of one round; see deltas.py for a message of several.

    Args:
        token_offset: Index of token_ids[0] in the output, resumed tokens included.
        logprobs: One per token when asked for, else empty.
        num_accepted_drafts: How many of token_ids were accepted drafts; they come first.
        num_accepted_draft_chars: How many leading characters of text they wrote.
    """

    token_offset: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    num_accepted_drafts: int = 0
    num_accepted_draft_chars: int = 0


@message(generation_pb2.Usage)
@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request; `num_output_tokens` excludes resumed tokens."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0


@message(generation_pb2.SpeculationStats, derived=("accept_length",))
@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """How speculation went; every field as in the proto.

    Args:
        num_rounds: Verify rounds, root-only ones included, prefills excluded.
        num_draft_tokens: Nodes verified, roots excluded.
        num_accepted_drafts: Bonus tokens and what a stop cut off excluded.
        accept_length_histogram: Entry j counts the rounds with j accepted drafts.
        num_moved_rounds: Rounds whose accepted nodes were not the first ones of the tree.
        num_resting_rounds: Root-only rounds whose trees the target did not want.
        tree_size_histogram: Entry j counts the rounds whose tree had j nodes, root included.
    """

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_drafts: int = 0
    accept_length_histogram: tuple[int, ...] = ()
    num_root_only_rounds: int = 0
    num_moved_rounds: int = 0
    num_resting_rounds: int = 0
    tree_size_histogram: tuple[int, ...] = ()

    @property
    def accept_length(self) -> float:
        """Return the mean tokens committed per round, bonus included; 0 without rounds."""
        if not self.num_rounds:
            return 0.0
        return (self.num_accepted_drafts + self.num_rounds) / self.num_rounds


@message(generation_pb2.Timings)
@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of one request went, milliseconds."""

    queue_ms: float = 0.0
    time_to_first_token_ms: float = 0.0
    total_ms: float = 0.0
    mean_draft_wait_ms: float = 0.0
    mean_verify_ms: float = 0.0


@message(generation_pb2.RoundTimes)
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Where the time of one round went; see proto RoundTimes."""

    round_idx: int
    begin_ns: int
    stages: tuple[StageTime, ...]


@message(generation_pb2.FinishInfo)
@dataclass(frozen=True, slots=True, kw_only=True)
class FinishInfo:
    """Why and how a request ended.

    Args:
        matched_stop: The stop string (str) or stop token id (int) that ended it, if one did.
        retries: Times that the request was moved to another worker or rebuilt on one.
        round_times: When asked for.
    """

    reason: FinishReason
    matched_stop: int | str | None = None
    usage: Usage = field(default_factory=Usage)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    timings: Timings = field(default_factory=Timings)
    retries: int = 0
    round_times: tuple[RoundTimes, ...] = ()

    @property
    def text(self) -> str:
        """Return "": every event has a text, which is the output when put together."""
        return ""


GenerateEvent = PromptInfo | TokenDelta | FinishInfo

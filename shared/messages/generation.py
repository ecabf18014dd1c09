"""What a Generate call streams back, as plain values; see protos/coppice/v1/generation.proto.

The orchestrator produces them, the client hands them to its user. Torch-free.
"""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass, field

from coppice.v1 import generation_pb2
from shared.errors import InvalidArgumentError
from shared.messages.codec import message
from shared.messages.fields import Count, SomeIds
from shared.messages.routed_experts import RoutedExperts
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


def _check_tree(tree: RoundTree) -> None:
    num_nodes, parents = len(tree.token_ids), tree.parent_index
    is_tree = len(parents) == num_nodes and all(map(operator.lt, parents, range(num_nodes)))
    if not (is_tree and parents[0] == -1 and min(parents[1:], default=0) >= 0):
        raise InvalidArgumentError(
            f"parent_index is {list(parents)}, expected a parent before each of {num_nodes} nodes, "
            "the root's -1",
            field="parent_index",
        )
    for node, parent in zip(tree.accept_index[1:], tree.accept_index, strict=False):
        if node >= num_nodes or parents[node] != parent:
            raise InvalidArgumentError(
                f"accept_index is {list(tree.accept_index)}, no path of the tree",
                field="accept_index",
            )
    if tree.accept_index[0] != 0:
        raise InvalidArgumentError("accept_index does not begin at the root", field="accept_index")
    if tree.texts and len(tree.texts) != num_nodes + 1:
        raise InvalidArgumentError(
            f"texts has {len(tree.texts)} entries for {num_nodes} nodes and the bonus token",
            field="texts",
        )


@message(generation_pb2.RoundTree, check=_check_tree)
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTree:
    """The tree of a round as the target has verified it.

    Args:
        token_ids: [num_draft_tokens], root included.
        parent_index: [num_draft_tokens], topological, root = -1.
        accept_index: Nodes of the accepted path, root first; cut where a stop token, a length or
            the context ends the output.
        bonus_token_id: What the target sampled at the last of them.
        texts: [num_draft_tokens + 1], of each node, then of the bonus token; empty without text.
    """

    token_ids: SomeIds
    parent_index: tuple[int, ...]
    accept_index: SomeIds
    bonus_token_id: Count
    texts: tuple[str, ...] = ()

    @property
    def num_accepted_drafts(self) -> int:
        """Return how many drafts were accepted, bonus token excluded."""
        return len(self.accept_index) - 1


@message(
    generation_pb2.TokenDelta,
    ignored=(
        "round_token_offsets",
        "round_num_chars",
        "round_num_accepted_drafts",
        "round_num_accepted_draft_chars",
        "round_trees",
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
        tree: Of the round, if asked for; None in a delta that goes on with a round.
        routed_experts: A row per token if asked for, else None, as without tokens.
    """

    token_offset: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    num_accepted_drafts: int = 0
    num_accepted_draft_chars: int = 0
    tree: RoundTree | None = None
    routed_experts: RoutedExperts | None = None


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

"""Messages of the session of an orchestrator with a target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from coppice.v1 import target_pb2
from shared.messages.codec import Mark, message
from shared.messages.fields import Count, RequestId, SomeIds, require_range
from shared.messages.params import SamplingParams, StoppingParams
from shared.messages.times import AnswerTimes
from shared.messages.tree import FlatShape, TokenTree

MAX_TOP_LOGPROBS = 20

RoundIdx = Annotated[int, partial(require_range, low=1)]  # 0 is the prefill


@message(target_pb2.RootOnly)
@dataclass(frozen=True, slots=True, kw_only=True)
class RootOnly:
    """Rounds of the root alone."""


@message(target_pb2.PeerTrees)
@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTrees:
    """Trees that the target orders from the draft that is attached to it.

    There are none until it is attached and has caught up: these rounds have the root alone.

    Args:
        shape: The largest shape that the target may order.
        adapts: It may order smaller ones, or none; else every tree has this shape.
    """

    draft_epoch: Count
    shape: FlatShape
    adapts: bool = False


@message(target_pb2.Credit)
@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Rounds up to and including `until_round_idx` need no order; see proto Credit.

    Args:
        trees: Where the trees of these rounds come from.
    """

    until_round_idx: RoundIdx
    trees: RootOnly | PeerTrees = RootOnly()


def _check_open(value: TargetOpen) -> None:
    require_range(value.num_prompt_tokens, "num_prompt_tokens", 1, len(value.token_ids))


@message(target_pb2.TargetOpen, check=_check_open)
@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOpen:
    """Rebuild a request from its tokens and prefill it; answered by AcceptedPath of round 0.

    Args:
        credit: For the rounds after it; None: each needs an order or a CreditUpdate.
        compiled_grammar: Of the output, as of `shared/grammar/compile.py`; empty: it is free.
        grows_forced: Tokens that it forces are verified as drafts are, also in rounds without a
            tree.
        wants_trees: Answers carry the trees of their rounds.
        wants_routed_experts: Answers carry the experts that the rows of their tokens chose.
    """

    request_id: RequestId
    target_epoch: Count
    token_ids: SomeIds
    num_prompt_tokens: int
    sampling: SamplingParams
    stopping: StoppingParams
    logprobs: bool = False
    top_logprobs: Annotated[int, partial(require_range, low=0, high=MAX_TOP_LOGPROBS)] = 0
    wants_features: bool = False
    priority: int = 0
    is_timed: bool = False
    credit: Credit | None = None
    compiled_grammar: bytes = b""
    grows_forced: bool = False
    wants_trees: bool = False
    wants_routed_experts: bool = False


@message(target_pb2.TargetAdmitted)
@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAdmitted:
    """The request holds pages and is being prefilled.

    Args:
        times: From the reservation of its pages to this answer; None: unknown.
    """

    request_id: RequestId
    target_epoch: Count
    num_cached_tokens: Count = 0
    times: AnswerTimes | None = None


@message(target_pb2.VerifyRound)
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRound:
    """Verify a tree (None: a root-only round) at `seq_len`; ends a credit.

    Args:
        received_ns: When the order of a timed request reached the worker; never sent.
    """

    request_id: RequestId
    target_epoch: Count
    round_idx: RoundIdx
    seq_len: Count
    root_token_id: Count
    tree: TokenTree | None = None
    received_ns: Annotated[int, Mark.OFF_WIRE] = 0


@message(target_pb2.CreditUpdate)
@dataclass(frozen=True, slots=True, kw_only=True)
class CreditUpdate:
    """Renew a request's credit between orders."""

    request_id: RequestId
    target_epoch: Count
    credit: Credit


@message(target_pb2.DraftDetached)
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDetached:
    """The peer channel to the request's draft has closed: rounds go on with the root alone."""

    request_id: RequestId
    target_epoch: Count
    draft_epoch: Count


@message(target_pb2.DraftRest)
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRest:
    """The target orders no trees of the request for a while, or again: the draft is well."""

    request_id: RequestId
    target_epoch: Count
    draft_epoch: Count
    is_resting: bool


@message(target_pb2.TargetClose)
@dataclass(frozen=True, slots=True, kw_only=True)
class TargetClose:
    """Free whatever the request holds."""

    request_id: RequestId
    target_epoch: Count

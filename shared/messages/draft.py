"""Messages of the session of an orchestrator with a draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from coppice.v1 import draft_pb2
from shared.messages.codec import Mark, message
from shared.messages.fields import Count, Ids, RequestId, SomeIds, Text
from shared.messages.params import SamplingParams
from shared.messages.tree import FlatShape


@message(draft_pb2.DraftOpen)
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOpen:
    """Build draft state for a request from its tokens and the target's features.

    Args:
        target_socket: The target's WorkerInfo.peer_socket.
        target_peer_address: The target's WorkerInfo.peer_address.
        compiled_grammar: Of the output, as of TargetOpen; empty: it is free.
        num_prompt_tokens: Of token_ids; 0: not said.
    """

    request_id: RequestId
    target_epoch: Count
    draft_epoch: Count
    target_address: Text
    token_ids: SomeIds
    sampling: SamplingParams
    is_timed: bool = False
    target_socket: str = ""
    target_peer_address: str = ""
    compiled_grammar: bytes = b""
    num_prompt_tokens: Count = 0


@message(draft_pb2.DraftRound)
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRound:
    """New committed tokens, and the order to grow the next tree from the last of them.

    Args:
        token_offset: Index of token_ids[0] in prompt + output.
        unless_attached: A draft that is attached to the target's engine ignores the message.
        received_ns: When the order of a timed request reached the worker; never sent.
    """

    request_id: RequestId
    target_epoch: Count
    draft_epoch: Count
    round_idx: Count
    seq_len: Count
    token_offset: Count
    token_ids: Ids
    shape: FlatShape
    unless_attached: bool = False
    received_ns: Annotated[int, Mark.OFF_WIRE] = 0


@message(draft_pb2.DraftClose)
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftClose:
    """Free whatever the request holds."""

    request_id: RequestId
    draft_epoch: Count

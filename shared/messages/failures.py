"""What a worker says of a request that it does not serve any more."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from coppice.v1 import tree_pb2
from shared.messages.codec import message
from shared.messages.fields import Count, RequestId, require_range


@message(tree_pb2.RequestFailure)
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """A request-level failure; the stream goes on. `code` is a google.rpc.Code."""

    request_id: str
    code: Annotated[int, partial(require_range, low=1, high=16)]
    reason: str
    message: str
    field: str = ""
    target_epoch: int = 0
    draft_epoch: int = 0
    round_idx: int = 0


@message(tree_pb2.RequestRetracted)
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRetracted:
    """The worker dropped the request's state to make room."""

    request_id: RequestId
    target_epoch: Count = 0
    draft_epoch: Count = 0

"""Messages that the engines of a target and of a draft exchange over their peer channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

from coppice.v1 import peer_pb2
from shared.errors import InvalidArgumentError
from shared.messages.codec import message
from shared.messages.features import PathRows
from shared.messages.fields import Count, RequestId, require_range
from shared.messages.tree import TreeShape

ROWS_HANDLE_BYTES = 64
_MAX_GPU_LEN = 64


def _require_handle(value: bytes, field: str) -> bytes:
    if len(value) != ROWS_HANDLE_BYTES:
        raise InvalidArgumentError(
            f"{field} has {len(value)} bytes, expected {ROWS_HANDLE_BYTES}", field=field
        )
    return value


def _require_gpu(value: str, field: str) -> str:
    if not 0 < len(value) <= _MAX_GPU_LEN:
        raise InvalidArgumentError(
            f"{field} has {len(value)} characters, expected 1 to {_MAX_GPU_LEN}", field=field
        )
    return value


@message(peer_pb2.PeerAttach)
@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAttach:
    """The draft holds the request: the target may order its trees over this channel.

    Args:
        has_mailbox: The draft's device posts its trees to the target's mailbox as well.
        num_tokens: Tokens of the request that the draft has.
        protocol_version: Of the draft.
        streams_wait: With `has_mailbox`: streams wait for its words, no kernel does.
    """

    request_id: RequestId
    target_epoch: Count
    draft_epoch: Count
    has_mailbox: bool = False
    num_tokens: Count = 0
    protocol_version: Count = 0
    streams_wait: bool = False


@message(peer_pb2.PeerDetach)
@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDetach:
    """The draft has dropped the request and wants no more of its features."""

    request_id: RequestId
    target_epoch: Count
    draft_epoch: Count


@message(peer_pb2.RowsOffer)
@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOffer:
    """Memory on the draft's GPU where the target's may write feature rows of paths.

    Args:
        handle: Of CUDA, for other processes.
        gpu: UUID of the draft's.
        num_bytes: Of the rows.
    """

    handle: Annotated[bytes, _require_handle]
    gpu: Annotated[str, _require_gpu]
    num_bytes: Annotated[int, partial(require_range, low=1)]


@message(peer_pb2.RowsAnswer)
@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAnswer:
    """Whether rows go to the memory that was offered, and none to the mailbox, or all there."""

    is_taken: bool


class PathEntry(NamedTuple):
    """One request of a PathBatch.

    Args:
        round_idx: The round that the tree is for.
        seq_len: Index of the root that was verified, in prompt + output; position of the first row.
        token_ids: Accepted drafts and bonus token, which come after that root.
        mailbox_slot: Slot of the target's mailbox where the draft's device posts the next tree.
        round_tag: Number of that round in the mailbox; 0: the tree is not posted.
    """

    request_id: str
    target_epoch: int
    draft_epoch: int
    round_idx: int
    seq_len: int
    token_ids: Sequence[int]
    mailbox_slot: int = 0
    round_tag: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PathBatch:
    """What one step accepted of several requests of one draft, and the order of their next trees.

    Args:
        shape: Shape of every tree.
        following: Of the trees after these, which the draft's device grows by itself as soon as it
            has the paths; None: it grows none.
        rows: One row per token, in the order of the parts; None if the draft takes none.
    """

    parts: tuple[PathEntry, ...]
    shape: TreeShape
    rows: PathRows | None
    following: TreeShape | None = None

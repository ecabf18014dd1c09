"""Features: what is captured, who wants them, and rows on their way from target to draft."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from coppice.v1 import target_pb2, tree_pb2
from shared.errors import InvalidArgumentError
from shared.messages.codec import Via, message
from shared.messages.failures import RequestFailure
from shared.messages.fields import Count, Ids, RequestId

MAX_CHUNK_BYTES = 1 << 20

_DTYPES = {
    "": tree_pb2.TENSOR_DTYPE_UNSPECIFIED,
    "float32": tree_pb2.TENSOR_DTYPE_FLOAT32,
    "float16": tree_pb2.TENSOR_DTYPE_FLOAT16,
    "bfloat16": tree_pb2.TENSOR_DTYPE_BFLOAT16,
}
_DTYPE_NAMES: dict[int, str] = {number: name for name, number in _DTYPES.items()}


def dtype_to_wire(dtype: str) -> tree_pb2.TensorDtype:
    """Return the wire's number of a dtype; "" is unspecified."""
    return _DTYPES[dtype]


def dtype_from_wire(number: int, field: str = "dtype", *, may_be_absent: bool = True) -> str:
    """Return the name of a dtype.

    Raises: InvalidArgumentError if the number is unknown, or absent where it may not be.
    """
    name = _DTYPE_NAMES.get(number)
    if name is None or (not name and not may_be_absent):
        raise InvalidArgumentError(
            f"{field} is {number}, must be FLOAT32, FLOAT16 or BFLOAT16", field=field
        )
    return name


@message(tree_pb2.FeatureSpec)
@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSpec:
    """How the target's hidden rows become features.

    Args:
        layer_ids: Layers whose output (residual stream) is captured, in order of concatenation;
            empty: the output of the final norm.
        width: Values per row; 0 = the draft needs no features.
        dtype: "float32", "float16" or "bfloat16"; "" when width is 0.
        projection: model_hash of the EAGLE-3 head whose fc the target applies to what it captured;
            "": rows are as they were captured.
        kv_layer_ids: Layers whose K and V a row begins with, as their caches hold them, of each
            layer first K; the output of the final norm follows.
    """

    layer_ids: Ids = ()
    width: Count = 0
    dtype: Annotated[str, Via(dtype_to_wire, dtype_from_wire)] = ""
    projection: str = ""
    kv_layer_ids: Ids = ()


@message(target_pb2.FeatureSubscribe)
@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSubscribe:
    """Ask for every feature row from `from_position` on.

    Args:
        draft_epoch: The subscriber's; an older one than the current is refused. 0: unknown.
        ring_nonce: The nonce that the subscriber read from the target's feature ring; empty: rows
            must come in the messages.
    """

    request_id: RequestId
    target_epoch: Count
    from_position: Count
    draft_epoch: Count = 0
    ring_nonce: bytes = b""


@message(target_pb2.FeatureAck)
@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureAck:
    """Rows below `position` were received."""

    request_id: RequestId
    target_epoch: Count
    position: Count


@message(target_pb2.FeatureUnsubscribe)
@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureUnsubscribe:
    """End a subscription."""

    request_id: RequestId
    target_epoch: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureCommand:
    """A command of a draft's engine that its front sends on the target's feature stream.

    Args:
        avoids_ring: The rows of this subscription were overwritten in the ring: they must come as
            bytes.
    """

    target_address: str
    command: FeatureSubscribe | FeatureAck | FeatureUnsubscribe
    avoids_ring: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureFailure:
    """A target engine's answer to a subscription that it cannot serve.

    A failure of the request itself is a RequestFailure and goes to the orchestrator; this one goes
    to the feature stream, as the RequestFailure that it holds.
    """

    failure: RequestFailure

    @property
    def request_id(self) -> str:
        """Return the request of the subscription."""
        return self.failure.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpan:
    """Bytes in a target's feature ring (shared/peer/ring.py).

    Args:
        ring: Name of the ring.
        begin: Place of the first byte in the stream of everything ever written there.
    """

    ring: str
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRows:
    """Feature rows of accepted paths, one request's after the other's.

    Args:
        shape: (num_rows, feature_width).
        data: Row-major little-endian values of `dtype`, or where they lie.
    """

    shape: tuple[int, int]
    dtype: str
    data: bytes | RingSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureChunk:
    """Consecutive feature rows from position `start` on.

    Args:
        shape: (num_rows, feature_width).
        data: Row-major little-endian values of `dtype`, or where they lie.
    """

    request_id: str
    target_epoch: int
    start: int
    shape: tuple[int, int]
    dtype: str
    data: bytes | RingSpan

    @property
    def num_inline_bytes(self) -> int:
        """Return how many bytes of rows travel in the message itself."""
        return 0 if isinstance(self.data, RingSpan) else len(self.data)

    def rows(self, first: int, stop: int) -> FeatureChunk:
        """Return rows [first, stop) of the chunk."""
        num_rows, width = self.shape
        data = self.data
        if isinstance(data, RingSpan):
            row_bytes = data.num_bytes // num_rows
            data = RingSpan(
                ring=data.ring,
                begin=data.begin + first * row_bytes,
                num_bytes=(stop - first) * row_bytes,
            )
        else:
            row_bytes = len(data) // num_rows
            data = data[first * row_bytes : stop * row_bytes]
        return replace(self, start=self.start + first, shape=(stop - first, width), data=data)
